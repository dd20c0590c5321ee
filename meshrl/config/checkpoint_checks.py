"""Checks of how a run is saved and gone on with."""

from pathlib import Path

from meshrl.config.critic import uses_critic
from meshrl.config.errors import Note
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig
from meshrl.config.trainer import TrainerConfig
from meshrl.config.tree import changed_keys, get_value


def checkpoint_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """What is wrong with the keys of checkpoints, and those of them that would do nothing."""
    trainer = config.trainer
    problems = []
    if trainer.resume_mode == "resume_path":
        if trainer.resume_from_path is None:
            problems.append("trainer.resume_mode=resume_path needs trainer.resume_from_path")
        elif not Path(trainer.resume_from_path).is_dir():
            problems.append(f"trainer.resume_from_path: there is no folder {trainer.resume_from_path}")
        elif problem := _no_checkpoint_problem(Path(trainer.resume_from_path)):
            problems.append(f"trainer.resume_from_path={trainer.resume_from_path} {problem}")
    elif trainer.resume_from_path is not None:
        problems.append(
            f"trainer.resume_from_path has no effect with trainer.resume_mode={trainer.resume_mode}: set resume_path"
        )
    keep = _keys_of_keep(trainer)
    if len(set(keep.values())) > 1:
        told = ", ".join(f"{name}={value}" for name, value in keep.items())
        problems.append(f"a checkpoint is kept whole, actor and critic together: {told} must be the same")
    roles = ["checkpoint"] if isinstance(config, SupervisedConfig) else _roles(config)
    if trainer.save_freq < 0:
        idle = ["trainer.remote_dir"] if trainer.remote_dir and trainer.resume_mode != "auto" else []
        for role in roles:
            idle += [name for key in ("save_contents", "async_save") for name in changed_keys(config, f"{role}.{key}")]
        return problems + [
            (Note if name.endswith(".save_contents") else str)(f"{name} has no effect without trainer.save_freq")
            for name in idle
        ]
    for role in roles:
        contents = get_value(config, f"{role}.save_contents")
        if "model" not in contents:
            problems.append(f"{role}.save_contents={contents} must hold model: nothing could go on from it")
    return problems


def checkpoint_notes(config: PPOConfig | SupervisedConfig) -> list[str]:
    """How many checkpoints to keep, where none is written."""
    keep = _keys_of_keep(config.trainer) if config.trainer.save_freq < 0 else {}
    return [f"{name} is for checkpoints, and trainer.save_freq=-1 writes none" for name in keep]


def _no_checkpoint_problem(path: Path) -> str | None:
    """What a folder is instead of a checkpoint, and what to name; None where it may be one."""
    if (path / "manifest.json").is_file():
        return None
    for folder in (path / "checkpoints", path):
        steps = [int(step.name[12:]) for step in folder.glob("global_step_*") if step.name[12:].isdecimal()]
        if steps:
            what = "is the folder of a run" if folder != path else "holds checkpoints"
            return f"{what}, not one checkpoint: name {folder}/global_step_{max(steps)}"
    instead = "name RUN/checkpoints/global_step_N"
    if (path / "config.yaml").is_file():
        return f"is the folder of a run that has no checkpoints (trainer.save_freq writes them): {instead} of another"
    if (path / "config.json").is_file():
        return f"is a Hugging Face model, not a checkpoint: {instead}, or begin with it (its key is model.path)"
    return None


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
