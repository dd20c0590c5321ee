"""Functions by name: the built-in ones, those that users register, and those that are named by file.

The tables are here, below the algorithms that fill them, so that a config can be checked against them without torch.
"""

import difflib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def unknown_name(kind: str, name: str, known: list[str]) -> ValueError:
    """The error for a name that is in no table: it proposes the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(sorted(known))}")


def names_a_place(name: str) -> bool:
    """Whether a name says where to find a function, as `file.py:name` or `module:name`."""
    return ":" in name


class Registry:
    """Functions of one kind by name. A name can be given once; the same function may carry several names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Function], Function]:
        """Decorator that enters a function under `name`."""

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
        """The function called `name`, or found where `file.py:name` says; a ValueError has the nearest known name."""
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
