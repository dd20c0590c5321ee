"""Whole models over cp × sp ranks equal Transformers' own attention run document by document in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_group import ProcessGroups, subgroups
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.parallel.attention import PackedSequences
from meshrl.parallel.context_parallel import RingContext, UlyssesContext
from meshrl.parallel.sequence import SequenceParallel

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "qwen3_mixed"]
LAYOUTS = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)]  # cp, sp
# Two accumulated micro-batches: one long document among short ones, none of the totals divisible by the ranks.
MICRO_BATCHES = [(1, 37, 5, 5, 1, 9), (2, 1, 11, 3)]
SHORT = [(1,), (1, 2)]

Found = tuple[list[Tensor], dict[str, Tensor]]


def token_ids(lengths: tuple[int, ...]) -> Tensor:
    return torch.randint(2, 41, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))


def loss_of(logits: Tensor) -> Tensor:
    """Another weight for every logit, so that no two errors cancel."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    return (logits.log_softmax(-1) * weights).sum() / len(logits)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def train_alone(model: PreTrainedModel, micro_batches: list[tuple[int, ...]]) -> Found:
    """The reference: each document for itself, with Transformers' own attention."""
    found = []
    for lengths in micro_batches:
        documents = token_ids(lengths).split(lengths)
        logits = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
        loss_of(logits).backward()
        found.append(logits.detach())
    return found, gradients(model)


def train_part(
    model: PreTrainedModel,
    micro_batches: list[tuple[int, ...]],
    cp: int,
    sp: int,
    checkpointing: bool = False,
    break_by: str | None = None,
) -> Found:
    """Runs in a rank: the logits of the whole rows, gathered, and the gradients by way of the rank's own tokens."""
    cp_group, sp_group = subgroups(cp, sp)
    parallel = SequenceParallel(sp_group, cp_group)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    found = []
    for lengths in micro_batches:
        shard = parallel.shard(PackedSequences.of(lengths, "cpu"))
        position_ids = shard.position_ids
        if break_by == "position" and dist.get_rank() == 1:
            position_ids = position_ids + 1
        if break_by == "ring":
            context = shard.context.inner if isinstance(shard.context, UlyssesContext) else shard.context
            assert isinstance(context, RingContext)
            context.blocks[-1] = None
        local = shard.take(token_ids(lengths))[None]
        output = model(local, position_ids=position_ids, use_cache=False, attention_context=shard.context)
        logits = shard.gather(output.logits[0])
        loss_of(logits).backward()
        found.append(logits.detach())
    return found, gradients(model)


def train_on(
    ranks: ProcessGroups, model: PreTrainedModel, micro_batches: Any, cp: int, sp: int, **options: Any
) -> Found:
    """As `train_alone`: the logits every rank agrees on, and the sum of all ranks' gradients."""
    parts = ranks(cp * sp).run(train_part, model, micro_batches, cp, sp, **options)
    logits = [part[0] for part in parts]
    assert all(torch.equal(a, b) for other in logits[1:] for a, b in zip(logits[0], other, strict=True))
    names = {name for _, grads in parts for name in grads}
    return logits[0], {name: sum(grads[name] for _, grads in parts if name in grads) for name in names}


def worst(found: Found, wanted: Found) -> tuple[float, float]:
    """The largest relative difference of logits and of gradients, each tensor measured by its largest entry."""
    assert found[1].keys() == wanted[1].keys()
    scale = max(float(grad.abs().max()) for grad in wanted[1].values())
    in_logits = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[0], wanted[0], strict=True)]
    in_grads = [
        float((found[1][name] - grad).abs().max() / grad.abs().max().clamp(min=1e-2 * scale))
        for name, grad in wanted[1].items()
    ]
    return max(in_logits), max(in_grads)


@pytest.fixture(scope="module")
def reference(make_lm) -> Any:
    """The one-process result for a family, computed once."""
    known: dict[Any, Found] = {}

    def find(family: str, micro_batches: list[tuple[int, ...]] = MICRO_BATCHES) -> Found:
        key = family, tuple(micro_batches)
        if key not in known:
            known[key] = train_alone(make_lm(family, "eager"), micro_batches)
        return known[key]

    return find


# Every family with both cut at once, every layout with full attention and with a window.
CASES = [
    *[(family, 2, 2) for family in FAMILIES],
    *[("llama", cp, sp) for cp, sp in LAYOUTS if (cp, sp) != (2, 2)],
    *[("mistral", cp, sp) for cp, sp in LAYOUTS if (cp, sp) != (2, 2)],
    ("qwen3_mixed", 4, 1),
    ("qwen3_moe", 1, 2),
]


@pytest.mark.parametrize(("family", "cp", "sp"), CASES)
def test_logits_and_gradients_equal_one_process(ranks, make_lm, reference, family, cp, sp):
    logits, grads = worst(train_on(ranks, make_lm(family), MICRO_BATCHES, cp, sp), reference(family))
    assert logits < 1e-5
    assert grads < 1e-5


