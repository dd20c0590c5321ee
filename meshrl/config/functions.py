"""Loading a function that a user names by file (or module) and name."""

import functools
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(path: str, name: str) -> Callable[..., Any]:
    """Import the file or module `path` and return its callable `name`; a `ValueError` says what went wrong."""
    try:
        module = _import(path)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise ValueError(f"cannot import {path}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        offered = [other for other in vars(module) if not other.startswith("_") and callable(vars(module)[other])]
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(offered) or 'none'}")
    if not callable(function):
        raise ValueError(f"{name!r} in {path} is a {type(function).__name__}, not a function")
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an `async def`, or an object with such a `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def argument_problem(function: Callable[..., Any], kwargs: Mapping[str, Any], label: str) -> str | None:
    """Keyword arguments that a reward function does not take, or that it needs and is not given."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    options = [name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if unknown := sorted(set(kwargs) - set(parameters)):
        return (
            f"reward function '{label}' takes no argument {', '.join(unknown)}: it has {', '.join(options) or 'none'}"
        )
    missing = [name for name in options if parameters[name].default is inspect.Parameter.empty and name not in kwargs]
    return f"reward function '{label}' needs {', '.join(missing)}: give it in its kwargs" if missing else None


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
