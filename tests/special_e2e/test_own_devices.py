"""References, critics, reward models and judges on devices of their own: the same run, their work beside others'."""

import gzip
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from megatron_workers import OnCpu
from test_layouts import UNEVEN, compare
from test_overlap import judged
from test_ppo import PPO
from transformers import AutoConfig, AutoModelForCausalLM

from meshrl.trainer.rl_trainer import PPOTrainer
from meshrl.workers.actor import ReferenceWorker

sys.path.append(str(Path(__file__).parents[1] / "special_distributed"))

APART = (
    "critic.nnodes=1",
    "critic.n_gpus_per_node=2",
    "reward_model.nnodes=1",
    "reward_model.n_gpus_per_node=1",
    "actor_rollout_ref.ref.nnodes=1",
    "actor_rollout_ref.ref.n_gpus_per_node=1",
)
REF = "actor_rollout_ref.ref"
LAYOUTS = {
    "sequences": (f"{REF}.nnodes=1", f"{REF}.n_gpus_per_node=2", f"{REF}.ulysses_sequence_parallel_size=2"),
    "megatron": (
        f"{REF}.nnodes=1",
        f"{REF}.n_gpus_per_node=4",
        f"{REF}.strategy=megatron",
        f"{REF}.megatron.tensor_model_parallel_size=2",
        f"{REF}.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.dtype=fp32",
    ),
}
BESIDE = (
    ("update_critic", "update_actor"),
    ("compute_values", "compute_log_prob"),
    ("compute_ref_log_prob", "compute_log_prob"),
)
# Rejection changes which tokens count after the critic was asked: a rollout in bfloat16 is off by more than rounding.
REJECTING = (
    "algorithm.rollout_correction.bypass_mode=false",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=1.01",
    "actor_rollout_ref.rollout.dtype=bfloat16",
)


@pytest.fixture(scope="module")
def options(reward_model):
    return (
        *PPO,
        *REJECTING,
        # Few samples: processors without bfloat16 take hundreds of times as long for its products.
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "reward_model.enable=true",
        f"reward_model.model.path={reward_model[0]}",
        "reward_model.fsdp_config.mixed_precision.param_dtype=fp32",
    )


@pytest.fixture(scope="module")
def shared(task, options, tmp_path_factory):
    return task.train(tmp_path_factory.mktemp("shared") / "run", *options)


@pytest.fixture(scope="module")
def apart(task, options, tmp_path_factory):
    """Killed once: a rank of the critic, in the update of step 2 that runs beside the policy's."""
    update_actor, killed = PPOTrainer.update_actor, []

    def kill_and_go_on(self, batch):
        if self.step == 2 and not killed:
            killed.append(self.critic.pids()[-1])
            os.kill(killed[0], signal.SIGKILL)
        return update_actor(self, batch)

    survives = ("trainer.timeline=true", "trainer.save_freq=1", "trainer.max_restarts=1", "trainer.restart_wait=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOTrainer, "update_actor", kill_and_go_on)
        run = task.train(tmp_path_factory.mktemp("apart") / "run", *options, *APART, *survives)
    assert killed
    assert run.metrics[-1]["restarts/count"] == 1
    return run


def test_the_run_is_the_same(shared, apart):
    assert any(row.get("rollout_corr/rollout_rs_masked_fraction", 0) > 0 for row in shared.metrics)
    compare(shared, apart, 1e-5)


def test_others_work_while_the_policy_does(apart):
    with gzip.open(apart.path / "timeline.json.gz", "rt") as file:
        events = [event for event in json.load(file) if event]
    roles = {e["pid"]: e["args"]["name"].partition(" ")[0] for e in events if e["name"] == "process_name"}
    assert set(roles.values()) == {"controller", "actor_rollout_ref", "ref", "critic", "reward_model"}
    calls = [(roles[e["pid"]], e) for e in events if e["ph"] == "X" and e["cat"] == "calls"]
    for one, other in BESIDE:
        for step in (1, 2):
            (first, *_), (second, *_) = (
                [(e["ts"], e["ts"] + e["dur"]) for _, e in calls if e["name"] == name and e["args"]["step"] == step]
                for name in (one, other)
            )
            assert max(first[0], second[0]) < min(first[1], second[1]), (one, other, step)


def test_a_judge_of_its_own_grades_while_others_are_generated(task, tmp_path):
    options = (
        *UNEVEN,
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        *judged(task),
    )
    apart = ("reward.judge.nnodes=1", "reward.judge.n_gpus_per_node=2", "reward_manager.overlap=true")
    here = task.train(tmp_path / "here", *options)
    there = task.train(tmp_path / "there", *options, *apart)
    assert there.metrics[-1]["reward/overlapped_share"] > 0
    there.metrics[-1].pop("reward/overlapped_share")
    compare(here, there, 1e-5)


class ReferenceOnCpu(OnCpu, ReferenceWorker):
    pass


def test_a_larger_teacher_has_devices_and_a_layout_of_its_own(task, tmp_path, monkeypatch):
    """Of another shape than the policy, which only has to share its tokens; cut over ranks, in either engine."""
    pytest.importorskip("megatron.core")
    monkeypatch.setattr("meshrl.trainer.launch.ReferenceWorker", ReferenceOnCpu)
    teacher = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(task.model, intermediate_size=96))
    teacher.save_pretrained(tmp_path / "teacher")
    options = (
        *UNEVEN,
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "algorithm.adv_estimator=distillation",
        f"actor_rollout_ref.ref.model.path={tmp_path / 'teacher'}",
        "actor_rollout_ref.model.lora_rank=4",
    )
    here = task.train(tmp_path / "here", *options)
    assert here.metrics[-1]["distillation/reverse_kl"] > 0.1
    for name, layout in LAYOUTS.items():
        there = task.train(tmp_path / name, *options, *layout)
        compare(here, there, 1e-5)
