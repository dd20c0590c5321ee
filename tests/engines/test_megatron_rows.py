"""Rows as the ranks of a Megatron layout see them: padding, zig-zag chunks, and attention over them."""

import pytest
import torch

pytest.importorskip("megatron.core")

from meshrl.data.packing import pack
from meshrl.engines.megatron.packed_rows import RowSharing, SharedRow
from meshrl.engines.megatron.zigzag import ZigZag
from meshrl.parallel.attention import PackedSequences

CPU = torch.device("cpu")


def batch(lengths=(3, 8, 1, 5), columns=4):
    """Left-padded ids 1, 2, ... in each document; the last `columns` but a document's first token are targets."""
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.arange(1, length + 1) + 100 * row
        mask[row, width - length :] = 1
    targets = mask[:, -columns:].clone()
    for row, length in enumerate(lengths):
        if length <= columns:
            targets[row, columns - length] = 0
    return ids, mask, targets


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (4, 2)])
def test_every_token_and_target_is_on_one_rank(cp, tp):
    row = pack(*batch())
    seen, answered = [], []
    for rank in range(cp):
        shared = SharedRow(row, RowSharing(cp=cp, cp_rank=rank, tp=tp), CPU, CPU)
        assert shared.input_ids.shape[1] % tp == 0
        real = ~shared.padding[0]
        seen += shared.input_ids[0][real].tolist()
        # A token's number says its document and position.
        assert (shared.input_ids[0][real] % 100 - 1).tolist() == shared.position_ids[0][real].tolist()
        question = shared.question(1.0, False)
        answered += question.targets.tolist()
        assert (shared.input_ids[0][question.places] + 1).tolist() == question.targets.tolist()
        assert shared.packed.cu_seqlens_q.tolist() == [0, *torch.tensor(shared.documents.lengths).cumsum(0).tolist()]
    assert sorted(seen) == sorted(row.input_ids.tolist())
    assert sorted(answered) == sorted(row.targets.tolist())


def test_without_context_parallelism_the_order_is_the_rows():
    row = pack(*batch())
    question = SharedRow(row, RowSharing(tp=8), CPU, CPU).question(1.0, True)
    assert question.targets.tolist() == row.targets.tolist()


def test_zigzag_gives_each_rank_both_ends():
    documents = PackedSequences.of([8, 4], CPU)
    assert ZigZag(documents, 2, 0).index.tolist() == [0, 1, 6, 7, 8, 11]
    assert ZigZag(documents, 2, 1).index.tolist() == [2, 3, 4, 5, 9, 10]
    whole = torch.arange(12)
    parts = torch.cat([whole[ZigZag(documents, 2, rank).index] for rank in range(2)])
    assert parts[ZigZag(documents, 2, 0).order].tolist() == whole.tolist()
    with pytest.raises(ValueError, match=r"6 tokens does not divide into 2 \* 2"):
        ZigZag(PackedSequences.of([8, 6], CPU), 2, 0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_zigzag_attention_is_causal_attention_of_each_document(size, window):
    torch.manual_seed(0)
    lengths = [12, 24, 12]
    query, key, value = (torch.randn(sum(lengths), heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    documents = PackedSequences.of(lengths, CPU)
    expected, start = [], 0
    for length in lengths:
        whole = query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        q, k, v = (x[start : start + length] for x in whole)
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += length
    expected = torch.cat(expected)
    for rank in range(size):
        zigzag = ZigZag(documents, size, rank)
        found = zigzag.attend(query[zigzag.index], key, value, 0.3, window)
        torch.testing.assert_close(found, expected[zigzag.index])
        other = ZigZag(documents, size, (rank + 1) % size)
        assert (found - expected[other.index]).abs().max() > 0.01
