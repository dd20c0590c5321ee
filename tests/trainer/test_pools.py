"""What the workers of a run are told."""

from types import SimpleNamespace

import pytest

from meshrl.config.rl import PPOConfig
from meshrl.trainer.launch import ppo_pools


@pytest.mark.parametrize(("warmup", "policy_steps"), [(0, 30), (4, 18), (10, 3), (12, 3)])
def test_the_policys_schedule_waits_while_only_the_critic_learns(warmup, policy_steps):
    config = PPOConfig()
    config.algorithm.adv_estimator, config.trainer.critic_warmup = "gae", warmup
    units = SimpleNamespace(
        mini_batches_per_epoch=1, optimizer_steps_per_step=3, critic_mini_batches_per_epoch=1, critic_steps_per_step=2
    )
    (pool,) = ppo_pools(config, units, steps=10)
    steps = {role: made.args[1].total_optimizer_steps for role, made in pool.workers.items()}
    assert steps == {"actor_rollout_ref": policy_steps, "critic": 20}
