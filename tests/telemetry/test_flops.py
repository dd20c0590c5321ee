"""Operations from configs, against what torch counts while the models run."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3Config, Qwen2MoeConfig, Qwen3Config

from meshrl.parallel.delta_rule import DeltaRule
from meshrl.plan.hardware import known_peak
from meshrl.telemetry.flops import ModelShape, utilisation, utilisation_metrics

LENGTH = 11
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "qwen3_mixed", "qwen3_moe"]


def counted(run):
    """Operations of matrix products, those of attention among them, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def all_pairs(shape):
    """Plain attention computes every pair and masks some afterwards."""
    return 4 * shape.attention_width * LENGTH * LENGTH * len(shape.windows)


@pytest.mark.parametrize("family", FAMILIES)
def test_matrix_products_are_exactly_what_torch_counts(make_lm, family):
    model = make_lm(family, attention="eager")
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")
    ids = torch.arange(LENGTH)[None] % 40
    shape = ModelShape.of(model.config)
    but_attention = shape.forward(np.array([LENGTH])) - 4 * shape.attention_width * pairs(shape)
    assert but_attention + all_pairs(shape) == counted(lambda: model(ids))


def pairs(shape):
    """By a plain loop: what each token looks at."""
    return sum(min(token + 1, window or LENGTH) for window in shape.windows for token in range(LENGTH))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_counts_the_pairs_that_the_mask_leaves(make_lm, family):
    shape = ModelShape.of(make_lm(family).config)
    no_attention = 2 * (shape.linear_weights + shape.head_weights) * LENGTH
    assert shape.forward(np.array([LENGTH])) - no_attention == 4 * shape.attention_width * pairs(shape)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_training_is_three_forwards(make_lm, family):
    model = make_lm(family, attention="eager").train()
    ids = torch.arange(LENGTH)[None] % 40
    shape = ModelShape.of(model.config)
    but_attention = shape.training(np.array([LENGTH])) - 3 * 4 * shape.attention_width * pairs(shape)
    assert but_attention + 3 * all_pairs(shape) == counted(lambda: model(ids).logits.sum().backward())


def test_cached_tokens_cost_only_what_looks_at_them():
    shape = ModelShape.of(Qwen3Config(num_hidden_layers=3))
    lengths, starts = np.array([9, 30, 4]), np.array([5, 8, 3])
    whole = shape.forward(lengths, 0)
    assert shape.forward(lengths, 0, starts) == pytest.approx(whole - shape.forward(starts, 0))
    assert shape.forward(lengths, 7) - whole == 2 * shape.head_weights * 7


def test_packed_documents_add_up_and_differ_from_one_long_one():
    shape = ModelShape.of(Qwen3Config(num_hidden_layers=2))
    apart = shape.forward(np.array([100, 28]))
    assert apart == pytest.approx(shape.forward(np.array([100])) + shape.forward(np.array([28])))
    assert apart < shape.forward(np.array([128]))


def test_sparse_layers_shared_experts_and_values():
    config = Qwen2MoeConfig(
        num_hidden_layers=3, decoder_sparse_step=2, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[]
    )
    hidden = config.hidden_size
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * hidden * (hidden // config.num_attention_heads) * heads
    dense = 3 * hidden * config.intermediate_size
    width = 2 * config.moe_intermediate_size + config.shared_expert_intermediate_size
    sparse = 3 * hidden * width + hidden * 8 + hidden
    shape = ModelShape.of(config, values=True)
    assert shape.linear_weights == 3 * attention + 2 * dense + sparse
    assert shape.head_weights == hidden


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_layers_with_a_state(make_lm, family):
    """Their weights by the model's own modules; the state itself by what torch counts of a token's step."""
    model = make_lm(family)
    shape = ModelShape.of(model.config)
    assert shape.windows == (None,)
    layers = model.base_model.layers
    owners = (torch.nn.Linear, torch.nn.Conv1d)
    weights = sum(m.weight.numel() for layer in layers for m in layer.modules() if isinstance(m, owners))
    if family == "qwen3_next":  # of four experts a token meets two, and a router of four
        weights += len(layers) * (2 * 3 * 32 * 16 + 32 * 4)
    mixers = [m for m in model.modules() if hasattr(m, "A_log")]
    rule = DeltaRule(mixers[0].conv1d.weight[:, 0], 2, 4, 6, 10)
    row = torch.randn(1, len(rule.conv)), torch.randn(1, 4), torch.randn(1, 4)
    read_twice = counted(lambda: rule.step(*row, rule.no_states(1, row[0])))
    assert 2 * shape.linear_weights == 2 * weights + len(mixers) * read_twice * 3 // 2  # and written once


def test_models_of_another_build_are_left_out():
    assert ModelShape.of(DeepseekV3Config()) is None


def test_peaks_and_utilisation():
    assert known_peak("NVIDIA H200") == 989e12
    assert known_peak("NVIDIA GeForce RTX 4090") is None
    assert utilisation(1e12, 2.0, 4, 1e12) == pytest.approx(0.125)
    with pytest.raises(ValueError, match="above 0"):
        utilisation(1.0, 0.0, 1, 1.0)


def test_phases_last_as_long_as_on_their_slowest_rank():
    generated = {"flops/generate_sequences": 1e12}
    counts = {
        ("actor_rollout_ref", 0): generated | {"flops/update_actor": 3e12, "seconds/update_actor": 1.0},
        ("actor_rollout_ref", 1): generated | {"flops/update_actor": 5e12, "seconds/update_actor": 2.0},
    }
    booked = {key: {"generate": 0.5, "prefill": 1.5, "sync": 9.0} for key in counts}
    found = utilisation_metrics(counts, booked, peak=8e12)
    assert found["perf/tflops/update_actor"] == pytest.approx(8 / (2 * 2))
    assert found["mfu/update_actor"] == pytest.approx(8 / (2 * 2 * 8))
    assert found["mfu/gen"] == pytest.approx(2 / (2 * 2 * 8))
    assert not [name for name in utilisation_metrics(counts, booked, None) if name.startswith("mfu")]
