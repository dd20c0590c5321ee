"""Rollout correction of a batch, against a computation by hand."""

import pytest
import torch

from meshrl.config.load import load_config
from meshrl.config.rl import RolloutCorrectionConfig
from meshrl.config.validate import check_config
from meshrl.data.batch import DataProto
from meshrl.trainer.rl_trainer import correct_rollout, corrects_rollout


def batch_of() -> DataProto:
    ratio = torch.tensor([[1.0, 4.0, 0.5], [1.0, 1.0, 9.0]])  # trainer over rollout
    rollout = torch.full((2, 3), -1.0)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    tensors = {"old_log_probs": rollout + ratio.log(), "rollout_log_probs": rollout, "response_mask": mask}
    return DataProto.from_dict(tensors)


@pytest.mark.parametrize(
    ("options", "loss", "expected"),
    [
        ({"rollout_is": "token"}, "vanilla", [[1.0, 2.0, 0.5], [1.0, 1.0, 0.0]]),
        ({"rollout_is": "token", "rollout_is_threshold": 3.0}, "vanilla", [[1.0, 3.0, 0.5], [1.0, 1.0, 0.0]]),
        ({"rollout_is": "sequence", "rollout_is_threshold": 9.0}, "vanilla", [[2.0, 2.0, 2.0], [1.0, 1.0, 0.0]]),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.6_3.0"},
            "vanilla",
            [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]],
        ),
        (
            {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_is_threshold": 9.0},
            "vanilla",
            [[1 / 1.5, 4 / 1.5, 0.5 / 1.5], [1 / 1.5, 1 / 1.5, 0.0]],
        ),
        ({}, "icepop", [[1.0, 4.0, 0.5], [1.0, 1.0, 0.0]]),
        ({}, "decoupled", [[1.0, 4.0, 0.5], [1.0, 1.0, 0.0]]),
    ],
)
def test_weights(options, loss, expected):
    config, batch = RolloutCorrectionConfig(**options), batch_of()
    assert corrects_rollout(config, loss)
    metrics = correct_rollout(batch, config, loss)
    torch.testing.assert_close(batch.batch["rollout_is_weights"], torch.tensor(expected))
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert all(name.startswith("rollout_corr/") for name in metrics)


def test_rejected_tokens_leave_the_mask():
    batch = batch_of()
    correct_rollout(batch, RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=3.0), "vanilla")
    assert batch.batch["response_mask"].tolist() == [[1, 0, 1], [1, 1, 0]]
    assert "rollout_is_weights" not in batch.batch.keys()


def test_nothing_is_corrected_unless_asked():
    assert not corrects_rollout(RolloutCorrectionConfig(), "vanilla")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout_is=token", "bypass_mode=true"], "bypass_mode=false"),
        (["rollout_rs=seq_mean_k3"], "go together"),
        (["rollout_rs_threshold=2.0"], "go together"),
    ],
)
def test_what_does_not_go_together_is_said(overrides, words):
    named = [f"algorithm.rollout_correction.{text}" for text in overrides]
    problems = check_config(load_config("grpo", named).config, check_files=False)
    assert len(problems) == 1
    assert words in problems[0]
