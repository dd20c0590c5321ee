"""Checks of a run itself: checkpoints, timeline, profiler, installed packages, optimizer and idle engine keys."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from meshrl.config.actor_critic import uses_critic
from meshrl.config.batch_sizes import reads_the_other_engine
from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.config.keys import ACTOR, MODEL, Note, changed_keys, get_value
from meshrl.config.rl import PPOConfig
from meshrl.config.supervised import SupervisedConfig
from meshrl.config.trainer import TRACKERS, ProfilerConfig, RunConfig, TrainerConfig


def checkpoint_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Check the keys of checkpoints: the place to resume from, the contents, and keys without effect."""
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
    """Return a note for each key that limits the number of checkpoints, if the run writes no checkpoints."""
    keep = _keys_of_keep(config.trainer) if config.trainer.save_freq < 0 else {}
    return [f"{name} is for checkpoints, and trainer.save_freq=-1 writes none" for name in keep]


def _no_checkpoint_problem(path: Path) -> str | None:
    """Describe a folder that is not a checkpoint, and give the path to name instead.

    The result is None if the folder may be a checkpoint: it has a manifest, or nothing in it is recognised.
    """
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


# Checks of the time ledger, the timeline and the profiler.

PROFILER = "global_profiler"


def timeline_problems(trainer: RunConfig) -> list[str]:
    """Check the keys of the timeline and of `mfu`, which need the ledger."""
    problems = []
    if trainer.timeline and not trainer.ledger:
        problems.append("trainer.timeline=true is drawn from the ledger: set trainer.ledger=true")
    if trainer.timeline_steps and not trainer.timeline:
        problems.append("trainer.timeline_steps has no effect without trainer.timeline=true")
    if trainer.peak_tflops is not None and not trainer.ledger:
        problems.append("trainer.peak_tflops has no effect with trainer.ledger=false")
    return problems


def profiler_problems(config: PPOConfig) -> list[str]:
    """Check that the profiler has steps, ranks that exist and, except for the tool `torch`, GPUs."""
    profiler: ProfilerConfig = config.global_profiler
    if profiler.tool is None:
        changed = changed_keys(config, f"{PROFILER}.")
        return [f"{name} has no effect without {PROFILER}.tool" for name in changed]
    problems = []
    if not profiler.steps:
        problems.append(f"{PROFILER}.tool={profiler.tool} needs steps to profile: set {PROFILER}.steps=[3]")
    world_size = config.trainer.world_size
    if beyond := [rank for rank in profiler.ranks if rank >= world_size]:
        problems.append(f"{PROFILER}.ranks: there is no rank {beyond[0]} among {world_size} processes")
    if profiler.tool != "torch" and config.trainer.device == "cpu":
        problems.append(f"{PROFILER}.tool={profiler.tool} needs GPUs, and trainer.device is cpu: use tool=torch")
    return problems


# Checks that the packages which a config needs are installed. The packages are looked up and not imported.

EXTERNAL_ROLLOUTS = ("vllm", "sglang")


def package_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return one message for each package that the config needs and that is missing, with the extra to install."""
    return [
        f"{asked} needs the package {package}: pip install 'meshrl[{extra}]'"
        for asked, package, extra in _wanted(config)
        if not is_installed(package)
    ]


def is_installed(package: str) -> bool:
    """Return whether a package is imported already or could be imported."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _wanted(config: PPOConfig | SupervisedConfig) -> Iterator[tuple[str, str, str]]:
    """Yield `(key that needs it, package, extra)` for each package that a process on this machine will import."""
    for name in config.trainer.logger:
        if name in TRACKERS:
            yield f"trainer.logger={name}", name, name
    reads_files = not isinstance(config, PPOConfig) or config.data.custom_cls.path is None
    for key in ("train_files", "val_files") if reads_files else ():
        if any(Path(entry).is_dir() for entry in getattr(config.data, key)):
            yield f"a folder in data.{key}", "datasets", "datasets"
    if config.trainer.backend != "local":
        return  # workers of a cluster may have packages that the controller does not have
    if isinstance(config, PPOConfig):
        prefix, model, engine = (
            "actor_rollout_ref.",
            config.actor_rollout_ref.model,
            config.actor_rollout_ref.rollout.name,
        )
    else:
        prefix, model, engine = "", config.model, ""
    if model.lora_rank > 0:
        yield f"{prefix}model.lora_rank={model.lora_rank}", "peft", "lora"
    elif model.lora_adapter_path:
        yield f"{prefix}model.lora_adapter_path", "peft", "lora"
    if engine in EXTERNAL_ROLLOUTS:
        yield f"{prefix}rollout.name={engine}", engine, engine
    if isinstance(config, PPOConfig) and engine == "sglang" and config.trainer.device != "cpu":
        policy = config.actor_rollout_ref
        if policy.hybrid_engine and policy.rollout.free_cache_engine:
            yield (
                f"{prefix}rollout.free_cache_engine=true with {prefix}rollout.name=sglang",
                "torch_memory_saver",
                "sglang",
            )


