"""Checks written in Python: which forms can be run, and what they take from the program.

Checks run in a process of their own. Names that they use and do not define are the program's: functions, classes and
values there, of which plain data comes back.
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

DATA_ALONE = "the program hands over plain data alone"
OTHER_PROCESS = "checks run in another process than the program"
# What checks may not use, with the reason: it would run the program's text, or look for what is not in this process.
REFUSED = {
    **dict.fromkeys(
        ("eval", "exec", "compile", "__import__", "importlib"), "that could run the program's text as code"
    ),
    **dict.fromkeys(("pickle", "marshal", "shelve", "inspect", "asyncio"), DATA_ALONE),
    **dict.fromkeys(
        ("globals", "locals", "vars", "__main__", "mock", "redirect_stdout", "redirect_stderr"), OTHER_PROCESS
    ),
    **dict.fromkeys(("open", "input", "breakpoint"), OTHER_PROCESS),
}
# The calls of LiveCodeBench, APPS and TACO: their values went through JSON, in which tuples are lists and keys are
# text, and outputs sometimes lie in a list of their own.
CALL = """
import json
def _as_json(value):
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return {{str(key): _as_json(item) for key, item in value.items()}} if isinstance(value, dict) else value
_arguments, _wanted = json.loads({values!r})
try:
    _function = {name}
except NameError:
    _function = Solution().{name}
_found = _as_json(_function(*_arguments))
assert _found == _wanted or (isinstance(_wanted, list) and _wanted[:1] == [_found]), _found
"""


@dataclass(frozen=True)
class Checks:
    """Checks as Python text, the names that the program may define for them, and modules that they take for granted."""

    checks: str
    names: tuple[str, ...]
    modules: tuple[str, ...] = ()

    def as_json(self) -> str:
        """What the checking process reads."""
        return json.dumps(asdict(self))


def call_checks(name: str, given: Any, wanted: Any) -> Checks:
    """The check that a function, or the method of a class `Solution`, returns what is wanted.

    Arguments are a list, or text with the JSON of one in each line; what is wanted may be the text of its JSON, too.
    """
    if not name.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, got {name!r}")
    arguments = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"with fn_name, each of the inputs must be a list of arguments, got {str(given)[:80]!r}")
    if isinstance(wanted, str):
        with suppress(json.JSONDecodeError):  # else it is the text itself
            wanted = json.loads(wanted)
    return Checks(CALL.format(values=json.dumps([list(arguments), wanted]), name=name), (name, "Solution"))


@lru_cache(maxsize=256)
def read_checks(text: str, entry_point: str | None = None) -> Checks:
    """Checks from their text; a `ValueError` names what cannot be used. `entry_point` is the function under test."""
    try:
        tree = ast.parse(text)
        table = symtable.symtable(text, "checks", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"checks that are no Python: {error}") from error
    _refuse_by_name(tree)
    text += "".join(f"\n{call}" for call in _missing_calls(tree, entry_point))
    free = _free_names(table) - _bound(table)
    free = {name for name in free if not name.startswith("__")}
    bases = _only_before_a_dot(tree)
    modules = {name for name in free if name in sys.stdlib_module_names and name in bases and name != entry_point}
    names = free - modules - set(dir(builtins))
    if entry_point is not None:
        names.add(entry_point)
    if not names:
        names = _builtin_under_test(tree)
    return Checks(text, tuple(sorted(names)), tuple(sorted(modules)))


def _refuse_by_name(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used = [node.id]
        elif isinstance(node, ast.Attribute):
            used = [node.attr] if node.attr in ("mock", "redirect_stdout", "redirect_stderr") else []
        elif isinstance(node, ast.Import):
            used = [part for entry in node.names for part in entry.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            used = [*(node.module or "").split("."), *(entry.name for entry in node.names)]
        for name in used:
            if name in REFUSED:
                line = getattr(node, "lineno", 0)
                raise ValueError(f"checks that use {name} (line {line}) cannot be used: {REFUSED[name]}")


def _missing_calls(tree: ast.Module, entry_point: str | None) -> list[str]:
    """Calls of `check(candidate)` and of tests as pytest finds them, where the checks only define them."""
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    calls = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in loaded:
            needed = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults)
            if node.name == "check" and needed == 1 and entry_point is not None:
                calls.append(f"check({entry_point})")
            elif node.name.startswith("test") and needed == 0 and not node.decorator_list:
                calls.append(f"{node.name}()")
            elif node.name == "check" or node.name.startswith("test"):
                raise ValueError(
                    f"checks define {node.name}() (line {node.lineno}) and never call it: call it, or for "
                    "check(candidate) name the function under test as entry_point"
                )
    if not calls and all(_does_nothing(node) for node in tree.body):
        raise ValueError("checks that only define something check nothing: call it")
    return calls


def _does_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _tables(child)


def _bound(table: symtable.SymbolTable) -> set[str]:
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }


def _free_names(table: symtable.SymbolTable) -> set[str]:
    """Names that are read as globals anywhere."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    for child in _tables(table):
        names |= {symbol.get_name() for symbol in child.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return names


def _only_before_a_dot(tree: ast.Module) -> set[str]:
    """Names that are read only to reach an attribute, as modules are."""
    before_dots = [
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    read = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {name for name in before_dots if read.count(name) == before_dots.count(name)}


def _builtin_under_test(tree: ast.Module) -> set[str]:
    """The function of the program that has the name of a built-in one, if the checks name no other.

    Other built-in functions are never the program's: one that replaces `abs` or `sorted` could agree to everything.
    """
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in dir(builtins)
    }
    if len(called) > 1:
        raise ValueError(
            f"checks that call built-in functions alone ({', '.join(sorted(called))}): say which one the program "
            "defines, as {'checks': ..., 'entry_point': NAME}"
        )
    return called
