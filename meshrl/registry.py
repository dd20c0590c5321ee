"""Registries of functions by name: built-in functions, functions that users register, and functions in named files.

The registries are here, below the algorithms that fill them, so that a config can be checked without importing torch.
"""

import difflib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def unknown_name(kind: str, name: str, known: list[str]) -> ValueError:
    """Return the error for a name that is in no registry, with the nearest known name as a suggestion."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(sorted(known))}")


def names_a_place(name: str) -> bool:
    """Return whether a name gives a function's location, as `file.py:name` or `module:name`."""
    return ":" in name


class Registry:
    """Functions of one kind by name. Each name is registered once; a function may have several names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Function], Function]:
        """Return a decorator that registers a function under `name`."""

        def enter(function: Function) -> Function:
            present = self._functions.get(name)
            if present is not None and present is not function:
                raise ValueError(
                    f"{self.kind} {name!r} is already registered by {present.__module__}.{present.__name__}"
                )
            self._functions[name] = function
            return function

        return enter

    def get(self, name: str) -> Callable[..., Any]:
        """Return the function called `name`, or the one at a location such as `file.py:name`.

        Raise a `ValueError` with the nearest known name if there is none.
        """
        if name in self._functions:
            return self._functions[name]
        if names_a_place(name):
            from meshrl.config.user_code import load_by_path

            return load_by_path(name)
        raise unknown_name(self.kind, name, list(self._functions))

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._functions))


ADVANTAGE_ESTIMATORS = Registry("advantage estimator")
POLICY_LOSSES = Registry("policy loss")
REWARD_MANAGERS = Registry("reward manager")
