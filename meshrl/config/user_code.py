"""Loading of user code, checks that it can be called, and JSON schemas of its parameters.

* `load_function`, `load_by_path`, `import_code`: import a module or file, and find a function in it.
* `call_problem`, `argument_problem`, `reward_call_problem`, ...: check a signature before a run starts.
* `function_schema`, `read_docstring`: the schema of a tool, from its type hints and docstring.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
import traceback
import types
import typing
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

# Arguments of reward functions: the name for one sample and the name for a batch. A function gets those in `PLURALS`
# always, and those in `ON_DEMAND` if its signature names them.
PLURALS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
ON_DEMAND = {"prompt": "prompts", "response_ids": "response_ids", "turn_rewards": "turn_rewards"}
# Places of code that is not the user's: this package, and the libraries of Python and pip.
PACKAGE = (f"{Path(__file__).parents[1]}{os.sep}", "<frozen ")
LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def load_function(path: str, name: str) -> Callable[..., Any]:
    """Import the file or module `path` and return its callable `name`. Raise `ValueError` if that fails."""
    module = import_code(path)
    function = getattr(module, name, None)
    if function is None:
        offered = [other for other in vars(module) if not other.startswith("_") and callable(vars(module)[other])]
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(offered) or 'none'}")
    if not callable(function):
        raise ValueError(f"{name!r} in {path} is a {type(function).__name__}, not a function")
    return function


def load_by_path(path: str) -> Any:
    """Load the callable that `module:name`, `file.py:name` or `module.name` refers to."""
    module, colon, name = path.rpartition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not module or not name:
        raise ValueError(f"'{path}' is no import path: write it as module:name or file.py:name")
    return load_function(module, name)


def import_code(path: str) -> ModuleType:
    """Import a module by name or a file by path. Raise `ValueError` with the place in the user's code if that fails."""
    try:
        return _import(path)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        where = "".join(f" ({frame})" for frame in own_frames(error)[-1:])
        raise ValueError(f"cannot import {path}: {type(error).__name__}: {error}{where}") from error


