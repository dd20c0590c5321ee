"""Checks of ledger, timeline and profiler."""

from meshrl.config.root import PPOConfig
from meshrl.config.trainer import ProfilerConfig, RunConfig
from meshrl.config.tree import changed_keys

PROFILER = "global_profiler"


def timeline_problems(trainer: RunConfig) -> list[str]:
    """What a timeline needs."""
    problems = []
    if trainer.timeline and not trainer.ledger:
        problems.append("trainer.timeline=true is drawn from the ledger: set trainer.ledger=true")
    if trainer.timeline_steps and not trainer.timeline:
        problems.append("trainer.timeline_steps has no effect without trainer.timeline=true")
    if trainer.peak_tflops is not None and not trainer.ledger:
        problems.append("trainer.peak_tflops has no effect with trainer.ledger=false")
    return problems


def profiler_problems(config: PPOConfig) -> list[str]:
    """What a profiler needs: steps, ranks that exist and, for two of the tools, GPUs."""
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
