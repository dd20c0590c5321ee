"""Checks of how a run is saved and gone on with."""

from pathlib import Path

from meshrl.config.critic import uses_critic
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SFTConfig
from meshrl.config.trainer import TrainerConfig
from meshrl.config.tree import changed_keys, get_value


def checkpoint_problems(config: PPOConfig | SFTConfig) -> list[str]:
    """What is wrong with the keys of checkpoints, and those of them that would do nothing."""
    trainer = config.trainer
    problems = []
    if trainer.resume_mode == "resume_path":
        if trainer.resume_from_path is None:
            problems.append("trainer.resume_mode=resume_path needs trainer.resume_from_path")
        elif not Path(trainer.resume_from_path).is_dir():
            problems.append(f"trainer.resume_from_path: there is no folder {trainer.resume_from_path}")
    elif trainer.resume_from_path is not None:
        problems.append(
            f"trainer.resume_from_path has no effect with trainer.resume_mode={trainer.resume_mode}: set resume_path"
        )
    keep = _keys_of_keep(trainer)
    if len(set(keep.values())) > 1:
        told = ", ".join(f"{name}={value}" for name, value in keep.items())
        problems.append(f"a checkpoint is kept whole, actor and critic together: {told} must be the same")
    roles = ["checkpoint"] if isinstance(config, SFTConfig) else _roles(config)
    if trainer.save_freq < 0:
        idle = [*keep, *(["trainer.remote_dir"] if trainer.remote_dir and trainer.resume_mode != "auto" else [])]
        for role in roles:
            idle += [name for key in ("save_contents", "async_save") for name in changed_keys(config, f"{role}.{key}")]
        return problems + [f"{name} has no effect without trainer.save_freq" for name in idle]
    for role in roles:
        contents = get_value(config, f"{role}.save_contents")
        if "model" not in contents:
            problems.append(f"{role}.save_contents={contents} must hold model: nothing could go on from it")
    return problems


def _roles(config: PPOConfig) -> list[str]:
    roles = ["actor_rollout_ref.actor.checkpoint"]
    if uses_critic(config.critic, config.algorithm.adv_estimator):
        roles.append("critic.checkpoint")
    return roles


def _keys_of_keep(trainer: object) -> dict[str, int]:
    names = ["max_ckpt_to_keep"]
    if isinstance(trainer, TrainerConfig):
        names += ["max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"]
    values = {f"trainer.{name}": getattr(trainer, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