# Keys that FSDP reads and Megatron does not, of the engine and of the model. Then, by strategy, the key of FSDP's
# section that only the other version of FSDP reads.
FSDP_ONLY_KEYS = (
    "ulysses_sequence_parallel_size",
    "context_parallel_size",
    "use_torch_compile",
    "activation_memory_budget",
    "keep_logits_megabytes",
)
FSDP_ONLY_MODEL_KEYS = ("lora_rank", "lora_adapter_path", "enable_activation_offload", "use_remove_padding")
IDLE_FSDP_KEYS = {"fsdp2": "use_orig_params", "fsdp": "reshard_after_forward"}


def epoch_problems(config: SupervisedConfig) -> list[str]:
    """Check `test_after_epoch` and `save_after_epoch` against `test_freq` and `save_freq`.

    Set the frequency to 1 for those that are true. Later checks then see that the run validates or saves.
    """
    trainer, problems = config.trainer, []
    for what in ("test", "save"):
        if not getattr(trainer, f"{what}_after_epoch"):
            continue
        if (steps := getattr(trainer, f"{what}_freq")) > 0:
            problems.append(f"trainer.{what}_freq={steps} and {what}_after_epoch=true both say when: choose one")
        setattr(trainer, f"{what}_freq", 1)
    return problems


def optim_problems(optim: OptimConfig, prefix: str) -> list[str]:
    """Check an optimizer's betas and the keys of its learning-rate schedule."""
    problems = []
    if len(optim.betas) != 2 or any(beta >= 1 for beta in optim.betas):
        problems.append(f"{prefix}.betas={optim.betas} must be two numbers below 1")
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
        problems.append(
            f"{prefix}.lr_warmup_steps ({optim.lr_warmup_steps}) and lr_warmup_steps_ratio "
            f"({optim.lr_warmup_steps_ratio}) both say how long to warm up: choose one"
        )
    if optim.min_lr_ratio and optim.lr_scheduler_type == "constant":
        problems.append(
            f"{prefix}.min_lr_ratio={optim.min_lr_ratio} has no effect with {prefix}.lr_scheduler_type=constant: set "
            "linear or cosine"
        )
    decay, is_wsd = optim.lr_decay_steps_ratio, optim.lr_scheduler_type == "wsd"
    if not is_wsd and decay != OptimConfig().lr_decay_steps_ratio:
        problems.append(
            f"{prefix}.lr_decay_steps_ratio has no effect with lr_scheduler_type={optim.lr_scheduler_type}: it is for "
            "wsd"
        )
    if is_wsd and (decay == 0 or optim.lr_warmup_steps_ratio + decay > 1):
        problems.append(
            f"{prefix}.lr_decay_steps_ratio ({decay}) must be above 0 and, with lr_warmup_steps_ratio "
            f"({optim.lr_warmup_steps_ratio}), at most 1"
        )
    return problems


def run_problems(trainer: RunConfig) -> list[str]:
    """Check the keys of `trainer` that all commands share: machines, limits of NaN steps and frequencies."""
    problems = timeline_problems(trainer)
    if trainer.nnodes > 1 and trainer.backend != "ray":
        problems.append(f"trainer.nnodes={trainer.nnodes} needs trainer.backend=ray, not {trainer.backend}")
    if trainer.nan_gradient == "stop" and trainer.max_nan_steps is not None:
        problems.append(
            f"trainer.max_nan_steps={trainer.max_nan_steps} has no effect with trainer.nan_gradient=stop: set skip"
        )
    in_a_row = trainer.max_nan_steps_in_a_row or 0
    if in_a_row not in (0, RunConfig.max_nan_steps_in_a_row):
        earlier = "nan_gradient=stop" if trainer.nan_gradient == "stop" else f"max_nan_steps={trainer.max_nan_steps}"
        if earlier == "nan_gradient=stop" or (trainer.max_nan_steps is not None and trainer.max_nan_steps < in_a_row):
            problems.append(
                f"trainer.max_nan_steps_in_a_row={in_a_row} has no effect with trainer.{earlier}, which ends the run "
                "before: leave one of them out"
            )
    for name in ("test_freq", "save_freq", "memory_copy_freq"):
        if getattr(trainer, name) == 0:
            problems.append(f"trainer.{name}=0 must be -1 (never) or a number of steps")
    return problems


