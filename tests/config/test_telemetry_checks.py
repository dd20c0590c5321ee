"""Ledger, timeline and profiler: settings that would do nothing, or cannot work, are refused before a run starts."""

from collections.abc import Callable

import pytest

from meshrl.config.rl import PPOConfig
from meshrl.config.validate_training import profiler_problems, timeline_problems

PROBLEMS = [
    (["trainer.timeline=true", "trainer.ledger=false"], "drawn from the ledger"),
    (["trainer.timeline_steps=[2]"], "no effect without trainer.timeline=true"),
    (["trainer.peak_tflops=10", "trainer.ledger=false"], "no effect with trainer.ledger=false"),
    (["global_profiler.steps=[2]"], "global_profiler.steps has no effect without global_profiler.tool"),
    (["global_profiler.tool=torch"], "needs steps to profile"),
    (["global_profiler.tool=torch", "global_profiler.steps=[2]", "global_profiler.ranks=[99]"], "no rank 99 among"),
    (["global_profiler.tool=nsys", "global_profiler.steps=[2]", "trainer.device=cpu"], "needs GPUs"),
    (["global_profiler.tool=torch_memory", "global_profiler.steps=[2]", "trainer.device=cpu"], "needs GPUs"),
]


@pytest.mark.parametrize(("overrides", "words"), PROBLEMS)
def test_what_cannot_work_is_said(fine: Callable[..., PPOConfig], overrides: list[str], words: str) -> None:
    config = fine(*overrides)
    (problem,) = timeline_problems(config.trainer) + profiler_problems(config)
    assert words in problem


def test_what_works_is_not_refused(fine: Callable[..., PPOConfig]) -> None:
    config = fine(
        "trainer.timeline=true",
        "trainer.timeline_steps=[2]",
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        "trainer.device=cpu",
    )
    assert timeline_problems(config.trainer) + profiler_problems(config) == []
