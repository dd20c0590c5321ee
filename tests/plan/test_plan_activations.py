"""Metered layers against what autograd really saves, on the CPU with real memory, for the same models."""

import pytest
import torch

from meshrl.config.engine import ModelConfig
from meshrl.models.lora import add_adapters
from meshrl.parallel.attention import PackedSequences
from meshrl.tools.plan.models import PlannedModel
from meshrl.tools.plan.trace import TRACED_TOKENS, Cut, LayerSettings, Meter, small_model, trace_layer, trace_model

LENGTHS = (23, 23, 23)  # one run of equal documents, as one kernel call
TOKENS = sum(LENGTHS)
CASES = {
    "llama": ("llama", {"num_key_value_heads": 4}, 0),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}, 0),
    "wide": ("qwen2", {"num_key_value_heads": 4, "intermediate_size": 101, "hidden_size": 40, "head_dim": 10}, 0),
    "lora": ("llama", {"num_key_value_heads": 4}, 3),
}


def saved_bytes(model, checkpointing):
    """Bytes of distinct memory that autograd holds after a forward, without the parameters."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(TOKENS) % 41
    packed = PackedSequences.of(LENGTHS, "cpu")
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        embedded = model.get_input_embeddings()(ids[None]).requires_grad_()
        model.base_model(
            inputs_embeds=embedded, position_ids=packed.position_ids, use_cache=False, attention_context=packed
        )
    return sum(size for size, _ in held.values())


@pytest.mark.parametrize("case", CASES)
def test_kept_bytes_are_what_autograd_saves(make_lm, case):
    family, fields, rank = CASES[case]
    two, three = (make_lm(family, num_hidden_layers=layers, **fields) for layers in (2, 3))
    lora = ModelConfig(lora_rank=rank) if rank else None
    for model in (two, three) if lora else ():
        add_adapters(model, lora)
    real = saved_bytes(three, False) - saved_bytes(two, False)
    planned = PlannedModel(make_lm(family, num_hidden_layers=2, **fields).config, "test", lora)
    traced = trace_layer(small_model(planned, 2, Cut()), 0, LayerSettings(TOKENS, torch.float32))
    assert real > 8 * TOKENS * two.config.hidden_size * 4
    assert traced.kept == real


def test_a_checkpointed_layer_keeps_its_input_alone(make_lm):
    planned = PlannedModel(make_lm("qwen3").config, "test")
    settings = LayerSettings(TOKENS, torch.float32, checkpointing=True)
    traced = trace_layer(small_model(planned, 2, Cut()), 0, settings)
    plain = trace_layer(small_model(planned, 2, Cut()), 0, LayerSettings(TOKENS, torch.float32))
    assert traced.kept == TOKENS * planned.config.hidden_size * 4
    # The backward runs the layer again: what is saved comes back for a moment.
    assert traced.backward > plain.kept - traced.kept


def test_bytes_grow_with_the_tokens(make_lm):
    planned = PlannedModel(make_lm("llama").config, "test")
    trace = trace_model(planned, LayerSettings(0, torch.float32))
    real = trace_layer(small_model(planned, 2, Cut()), 0, LayerSettings(300, torch.float32))
    assert trace.of_layer(0, 300).kept == pytest.approx(real.kept, rel=1e-3)
    assert TRACED_TOKENS != 300


def test_tensor_parallel_ranks_keep_a_part(make_lm):
    planned = PlannedModel(make_lm("llama", num_key_value_heads=4).config, "test")
    settings = LayerSettings(0, torch.bfloat16)
    whole, cut, shared = (
        trace_model(planned, settings, how).of_layer(0, 4096).kept for how in (Cut(), Cut(2), Cut(2, 1, True))
    )
    assert shared == pytest.approx(whole / 2, rel=0.01)
    assert whole / 2 < cut < whole


def test_experts_count_the_rows_they_get(make_lm):
    one, two = (PlannedModel(make_lm("qwen3_moe", num_experts_per_tok=visited).config, "test") for visited in (1, 2))
    few, many = (trace_model(m, LayerSettings(0, torch.float32)).of_layer(0, 4096).kept for m in (one, two))
    # Another row a token: its input and output, gate and up, their product, and what the weights multiply.
    row = 16 * 4 + 32 * 2
    assert (many - few) / 4096 / 4 > row * 0.9


def test_the_meter_sees_memory_come_and_go():
    with Meter() as meter:
        first = torch.empty(100, device="meta")
        second = first + 1
        view = second.view(10, 10)
        assert meter.live == 800
        del first
        assert meter.live == 400
        del second
        assert meter.live == 400
        del view
    assert meter.live == 0
    assert meter.peak == 800
