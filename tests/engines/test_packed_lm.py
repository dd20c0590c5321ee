"""Log-probs of a packed row, computed on its distinct prefixes or place by place, against each sample alone."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshrl.data.packing import pack
from meshrl.engines import packed_model
from meshrl.engines.packed_model import PackedCausalLM
from meshrl.parallel.attention import ATTENTION_NAME, PackedSequences
from meshrl.parallel.sequence import SequenceParallel

PROMPT = 4


@pytest.fixture
def samples():
    """Three prompts (one left-padded) with four answers each, some of them equal, with lengths from 1 to 5."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randperm(30, generator=generator)[: 3 * PROMPT].view(3, PROMPT).repeat_interleave(4, 0)
    answers = torch.randint(0, 3, (12, 5), generator=generator)
    answers[1], answers[6] = answers[0], answers[4]
    mask = torch.ones(12, PROMPT + 5, dtype=torch.long)
    mask[4:8, :2] = 0
    for row, length in enumerate([5, 5, 1, 3, 4, 5, 4, 2, 5, 5, 1, 5]):
        mask[row, PROMPT + length :] = 0
    return torch.cat([prompts, answers], 1), mask


def log_probs_of(module, samples, target_mask=None, monkeypatch=None, most_nodes=None):
    ids, mask = samples
    if most_nodes is not None:
        monkeypatch.setattr(packed_model, "MOST_NODES", most_nodes)
    row = pack(ids, mask, mask[:, PROMPT:] if target_mask is None else target_mask)
    seen = []
    hook = module.hf_model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    shard = SequenceParallel(None, None).shard(PackedSequences.of(row.lengths, "cpu"))
    answers = module(row, shard, 0.7, True)
    hook.remove()
    return row.unpack(answers["log_probs"]), row.unpack(answers["entropys"]), seen[0]


