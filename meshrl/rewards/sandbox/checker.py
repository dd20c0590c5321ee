"""The process that runs the checks, in its own sandbox. The program runs in another process and sends plain data.

This file is loaded from its source text. The process prints only the verdict.

* `Program`: the connection to the program. `ProgramObject`: a proxy of an object in the program's process.
* `judge`, `main`: run the checks and print the verdict.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
from collections import deque
from typing import Any, NoReturn

from meshrl.rewards.sandbox.plain import Channel, from_json, to_json

# The kinds of proxies, which differ in what checks may do. Checks may pass values only to what they name themselves: a
# class (its name begins with a capital letter), its instances and their attributes, or a function. An object that a
# function returned is closed, because it could be made to satisfy every check.
CLASS, OPEN, FUNCTION, CLOSED = "class", "open", "function", "closed"


class NotPlainError(BaseException):
    """An error of a program that gives an object where the checks need plain data.

    The class is not an `Exception`, so that checks cannot catch it by `except Exception`.
    """


class RefusedError(BaseException):
    """An error of checks that use something impossible in this setting, independent of the program."""


class ProgramEndedError(BaseException):
    """An error of a program that has ended or sent an invalid message."""


class Program:
    """The checks' connection to the program: looks up the program's names and sends requests about its objects."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.problem: tuple[str, str] | None = None
        self.callbacks: list[Any] = []
        self.errors: dict[str, type[BaseException]] = {}
        self.error_numbers: dict[type, int] = {}
        self.known: dict[tuple[int, str], ProgramObject] = {}
        self.raised: list[BaseException] = []

    def lookup(self, names: list[str]) -> dict[str, Any]:
        """Return the values or proxies of the requested names that the program defines, by name."""
        reply = self._exchange({"names": names})
        if "names" not in reply:
            self._end(f"its names cannot be listed: {reply}")
        found: dict[str, Any] = {}
        for name in set(names) & set(reply["names"]):  # an unrequested name could replace one of the checks
            held = reply["names"][name]
            if isinstance(held, dict) and set(held) == {"error"}:
                found[name] = self._stand_in(name, *held["error"])
            else:
                found[name] = self._decode(held, CLASS if name.lstrip("_")[:1].isupper() else FUNCTION)
        return found

    def ask(
        self,
        target: ProgramObject,
        question: str,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
        kind: str = CLOSED,
    ) -> Any:
        """Send a request about one of the program's objects, and return the result or raise the program's error.

        `kind` is the kind of the proxy if the result is an object. Arguments that the program's function has changed in
        place are updated.
        """
        given = {"arguments": self._encode(arguments), "named": self._encode(named or {})}
        reply = self._exchange({"question": question, "of": target._number, **given})
        if "raised" in reply:
            error = self._error_of(reply)
            if isinstance(error, StopIteration) and question != "next":
                # A StopIteration would end a loop of the checks, such as `all(map(...))`, as if all checks had passed.
                error = RuntimeError("the program raised StopIteration")
            self.raised.append(error)
            raise error
        for index, now in reply.get("changed", {}).items():
            _write_back(arguments[int(index)], self._decode(now, CLOSED))
        return self._decode(reply["value"], kind)

    def not_plain(self, what: str) -> NoReturn:
        """Record that the program gave an object instead of plain data, and raise `NotPlainError`.

        The recorded problem decides the verdict even if the checks catch the error.
        """
        self.problem = self.problem or ("not plain", what)
        raise NotPlainError(what)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self.channel.send(message)
            while "callback" in (reply := self.channel.receive()):
                self._call_back(reply)
            return dict(reply)
        except (EOFError, OSError):
            self._end("it ended")
        except (ValueError, TypeError, RecursionError) as error:
            self._end(f"it said what is no message: {type(error).__name__}: {error}"[:300])

    def _call_back(self, message: dict[str, Any]) -> None:
        try:
            function = self.callbacks[message["callback"]]
            result = self._encode(function(*self._decode(message["arguments"], CLOSED)))
        except (Exception, RefusedError) as error:
            self.channel.send({"raised": type(error).__name__})
        else:
            self.channel.send({"result": result})

    def _error_of(self, reply: dict[str, Any]) -> BaseException:
        """Return the program's error as an exception that the checks can catch.

        Its class is the first class of the error's MRO that is known by name: a stand-in class or a built-in one.
        """
        names, arguments = [str(name) for name in reply["raised"]], list(reply.get("arguments", ()))
        for name in names:
            kind = self.errors.get(name) or _built_in_error(name)
            if kind is not None:
                try:
                    return kind(*arguments)
                except Exception:  # a class with other arguments
                    break
        return Exception(f"{names[:1]}: {arguments}")

    def _stand_in(self, name: str, number: int, names: list[str]) -> type[BaseException]:
        base = next((kind for parent in names if (kind := _built_in_error(str(parent)))), Exception)
        self.errors[name] = type(name, (base,), {})
        self.error_numbers[self.errors[name]] = int(number)
        return self.errors[name]

    def _encode(self, value: Any) -> Any:
        return to_json(value, self._encode_other)

    def _encode_other(self, value: Any) -> dict[str, Any]:
        if isinstance(value, ProgramObject):
            return {"object": value._number}
        if isinstance(value, type) and value in self.error_numbers:
            return {"object": self.error_numbers[value]}
        if callable(value):
            self.callbacks.append(value)
            return {"callback": len(self.callbacks) - 1}
        raise RefusedError(f"they give the program an object of type {type(value).__name__}, which is not plain data")

    def _decode(self, held: Any, kind: str) -> Any:
        def other(name: str, inner: Any) -> Any:
            if name != "object":
                raise ValueError(f"there is no kind of data called {name}"[:200])
            number, type_name = int(inner[0]), str(inner[1])
            if (number, kind) not in self.known:
                self.known[number, kind] = ProgramObject(self, number, type_name, kind)
            return self.known[number, kind]

        try:
            return from_json(held, other)
        except Exception as error:
            self._end(f"it said what is no data: {type(error).__name__}: {error}"[:300])

    def _end(self, why: str) -> NoReturn:
        self.problem = self.problem or ("failed", f"the program: {why}")
        raise ProgramEndedError(why)


