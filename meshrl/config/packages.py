"""Whether the packages that a config asks for are installed: looked up, not imported."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig
from meshrl.config.trainer import TRACKERS

EXTERNAL_ROLLOUTS = ("vllm", "sglang")


def package_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """What is asked for and not installed here, each with the extra that brings it."""
    return [
        f"{asked} needs the package {package}: pip install 'meshrl[{extra}]'"
        for asked, package, extra in _wanted(config)
        if not is_installed(package)
    ]


def is_installed(package: str) -> bool:
    """Whether it could be imported."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _wanted(config: PPOConfig | SupervisedConfig) -> Iterator[tuple[str, str, str]]:
    """(what asks for it, package, extra), for what this process or one beside it will import."""
    for name in config.trainer.logger:
        if name in TRACKERS:
            yield f"trainer.logger={name}", name, name
    reads_files = not isinstance(config, PPOConfig) or config.data.custom_cls.path is None
    for key in ("train_files", "val_files") if reads_files else ():
        if any(Path(entry).is_dir() for entry in getattr(config.data, key)):
            yield f"a folder in data.{key}", "datasets", "datasets"
    if config.trainer.backend != "local":
        return  # workers of a cluster may have what the controller has not
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
