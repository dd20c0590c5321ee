"""Sums of rectangles: additive over any cut, and changed by whatever can go wrong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.weights import executor as module
from meshrl.weights.executor import _weights, checksum

WRAP = 1 << 64


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 9),
    row=st.integers(0, 3000),
    col=st.integers(0, 3000),
    cut=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
)
def test_parts_add_up_to_the_whole(rows, cols, row, col, cut, dtype):
    values = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(row)) * 50).to(dtype)
    whole = int(checksum(values, row, col))
    a, b = min(cut[0], rows), min(cut[1], cols)
    parts = [
        (values[r:s, c:d], row + r, col + c)
        for r, s in ((0, a), (a, rows))
        for c, d in ((0, b), (b, cols))
        if r < s and c < d
    ]
    assert (sum(int(checksum(*part)) for part in parts) - whole) % WRAP == 0
    turned = values.t().contiguous().t()
    assert int(checksum(turned, row, col)) == whole


def test_equals_a_plain_loop():
    values = torch.randn(5, 7)
    by_row, by_col = _weights(5, 11, module.ROW_SEED, values.device), _weights(7, 3, module.COL_SEED, values.device)
    bits = values.view(torch.int32)
    total = 0
    for i in range(5):
        for j in range(7):
            total += int(bits[i, j]) * (int(by_row[i]) + int(by_col[j]))
    assert (total - int(checksum(values, 11, 3))) % WRAP == 0


def test_chunks_and_conversion_change_nothing(monkeypatch):
    values = torch.randn(37, 11)
    expected = int(checksum(values.bfloat16(), 2, 5))
    assert int(checksum(values, 2, 5, torch.bfloat16)) == expected
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 30)
    assert int(checksum(values, 2, 5, torch.bfloat16)) == expected


@pytest.mark.parametrize("fault", ["bit", "rows", "columns", "shift", "zero"])
def test_faults_change_the_sum(fault):
    values = torch.randn(12, 9).bfloat16()
    wrong = values.clone()
    if fault == "bit":
        wrong.view(torch.int16)[4, 4] ^= 1
    elif fault == "rows":
        wrong[[2, 7]] = values[[7, 2]]
    elif fault == "columns":
        wrong[:, [0, 8]] = values[:, [8, 0]]
    elif fault == "shift":
        wrong = values.roll(1, 0)
    else:
        wrong[3:5] = 0
    assert int(checksum(values, 0, 0)) != int(checksum(wrong, 0, 0))
    assert int(checksum(values, 0, 0)) == int(checksum(values.clone(), 0, 0))


def test_what_leaves_the_sums_of_rows_and_columns_alone_goes_unseen():
    """As the module says."""
    mirrored = torch.eye(2).flip(0)
    assert int(checksum(torch.eye(2), 0, 0)) == int(checksum(mirrored, 0, 0))
    assert int(checksum(torch.eye(2), 0, 0)) != int(checksum(torch.diag(torch.tensor([1.0, 2.0])).flip(0), 0, 0))
