"""Packing against a plain loop over documents."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshrl.data.packing import pack


def padded(prompts: list[int], answers: list[int], width: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left-padded prompts beside right-padded answers: ids (all different), attention mask, target mask."""
    batch = len(prompts)
    ids = torch.arange(1, batch * (width + columns) + 1).view(batch, -1)
    mask = torch.zeros_like(ids)
    target = torch.zeros(batch, columns, dtype=torch.long)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mask[row, width - prompt : width + answer] = 1
        target[row, :answer] = 1
    return ids, mask, target


def loop_pack(
    ids: Tensor, mask: Tensor, target: Tensor
) -> tuple[list[list[int]], dict[tuple[int, int], tuple[int, int]]]:
    """Documents as lists, and for each wanted place of the rectangle (the token before it, the token)."""
    documents, wanted = [], {}
    offset = ids.shape[1] - target.shape[1]
    for row in range(len(ids)):
        kept = [at for at in range(ids.shape[1]) if mask[row, at]]
        documents.append([int(ids[row, at]) for at in kept])
        for before, at in itertools.pairwise(kept):
            if at >= offset and target[row, at - offset]:
                wanted[row, at - offset] = int(ids[row, before]), int(ids[row, at])
    return documents, wanted


def check(ids: Tensor, mask: Tensor, target: Tensor) -> None:
    row = pack(ids, mask, target)
    documents, wanted = loop_pack(ids, mask, target)
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))  # stable
    assert row.lengths == [len(documents[i]) for i in order]
    assert row.input_ids.tolist() == [token for i in order for token in documents[i]]
    found = {
        divmod(int(slot), row.shape[1]): (int(row.input_ids[at]), int(token))
        for slot, at, token in zip(row.slots, row.predictors, row.targets, strict=True)
    }
    assert found == wanted
    rectangle = row.unpack(row.targets.float())
    assert rectangle.shape == target.shape
    for place in torch.cartesian_prod(torch.arange(len(ids)), torch.arange(target.shape[1])).tolist():
        assert rectangle[tuple(place)] == wanted.get(tuple(place), (0, 0))[1]


sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=7)


@settings(max_examples=80, deadline=None)
@given(sizes, st.integers(0, 2), st.integers(1, 3))
def test_prompts_and_answers_of_all_lengths(lengths, spare_left, spare_right):
    prompts, answers = ([x[i] for x in lengths] for i in (0, 1))
    check(*padded(prompts, answers, max(prompts) + spare_left, max(answers) + spare_right))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(2, 9), st.randoms(use_true_random=False))
def test_masks_with_holes(batch, width, random):
    """Tool output is attended but not predicted; padding may lie anywhere."""
    ids = torch.arange(1, batch * width + 1).view(batch, width)
    mask = torch.tensor([[1] + [random.randint(0, 1) for _ in range(width - 1)] for _ in range(batch)])
    columns = random.randint(1, width - 1)
    target = torch.tensor([[random.randint(0, 1) for _ in range(columns)] for _ in range(batch)])
    check(ids, mask, target)


def test_whole_sequences_padded_on_the_right():
    ids, mask, _ = padded([3, 1], [0, 0], 3, 2)
    mask = mask.flip(1)  # documents now begin somewhere in the middle and the mask covers all columns
    target = mask.clone()
    target[torch.arange(2), mask.argmax(1)] = 0
    check(ids, mask, target)


def test_gradients_reach_the_values_they_came_from():
    ids, mask, target = padded([2, 4, 1], [3, 0, 2], 4, 3)
    row = pack(ids, mask, target)
    values = torch.randn(len(row.targets), requires_grad=True)
    weights = torch.arange(9.0).view(3, 3)
    (row.unpack(values) * weights).sum().backward()
    assert torch.equal(values.grad, weights.flatten()[row.slots])


def test_no_targets_at_all():
    ids, mask, target = padded([2, 1], [1, 0], 2, 2)
    row = pack(ids, mask, torch.zeros_like(target))
    assert len(row.targets) == len(row.predictors) == 0
    assert torch.equal(row.unpack(torch.empty(0)), torch.zeros(2, 2))


def test_targets_on_padding_are_not_predicted():
    ids, mask, target = padded([2, 1], [1, 2], 2, 3)
    assert torch.equal(pack(ids, mask, torch.ones_like(target)).slots.sort().values, torch.tensor([0, 3, 4]))


def test_an_answer_without_prompt_is_refused():
    ids, mask, target = padded([1, 0], [2, 2], 2, 2)
    with pytest.raises(ValueError, match="every prompt needs at least one token"):
        pack(ids, mask, target)
    target[1, 0] = 0  # but its later tokens can be predicted
    assert sorted(pack(ids, mask, target).slots.tolist()) == [0, 1, 3]


def test_a_sample_without_tokens_is_refused():
    ids, mask, target = padded([1, 0], [2, 0], 2, 2)
    with pytest.raises(ValueError, match="all zeros"):
        pack(ids, mask, target)


@pytest.mark.parametrize("shape", [(2, 6), (3, 2)], ids=["more columns than tokens", "more rows"])
def test_shapes_that_do_not_belong_together(shape):
    with pytest.raises(ValueError, match="do not belong together"):
        pack(torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5), torch.ones(shape))
    with pytest.raises(ValueError, match="do not belong together"):
        pack(torch.ones(2, 5, dtype=torch.long), torch.ones(2, 4), torch.ones(2, 2))
