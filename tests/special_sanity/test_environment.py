"""The environment: one table of the variables that the package reads, also in the docs, and one way to read them."""

import ast
import importlib
from pathlib import Path

import pytest

from meshrl import environment
from meshrl.cli import main
from meshrl.environment import VARIABLES, number, switch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshrl"
READS = {"get", "pop", "setdefault"}
GETTERS = {"os.getenv", "getenv", "switch", "number"}
# (file, expression): reads of names that are no constants, and why.
DYNAMIC = {
    ("rewards/judge.py", "api_key_env"): "a config key names it: reward.judge.api_key_env",
    ("weights/disaggregated.py", "name"): "what is set for a moment is put back",
    ("weights/colocated.py", "name"): "VARIABLES of that module, looked at below",
}


def is_environ(node):
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or ast.unparse(node) == "environ"


def reads_of(tree):
    """The expressions by which variables are read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            on_environ = isinstance(node.func, ast.Attribute) and is_environ(node.func.value)
            if (on_environ and node.func.attr in READS) or name in (
                "os.getenv",
                "getenv",
                "switch",
                "number",
                "environment.switch",
                "environment.number",
            ):
                yield node.args[0]
        elif isinstance(node, ast.Subscript) and is_environ(node.value) and isinstance(node.ctx, ast.Load):
            yield node.slice
        elif isinstance(node, ast.Compare) and any(is_environ(other) for other in node.comparators):
            yield node.left


def names_read():
    """(file, name) of every read; a name that is not known is None, with the expression."""
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        if file == PACKAGE / "environment.py" or ("os.environ" not in text and "meshrl.environment" not in text):
            continue
        where = str(file.relative_to(PACKAGE))
        for node in reads_of(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield where, node.value
            elif isinstance(node, ast.Name) and node.id.isupper():
                module = importlib.import_module("meshrl." + where.removesuffix(".py").replace("/", "."))
                yield where, getattr(module, node.id)
            elif (where, ast.unparse(node)) not in DYNAMIC:
                yield where, f"? {ast.unparse(node)}"


def test_the_table_has_all_that_is_read_and_nothing_else():
    from meshrl.weights import colocated

    read = {name for _, name in names_read()} | set(colocated.VARIABLES)
    assert read == set(VARIABLES)


def test_the_docs_have_the_table():
    rows = [line for line in (ROOT / "docs" / "config.md").read_text().splitlines() if line.startswith("| `")]
    for name, what in VARIABLES.items():
        assert f"| `{name}` | {what} |" in rows


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("os.environ.get('A')", ["'A'"]),
        ("os.environ['A']", ["'A'"]),
        ("os.environ['A'] = 'x'", []),
        ("'A' in os.environ", ["'A'"]),
        ("switch(B)", ["B"]),
        ("os.getenv('A')", ["'A'"]),
        ("dict(os.environ)", []),
    ],
)
def test_the_lint_sees_them(code, found):
    assert [ast.unparse(node) for node in reads_of(ast.parse(code))] == found


@pytest.mark.parametrize(
    ("word", "on"),
    [
        *[(word, True) for word in ("1", "true", "ON", " yes ")],
        *[(word, False) for word in ("0", "false", "Off", "no", "", None)],
    ],
)
def test_a_switch(monkeypatch, word, on):
    monkeypatch.delenv("SOME_SWITCH", raising=False)
    if word is not None:
        monkeypatch.setenv("SOME_SWITCH", word)
    assert switch("SOME_SWITCH") is on


def test_other_words_are_refused(monkeypatch):
    monkeypatch.setenv("SOME_SWITCH", "2")
    with pytest.raises(ValueError, match="SOME_SWITCH=2 must be one of 1, true, yes, on or 0, false, no, off"):
        switch("SOME_SWITCH")
    monkeypatch.setenv("SOME_NUMBER", "many")
    with pytest.raises(ValueError, match="SOME_NUMBER=many must be a whole number"):
        number("SOME_NUMBER", 3)
    monkeypatch.setenv("SOME_NUMBER", " 7 ")
    assert (number("SOME_NUMBER", 3), number("NO_SUCH_NUMBER", 3)) == (7, 3)


@pytest.mark.parametrize(("word", "code", "shown"), [("1", 2, True), ("0", 2, False), ("off", 2, False)])
def test_the_traceback_is_switched(monkeypatch, capsys, word, code, shown):
    monkeypatch.setenv("MESHRL_TRACEBACK", word)
    assert main(["train", "grpo", "no.such.key=1"]) == code
    assert ("Traceback (most recent call last)" in capsys.readouterr().err) is shown


def test_a_word_that_is_no_switch_is_told_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setenv("MESHRL_TRACEBACK", "maybe")
    assert main(["config"]) == 2
    assert capsys.readouterr() == (
        "",
        "meshrl: MESHRL_TRACEBACK=maybe must be one of 1, true, yes, on or 0, false, no, off\n",
    )
    assert environment.TRACEBACK == "MESHRL_TRACEBACK"