def _built_in_error(name: str) -> type[BaseException] | None:
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def _write_back(given: Any, now: Any) -> None:
    """Copy the changes that the program's function made in place into the checks' own object."""
    if type(given) is not type(now):
        return
    if isinstance(given, list | bytearray):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)
    elif isinstance(given, deque):
        given.clear()
        given.extend(now)


class ProgramObject:
    """A proxy of an object in the program's process, such as a function, a class or an instance."""

    def __init__(self, program: Program, number: int, type_name: str, kind: str):
        self._program, self._number, self._type_name, self._kind = program, number, type_name, kind

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._kind == CLOSED and (arguments or named):
            self._program.not_plain(f"checks call an object of type {self._type_name}, which a function returned")
        kind = OPEN if self._kind == CLASS else CLOSED
        return self._program.ask(self, "call", arguments, named, kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask(self, "getattr", (name,), kind=OPEN if self._kind in (CLASS, OPEN) else CLOSED)

    def __getitem__(self, key: Any) -> Any:
        if self._kind not in (CLASS, OPEN):
            self._program.not_plain(f"checks look into an object of type {self._type_name}, which a function returned")
        return self._program.ask(self, "getitem", (key,))

    def __contains__(self, value: Any) -> bool:
        return any(value is item or value == item for item in self)  # the program would accept anything

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, ProgramObject) and self._program.ask(self, "isinstance", (value,)) is True

    def __iter__(self) -> Any:
        items = self._program.ask(self, "iter")
        return iter(items if type(items) is list else self._program.not_plain("an iterator gives no list"))

    def __next__(self) -> Any:
        return self._program.ask(self, "next")

    def __bool__(self) -> bool:
        return self._program.ask(self, "bool") is True

    def __len__(self) -> int:
        return int(self._program.ask(self, "len"))

    def __str__(self) -> str:
        return str(self._program.ask(self, "str"))

    def __repr__(self) -> str:
        return str(self._program.ask(self, "repr"))

    def __int__(self) -> int:
        return int(self._program.ask(self, "int"))

    def __float__(self) -> float:
        return float(self._program.ask(self, "float"))

    def _refuse_comparison(self, other: object) -> NoReturn:
        self._program.not_plain(f"checks compare an object of type {self._type_name}")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse_comparison
    __hash__ = object.__hash__


def judge(given: dict[str, Any], program: Program) -> tuple[str, str]:
    """Run the checks, and return the verdict's status and its reason."""
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    try:
        for name in given["modules"]:
            names[name] = importlib.import_module(name)
        names.update(program.lookup(given["names"]))
        exec(compile(given["checks"], "checks.py", "exec"), names)
    except SystemExit as end:
        if end in program.raised or end.code:
            return "wrong" if end not in program.raised else "failed", f"the checks ended with {end.code}"
    except RefusedError as error:
        return "refused", str(error)
    except (NotPlainError, ProgramEndedError) as error:
        return program.problem or ("failed", str(error))
    except BaseException as error:
        if isinstance(error, ImportError) and error not in program.raised:
            return "refused", f"{type(error).__name__}: {error}"
        what = "wrong" if isinstance(error, AssertionError) and error not in program.raised else "failed"
        return program.problem or (what, f"{type(error).__name__}: {error}"[:300])
    return program.problem or ("passed", "")


def main(number: int) -> None:
    """Read the checks from standard input, run them with the program on socket `number`, and print the verdict."""
    given = json.loads(sys.stdin.read())
    verdict_to = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    verdict = judge(given, Program(Channel(number)))
    os.write(verdict_to, json.dumps(verdict).encode())
    os._exit(0)
