"""Real batches: dicts, TensorDicts, DataProto-like objects and nested tensors go out and come back in order."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from meshrl.balance import (
    pad_sequences_to_fixed_length,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
    sequence_lengths,
)

LENGTHS = [3, 9, 1, 7, 7, 2, 5]


def padded_batch() -> dict[str, torch.Tensor]:
    mask = (torch.arange(10) < torch.tensor(LENGTHS)[:, None]).long()
    return {"attention_mask": mask, "input_ids": torch.arange(70).reshape(7, 10) * mask, "sample": torch.arange(7)}


class LikeDataProto:
    def __init__(self, batch: dict[str, torch.Tensor], names: np.ndarray) -> None:
        self.batch, self.names = batch, names

    def select_idxs(self, idxs: torch.Tensor) -> "LikeDataProto":
        return LikeDataProto({key: value[idxs] for key, value in self.batch.items()}, self.names[idxs.numpy()])


def test_dict_round_trip() -> None:
    batch = padded_batch() | {"names": np.array(list("abcdefg")), "temperature": 0.7}
    parts, indices = rearrange_micro_batches(batch, max_token_len=12)
    assert len(parts) == 3
    for part, index in zip(parts, indices, strict=True):
        assert part["attention_mask"].sum() <= 12
        assert part["sample"].tolist() == index
        assert part["names"].tolist() == [batch["names"][i] for i in index]
        assert part["temperature"] == 0.7
    results = torch.cat([part["input_ids"].sum(-1) for part in parts])
    assert torch.equal(restore_dynamic_batch(results, indices), batch["input_ids"].sum(-1))
    assert not torch.equal(results, batch["input_ids"].sum(-1)), "the order did change"


def test_tensordict_round_trip() -> None:
    batch = TensorDict(padded_batch(), batch_size=[7])
    parts, indices = rearrange_micro_batches(batch, max_token_len=12)
    assert isinstance(parts[0], TensorDict)
    assert torch.equal(restore_dynamic_batch(torch.cat([p["sample"] for p in parts]), indices), torch.arange(7))


def test_data_proto_round_trip() -> None:
    data = LikeDataProto(padded_batch(), np.array(list("abcdefg")))
    parts, indices = prepare_dynamic_batch(data, max_token_len=12, sort_strategy="max")
    assert [list(part.names) for part in parts] == [["abcdefg"[i] for i in index] for index in indices]
    assert torch.equal(restore_dynamic_batch(torch.cat([p.batch["sample"] for p in parts]), indices), torch.arange(7))


@pytest.mark.parametrize("wrap", [dict, lambda batch: TensorDict(batch, batch_size=[7])])
def test_nested_round_trip(wrap) -> None:  # type: ignore[no-untyped-def]
    rows = [torch.arange(n, dtype=torch.float32) + 100 * i for i, n in enumerate(LENGTHS)]
    batch = wrap({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "sample": torch.arange(7)})
    assert sequence_lengths(batch).tolist() == LENGTHS
    parts, indices = rearrange_micro_batches(batch, max_token_len=12)
    assert all(part["input_ids"].values().numel() <= 12 for part in parts)
    results = torch.nested.as_nested_tensor(
        [row * 2 for part in parts for row in part["input_ids"].unbind()], layout=torch.jagged
    )
    restored = restore_dynamic_batch(results, indices)
    assert restored.layout is torch.jagged
    for one, other in zip(restored.unbind(), rows, strict=True):
        assert torch.equal(one, other * 2)
    parts, _ = rearrange_micro_batches(batch, max_token_len=12, min_num_micro_batch=8)
    assert [len(part["input_ids"].unbind()) for part in parts] == [1] * 7 + [0]


def test_options_reach_the_plan() -> None:
    batch = padded_batch()
    assert len(rearrange_micro_batches(batch, 12, num_batches_divided_by=4)[0]) == 4
    assert len(rearrange_micro_batches(batch, 12, min_num_micro_batch=6)[0]) == 6
    assert len(rearrange_micro_batches(batch, 12, fixed_num_micro_batches=5)[0]) == 5
    unsorted, _ = rearrange_micro_batches(batch, 100, min_num_micro_batch=3, use_dynamic_bsz_balance=False)
    assert len(unsorted) == 3
    with pytest.raises(ValueError, match="sample 1 has 9 tokens, more than max_token_len=8"):
        rearrange_micro_batches(batch, 8)
    with pytest.raises(ValueError, match="needs attention_mask or nested input_ids"):
        rearrange_micro_batches({"responses": torch.ones(2, 2)}, 8)


def test_restore_checks_its_indices() -> None:
    with pytest.raises(ValueError, match="no permutation of the 3 rows"):
        restore_dynamic_batch(torch.arange(3), [[0, 1], [1]])
    with pytest.raises(ValueError, match="with 2 entries"):
        restore_dynamic_batch(torch.arange(3), [[0], [1]])


def test_padding_to_a_fixed_length() -> None:
    batch = padded_batch() | {"position_ids": torch.arange(10).expand(7, 10)}
    padded = pad_sequences_to_fixed_length(batch, 16, pad_token_id=9)
    assert padded["input_ids"].shape == padded["attention_mask"].shape == (7, 16)
    assert bool((padded["input_ids"][:, 10:] == 9).all())
    assert torch.equal(padded["attention_mask"].sum(-1), batch["attention_mask"].sum(-1))
    assert torch.equal(padded["position_ids"][0], torch.arange(16))
    assert torch.equal(padded["sample"], batch["sample"])
    with pytest.raises(ValueError, match="padded to 10 already, more than target_length=8"):
        pad_sequences_to_fixed_length(batch, 8)
