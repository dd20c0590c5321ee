"""The gated delta rule over packed documents, against a loop over single tokens; models with it, against HF's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.parallel.attention import PackedSequences, check_layers
from meshrl.parallel.linear_attention import CHUNK, DeltaRule, States, chunks_of, enter_recurrences, recurrences

STATEFUL = ("qwen3_next", "qwen3_5", "olmo_hybrid")
# One token; less than the convolution is wide; a whole chunk; one more; several; and their order is not by length.
LENGTHS = [5, 2 * CHUNK + 2, 1, CHUNK, CHUNK + 1, 3]


def made(lengths: list[int], seed: int = 0) -> tuple[DeltaRule, Tensor, Tensor, Tensor]:
    """A rule with twice as many heads of values as of keys, and a row for it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rule = DeltaRule(normal(2 * 2 * 6 + 4 * 10, 4) * 0.5, 2, 4, 6, 10)
    tokens = sum(lengths)
    decay = -F.softplus(normal(tokens, 4) - 2)
    return rule, normal(tokens, len(rule.conv)), decay, normal(tokens, 4).sigmoid()


def token_by_token(
    rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor, recent: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One document in float64, as the formulas say it."""
    outputs = []
    for now, fade, share in zip(channels.double(), decay.double(), rate.double(), strict=True):
        window = torch.cat([recent, now[None]])
        mixed = F.silu((window * rule.conv.double().t()).sum(0))
        query, key, value = mixed.split(rule.sizes)
        query, key = (x.view(rule.key_heads, -1) for x in (query, key))
        query, key = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        out = []
        for head in range(rule.value_heads):
            of = head // (rule.value_heads // rule.key_heads)
            wanted = value.view(rule.value_heads, -1)[head]
            state = memory[head] * fade[head].exp()
            state = state + torch.outer(key[of], share[head] * (wanted - state.t() @ key[of]))
            memory = torch.cat([memory[:head], state[None], memory[head + 1 :]])
            out.append(state.t() @ query[of] / rule.key_dim**0.5)
        outputs.append(torch.stack(out))
        recent = window[1:]
    return torch.stack(outputs), recent, memory


def by_hand(rule: DeltaRule, row: tuple[Tensor, ...], lengths: list[int], before: States) -> tuple[Tensor, States]:
    parts = zip(*(x.split(lengths) for x in row), before.recent.double(), before.memory.double(), strict=True)
    found = [token_by_token(rule, *part) for part in parts]
    outputs, recent, memory = zip(*found, strict=True)
    return torch.cat(outputs), States(torch.stack(recent), torch.stack(memory))


def apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("goes_on", [False, True])
def test_chunks_are_what_single_tokens_make(goes_on: bool) -> None:
    rule, *row = made(LENGTHS)
    before = rule.no_states(len(LENGTHS), row[0])
    if goes_on:
        before = States(torch.randn_like(before.recent), torch.randn_like(before.memory))
    packed = PackedSequences.of(LENGTHS, "cpu")
    out, after = rule.over(row[0], row[1], row[2], packed, before if goes_on else None, wants_after=True)
    assert after is not None
    expected, states = by_hand(rule, tuple(row), LENGTHS, before)
    assert apart(out, expected) < 1e-6
    assert apart(after.recent, states.recent) < 1e-7
    assert apart(after.memory, states.memory) < 1e-6
    # With another border somewhere it is something else.
    moved = PackedSequences.of([LENGTHS[0] + 1, LENGTHS[1] - 1, *LENGTHS[2:]], "cpu")
    assert apart(rule.over(row[0], row[1], row[2], moved)[0], expected) > 1e-3


def test_steps_go_on_where_chunks_ended() -> None:
    lengths = [3, 70, 1]
    rule, *row = made(lengths)
    whole = PackedSequences.of(lengths, "cpu")
    expected, ends = rule.over(row[0], row[1], row[2], whole, wants_after=True)
    assert ends is not None
    states, last = rule.no_states(3, row[0]), torch.tensor(lengths).cumsum(0) - 1
    begun = [length - 1 for length in lengths if length > 1]
    kept = torch.cat([torch.arange(end - length + 1, end) for end, length in zip(last.tolist(), lengths, strict=True)])
    _, after = rule.over(*(x[kept] for x in row), PackedSequences.of(begun, "cpu"), wants_after=True)
    assert after is not None
    for own, new in zip(states, after, strict=True):
        own[:2] = new
    out, states = rule.step(*(x[last] for x in row), states)
    assert apart(out, expected[last]) < 1e-6
    assert apart(states.memory, ends.memory) < 1e-6
    assert torch.equal(states.recent, ends.recent)


def test_gradients_are_those_of_single_tokens() -> None:
    rule, *row = made(LENGTHS[:3], seed=1)
    leaves = [rule.conv, *row]
    weights = torch.randn(sum(LENGTHS[:3]), 4, 10)
    found = []
    for compute in (
        lambda: rule.over(*row, PackedSequences.of(LENGTHS[:3], "cpu"))[0],
        lambda: by_hand(rule, tuple(row), LENGTHS[:3], rule.no_states(3, row[0]))[0],
    ):
        for leaf in leaves:
            leaf.requires_grad_()
            leaf.grad = None
        (compute() * weights).sum().backward()
        found.append([leaf.grad.clone() for leaf in leaves if leaf.grad is not None])
    assert len(found[0]) == 4
    for ours, theirs in zip(*found, strict=True):
        assert apart(ours, theirs) < 1e-5


def test_chunks_have_no_padding_but_at_the_ends_of_documents() -> None:
    chunks = chunks_of(tuple(LENGTHS), torch.device("cpu"))
    assert len(chunks.tokens) == sum(-(-length // CHUNK) for length in LENGTHS) == sum(chunks.sizes)
    assert chunks.sizes == [6, 2, 1]
    assert sorted(chunks.place.tolist()) == (chunks.tokens.flatten() < sum(LENGTHS)).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("family", STATEFUL)
def test_models_on_packed_rows_are_theirs_on_single_samples(
    make_lm: Callable[..., PreTrainedModel], family: str
) -> None:
    ours, theirs = (make_lm(family, *how, max_position_embeddings=256) for how in ((), ("eager",)))
    names = list(ours.state_dict())
    for layer in (layer for model in (ours, theirs) for layer in recurrences(model)):
        with torch.no_grad():  # as Transformers begins, they fade within a few tokens
            layer.A_log.fill_(-2)
            layer.dt_bias.fill_(-1)
    assert enter_recurrences(ours)
    assert enter_recurrences(ours)  # again changes nothing
    assert list(ours.state_dict()) == names
    documents = [torch.randint(2, 41, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
    packed = PackedSequences.of(LENGTHS, "cpu")

    def hidden(lengths: PackedSequences) -> Tensor:
        ids = torch.cat(documents)[None]
        out = ours.base_model(
            input_ids=ids, position_ids=packed.position_ids, use_cache=False, attention_context=lengths
        )
        return out.last_hidden_state[0]

    out = hidden(packed)
    check_layers(ours)
    expected = torch.cat(
        [theirs.base_model(input_ids=x[None], use_cache=False).last_hidden_state[0] for x in documents]
    )
    assert apart(out, expected) < 2e-5
    assert apart(hidden(PackedSequences.of([sum(LENGTHS)], "cpu")), expected) > 1e-2  # the control: one document
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for result in (out, expected):
        (result * weights).sum().backward()
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            assert own.grad is not None, name
            assert apart(own.grad, other.grad) < 1e-4, name


def test_without_a_context_a_model_is_what_it_was(make_lm: Callable[..., PreTrainedModel]) -> None:
    ours, theirs = make_lm("qwen3_5", "eager"), make_lm("qwen3_5", "eager")
    enter_recurrences(ours)
    ids = torch.randint(2, 41, (2, 7))
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_a_context_without_a_place_for_states_is_refused(make_lm: Callable[..., PreTrainedModel]) -> None:
    model = make_lm("qwen3_5")
    enter_recurrences(model)
    with pytest.raises(ValueError, match="carries a state, which object has no place for"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False, attention_context=object())
