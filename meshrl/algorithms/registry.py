"""A name -> function table whose errors name the nearest entry."""

import difflib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def unknown_name(kind: str, name: str, known: list[str]) -> ValueError:
    """The error for a name that is in no table: it proposes the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(sorted(known))}")


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
        """The function called `name`, or a ValueError with the nearest known name."""
        if name not in self._functions:
            raise unknown_name(self.kind, name, list(self._functions))
        return self._functions[name]

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._functions))
