"""Rewards that fail inside a run: zero, drop or stop, counted by kind, and no sample's advantage is guessed."""

import json
from pathlib import Path

import by_hand
import pytest
import torch
from by_hand import Recorder
from rich.console import Console
from test_algorithms_by_hand import REWARD, SETTING

from meshrl.rewards.results import RewardError
from meshrl.trainer.launch import train

FAILING = ("reward.name=null", f"custom_reward_function.path={Path(__file__).with_name('failing_reward.py')}")
KINDS = {"1": "raised", "2": "nan", "3": "invalid"}


def first_digits(batch, tokenizer):
    return [text[:1] for text in tokenizer.batch_decode(batch["responses"], skip_special_tokens=True)]


@pytest.fixture(scope="module")
def tokenizer_of_task(task):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(task.model)


@pytest.mark.parametrize("manager", ["naive", "prime"])
@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_failures_are_counted_and_do_what_the_policy_says(
    task, tmp_path, monkeypatch, tokenizer_of_task, policy, manager
):
    recorder = Recorder().watch(monkeypatch)
    more = ("trainer.total_training_steps=2", f"reward.on_error={policy}", f"reward_manager.name={manager}")
    workers = ("reward_manager.num_processes=2",) if manager == "prime" else ()
    run = task.train(tmp_path, *SETTING, *FAILING, *more, *workers)
    for batch, row in zip(recorder.batches, run.metrics, strict=True):
        digits = first_digits(batch, tokenizer_of_task)
        failed = [digit in KINDS for digit in digits]
        assert sum(failed) > 2
        assert row["reward/errors"] == sum(failed)
        for digit, kind in KINDS.items():
            assert row.get(f"reward/errors/{kind}", 0) == digits.count(digit)
        scores = by_hand.scores_of(batch)
        assert all(scores[at] == 0 for at, bad in enumerate(failed) if bad)
        if policy == "drop":
            assert row["reward/dropped"] == sum(failed)
            assert batch["response_mask"][torch.tensor(failed)].sum() == 0
            # The others of a group are compared among themselves; one that is left alone has no advantage.
            groups = by_hand.groups_of(batch["uid"])
            assert len(groups) == len({uid for uid in groups if "dropped" not in uid}) + sum(failed)
            kept = {uid: rows for uid, rows in groups.items() if len(rows) > 1}
        else:
            kept = by_hand.groups_of(batch["uid"])
            assert all(len(rows) == 4 for rows in kept.values())
        expected = [0.0] * len(scores)
        for rows in kept.values():
            own = {"uid": [0] * len(rows)}
            for at, advantage in zip(rows, by_hand.grpo(own, scores=[scores[r] for r in rows]), strict=True):
                expected[at] = advantage
        wanted = torch.tensor(by_hand.on_tokens(expected, batch["response_mask"]))
        torch.testing.assert_close(batch["advantages"], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_stopping_shows_the_sample(task, tmp_path, overlap):
    with pytest.raises(RewardError, match=r"failed on sample \d+ \(row-.*answer '[123]"):
        task.train(tmp_path, *SETTING, *FAILING, f"reward_manager.overlap={overlap}")


def test_a_prompt_without_a_greedy_score_is_dropped(task, tmp_path, monkeypatch):
    recorder = Recorder().watch(monkeypatch)
    remax = ("algorithm.adv_estimator=remax", "reward.on_error=drop", "trainer.total_training_steps=1")
    run = task.train(tmp_path, *SETTING, *FAILING, *remax)
    (batch,) = recorder.batches
    dropped = int(run.metrics[-1]["reward/baseline/errors"])
    assert dropped > 0
    without = [rows for rows in batch["response_mask"].view(12, 4, -1) if not rows.any()]
    assert len(without) >= dropped


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_coroutine_gives_the_run_of_the_plain_function(task, tmp_path, overlap):
    plain = ["reward.name=null", f"custom_reward_function.path={REWARD}"]
    waits = tmp_path / "awaited_dense.py"
    source = REWARD.read_text().replace("def compute", "async def compute")
    waits.write_text(
        "import asyncio\n" + source.replace("    wanted =", "    await asyncio.sleep(0.001)\n    wanted =")
    )
    short = ("trainer.total_training_steps=1", f"reward_manager.overlap={overlap}")
    one = task.train(tmp_path / "plain", *SETTING, *plain, *short)
    own = (f"custom_reward_function.path={waits}", "reward_manager.max_concurrent_calls=3")
    other = task.train(tmp_path / "awaited", *SETTING, plain[0], *own, *short)
    assert one.metrics[-1]["critic/score/mean"] == other.metrics[-1]["critic/score/mean"] != 0
    for name, weight in one.weights.items():
        assert torch.equal(other.weights[name], weight), name


def test_validation_leaves_dropped_samples_out(task, tmp_path):
    """With zero they count as wrong, with drop they do not count; both say how many there were."""
    means = {}
    for policy in ("zero", "drop"):
        only = (
            f"reward.on_error={policy}",
            "trainer.val_only=true",
            f"trainer.validation_data_dir={tmp_path / policy}",
        )
        folder = train(task.config(tmp_path / f"run-{policy}", *FAILING, *only), console=Console(quiet=True))
        (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        samples = [json.loads(line) for line in (tmp_path / policy / "0.jsonl").read_text().splitlines()]
        failed = [sample["response"][:1] in KINDS for sample in samples]
        assert 0 < sum(failed) < len(failed)
        assert row["val-aux/reward_errors"] == sum(failed)
        scores = [len(set(sample["response"])) / 10 for sample, bad in zip(samples, failed, strict=True) if not bad]
        means[policy] = row["val-core/sort_digits/acc/mean@1"]
        assert means[policy] == pytest.approx(sum(scores) / (len(samples) if policy == "zero" else len(scores)))
    assert means["drop"] > means["zero"] + 0.01