def idle_engine_problems(
    config: PPOConfig | SupervisedConfig, engine: EngineConfig, prefix: str, model_prefix: str
) -> list[str]:
    """Return one message for each set key of a role's engine and model that the chosen strategy does not read."""
    idle = "fsdp_config" if engine.strategy == "megatron" else "megatron"
    changed = changed_keys(config, f"{prefix}.{idle}.")
    if prefix == ACTOR and isinstance(config, PPOConfig) and reads_the_other_engine(config):
        changed = []
    elif engine.strategy == "megatron":
        changed += [name for key in FSDP_ONLY_KEYS for name in changed_keys(config, f"{prefix}.{key}")]
        changed += [name for key in FSDP_ONLY_MODEL_KEYS for name in changed_keys(config, f"{model_prefix}.{key}")]
    else:
        changed += changed_keys(config, f"{prefix}.fsdp_config.{IDLE_FSDP_KEYS[engine.strategy]}")
    problems = [
        (Note if name.endswith(".fsdp_config.use_orig_params") else str)(
            f"{name} has no effect with {prefix}.strategy={engine.strategy}"
        )
        for name in changed
    ]
    model: ModelConfig = get_value(config, model_prefix)
    for field in ("router_aux_loss_coef", "output_router_logits"):
        if model.override_config.get(field):
            key = f"{prefix}.megatron.override_transformer_config.moe_aux_loss_coeff"
            problems.append(
                f"{model_prefix}.override_config.{field} has no effect: the experts' balancing loss is that of "
                f"Megatron ({key}, with {prefix}.strategy=megatron); with FSDP there is none"
            )
    if prefix in ("critic", "reward_model") and model.custom_chat_template is not None:
        problems.append(f"{model_prefix}.custom_chat_template has no effect: it gets the policy's token ids")
    if not model.has_adapters:
        idle_keys = [
            n for key in ("lora_alpha", "target_modules") for n in changed_keys(config, f"{model_prefix}.{key}")
        ]
        problems += [f"{name} has no effect without {model_prefix}.lora_rank" for name in idle_keys]
    needs = {"activation_memory_budget": "use_torch_compile", "megatron.grad_offload": "megatron.optimizer_offload"}
    for name, needed in needs.items():
        given = changed_keys(config, f"{prefix}.{name}")
        if given and given[0] not in changed and not get_value(config, f"{prefix}.{needed}"):
            problems.append(f"{given[0]} has no effect without {prefix}.{needed}=true")
    return problems


def idle_problems(config: PPOConfig | SupervisedConfig, engine: EngineConfig, prefix: str) -> list[str]:
    """Return one message for each set key that the policy's strategy, a supervised run or the Ray backend ignores.

    A missing Ray is reported as well.
    """
    problems = idle_engine_problems(config, engine, prefix, "model" if isinstance(config, SupervisedConfig) else MODEL)
    if isinstance(config, SupervisedConfig):
        used, instead = ("megatron", "") if engine.strategy == "megatron" else ("fsdp_config", ": use offload_policy")
        names = ("param_offload", "optimizer_offload", "grad_offload")
        offload = [name for key in names for name in changed_keys(config, f"{prefix}.{used}.{key}")]
        problems += [f"{name} has no effect here, where there are no phases{instead}" for name in offload]
    if config.ray_init.address is not None:
        started = [f"ray_init.{name}" for name in ("num_cpus", "num_gpus", "object_store_memory")]
        given = [name for name in started if get_value(config, name) is not None]
        problems += [
            f"{name} is for a Ray started here, not for ray_init.address={config.ray_init.address}" for name in given
        ]
    if config.trainer.backend == "ray" and importlib.util.find_spec("ray") is None:
        problems.append("trainer.backend=ray needs Ray: pip install 'meshrl[ray]'")
    return problems
