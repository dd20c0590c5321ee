"""DAPO through the config: dynamic sampling with surplus groups, clip-higher and the punishment of long answers."""

import json

import by_hand
import pytest
import torch
from by_hand import Loss, Recorder
from safetensors.torch import load_file
from test_algorithms_by_hand import DENSE, SETTING

ACTOR = "actor_rollout_ref.actor"
DAPO = (
    *SETTING,
    "trainer.total_training_steps=3",
    "algorithm.filter_groups.enable=true",
    "data.gen_batch_size=10",
    f"{ACTOR}.clip_ratio_low=0.02",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.clip_ratio_c=10.0",
    "reward_manager.name=dapo",
    "reward_manager.overlong_buffer.len=3",
    "reward_manager.overlong_buffer.penalty_factor=0.5",
    "algorithm.filter_groups.metric=seq_reward",
)


@pytest.mark.parametrize("bypass", [True, False])
def test_three_steps_of_dapo(task, tmp_path, monkeypatch, bypass):
    recorder = Recorder().watch(monkeypatch)
    options = (*DAPO, f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}")
    run = task.train(tmp_path, *options)
    seen = []
    for number, (batch, row) in enumerate(zip(recorder.batches, run.metrics, strict=True)):
        assert len(batch["uid"]) == 48
        groups = by_hand.groups_of(batch["uid"])
        assert [len(rows) for rows in groups.values()] == [4] * 12
        scores = by_hand.scores_of(batch)
        lengths = batch["response_mask"].sum(1).tolist()
        for at, (digits, score, length) in enumerate(zip(batch["extra_info"], scores, lengths, strict=True)):
            ids = batch["responses"][at][: int(length)]
            text = "".join(str(int(i)) for i in ids)  # only to see whether it can be right at all
            punished = -0.5 * max(0, length - 4) / 3
            assert min(abs(score - punished), abs(score - punished - 1)) < 1e-5, (digits, text)
        for rows in groups.values():
            assert len({round(scores[r], 5) for r in rows}) > 1
        seen += list(groups)
        expected = torch.tensor(by_hand.on_tokens(by_hand.grpo(batch), batch["response_mask"]))
        torch.testing.assert_close(batch["advantages"], expected, rtol=1e-3, atol=1e-4)
        made, dropped = row["filter_groups/generated_groups"], row["filter_groups/dropped_groups"]
        before = run.metrics[number - 1]["filter_groups/surplus_groups"] if number else 0
        assert before + made - dropped == 12 + row["filter_groups/surplus_groups"]
        assert row["filter_groups/rounds"] == made / 10
        # Surplus groups are one version old, and measured against the policy that sampled them.
        older = ((batch["versions"] >= 0) & (batch["versions"] < batch["versions"].max())).any(1)
        assert int(older.sum()) == 4 * min(before, 12)
        difference = (batch["old_log_probs"] - batch["rollout_log_probs"])[older] * batch["response_mask"][older]
        assert difference.abs().sum() == 0
    assert len(set(seen)) == len(seen)
    assert any(row["filter_groups/surplus_groups"] for row in run.metrics)
    loss = Loss(low=0.02, high=0.28, dual=10.0)
    for mini_batch in recorder.mini_batches:
        assert mini_batch["metrics"]["actor/pg_loss"] == pytest.approx(loss.value(mini_batch), rel=1e-3, abs=2e-5)


def test_rewards_that_never_differ_stop_the_run(task, tmp_path):
    limits = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2")
    unlike = ("reward.name=format_match", "reward.kwargs.pattern='x'")
    with pytest.raises(ValueError, match="0 of the 12 groups of a step after 2 rounds with 24 groups"):
        task.train(tmp_path, *SETTING, *limits, *unlike)


