"""Parsing and validation of checks, which are Python code that tests a program.

Checks run in a separate process. Names that the checks use but do not define are looked up in the program. Such names
are functions, classes and values, and the program returns plain data.
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
# Names that checks may not use, with the reason: they could run text of the program as code, or they need objects that
# do not exist in the process of the checks.
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
# The check of one function call in LiveCodeBench, APPS and TACO. The values of these datasets went through JSON, in
# which tuples become lists and keys become text. Some expected outputs are wrapped in a list of one element.
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
    """The source text of checks, the names that the program may define for them, and modules to import for them."""

    checks: str
    names: tuple[str, ...]
    modules: tuple[str, ...] = ()

    def as_json(self) -> str:
        """Return the JSON that the checking process reads from standard input."""
        return json.dumps(asdict(self))


def call_checks(name: str, given: Any, wanted: Any) -> Checks:
    """Build the check that the function `name`, or the method `name` of a class `Solution`, returns `wanted`.

    `given` is a list of arguments, or a text with one argument as JSON in each line. `wanted` may be JSON text as well.
    """
    if not name.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, got {name!r}")
    arguments = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"with fn_name, each of the inputs must be a list of arguments, got {str(given)[:80]!r}")
    if isinstance(wanted, str):
        with suppress(json.JSONDecodeError):  # a text that is no JSON is the expected value itself
            wanted = json.loads(wanted)
    return Checks(CALL.format(values=json.dumps([list(arguments), wanted]), name=name), (name, "Solution"))


@lru_cache(maxsize=256)
def read_checks(text: str, entry_point: str | None = None) -> Checks:
    """Parse checks from their source text, and raise `ValueError` for checks that cannot be used.

    `entry_point` is the name of the function under test. Calls of `check(candidate)` and of test functions are appended
    if the text only defines these functions.
    """
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
    """Return the calls of `check(candidate)` and of functions `test*` that the text defines but never uses.

    Raise `ValueError` if such a function cannot be called, or if the text checks nothing.
    """
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
    """Return the names that are read as globals anywhere in the module."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    for child in _tables(table):
        names |= {symbol.get_name() for symbol in child.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return names


def _only_before_a_dot(tree: ast.Module) -> set[str]:
    """Return the names that occur only before a dot, as names of modules do."""
    before_dots = [
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    read = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {name for name in before_dots if read.count(name) == before_dots.count(name)}


def _builtin_under_test(tree: ast.Module) -> set[str]:
    """Return the built-in function's name that the checks call, if the program is to define that function.

    The caller uses this only for checks that need no other name of the program. In all other checks, built-in functions
    are never taken from the program, because a replaced `abs` or `sorted` could make every check pass. Raise
    `ValueError` if the checks call several built-in functions.
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
