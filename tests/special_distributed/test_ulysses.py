"""Ulysses: tokens traded for heads over real processes equals attention over the whole row."""

import pytest
import torch
from process_group import RankFailedError, subgroups
from row_attention import attend_alone, attend_on, random_row, worst

from meshrl.parallel.context_parallel import check_heads, exchange_blocks, heads_for_tokens, kv_copies, tokens_for_heads

LENGTHS = (1, 13, 4, 4, 1)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"),
    [(2, 4, 4), (2, 4, 2), (2, 4, 1), (2, 6, 3), (3, 6, 2), (4, 4, 2), (4, 8, 2), (4, 8, 1), (4, 12, 6), (4, 12, 3)],
)
def test_output_and_gradients_equal_those_of_the_whole_row(ranks, size, heads, kv_heads):
    row = random_row(LENGTHS, heads, kv_heads)
    assert worst(attend_on(ranks, row, 1, size), attend_alone(row)) < 1e-12


@pytest.mark.parametrize("lengths", [(1,), (3,), (1, 1, 1, 1, 1), (9, 30, 9), (16,)], ids=str)
def test_rows_of_any_length(ranks, lengths):
    row = random_row(lengths, 4, 2)
    assert worst(attend_on(ranks, row, 1, 4), attend_alone(row)) < 1e-12


@pytest.mark.parametrize("window", [1, 3, 100])
def test_sliding_windows_and_values_of_another_dim(ranks, window):
    row = random_row(LENGTHS, 4, 2, dim=6, value_dim=4, window=window)
    assert worst(attend_on(ranks, row, 1, 2), attend_alone(row)) < 1e-12


def test_the_comparison_notices_a_moved_border(ranks):
    row = random_row(LENGTHS, 4, 2)
    moved = row._replace(lengths=(2, 12, 4, 4, 1))
    assert worst(attend_on(ranks, row, 1, 2), attend_alone(moved)) > 1e-2


def test_heads_that_cannot_be_shared_are_refused_with_the_numbers(ranks):
    message = r"heads \(6\) must be divisible by ulysses_sequence_parallel_size \(4\).*one of \[1, 2, 3, 6\]"
    with pytest.raises(ValueError, match=message):
        check_heads(6, 4)
    with pytest.raises(RankFailedError, match=message):
        attend_on(ranks, random_row(LENGTHS, 6, 2), 1, 4)


def test_repeated_key_heads_stay_beside_their_query_heads():
    """Every rank's query heads, counted through, must meet the key heads that the model gives them."""
    for size in range(1, 13):
        for kv_heads in range(1, 13):
            for group in (g for g in range(1, 13) if kv_heads * g % size == 0):
                heads = kv_heads * group
                copies = [h for h in range(kv_heads) for _ in range(kv_copies(kv_heads, size))]
                assert len(copies) % size == 0
                assert heads % len(copies) == 0
                serves = heads // len(copies)
                assert [copies[h // serves] for h in range(heads)] == [h // group for h in range(heads)]


def trade_and_return(size: int) -> list[torch.Tensor]:
    (group,) = subgroups(size)
    rank = torch.distributed.get_rank()
    # Each number names its place: head * 100 + token, where this rank's tokens are 3 * rank, ...
    own = torch.arange(2 * size)[:, None] * 100 + torch.arange(3 * rank, 3 * rank + 3)
    whole = tokens_for_heads([own[None, ..., None].double(), -own[None, ..., None].double()], group)
    back = heads_for_tokens(whole[0].transpose(1, 2), group)
    blocks = exchange_blocks(torch.arange(size) + 10.0 * rank, group)
    return [whole[0][0, ..., 0], whole[1][0, ..., 0], back[0, ..., 0].T - own, blocks]


def test_each_number_lands_where_it_belongs(ranks):
    for rank, (first, second, difference, blocks) in enumerate(ranks(4).run(trade_and_return, 4)):
        wanted = (torch.tensor([2 * rank, 2 * rank + 1])[:, None] * 100 + torch.arange(12)).double()
        assert torch.equal(first, wanted)
        assert torch.equal(second, -wanted)
        assert not difference.any()
        assert blocks.tolist() == [10.0 * other + rank for other in range(4)]
