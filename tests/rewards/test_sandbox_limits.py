"""Limits and sandboxes that cannot be, and how one is chosen."""

import pytest

from meshrl.config.reward import REWARD_OPTIONS
from meshrl.rewards import functions
from meshrl.rewards.from_config import sandbox_notes
from meshrl.rewards.functions import describe_sandbox
from meshrl.rewards.reward_calls import RewardFunctionSpec
from meshrl.rewards.sandbox import backends
from meshrl.rewards.sandbox.backends import Backend, SandboxError, choose_backend
from meshrl.rewards.sandbox.run import Limits, chosen_backend, run_python


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"memory_mb": -1}, {"processes": 0}, {"output_kb": float("nan")}])
def test_limits_are_above_nothing(bad):
    with pytest.raises(ValueError, match=f"limit {next(iter(bad))} must be above 0"):
        Limits(**bad)


def test_an_interpreter_that_is_not_there():
    with pytest.raises(SandboxError, match="/no/such/python"):
        chosen_backend("auto", "/no/such/python", False)


def kernel_with(*works):
    """A trial on a machine where these backends work, and the names that it was asked for."""
    tried = []

    def trial(backend: Backend) -> None:
        tried.append(backend.name)
        if backend.name not in works:
            raise SandboxError(f"no {backend.name} here")

    return trial, tried


@pytest.mark.parametrize(
    ("works", "strict", "chosen"),
    [
        (("bwrap", "namespaces", "landlock", "none"), True, "bwrap"),
        (("namespaces", "landlock", "none"), True, "namespaces"),
        (("landlock", "none"), True, "landlock"),
        (("landlock", "none"), False, "landlock"),
        (("none",), False, "none"),
    ],
)
def test_the_strongest_that_works_is_chosen(works, strict, chosen):
    trial, tried = kernel_with(*works)
    found = choose_backend(trial, "auto", "/usr/bin/python3", strict)
    assert found.name == chosen
    assert tried == list(backends.BACKENDS)[: len(tried)]
    for name in tried[:-1]:
        assert f"{name}: no {name} here" in found.describe()


def test_nothing_that_keeps_programs_in_is_an_error_by_default():
    trial, _ = kernel_with("none")
    with pytest.raises(SandboxError, match=r"bwrap: no bwrap here; namespaces: .*; landlock: .* strict=false"):
        choose_backend(trial)
    with pytest.raises(ValueError, match="strict=false"):
        choose_backend(trial, "none")
    with pytest.raises(ValueError, match="no sandbox 'bwarp': use auto, bwrap, namespaces, landlock, none"):
        choose_backend(trial, "bwarp")


def test_a_run_is_told_before_it_starts():
    with pytest.raises(ValueError, match="no limit second"):
        describe_sandbox({"limits": {"second": 1}})
    for wrong in (True, "ten"):
        with pytest.raises(ValueError, match=f"limit seconds must be a number, not {wrong!r}"):
            describe_sandbox({"limits": {"seconds": wrong}})
    with pytest.raises(ValueError, match="/no/such/python"):
        describe_sandbox({"interpreter": "/no/such/python"})
    assert "sandbox" in REWARD_OPTIONS["code"]


def test_the_run_says_which_sandbox_it_uses(monkeypatch):
    monkeypatch.setattr(functions, "chosen_backend", lambda **wanted: Backend("landlock", str(wanted), ("bwrap: no",)))
    specs = [
        RewardFunctionSpec("tests", name="code", kwargs={"sandbox": "landlock", "limits": {"seconds": 1}}),
        RewardFunctionSpec("exact_match"),
    ]
    (note,) = sandbox_notes(specs)
    assert note.startswith("tests: programs run in the sandbox landlock")
    assert "{'sandbox': 'landlock'}" in note
    assert note.endswith("(not bwrap: no)")
    assert sandbox_notes(specs[1:]) == []


def test_what_is_accepted_without_strict():
    """The control of all tests that look for files: with limits alone, a program reads what its user can."""
    done = run_python("print(open('/proc/self/status').readline())", backend=chosen_backend("none", strict=False))
    assert done.stdout.startswith("Name:")
    assert done.isolation["root"] is False
    assert done.isolation["landlock"] is False
