"""Ring attention: its blocks against counting pair by pair, its parts against autograd, the ring against the row."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_attention import attend_alone, attend_on, random_row, worst
from torch import Tensor

from meshrl.parallel import context_parallel
from meshrl.parallel.attention import PackedSequences
from meshrl.parallel.context_parallel import attend_with_lse, attend_with_lse_backward, block_window, ring_block

LENGTHS = (1, 13, 4, 4, 1, 2)
ROWS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def padded_row(lengths: list[int], size: int) -> PackedSequences:
    missing = -sum(lengths) % size
    return PackedSequences.of(lengths + [missing] * bool(missing), "cpu")


def pairs_of_block(row: PackedSequences, size: int, own: int, other: int, window: int | None) -> set[tuple[int, int]]:
    """The (query, key) positions of the row that a block stands for."""
    block = ring_block(row, size, own, other)
    narrow = None if window is None else block_window(window, size, own, other)
    if block is None or (narrow is not None and narrow < 1):
        return set()
    everything = torch.arange(row.num_tokens // size)
    queries = everything if block.queries is None else block.queries
    keys = everything if block.keys is None else block.keys
    pairs = set()
    start = 0
    for length in block.packed.lengths:
        for i in range(length):
            for j in range(0 if narrow is None else max(0, i - narrow + 1), i + 1):
                pairs.add((int(queries[start + i]) * size + own, int(keys[start + j]) * size + other))
        start += length
    return pairs


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(2, 5), st.one_of(st.none(), st.integers(1, 15)))
def test_the_blocks_are_exactly_the_pairs_that_may_see_each_other(lengths, size, window):
    row = padded_row(lengths, size)
    document = torch.repeat_interleave(torch.arange(len(row.lengths)), torch.tensor(row.lengths)).tolist()
    wanted = {
        (q, k)
        for q, k in itertools.product(range(row.num_tokens), repeat=2)
        if document[q] == document[k] and k <= q and (window is None or q - k < window)
    }
    blocks = [pairs_of_block(row, size, own, other, window) for own in range(size) for other in range(size)]
    assert set().union(*blocks) == wanted
    assert sum(map(len, blocks)) == len(wanted)


def work(row: PackedSequences, size: int, own: int) -> int:
    blocks = (ring_block(row, size, own, other) for other in range(size))
    return sum(length * (length + 1) // 2 for block in blocks if block for length in block.packed.lengths)


def unevenness(shares: list[int]) -> float:
    return max(shares) / (sum(shares) / len(shares))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_rank_has_the_same_causal_work(size, seed):
    """Pairs a rank multiplies, and where contiguous parts of the same row would leave the ranks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(12).log_normal_(6.0, 1.2, generator=generator).long().clamp(1, 8192).tolist()
    row = padded_row(lengths, size)
    shares = [work(row, size, own) for own in range(size)]
    assert sum(shares) == sum(length * (length + 1) // 2 for length in row.lengths)
    assert unevenness(shares) < 1.05
    contiguous = (row.position_ids[0] + 1).view(size, -1).sum(1).tolist()
    assert unevenness(contiguous) > 1.1


@pytest.mark.parametrize("tile_rows", [1, 3, 128])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_tiles_have_the_output_and_gradients_of_the_whole(monkeypatch, tile_rows, window):
    """Output and gradients as autograd finds them, and the log-sum-exp as its definition says."""
    monkeypatch.setattr(context_parallel, "TILE_ROWS", tile_rows)
    row = random_row((5, 5, 1, 8), 4, 2, value_dim=3, window=window)
    packed = PackedSequences.of(row.lengths, "cpu")
    query, key, value, weights = (x.transpose(0, 1) for x in (row.query, row.key, row.value, row.weights))
    output, lse = attend_with_lse(packed, query, key, value, row.scaling, window)
    grads = attend_with_lse_backward(packed, weights, query, key, value, output, lse, row.scaling, window)
    assert worst([x.transpose(0, 1) for x in (output, *grads)], attend_alone(row)) < 1e-12
    torch.testing.assert_close(lse, brute_force_lse(query, key, row.lengths, row.scaling, window))


def brute_force_lse(query: Tensor, key: Tensor, lengths: tuple[int, ...], scaling: float, window: int | None) -> Tensor:
    lse = query.new_empty(query.shape[:2])
    group, start = len(query) // len(key), 0
    for length in lengths:
        for head, at in itertools.product(range(len(query)), range(start, start + length)):
            first = start if window is None else max(start, at - window + 1)
            scores = key[head // group, first : at + 1] @ query[head, at] * scaling
            lse[head, at] = scores.exp().sum().log()
        start += length
    return lse


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_output_and_gradients_equal_those_of_the_whole_row(ranks, size, window):
    row = random_row(LENGTHS, 4, 2, value_dim=4, window=window)
    assert worst(attend_on(ranks, row, size, 1), attend_alone(row)) < 1e-12


@pytest.mark.parametrize("lengths", [(1,), (3,), (1, 1, 1, 1, 1), (9, 30, 9), (16,), (2, 2, 2, 2, 3, 3, 3)], ids=str)
def test_rows_of_any_length(ranks, lengths):
    row = random_row(lengths, 3, 1)
    assert worst(attend_on(ranks, row, 4, 1), attend_alone(row)) < 1e-12


@pytest.mark.parametrize(("cp", "sp"), [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("window", [None, 3])
def test_ring_and_ulysses_together(ranks, cp, sp, window):
    row = random_row(LENGTHS, 4, 2, window=window)
    assert worst(attend_on(ranks, row, cp, sp), attend_alone(row)) < 1e-12


def test_half_types_are_summed_up_in_float32(ranks):
    row = random_row((3, 90, 20), 4, 2, dim=16, dtype=torch.bfloat16)
    exact = attend_alone(row._replace(**{name: getattr(row, name).double() for name in ("query", "key", "value")}))
    found = attend_on(ranks, row, 4, 1)
    assert all(x.dtype == torch.bfloat16 for x in found)
    assert worst([x.double() for x in found], exact) < 1e-2


def test_large_scores_do_not_overflow(ranks):
    row = random_row(LENGTHS, 4, 2)._replace(scaling=300.0)
    found = attend_on(ranks, row, 2, 1)
    assert all(bool(x.isfinite().all()) for x in found)
    assert worst(found, attend_alone(row)) < 1e-9


@pytest.mark.parametrize("lost_step", [0, 1, 2])
def test_the_comparison_notices_a_lost_step(ranks, lost_step):
    row = random_row(LENGTHS, 4, 2)
    found = [x.nan_to_num(0.0) for x in attend_on(ranks, row, 3, 1, lost_step=lost_step)]
    assert worst(found, attend_alone(row)) > 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_kernels_equal_the_tiles(window, dtype):
    row = random_row((1, 700, 33, 2, 128), 8, 2, dim=64, window=window, dtype=dtype)
    packed = PackedSequences.of(row.lengths, "cuda")
    query, key, value, weights = (x.cuda().transpose(0, 1) for x in (row.query, row.key, row.value, row.weights))

    def run(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> list[Tensor]:
        output, lse = attend_with_lse(packed, query, key, value, 0.2, window)
        grads = attend_with_lse_backward(packed, weights, query, key, value, output, lse, 0.2, window)
        return [x.float() for x in (output, lse, *grads)]

    tiles = run(*(x.float() for x in (query, key, value, weights)))
    assert worst(run(query, key, value, weights), tiles) < 2e-2
