"""Every algorithm, two steps through the config: advantages and losses recomputed by plain loops from the batches."""

from pathlib import Path

import by_hand
import pytest
import torch
from by_hand import Loss, Recorder
from test_layouts import UNEVEN
from transformers import AutoModelForCausalLM, AutoTokenizer

REWARD = Path(__file__).with_name("dense_reward.py")
DENSE = ("reward.name=null", f"custom_reward_function.path={REWARD}")
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
# Instead of four of each mini-batch, and five turns to generate them.
TWO_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200",
    "actor_rollout_ref.rollout.max_num_seqs=26",
)
# Hot and in two epochs, so that lengths differ, ratios move and clips bite.
SETTING = (
    *UNEVEN,
    *TWO_MICRO_BATCHES,
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "actor_rollout_ref.rollout.temperature=1.6",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.optim.lr_warmup_steps=0",
    f"{ACTOR}.clip_ratio=0.05",
)
TWO_REWARDS = (
    "reward.name=null",
    f"reward.functions.dense={{weight: 1.0, name: compute_score, path: {REWARD}}}",
    'reward.functions.form={weight: 0.5, name: format_match, kwargs: {pattern: "[0-5]*[6-9]?"}}',
)
TEACHER = "actor_rollout_ref.ref.model.path=TEACHER"
CLIP = Loss(low=0.05, high=0.05)


