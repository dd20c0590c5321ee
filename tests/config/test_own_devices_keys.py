"""Devices of a role's own: how many ranks it has, what is checked against them, and what is said of them."""

import pytest

from meshrl.config import load_config
from meshrl.config.batch_sizes import BatchUnits
from meshrl.config.keys import ACTOR, REF
from meshrl.config.rl import num_devices, ranks_of
from meshrl.config.show import summary_lines
from meshrl.config.validate import check_config

PPO = (
    "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.model.path=anywhere", "critic.model.path=anywhere",
)  # fmt: skip
KL = ("actor_rollout_ref.actor.use_kl_loss=true",)
SCORED = ("reward_model.enable=true", "reward_model.model.path=anywhere")


def load(*words):
    return load_config("grpo", [*PPO, *words]).config


def problems(*words):
    return check_config(load(*words), check_files=False)


def test_ranks_and_units_are_those_of_the_roles_own_devices():
    config = load(
        "critic.nnodes=1", "critic.n_gpus_per_node=2", *SCORED, "reward_model.ulysses_sequence_parallel_size=2"
    )
    assert (ranks_of(config, config.critic), ranks_of(config, config.reward_model)) == (2, 4)
    units = BatchUnits.from_config(config)
    assert (units.dp_size, units.critic_dp_size, units.reward_model_dp_size) == (4, 2, 2)
    assert num_devices(config) == 6
    lines = "\n".join(summary_lines(config))
    assert "= 4, backend local, device auto; 6 with those of roles on devices of their own" in lines
    assert "critic: fsdp2 on 2 ranks" in lines
    assert "on devices of its own" in lines
    assert "reward model: fsdp2 on 4 ranks" in lines
    assert check_config(config, check_files=False) == []


def test_all_devices_are_counted():
    apart = ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1")
    config = load(*apart, "actor_rollout_ref.rollout.n_gpus_per_node=3", "critic.nnodes=2", "critic.n_gpus_per_node=2")
    assert num_devices(config) == 4 + 3 + 4
    config = load(*KL, f"{REF}.nnodes=1", f"{REF}.n_gpus_per_node=2", f"{REF}.log_prob_micro_batch_size=8")
    assert (num_devices(config), BatchUnits.from_config(config).ref_dp_size) == (6, 2)
    assert config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 4
    assert any("reference: fsdp2 on 2 ranks" in line for line in summary_lines(config))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("critic.nnodes=1",), "critic.nnodes * n_gpus_per_node (1 * 0) gives it no devices"),
        ((*SCORED, "reward_model.n_gpus_per_node=8"), "reward_model.nnodes * n_gpus_per_node (0 * 8) gives it no"),
        (("critic.nnodes=2", "critic.n_gpus_per_node=1"), "critic.nnodes=2 needs trainer.backend=ray"),
        (
            ("critic.nnodes=1", "critic.n_gpus_per_node=3", "critic.ulysses_sequence_parallel_size=2"),
            "n_gpus (3 = critic.nnodes * n_gpus_per_node) must be divisible by critic.ulysses_sequence_parallel_size",
        ),
        (
            ("critic.nnodes=1", "critic.n_gpus_per_node=3"),
            "must be divisible by the data-parallel size (3 = critic.nnodes * n_gpus_per_node)",
        ),
        (("reward_model.nnodes=1",), "reward_model.nnodes has no effect without reward_model.enable=true"),
        (("algorithm.adv_estimator=grpo", "critic.nnodes=1"), "critic.nnodes has no effect with"),
        (("actor_rollout_ref.ref.nnodes=1",), "actor_rollout_ref.ref.nnodes=1 has no effect without a reference"),
        (
            (*KL, "actor_rollout_ref.ref.nnodes=1", "actor_rollout_ref.ref.n_gpus_per_node=1", f"{REF}.update_every=2"),
            "update_every=2 needs a reference on the policy's devices",
        ),
        (
            (*KL, f"{REF}.nnodes=1", f"{REF}.n_gpus_per_node=3", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
            "n_gpus (3 = actor_rollout_ref.ref.nnodes * n_gpus_per_node) must be divisible by",
        ),
        (("reward.judge.nnodes=1",), "reward.judge has no effect without reward.judge.path"),
    ],
)
def test_what_does_not_fit_is_said_with_the_numbers(words, said):
    found = problems(*words)
    assert any(said in line for line in found), found


def test_budgets_of_compiled_layers_may_differ_between_processes():
    words = (
        "actor_rollout_ref.actor.use_torch_compile=true", "critic.use_torch_compile=true",
        "critic.activation_memory_budget=0.3",
    )  # fmt: skip
    assert any("torch has one for all models of a process" in line for line in problems(*words))
    apart = ("critic.nnodes=1", "critic.n_gpus_per_node=2")
    assert not any("torch has one for all" in line for line in problems(*words, *apart))


def test_a_judge_of_its_own_may_grade_beside_generation():
    words = ("reward.name=judge", "reward.judge.path=anywhere", "reward_manager.overlap=true")
    assert any("overlap=true: a judge on the policy's devices waits" in line for line in problems(*words))
    assert problems(*words, "reward.judge.nnodes=1", "reward.judge.n_gpus_per_node=1") == []


def test_sizes_over_all_ranks_are_divided_by_the_roles_own():
    loaded = load_config(
        "grpo", [*PPO, "critic.nnodes=1", "critic.n_gpus_per_node=2", "critic.ppo_micro_batch_size=8",
                 "critic.use_dynamic_bsz=false"],
    )  # fmt: skip
    assert loaded.config.critic.ppo_micro_batch_size_per_gpu == 4


def test_verls_pool_of_the_reward_model_is_read():
    pool = ("reward_model.enable_resource_pool=true", "reward_model.nnodes=1", "reward_model.n_gpus_per_node=2")
    config = load(*SCORED, *pool)
    assert ranks_of(config, config.reward_model) == 2
