"""Kept batches after a run has gone back."""

import pytest
import torch

from meshrl.config import ConfigError, PPOConfig
from meshrl.data.batch import DataProto
from meshrl.telemetry.run_folder import RunFiles
from meshrl.trainer.replay import replay, train_only
from meshrl.trainer.run_state import KeptBatches, batch_files


def batch(value: int) -> DataProto:
    return DataProto.from_dict({"x": torch.full((1 << 17,), value)})  # 1 MiB


def test_what_is_no_batch_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(
        ConfigError, match=r"--train-only needs a batch .*step_N\.dataproto.*rows\.jsonl is no whole file"
    ):
        train_only(PPOConfig(), tmp_path / "rows.jsonl")


def test_steps_and_tokens_that_are_not_there_are_refused(tmp_path):
    for step in (0, -1):
        with pytest.raises(ValueError, match=rf"there is no step {step}: they count from 1, and .* has 0"):
            replay(tmp_path, step)
    KeptBatches(RunFiles(tmp_path).batches, 1).keep(DataProto.from_dict({"response_mask": torch.ones(4, 3)}), {}, 1)
    for token in ((9999, 0), (4, 0), (0, 3)):
        with pytest.raises(ValueError, match="samples 0 to 3 with tokens 0 to 2"):
            replay(tmp_path, 1, token)


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
