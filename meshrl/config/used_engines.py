"""Which training engines a run has, by the names of their sections."""

from meshrl.config.critic import uses_critic
from meshrl.config.engine import EngineConfig
from meshrl.config.names import ACTOR
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig


def used_engines(config: PPOConfig | SupervisedConfig) -> dict[str, EngineConfig]:
    """Those of the policy (a reference has the same), of a critic and of a reward model, where there is one."""
    if isinstance(config, SupervisedConfig):
        return {"engine": config.engine}
    found: dict[str, EngineConfig] = {ACTOR: config.actor_rollout_ref.actor}
    if uses_critic(config.critic, config.algorithm.adv_estimator):
        found["critic"] = config.critic
    if config.reward_model.enable:
        found["reward_model"] = config.reward_model
    return found