def alone(model, samples):
    ids, mask = samples
    log_probs, entropy = torch.zeros(12, 5), torch.zeros(12, 5)
    for row in range(12):
        tokens = ids[row][mask[row].bool()]
        log_p = (model(tokens[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
        count = int(mask[row, PROMPT:].sum())
        at = torch.arange(len(tokens) - count, len(tokens))
        log_probs[row, :count] = log_p[at - 1, tokens[at]]
        entropy[row, :count] = -(log_p[at - 1].exp() * log_p[at - 1]).sum(-1)
    return log_probs, entropy


@pytest.mark.parametrize("most_nodes", [0.9, 0.0], ids=["tree", "row"])
def test_equals_each_sample_alone(make_lm, samples, monkeypatch, most_nodes):
    module, reference = PackedCausalLM(make_lm("qwen3")), make_lm("qwen3", "eager")
    log_probs, entropy, computed = log_probs_of(module, samples, None, monkeypatch, most_nodes)
    wanted, wanted_entropy = alone(reference, samples)
    torch.testing.assert_close(log_probs, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)
    ids, mask = samples
    documents = [tuple(d[m.bool()].tolist()) for d, m in zip(ids, mask, strict=True)]
    needed = {d[:cut] for d in documents for cut in range(1, len(d))}
    assert computed == (len(needed) if most_nodes else int(mask.sum()))
    weights = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    for values in (log_probs, wanted):
        (values * weights).sum().backward()
    for (name, ours), theirs in zip(module.hf_model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_only_the_tokens_before_the_last_target_are_computed(make_lm, samples):
    _, mask = samples
    first_only = mask[:, PROMPT:].clone()
    first_only[:, 1:] = 0
    log_probs, _, computed = log_probs_of(PackedCausalLM(make_lm("qwen3")), samples, first_only)
    assert computed == 4 + 2 + 4
    wanted, _ = alone(make_lm("qwen3", "eager"), samples)
    torch.testing.assert_close(log_probs[:, 0], wanted[:, 0], rtol=1e-5, atol=1e-5)


def test_dropout_draws_at_every_place(make_lm, samples):
    model = make_lm("qwen3")
    model.get_input_embeddings().dropout = nn.Dropout(0.1)
    module = PackedCausalLM(model)
    _, mask = samples
    assert log_probs_of(module.train(), samples)[2] == int(mask.sum())
    assert log_probs_of(module.eval(), samples)[2] < int(mask.sum())


def test_a_row_without_targets_still_has_a_gradient_of_zeros(make_lm, samples):
    module = PackedCausalLM(make_lm("qwen3"))
    log_probs, _, _ = log_probs_of(module, samples, torch.zeros(12, 5, dtype=torch.long))
    log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def tiny(kind, attention=ATTENTION_NAME, **more):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    how = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **(sizes | heads | how | more))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def assert_equals_each_alone(samples, kind, **more):
    found, _, _ = log_probs_of(PackedCausalLM(tiny(kind, **more)), samples)
    torch.testing.assert_close(found, alone(tiny(kind, "eager", **more), samples)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, r"of which 1 go through .* 1 convolutions over tokens"),
        ("rwkv", {"attention_hidden_size": 32}, "has 2 layers, of which 0 go through"),
        ("bloom", {"n_layer": 2, "n_head": 2}, "of which 0 go through .*model.use_remove_padding=false"),
    ],
)
def test_layers_that_take_a_row_for_one_sample_are_refused(samples, kind, more, words):
    with pytest.raises(ValueError, match=words):
        log_probs_of(PackedCausalLM(tiny(kind, **more)), samples)
    assert_equals_each_alone(samples, "gpt2", n_embd=32, n_layer=2, n_head=2)


def test_angles_that_depend_on_the_longest_sample_are_refused(samples):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    rope = {"rope_parameters": {"rope_type": "longrope", **factors}}
    assert_equals_each_alone(samples, "phi3", original_max_position_embeddings=9, **rope)  # the longest has 9 tokens
    with pytest.raises(ValueError, match="a sample has 9 tokens: beyond 8 the rotary embedding of Phi3ForCausalLM"):
        log_probs_of(PackedCausalLM(tiny("phi3", original_max_position_embeddings=8, **rope)), samples)


def graphs_after_rows(folder, images_of_rows):
    """How many graphs there are after each of some rows; in a process of its own, where nobody has changed torch."""
    from torch._dynamo.utils import counters

    from meshrl.config.engine import ModelConfig
    from meshrl.engines.fsdp.fsdp_engine import compile_layers
    from meshrl.models.loading import load_model
    from meshrl.models.vision import find_sight

    model = load_model(folder, ATTENTION_NAME)
    sight = find_sight(model.config, ModelConfig(path=str(folder)))
    torch._dynamo.reset()
    counters.clear()
    compiled, torch.compile = torch.compile, lambda forward: compiled(forward, backend="eager")
    compile_layers(model, 1.0)
    torch.compile = compiled
    module = PackedCausalLM(model, sight=sight, looks_always=True)
    graphs = []
    for size, images in images_of_rows:
        tokens = [token for one in images for token in [11, *[sight.image_token] * sight.reader.num_tokens(one)]]
        ids = torch.tensor([tokens + list(range(2, 2 + size))])
        mask = torch.ones_like(ids)
        row = pack(ids, mask, mask[:, -3:])
        row = replace(row, seen=sight.look(row.input_ids, row.lengths, [images]))
        shard = SequenceParallel(None, None).shard(PackedSequences.of(row.lengths, "cpu"))
        module(row, shard, 1.0, False)["log_probs"].sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def test_compiled_layers_take_rows_of_any_size_with_and_without_images(seeing_folder, image):
    """The second size makes the code general; images and their absence, and the first layer's input, change nothing."""
    rows = [
        (size, tuple(image(16, 8 * at, at) for at in range(1, shown + 1)))
        for size, shown in ((5, 1), (9, 2), (7, 0), (12, 3), (6, 0), (20, 2))
    ]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for family in ("qwen3_vl", "qwen2_5_vl"):
            graphs = pool.submit(graphs_after_rows, seeing_folder(family), rows).result(timeout=240)
            assert 0 < 2 * graphs[0] == graphs[1]
            assert graphs[1:] == [graphs[1]] * 5