def own_frames(error: BaseException) -> list[str]:
    """Return the places of an error's traceback in user code, as `file:line in function: source`, innermost last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(PACKAGE)]
    # If all frames are in installed libraries, the first of them is the user's function, installed as a package.
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames[:1]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in own]


def with_absolute_file(place: str) -> str:
    """Make the file in `file.py` or `file.py:name` absolute, for processes with another working directory."""
    file, colon, name = place.partition(":")
    return f"{Path(file).resolve()}{colon}{name}" if Path(file).suffix == ".py" else place


def call_problem(function: Callable[..., Any], offered: Collection[str], must_take: Collection[str]) -> str | None:
    """Return the reason that a function cannot be called by keyword, or None.

    A function may not need arguments beyond those in `offered`, and must accept all arguments in `must_take`.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return None
    kinds = inspect.Parameter
    free = (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    named = {name: p for name, p in parameters.items() if p.kind not in (*free, kinds.POSITIONAL_ONLY)}
    needed = [name for name, p in parameters.items() if p.default is kinds.empty and p.kind not in free]
    if unmet := [name for name in needed if name not in named or name not in offered]:
        return f"it needs {', '.join(unmet)}; what it can be given by name is {', '.join(offered)}"
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    if untaken := [name for name in must_take if name not in named and not takes_any]:
        return f"it takes no argument {', '.join(untaken)}: it is called by name with {', '.join(must_take)}"
    return None


def positional_problem(function: Callable[..., Any], words: str) -> str | None:
    """Return the reason that a function or class cannot be called with these positional arguments, or None.

    `words` describes the arguments in their order, separated by `, `.
    """
    try:
        inspect.signature(function).bind(*words.split(", "))
    except TypeError as error:
        return f"cannot be called with ({words}): {error}"
    except ValueError:  # some callables have no signature
        return None
    return None


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine: for an `async def`, or an object with an async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def argument_problem(function: Callable[..., Any], kwargs: Mapping[str, Any], label: str) -> str | None:
    """Return the problem with the keyword arguments that the config gives to a reward function, or None.

    The problem is an argument that the function does not have, or a required argument that is missing.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    given = {*PLURALS, *PLURALS.values(), *ON_DEMAND, *ON_DEMAND.values()}
    keyword_only = [name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    options = [name for name in keyword_only if name not in given]
    if unknown := sorted(set(kwargs) - set(parameters)):
        return (
            f"reward function '{label}' takes no argument {', '.join(unknown)}: it has {', '.join(options) or 'none'}"
        )
    missing = [name for name in options if parameters[name].default is inspect.Parameter.empty and name not in kwargs]
    return f"reward function '{label}' needs {', '.join(missing)}: give it in its kwargs" if missing else None


def is_batch_function(function: Callable[..., Any]) -> bool:
    """Return whether a reward function takes a batch of samples with every manager: it has `per_batch = True`."""
    while isinstance(function, functools.partial):
        function = function.func
    return bool(getattr(function, "per_batch", False))


def reward_call_problem(function: Callable[..., Any], kwargs: Collection[str], label: str, manager: str) -> str | None:
    """Return the reason that a manager cannot call a reward function, or None.

    Managers call functions by keyword, for one sample or for a batch.
    """
    forms = {"naive": ([*PLURALS], [*ON_DEMAND]), "batch": ([*PLURALS.values()], [*ON_DEMAND.values()])}
    fits = {
        form: call_problem(function, [*given, *on_demand, *kwargs], given) is None
        for form, (given, on_demand) in forms.items()
    }
    own = "batch" if manager == "batch" or is_batch_function(function) else "naive"
    if fits[own]:
        return None
    given, on_demand = forms[own]
    other = "batch" if own == "naive" else "naive"
    advice = "give it these parameters (**kwargs stands for any of them), and what else it needs in its kwargs"
    if fits[other] and not is_batch_function(function):
        advice = f"set reward_manager.name={other}, which calls it as it is written"
    takes = ", ".join(map(str, inspect.signature(function).parameters.values())) or "nothing"
    return (
        f"reward function '{label}' takes {takes}, but it is called by name with {', '.join(given)} (with "
        f"{', '.join(on_demand)} too, where it names them): {advice}"
    )


def _import(path: str) -> ModuleType:
    file = Path(path)
    if file.suffix != ".py" and not file.is_file():
        return importlib.import_module(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"meshrl_user_{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a function's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# The JSON schema of a Python function's parameters, from its signature and docstring.

JSON_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_HEADINGS = re.compile(r"^(args|arguments|parameters|returns|raises|yields|examples?|notes?):\s*$", re.IGNORECASE)
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_PARAM = re.compile(r"^:param\s+(?:[\w\[\], |.]+\s)?(\w+):\s*(.*)$")


def function_schema(function: Callable[..., Any], skip: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON schema of a function's parameters except those in `skip`.

    Raise `ValueError` for a parameter without a type hint, or one that cannot be given by name.
    """
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ValueError(f"the type hints of tool '{function.__qualname__}' cannot be read: {error}") from error
    _, described = read_docstring(function)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in skip:
            continue
        where = f"parameter '{name}' of tool '{function.__qualname__}'"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{where} cannot be given by name: tools take plain named parameters")
        if name not in hints:
            raise ValueError(f"{where} has no type hint: the model must be told what to give")
        properties[name] = type_schema(hints[name], where)
        if name in described:
            properties[name]["description"] = described[name]
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            properties[name]["default"] = parameter.default
        _check_json(properties[name], where)
    return {"type": "object", "properties": properties, "required": required}


def _check_json(schema: dict[str, Any], where: str) -> None:
    """Raise `ValueError` if a default or literal is not JSON, because chat templates write schemas as JSON."""
    try:
        json.dumps(schema)
    except TypeError as error:
        raise ValueError(f"{where} has a default or literal that JSON cannot hold: {error}") from error


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint: a plain type, list, dict, literal or union. Else raise `ValueError`."""
    if hint in JSON_NAMES:
        return {"type": JSON_NAMES[hint]}
    if hint is Any:
        return {}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is list or origin in (list, Sequence):
        return {"type": "array"} | ({"items": type_schema(arguments[0], where)} if arguments else {})
    if hint is dict or origin in (dict, Mapping):
        return {"type": "object"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (types.UnionType, typing.Union):
        options = [type_schema(option, where) for option in arguments if option is not types.NoneType]
        return options[0] if len(options) == 1 else {"anyOf": options}
    raise ValueError(f"{where} has the type {hint}, which JSON cannot hold: use str, int, float, bool, list or dict")


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Parse a docstring into the function's description and a description of each argument.

    Arguments are described in `Args:` sections or by `:param x:` lines.
    """
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()  # not inherited, as `inspect.getdoc` has it
    text: list[str] = []
    described: dict[str, str] = {}
    section, last = "", ""
    for line in lines:
        heading, param = _HEADINGS.match(line.strip()), _PARAM.match(line.strip())
        if heading:
            section, last = heading[1].lower(), ""
        elif param:
            section, last = "param", param[1]
            described[last] = param[2]
        elif section in ("args", "arguments", "parameters"):
            last = _read_argument(line, last, described)
        elif section == "param" and line.startswith(" ") and last:
            described[last] += " " + line.strip()
        elif not section:
            text.append(line)
    return " ".join(" ".join(text).split()), {name: value.strip() for name, value in described.items()}


def _read_argument(line: str, last: str, described: dict[str, str]) -> str:
    """Read one line of an `Args:` section into `described`. Return the argument that the line describes."""
    depth = len(line) - len(line.lstrip())
    found = _ARGUMENT.match(line.strip())
    if found and (not last or depth <= 4):
        described[found[1]] = found[2]
        return found[1]
    if last and line.strip():
        described[last] += " " + line.strip()
    return last
