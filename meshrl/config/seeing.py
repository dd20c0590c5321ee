"""What a policy that sees images can and cannot have yet."""

from typing import Any

from meshrl.config.critic import uses_critic
from meshrl.config.model_folder import PROCESSOR_FILES, SEEING, has_processor, read_model_config
from meshrl.config.names import ROLLOUT
from meshrl.config.root import PPOConfig

ROOT = "actor_rollout_ref"


def seeing_problems(config: PPOConfig) -> list[str]:
    """What does not go with the model in the folder, if it sees."""
    policy = config.actor_rollout_ref
    try:
        shape: dict[str, Any] = read_model_config(policy.model)
    except ValueError:
        return []  # said where the model is checked
    kind = shape.get("model_type")
    if kind not in SEEING:
        frozen = shape and policy.actor.freeze_vision_tower
        return [f"{ROOT}.actor.freeze_vision_tower=true has no effect: the model sees no images"] if frozen else []
    given = {
        f"{ROOT}.actor.strategy=megatron (use fsdp2)": policy.actor.strategy == "megatron",
        f"{ROLLOUT}.name={policy.rollout.name} (use embedded)": policy.rollout.name != "embedded",
        f"{ROLLOUT}: a replica over {policy.rollout.replica_size} ranks (use 1)": policy.rollout.replica_size > 1,
        f"{ROLLOUT}.multi_turn.enable=true": policy.rollout.multi_turn.enable,
        f"{ROOT}.model.use_remove_padding=false": not policy.model.use_remove_padding,
        f"a critic (algorithm.adv_estimator={config.algorithm.adv_estimator})": uses_critic(
            config.critic, config.algorithm.adv_estimator
        ),
        "reward_model.enable=true": config.reward_model.enable,
    }
    words = f"not supported yet: a model that sees images ({kind}) with"
    problems = [f"{words} {what}" for what, is_set in given.items() if is_set]
    path = policy.model.path
    if path and not has_processor(path):
        files = " or ".join(PROCESSOR_FILES)
        problems.append(f"{ROOT}.model.path: {path} sees images, but has no {files} that says how")
    return problems