def advantages(name, batch):
    mask = batch["response_mask"]
    if name in ("grpo", "dr_grpo"):
        return by_hand.on_tokens(by_hand.grpo(batch, by_std=name == "grpo"), mask)
    if name == "rloo":
        return by_hand.on_tokens(by_hand.rloo(batch), mask)
    if name == "reinforce_plus_plus":
        return by_hand.whitened(by_hand.to_go(batch), mask)
    if name == "gdpo":
        return by_hand.gdpo(batch, {"dense/score": 1.0, "form/score": 0.5})
    if name == "gae":
        found, returns = by_hand.gae(batch, 0.97, 0.9)
        torch.testing.assert_close(batch["returns"], torch.tensor(returns), rtol=1e-4, atol=1e-5)
        return found
    if name == "distillation":
        return by_hand.distillation(batch)
    if name == "grpo_and_teacher":
        parts = by_hand.on_tokens(by_hand.grpo(batch), mask), by_hand.distillation(batch)
        torch.testing.assert_close(batch["returns"], torch.tensor(parts[0]), rtol=1e-3, atol=1e-4)
        return [[a + 0.25 * b for a, b in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]
    return {"remax": by_hand.remax, "optimal_token_baseline": by_hand.token_baseline}[name](batch)


def estimator(name):
    return f"algorithm.adv_estimator={name}"


CASES = {
    "grpo": ("grpo", CLIP, ()),
    "dr_grpo": (
        "dr_grpo",
        Loss(low=0.05, high=0.05, aggregation="seq-mean-token-sum-norm"),
        ("algorithm.norm_adv_by_std_in_grpo=false", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
    ),
    "clip_higher": (
        "grpo",
        Loss(low=0.02, high=0.28, dual=1.01),
        (f"{ACTOR}.clip_ratio_low=0.02", f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=1.01"),
    ),
    "rloo_and_kl_in_the_loss": (
        "rloo",
        CLIP,
        (estimator("rloo"), f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.5"),
    ),
    "reinforce_plus_plus": ("reinforce_plus_plus", CLIP, (estimator("reinforce_plus_plus"),)),
    "remax": ("remax", CLIP, (estimator("remax"),)),
    "gdpo": ("gdpo", CLIP, (estimator("gdpo"), *TWO_REWARDS)),
    "distillation": ("distillation", CLIP, (estimator("distillation"), TEACHER)),
    "grpo_and_teacher": ("grpo_and_teacher", CLIP, ("algorithm.distillation_coef=0.25", TEACHER)),
    "gspo": (
        "grpo",
        Loss("gspo", low=3e-3, high=4e-3, aggregation="seq-mean-token-mean"),
        (
            f"{ACTOR}.policy_loss.loss_mode=gspo",
            f"{ACTOR}.clip_ratio_low=3e-3",
            f"{ACTOR}.clip_ratio_high=4e-3",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        ),
    ),
    "cispo": ("grpo", Loss("cispo", low=0.05, high=0.05), (f"{ACTOR}.policy_loss.loss_mode=cispo",)),
    "optimal_token_baseline": (
        "optimal_token_baseline",
        CLIP,
        (estimator("optimal_token_baseline"), f"{CORRECTION}.bypass_mode=false"),
    ),
    "gae": (
        "gae",
        CLIP,
        (
            estimator("gae"),
            "algorithm.gamma=0.97",
            "algorithm.lam=0.9",
            "critic.model.enable_gradient_checkpointing=false",
            "critic.fsdp_config.mixed_precision.param_dtype=fp32",
            "critic.optim.lr=1e-3",
            "critic.cliprange_value=0.03",
        ),
    ),
    "bypass_reinforce": (
        "grpo",
        Loss("reinforce", token_weight_cap=1.03),
        (
            f"{CORRECTION}.loss_type=reinforce",
            f"{ACTOR}.clip_ratio=0.2",  # the default again: nothing is clipped
            f"{CORRECTION}.rollout_is=token",
            f"{CORRECTION}.rollout_is_threshold=1.03",
        ),
    ),
    "bypass_rejection": (
        "grpo",
        Loss(low=0.05, high=0.05, reject_above_k3=1e-4),
        (f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold=1e-4"),
    ),
}


# Losses that are near, but wrong: the comparison must tell them apart.
WRONG = {
    "clip_higher": [Loss(low=0.02, high=0.02, dual=1.01), Loss(low=0.02, high=0.28)],
    "gspo": [Loss(low=3e-3, high=4e-3, aggregation="seq-mean-token-mean")],
    "cispo": [CLIP],
    "bypass_reinforce": [Loss("reinforce")],
    "bypass_rejection": [CLIP],
    "dr_grpo": [CLIP],
}


@pytest.fixture
def recorder(monkeypatch):
    return Recorder().watch(monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_two_steps_are_those_of_plain_loops(task, tmp_path, recorder, case):
    name, loss, overrides = CASES[case]
    teacher = task.folder / "assets" / "model"  # as it was before the warm-up
    overrides = tuple(word.replace("=TEACHER", f"={teacher}") for word in overrides)
    run = task.train(tmp_path, *SETTING, *(() if overrides[-3:] == TWO_REWARDS else DENSE), *overrides)
    assert [batch["step"] for batch in recorder.batches] == [1, 2]
    assert len(recorder.mini_batches) == 2 * 2 * 2
    for batch in recorder.batches:
        assert len(set(batch["response_mask"].sum(1).tolist())) > 1
        expected = torch.tensor(advantages(name, batch))
        torch.testing.assert_close(batch["advantages"], expected, rtol=1e-3, atol=1e-4)
        assert expected.abs().max() > 0.1
    for mini_batch in recorder.mini_batches:
        found = mini_batch["metrics"]["actor/pg_loss"]
        assert found == pytest.approx(loss.value(mini_batch), rel=1e-3, abs=2e-5)
    for wrong in WRONG.get(case, []):
        differences = [abs(m["metrics"]["actor/pg_loss"] - wrong.value(m)) for m in recorder.mini_batches]
        assert max(differences) > 1e-4
    assert all(row["actor/skipped_steps"] == 0 for row in run.metrics)
    # What the run reports of a step is the mean over its optimizer steps.
    for number, row in enumerate(run.metrics):
        own = recorder.mini_batches[4 * number : 4 * number + 4]
        assert row["actor/pg_loss"] == pytest.approx(sum(m["metrics"]["actor/pg_loss"] for m in own) / 4, abs=1e-6)
    if name == "gae":
        check_the_critic(recorder)
    if case == "rloo_and_kl_in_the_loss":
        check_the_kl(recorder)


def check_the_critic(recorder):
    assert len(recorder.critic_batches) == 2 * 2 * 2
    plain, clipped = 0.0, 0.0
    for mini_batch in recorder.critic_batches:
        found = mini_batch["metrics"]["critic/vf_loss"]
        assert found == pytest.approx(by_hand.value_loss(mini_batch, 0.03), rel=1e-4)
        plain = max(plain, abs(found - by_hand.value_loss(mini_batch, 1e9)))
        clipped = max(clipped, mini_batch["metrics"]["critic/vf_clipfrac"])
    assert plain > 1e-3  # the clip counts
    assert 0 < clipped < 1


def check_the_kl(recorder):
    found = [mini_batch["metrics"]["actor/kl_loss"] for mini_batch in recorder.mini_batches]
    for value, mini_batch in zip(found, recorder.mini_batches, strict=True):
        assert value == pytest.approx(by_hand.kl_of(mini_batch), rel=1e-3, abs=1e-6)
    assert max(found) > 1e-3


def test_remax_compares_with_the_greedy_answer(task, tmp_path, recorder):
    """At the first step the policy is the folder's model: plain transformers gives the same greedy answers."""
    run = task.train(tmp_path, *SETTING, estimator("remax"), "trainer.total_training_steps=1")
    (batch,) = recorder.batches
    model, tokenizer = AutoModelForCausalLM.from_pretrained(task.model), AutoTokenizer.from_pretrained(task.model)
    texts = list(batch["raw_prompt"])
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
    answers = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    right = [float(a == "".join(sorted(t[:-1]))) for a, t in zip(answers, texts, strict=True)]
    assert batch["reward_baselines"].tolist() == right
    assert 0 < sum(right) < len(right)
    assert run.metrics[-1]["reward/baseline/mean"] == pytest.approx(sum(right) / len(right))
    assert run.metrics[-1]["timing_s/gen_max"] > 0


def test_two_processes_give_the_same_sums_of_squares(task, tmp_path):
    """The only estimator that needs more of the model than log-probs, on real ranks."""
    options = (*SETTING, *DENSE, *CASES["optimal_token_baseline"][2])
    one = task.train(tmp_path / "one", *options)
    two = task.train(tmp_path / "two", *options, "trainer.n_gpus_per_node=2")
    for name, weight in one.weights.items():
        torch.testing.assert_close(two.weights[name], weight, rtol=1e-4, atol=1e-5)


def test_kl_in_the_reward_is_taken_off_token_by_token(task, tmp_path, recorder):
    options = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.3", f"{CORRECTION}.bypass_mode=false")
    run = task.train(tmp_path, *SETTING, *DENSE, *options)
    for number, batch in enumerate(recorder.batches):
        kls = []
        for row in range(len(batch["uid"])):
            for t in by_hand.tokens_of(batch["response_mask"], row):
                kl = (batch["old_log_probs"][row, t] - batch["ref_log_prob"][row, t]).item()
                kls.append(kl)
                expected = batch["token_level_scores"][row, t].item() - 0.3 * kl
                assert batch["token_level_rewards"][row, t].item() == pytest.approx(expected, abs=1e-5)
        assert bool(number) == (max(map(abs, kls)) > 1e-3)  # at first policy and reference are one
        wanted = torch.tensor(by_hand.on_tokens(by_hand.grpo(batch), batch["response_mask"]))
        torch.testing.assert_close(batch["advantages"], wanted, rtol=1e-3, atol=1e-4)
    assert run.metrics[0]["actor/reward_kl_penalty_coeff"] == 0.3
