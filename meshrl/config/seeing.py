"""What a model that sees images can and cannot have yet."""

from typing import Any

from meshrl.config.critic import uses_critic
from meshrl.config.engine import EngineConfig
from meshrl.config.model import ModelConfig
from meshrl.config.model_folder import PROCESSOR_FILES, SEEING, has_processor, read_model_config
from meshrl.config.names import ACTOR, MODEL, ROLLOUT
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SFTConfig


def seeing_problems(config: PPOConfig | SFTConfig) -> list[str]:
    """What does not go with the model in the folder, if it sees."""
    if isinstance(config, SFTConfig):
        return _problems(config.model, "model", config.engine, "engine", {})
    policy = config.actor_rollout_ref
    given = {
        f"{ROLLOUT}.name={policy.rollout.name} (use embedded)": policy.rollout.name != "embedded",
        f"{ROLLOUT}: a replica over {policy.rollout.replica_size} ranks (use 1)": policy.rollout.replica_size > 1,
        f"{ROLLOUT}.multi_turn.enable=true": policy.rollout.multi_turn.enable,
        f"a critic (algorithm.adv_estimator={config.algorithm.adv_estimator})": uses_critic(
            config.critic, config.algorithm.adv_estimator
        ),
        "reward_model.enable=true": config.reward_model.enable,
    }
    return _problems(policy.model, MODEL, policy.actor, ACTOR, given)


def _problems(
    model: ModelConfig, model_name: str, engine: EngineConfig, engine_name: str, others: dict[str, bool]
) -> list[str]:
    try:
        shape: dict[str, Any] = read_model_config(model)
    except ValueError:
        return []  # said where the model is checked
    kind = shape.get("model_type")
    if kind not in SEEING:
        frozen = shape and engine.freeze_vision_tower
        return [f"{engine_name}.freeze_vision_tower=true has no effect: the model sees no images"] if frozen else []
    given = {
        f"{engine_name}.strategy=megatron (use fsdp2)": engine.strategy == "megatron",
        f"{model_name}.use_remove_padding=false": not model.use_remove_padding,
        **others,
    }
    words = f"not supported yet: a model that sees images ({kind}) with"
    problems = [f"{words} {what}" for what, is_set in given.items() if is_set]
    if model.path and not has_processor(model.path):
        files = " or ".join(PROCESSOR_FILES)
        problems.append(f"{model_name}.path: {model.path} sees images, but has no {files} that says how")
    return problems
