"""What a model that sees images can and cannot have yet."""

from dataclasses import replace
from typing import Any

from meshrl.config.critic import uses_critic
from meshrl.config.data import DataConfig
from meshrl.config.engine import EngineConfig
from meshrl.config.families import SEEING
from meshrl.config.model import ModelConfig
from meshrl.config.model_folder import PROCESSOR_FILES, has_processor, read_model_config
from meshrl.config.names import ACTOR, MODEL, REF, ROLLOUT
from meshrl.config.rollout import SEEING_ROLLOUTS
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SFTDataConfig, SupervisedConfig
from meshrl.config.tree import changed_keys


def seeing_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """What does not go with the model in the folder, if it sees."""
    if isinstance(config, SupervisedConfig):
        pairs = {"pairs of answers": not isinstance(config.data, SFTDataConfig)}
        found = _problems(config.model, "model", config.engine, "engine", pairs)
        return found + _image_key_problems(config, config.model)
    policy = config.actor_rollout_ref
    rollout = policy.rollout
    sends_adapters = policy.model.has_adapters and policy.hybrid_engine and rollout.update_weights_adapters != "merged"
    given = {
        f"{ROLLOUT}.name={rollout.name} (use {' or '.join(SEEING_ROLLOUTS)})": rollout.name not in SEEING_ROLLOUTS,
        f"adapters sent to vllm alone (use {ROLLOUT}.update_weights_adapters=merged)": sends_adapters
        and rollout.name == "vllm",
        f"{ROLLOUT}.name=vllm in the processes of {rollout.replica_size} ranks (use {ROLLOUT}.as_server=true)": (
            rollout.name == "vllm" and rollout.replica_size > 1 and not rollout.as_server
        ),
        f"a critic (algorithm.adv_estimator={config.algorithm.adv_estimator})": uses_critic(
            config.critic, config.algorithm.adv_estimator
        ),
        "reward_model.enable=true": config.reward_model.enable,
    }
    idle = [
        f"{name}.freeze_vision_tower=true has no effect: only the policy may see images"
        for name, engine in (("critic", config.critic), ("reward_model", config.reward_model))
        if engine.freeze_vision_tower
    ]
    problems = _problems(policy.model, MODEL, policy.actor, ACTOR, given) + idle
    problems += _image_key_problems(config, policy.model)
    if policy.ref.model.path is not None and _kind(policy.model) in SEEING:
        reference = replace(policy.model, path=policy.ref.model.path)
        if (kind := _kind(reference)) not in SEEING:
            problems.append(
                f"{REF}.model.path={reference.path} ({kind}) does not see the images of the policy's prompts"
            )
        elif not has_processor(reference.path or ""):
            problems.append(_no_processor(f"{REF}.model", reference))
    return problems


def _image_key_problems(config: PPOConfig | SupervisedConfig, model: ModelConfig) -> list[str]:
    """A column of images for a model that is known to see none."""
    kind = _kind(model)
    if kind is None or kind in SEEING:
        return []
    return [
        f"{name}={config.data.image_key} has no effect: the model ({kind}) sees no images; leave it out"
        for name in changed_keys(config, "data.image_key")
        if isinstance(config.data, DataConfig | SFTDataConfig) and config.data.image_key is not None
    ]


def _kind(model: ModelConfig) -> str | None:
    try:
        return read_model_config(model).get("model_type")
    except ValueError:
        return None  # said where the model is checked


def _no_processor(name: str, model: ModelConfig) -> str:
    return f"{name}.path: {model.path} sees images, but has no {' or '.join(PROCESSOR_FILES)} that says how"


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
        problems.append(_no_processor(model_name, model))
    return problems