def test_groups_from_a_rollout_that_runs_ahead(task, tmp_path, monkeypatch):
    """Dynamic sampling over batches that another process has begun early: full batches, and no group twice."""
    recorder = Recorder().watch(monkeypatch)
    ahead = ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1")
    more = ("actor_rollout_ref.rollout.n_gpus_per_node=1", "async_training.max_staleness=1")
    off = "algorithm.rollout_correction.bypass_mode=false"
    run = task.train(tmp_path, *DAPO, *ahead, *more, off)
    uids = [uid for batch in recorder.batches for uid in by_hand.groups_of(batch["uid"])]
    assert len(uids) == len(set(uids)) == 3 * 12
    for batch, row in zip(recorder.batches, run.metrics, strict=True):
        for rows in by_hand.groups_of(batch["uid"]).values():
            assert len({round(by_hand.scores_of(batch)[r], 5) for r in rows}) > 1
        assert row["training/epoch"] == 0
        assert "rollout_corr/rollout_is_mean" in row


MASKED = "algorithm.mask_truncated_responses=true"


def cut_off(batch):
    """Rows that fill the rectangle and do not end with the end token."""
    width = batch["responses"].shape[1]
    return batch["attention_mask"][:, -width:].all(1) & (batch["responses"][:, -1] != 1)


GAE = ("algorithm.adv_estimator=gae", "critic.fsdp_config.mixed_precision.param_dtype=fp32")


@pytest.mark.parametrize("more", [(), ("reward_manager.overlap=true",), GAE])
def test_answers_that_were_cut_off_count_in_their_groups_but_not_in_the_loss(task, tmp_path, monkeypatch, more):
    recorder = Recorder().watch(monkeypatch)
    run = task.train(tmp_path, *SETTING, *DENSE, MASKED, *more)
    sums_of_the_others = []
    for batch, row in zip(recorder.batches, run.metrics, strict=True):
        cut = cut_off(batch)
        assert 0 < int(cut.sum()) < len(cut)
        assert row["training/truncated_masked"] == cut.sum()
        there = batch["attention_mask"][:, -batch["responses"].shape[1] :]
        assert torch.equal(batch["response_mask"], there * ~cut[:, None])
        if more == GAE:
            continue
        expected = torch.tensor(by_hand.on_tokens(by_hand.grpo(batch), batch["response_mask"]))
        torch.testing.assert_close(batch["advantages"], expected, rtol=1e-3, atol=1e-4)
        numbers = by_hand.grpo(batch)
        for rows in by_hand.groups_of(batch["uid"]).values():
            sums_of_the_others.append(abs(sum(numbers[row] for row in rows if not cut[row])))
    # The control: baselines of those that are left alone would make each group's advantages add up to 0.
    assert max(sums_of_the_others, default=1.0) > 0.5
    loss = Loss(low=0.05, high=0.05)
    for mini_batch in recorder.mini_batches:
        assert mini_batch["metrics"]["actor/pg_loss"] == pytest.approx(loss.value(mini_batch), rel=1e-3, abs=2e-5)
    for critic_batch in recorder.critic_batches:
        assert not critic_batch["response_mask"][cut_off_rows(critic_batch)].any()


def cut_off_rows(critic_batch):
    """The same where the responses are the ends of `input_ids`."""
    width = critic_batch["response_mask"].shape[1]
    return cut_off(critic_batch | {"responses": critic_batch["input_ids"][:, -width:]})


def test_a_step_whose_answers_were_all_cut_off_has_no_update(task, tmp_path, caplog):
    short = ("data.max_response_length=3", "trainer.total_training_steps=1")
    never = ("actor_rollout_ref.rollout.min_tokens=3",)
    run = task.train(tmp_path / "masked", *SETTING, *DENSE, *short, *never, MASKED)
    assert run.metrics[-1]["training/truncated_masked"] == 48
    assert run.metrics[-1]["training/rejected_batches"] == 1
    assert "all samples that are left (48) were cut off at data.max_response_length=3" in caplog.text
    before = load_file(task.model / "model.safetensors")
    for name, weight in run.weights.items():
        assert torch.equal(weight, before[name]), name
    # The control: without the key they are trained on.
    other = task.train(tmp_path / "trained", *SETTING, *DENSE, *short, *never)
    assert "training/truncated_masked" not in other.metrics[-1]
    assert any(not torch.equal(weight, before[name]) for name, weight in other.weights.items())
    texts = [json.loads(line) for file in run.path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    logged = [row for row in texts if row.get("split") == "train"]
    assert {row["finish"] for row in logged} == {"length"}
    assert all(len(row["response"]) == 3 for row in logged)
