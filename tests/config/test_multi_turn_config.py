"""Keys of multi-turn rollouts that contradict each other, do nothing or name what cannot be imported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.config import PPOConfig, check_config

KEY = "actor_rollout_ref.rollout.multi_turn"
TOOL = f"{KEY}.tools=[meshrl.agents.calculator:calculator]"
ON = f"{KEY}.enable=true"


def test_tools_and_environments_are_fine(fine: Callable[..., PPOConfig]) -> None:
    assert check_config(fine(ON, TOOL)) == []
    assert check_config(fine(ON, f"{KEY}.environment=meshrl.agents.environments:ScriptedUser")) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([TOOL], f"{KEY}.tools has no effect without {KEY}.enable=true"),
        ([f"{KEY}.max_parallel_calls=2"], f"{KEY}.max_parallel_calls has no effect"),
        ([ON], "nobody answers the model"),
        ([ON, TOOL, KEY + ".environment_kwargs={a: 1}"], f"{KEY}.environment_kwargs has no effect"),
        ([ON, f"{KEY}.environment=a:B", f"{KEY}.max_assistant_turns=1"], "ends before the environment answers"),
    ],
)
def test_contradictions_are_named(fine: Callable[..., PPOConfig], overrides: list[str], words: str) -> None:
    (problem,) = check_config(fine(*overrides), check_files=False)
    assert words in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{KEY}.tools=[meshrl.agents.calculator:abacus]", f"{KEY}.tools: meshrl.agents.calculator has no function"),
        (f"{KEY}.environment=no_such_module:Game", f"{KEY}.environment: cannot import no_such_module"),
        (f"{KEY}.tool_config_path=nowhere.yaml", f"{KEY}.tool_config_path: there is no file nowhere.yaml"),
    ],
)
def test_what_cannot_be_found_is_named(fine: Callable[..., PPOConfig], override: str, words: str) -> None:
    (problem,) = check_config(fine(ON, override))
    assert problem.startswith(words)


def test_tools_without_type_hints_and_bad_tool_files(fine: Callable[..., PPOConfig], tmp_path: Path) -> None:
    own, file = tmp_path / "own.py", tmp_path / "tools.yaml"
    own.write_text("def plain(q): return q\ndef hinted(q: str): return q\n")
    assert check_config(fine(ON, f"{KEY}.tools=[{own}:hinted]")) == []
    (problem,) = check_config(fine(ON, f"{KEY}.tools=[{own}:plain]"))
    assert problem.startswith(f"{KEY}.tools: parameter 'q' of tool 'plain' has no type hint")
    own.write_text(
        "from datetime import date\nfrom meshrl.agents.tools import Tool\n"
        "def typed(day: date): return 1\ndef unknown(x: 'Nowhere'): return 1\ndef stars(*words: str): return 1\n"
        "def preset(x: str = date(2020, 1, 1)): return 1\ndef fine(x: list[str] | None = None): return 1\n"
        "def plain(q): return q\n"
        "class Made(Tool):\n    def execute(self, state, day: date): return 1\n"
        "class Told(Made):\n    parameters = {'type': 'object', 'properties': {}}\n"
        "class Own(Made):\n    def __init__(self, **how): self.parameters = how\n"
    )
    fresh = own.rename(tmp_path / "more.py")  # a file is imported once
    for name, words in (
        ("typed", "parameter 'day' of tool 'typed' has the type <class 'datetime.date'>, which JSON cannot hold"),
        ("unknown", "the type hints of tool 'unknown' cannot be read: name 'Nowhere' is not defined"),
        ("stars", "parameter 'words' of tool 'stars' cannot be given by name"),
        ("preset", "parameter 'x' of tool 'preset' has a default or literal that JSON cannot hold"),
        ("Made", "parameter 'day' of tool 'Made.execute' has the type"),
    ):
        (problem,) = check_config(fine(ON, f"{KEY}.tools=[{fresh}:{name}]"))
        assert problem.startswith(f"{KEY}.tools: {words}")
    for name in ("fine", "Told", "Own"):
        assert check_config(fine(ON, f"{KEY}.tools=[{fresh}:{name}]")) == []
    own = fresh
    for text, words in (
        ("tools: 3", "needs a list"),
        ("tools: [", "cannot read"),
        (f"tools: [{own}:plain]", "no type"),
    ):
        file.write_text(text)
        (problem,) = check_config(fine(ON, f"{KEY}.tool_config_path={file}"))
        assert problem.startswith(f"{KEY}.tool_config_path: ")
        assert words in problem


def test_a_tool_file_is_enough(fine: Callable[..., PPOConfig], tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: [meshrl.agents.calculator:calculator]\n")
    assert check_config(fine(ON, f"{KEY}.tool_config_path={tmp_path / 'tools.yaml'}")) == []
