"""Kept batches after a run has gone back."""

import torch

from meshrl.data.proto import DataProto
from meshrl.trainer.batches import KeptBatches, batch_files


def batch(value: int) -> DataProto:
    return DataProto.from_dict({"x": torch.full((1 << 17,), value)})  # 1 MiB


def test_a_run_that_went_back_keeps_its_own_newest_batches(tmp_path):
    first = KeptBatches(tmp_path, 3)
    for step in range(1, 11):
        first.keep(batch(step), {}, step)
    assert list(batch_files(tmp_path)) == [9, 10]
    again = KeptBatches(tmp_path, 3)
    for step in (5, 6):
        again.keep(batch(-step), {}, step)
    assert list(batch_files(tmp_path)) == [5, 6]
    assert DataProto.load_from_disk(batch_files(tmp_path)[6]).batch["x"][0] == -6
