"""Packed attention against Transformers' own attention run document by document, and against plain loops."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Llama4TextConfig

from meshrl.parallel.attention import ATTENTION_NAME, PackedSequences, attention, causal_window

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "qwen3_mixed", "qwen3_moe"]
LENGTHS = [(1,), (13,), (5, 5, 5), (11, 3, 3, 1, 9, 1), (2, 7, 7, 4, 4, 4)]


def tokens_for(lengths: tuple[int, ...], vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))


def packed_logits(model, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    packed = PackedSequences.of(lengths, ids.device)
    return model(ids, position_ids=packed.position_ids, use_cache=False, attention_context=packed).logits[0]


def logits_by_document(model, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([model(part[None], use_cache=False).logits[0] for part in ids[0].split(lengths)])


def weighted(logits: Tensor) -> Tensor:
    """A loss with another weight for every logit, so that no two errors cancel."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    return (logits * weights).sum() / len(logits)


def worst(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_each_document_alone(make_lm, family, lengths):
    ours, reference = make_lm(family), make_lm(family, "eager")
    ids = tokens_for(lengths, ours.config.vocab_size)
    with torch.no_grad():
        assert worst(packed_logits(ours, ids, lengths), logits_by_document(reference, ids, lengths)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_each_document_alone(make_lm, family):
    lengths = (11, 3, 3, 1, 9)
    ours, reference = make_lm(family), make_lm(family, "eager")
    ids = tokens_for(lengths, ours.config.vocab_size)
    weighted(packed_logits(ours, ids, lengths)).backward()
    weighted(logits_by_document(reference, ids, lengths)).backward()
    wanted = dict(reference.named_parameters())
    scale = max(float(p.grad.abs().max()) for p in wanted.values() if p.grad is not None)
    for name, param in ours.named_parameters():
        assert (param.grad is None) == (wanted[name].grad is None), name
        if param.grad is not None:
            assert float((param.grad - wanted[name].grad).abs().max()) < 1e-5 * scale, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_notices_a_moved_border_and_a_moved_weight(make_lm, family):
    lengths, moved = (6, 5, 4), (6, 4, 5)
    ours, reference = make_lm(family), make_lm(family, "eager")
    ids = tokens_for(lengths, ours.config.vocab_size)
    with torch.no_grad():
        wanted = logits_by_document(reference, ids, lengths)
        assert worst(packed_logits(ours, ids, moved), wanted) > 1e-2
        ours.model.layers[0].self_attn.k_proj.weight[0, 0] += 1e-2
        assert worst(packed_logits(ours, ids, lengths), wanted) > 1e-5


@pytest.mark.parametrize("family", ["mistral", "qwen3_mixed"])
def test_a_window_is_used_and_one_token_more_is_noticed(make_lm, family):
    lengths = (11, 3, 9)
    wider, reference = make_lm(family, sliding_window=5), make_lm(family, "eager")
    ids = tokens_for(lengths, wider.config.vocab_size)
    with torch.no_grad():
        wanted = logits_by_document(reference, ids, lengths)
        assert worst(packed_logits(wider, ids, lengths), wanted) > 1e-2


def loop_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float, window: int | None
) -> Tensor:
    """Token by token and head by head, as the definition says."""
    _, heads, tokens, dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(1, tokens, heads, dim, dtype=query.dtype)
    start = 0
    for length in lengths:
        for at, head in itertools.product(range(start, start + length), range(heads)):
            first = start if window is None else max(start, at - window + 1)
            scores = torch.stack([query[0, head, at] @ key[0, head // group, k] for k in range(first, at + 1)])
            out[0, at, head] = (scores * scaling).softmax(0) @ value[0, head // group, first : at + 1]
        start += length
    return out


def random_qkv(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(1, heads, tokens, dim), (1, kv_heads, tokens, dim), (1, kv_heads, tokens, dim)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_attend_equals_a_plain_loop(heads, kv_heads, window):
    lengths = (4, 4, 1, 7, 2)
    qkv = random_qkv(sum(lengths), heads, kv_heads, 5)
    out = PackedSequences.of(lengths, "cpu").attend(0, *qkv, 0.7, window)
    torch.testing.assert_close(out, loop_attention(*qkv, lengths, 0.7, window), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 2])
def test_gradients_of_attend(window):
    qkv = [x.requires_grad_() for x in random_qkv(8, 4, 2, 3)]
    packed = PackedSequences.of((3, 3, 1, 1), "cpu")
    assert torch.autograd.gradcheck(lambda q, k, v: packed.attend(0, q, k, v, 0.5, window), qkv)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 4, 64), (8, 2, 64), (4, 4, 40)])
def test_the_cuda_kernel_equals_the_runs(scaling, heads, kv_heads, value_dim):
    lengths = (130, 7, 7, 1, 64)
    qkv = [x.cuda() for x in random_qkv(sum(lengths), heads, kv_heads, 64, torch.bfloat16)]
    qkv[2] = qkv[2][..., :value_dim].contiguous()
    packed = PackedSequences.of(lengths, "cuda")
    scale = scaling or 64**-0.5
    exact = [x.float().requires_grad_() for x in qkv]
    half = [x.requires_grad_() for x in qkv]
    wanted = packed.attend(0, *exact, scale, None)
    out = packed.attend(0, *half, scale, None)
    assert out.dtype == torch.bfloat16
    assert worst(out.float(), wanted) < 2e-2
    wanted.square().sum().backward()
    out.float().square().sum().backward()
    for ours, theirs in zip(half, exact, strict=True):
        assert worst(ours.grad.float(), theirs.grad) < 5e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_window_takes_no_square_of_memory_on_a_gpu():
    length, window = 8192, 512
    half = [x.cuda() for x in random_qkv(length, 4, 2, 64, torch.bfloat16)]
    packed = PackedSequences.of((length,), "cuda").ready()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = packed.attend(0, *half, 0.125, window)
    assert torch.cuda.max_memory_allocated() - before < length * length
    wanted = packed.attend(0, *(x.float() for x in half), 0.125, window)
    assert worst(out.float(), wanted) < 2e-2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_what_derives_from_the_lengths(lengths):
    packed = PackedSequences.of(lengths, "cpu")
    assert packed.num_tokens == sum(lengths)
    assert packed.max_length == max(lengths)
    assert packed.cu_seqlens.tolist() == [0, *itertools.accumulate(lengths)]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.position_ids.tolist() == [[at for length in lengths for at in range(length)]]
    assert [length for _, count, length in packed.runs for _ in range(count)] == lengths
    starts = list(itertools.accumulate((count * length for _, count, length in packed.runs), initial=0))
    assert [first for first, _, _ in packed.runs] == starts[:-1]
    assert all(a[2] != b[2] for a, b in itertools.pairwise(packed.runs))


@pytest.mark.parametrize(("length", "window"), [(1, 1), (5, 1), (5, 3), (5, 5), (4, 9)])
def test_causal_window_by_loop(length, window):
    mask = causal_window(length, window, torch.device("cpu"))
    assert mask.tolist() == [[k <= q and q - k < window for k in range(length)] for q in range(length)]


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_empty_documents_are_refused(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        PackedSequences.of(lengths, "cpu")


def call_attention(**changes):
    class Layer(torch.nn.Module):
        layer_idx = 0

    query, key, value = random_qkv(5, 4, 2, 8)
    arguments = {"attention_mask": None, "attention_context": PackedSequences.of([5], "cpu"), "scaling": 0.5}
    return attention(Layer(), query, key, value, **(arguments | changes))


def test_the_default_scale_is_that_of_the_head_dim():
    assert torch.allclose(call_attention(scaling=None)[0], call_attention(scaling=1 / math.sqrt(8))[0])
    assert not torch.allclose(call_attention(scaling=None)[0], call_attention()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_context": None}, "attention_context="),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask"),
        ({"dropout": 0.1}, "attention_dropout"),
        ({"softcap": 50.0}, "soft-capping"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
    ],
)
def test_what_cannot_be_expressed_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call_attention(**changes)


def test_refusals_reach_the_user_through_a_model(make_lm):
    model = make_lm("qwen3")
    ids, packed = torch.arange(6)[None], PackedSequences.of([6], "cpu")
    with pytest.raises(ValueError, match="attention_context="):
        model(ids)
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6), attention_context=packed, use_cache=False)
    dropping = make_lm("qwen3", attention_dropout=0.1)
    assert dropping(ids, attention_context=packed, use_cache=False).logits.shape == (1, 6, 41)
    with pytest.raises(ValueError, match="attention_dropout"):
        dropping.train()(ids, attention_context=packed, use_cache=False)


def run_family(config) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    packed = PackedSequences.of([3, 2], "cpu")
    model(torch.arange(5)[None], position_ids=packed.position_ids, attention_context=packed, use_cache=False)


SMALL = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
SMALL |= {"num_key_value_heads": 1, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def test_soft_capping_models_are_refused():
    with pytest.raises(ValueError, match="soft-capping"):
        run_family(Gemma2Config(**SMALL))


def test_chunked_attention_is_refused_and_not_taken_for_full_attention():
    config = Llama4TextConfig(
        **SMALL, num_local_experts=1, num_experts_per_tok=1, intermediate_size_mlp=16, attention_chunk_size=2
    )
    assert "chunked_attention" in config.layer_types
    with pytest.raises(ValueError, match="chunked_attention"):
        run_family(config)


def test_a_window_that_the_model_keeps_to_itself_is_refused(make_lm):
    model = make_lm("qwen3_mixed")
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ValueError, match="layer 1 has a sliding window"):
        packed_logits(model, torch.arange(6)[None], (6,))


def test_layers_that_look_ahead_are_refused(make_lm):
    model = make_lm("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match="looks ahead"):
        packed_logits(model, torch.arange(6)[None], (6,))