@pytest.mark.parametrize(("family", "cp", "sp"), [("qwen3", 2, 2), ("qwen3_moe", 1, 2), ("mistral", 4, 1)])
def test_gradient_checkpointing_changes_nothing(ranks, make_lm, reference, family, cp, sp):
    found = train_on(ranks, make_lm(family), MICRO_BATCHES, cp, sp, checkpointing=True)
    assert max(worst(found, reference(family))) < 1e-5


@pytest.mark.parametrize(("cp", "sp"), [(1, 4), (4, 1), (2, 2), (2, 4)])
def test_rows_shorter_than_the_group(ranks, make_lm, reference, cp, sp):
    """Some ranks hold nothing but padding, and still take part."""
    assert max(worst(train_on(ranks, make_lm("qwen3"), SHORT, cp, sp), reference("qwen3", SHORT))) < 1e-5


@pytest.mark.parametrize(
    ("break_by", "cp", "sp"), [("position", 1, 2), ("position", 2, 1), ("ring", 2, 1), ("ring", 2, 2)]
)
def test_the_comparison_notices_what_is_broken(ranks, make_lm, reference, break_by, cp, sp):
    logits, grads = worst(
        train_on(ranks, make_lm("llama"), MICRO_BATCHES, cp, sp, break_by=break_by), reference("llama")
    )
    assert logits > 1e-2
    assert grads > 1e-2


def forward_only(model: PreTrainedModel, lengths: tuple[int, ...], cp: int, sp: int) -> Tensor:
    cp_group, sp_group = subgroups(cp, sp)
    shard = SequenceParallel(sp_group, cp_group).shard(PackedSequences.of(lengths, "cpu"))
    with torch.no_grad():
        local = shard.take(token_ids(lengths))[None]
        output = model(local, position_ids=shard.position_ids, use_cache=False, attention_context=shard.context)
        gathered = shard.gather(output.logits[0])
    assert not gathered.requires_grad
    return gathered


def test_without_gradients(ranks, make_lm, reference):
    wanted = reference("qwen3")[0][0]
    for found in ranks(4).run(forward_only, make_lm("qwen3"), MICRO_BATCHES[0], 2, 2):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def gather_back(lengths: tuple[int, ...], cp: int, sp: int) -> tuple[Tensor, ...]:
    cp_group, sp_group = subgroups(cp, sp)
    shard = SequenceParallel(sp_group, cp_group).shard(PackedSequences.of(lengths, "cpu"))
    row = torch.arange(float(sum(lengths) * 2)).view(-1, 2) + 1
    local = shard.take(row).requires_grad_()
    whole = shard.gather(local)
    (whole * row).sum().backward()
    assert local.grad is not None
    return whole.detach(), shard.index, shard.position_ids[0], local.detach(), local.grad


@pytest.mark.parametrize(("cp", "sp"), [*LAYOUTS, (2, 4)])
@pytest.mark.parametrize("lengths", [(3, 1, 4), (5, 8), (1,)], ids=str)
def test_gather_returns_the_row_and_hands_each_rank_its_own_gradient(ranks, lengths, cp, sp):
    row = torch.arange(float(sum(lengths) * 2)).view(-1, 2) + 1
    padded_length = -(-len(row) // (cp * sp)) * cp * sp
    # The padding is a document of its own: its positions start again.
    positions = [at for length in (*lengths, padded_length - len(row)) for at in range(length)]
    seen = []
    for rank, (whole, index, places, local, grad) in enumerate(ranks(cp * sp).run(gather_back, lengths, cp, sp)):
        cp_rank, sp_rank = divmod(rank, sp)
        stripe = list(range(cp_rank, padded_length, cp))
        assert index.tolist() == stripe[sp_rank * len(stripe) // sp : (sp_rank + 1) * len(stripe) // sp]
        wanted = torch.stack([row[i] if i < len(row) else torch.zeros(2) for i in index.tolist()])
        assert places.tolist() == [positions[i] for i in index.tolist()]
        assert torch.equal(whole, row)
        assert torch.equal(local, wanted)
        assert torch.equal(grad, wanted)  # the loss weighs each number by itself
        seen += index.tolist()
    assert sorted(seen) == list(range(padded_length))


def test_without_groups_the_row_stays_as_it_is():
    packed = PackedSequences.of((3, 1, 4), "cpu")
    shard = SequenceParallel(None, None).shard(packed)
    values = torch.randn(8, 2)
    assert shard.context is packed
    assert shard.position_ids is packed.position_ids
    assert shard.index.tolist() == list(range(8))
    assert (shard.padded_length, shard.local_length, shard.parallel.size) == (8, 8, 1)
    assert shard.take(values) is values
    assert shard.gather(values) is values
