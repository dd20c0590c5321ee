"""Limits and sandboxes that cannot be."""

import pytest

from meshrl.rewards.sandbox.run import Limits, SandboxError, run_python


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"memory_mb": -1}, {"processes": 0}, {"output_kb": float("nan")}])
def test_limits_are_above_nothing(bad):
    with pytest.raises(ValueError, match=f"limit {next(iter(bad))} must be above 0"):
        Limits(**bad)


def test_an_interpreter_that_is_not_there():
    with pytest.raises(SandboxError, match="FileNotFoundError"):
        run_python("print(1)", interpreter="/no/such/python", strict=False)
