"""The program's side of the checks: runs the program, then executes the checks' requests on the program's objects.

This file is loaded from its source text in the interpreter that runs the program. The program can change everything
here, so the checks do not trust this process.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

from meshrl.rewards.sandbox.plain import Channel, from_json, to_json

# The operations that checks may request on an object. The checks' process decides which objects it uses them on.
QUESTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "getattr": getattr,
    "getitem": operator.getitem,
    "isinstance": lambda kind, value: isinstance(value, kind),
    "iter": list,
    "next": next,
    **{name.__name__: name for name in (len, bool, str, repr, int, float)},
}


def main(number: int) -> None:
    """Run `main.py` as Python runs a file, then serve requests on socket `number` until the checks close it."""
    run, build, answers = exec, compile, Host(Channel(number))
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names["__file__"] = sys.argv[0] = "main.py"
    with open("main.py", "rb") as file:
        program = file.read()
    run(build(program, "main.py", "exec"), names)
    answers.serve(names)


class Host:
    """A server of the checks' requests. Checks refer to the program's objects by numbers."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def serve(self, names: dict[str, Any]) -> None:
        """Reply to requests until the other end closes the channel. `names` are the program's globals."""
        try:
            while True:
                message = self.channel.receive()
                self._reply(message, names)
        except (EOFError, OSError):
            return

    def _reply(self, message: dict[str, Any], names: dict[str, Any]) -> None:
        try:
            if "names" in message:
                answer = {"names": {name: self._named(names[name]) for name in message["names"] if name in names}}
            else:
                answer = self._answer(message)
        except BaseException as error:  # also SystemExit, because the checks decide what an error means
            answer = self._raised(error)
        try:
            self.channel.send(answer)
        except ValueError as error:
            self.channel.send(self._raised(error))

    def _raised(self, error: BaseException) -> dict[str, Any]:
        texts = [item if type(item) in (str, int, float, bool) else str(item) for item in error.args]
        return {"raised": [kind.__name__ for kind in type(error).__mro__], "arguments": texts}

    def _named(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": [self._register(value), [kind.__name__ for kind in value.__mro__]]}
        return self._encode(value)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        given = message["arguments"]
        values = self._decode(given)
        result = QUESTIONS[message["question"]](self.objects[message["of"]], *values, **self._decode(message["named"]))
        reply = {"value": self._encode(result)}
        if result is None and message["question"] == "call":  # a function that may change its arguments in place
            reply["changed"] = {
                str(index): now
                for index, (before, value) in enumerate(zip(given["tuple"], values, strict=True))
                if (now := self._encode(value)) != before
            }
        return reply

    def _encode(self, value: Any) -> Any:
        return to_json(value, lambda item: {"object": [self._register(item), type(item).__name__]})

    def _decode(self, held: Any) -> Any:
        return from_json(held, self._other)

    def _other(self, name: str, held: Any) -> Any:
        return self.objects[held] if name == "object" else _Callback(self, held)

    def _register(self, item: Any) -> int:
        if id(item) not in self.numbers:
            self.numbers[id(item)] = len(self.objects)
            self.objects.append(item)
        return self.numbers[id(item)]


class _Callback:
    """A proxy of a function of the checks, which the checks passed to the program as an argument."""

    def __init__(self, host: Host, number: int):
        self._host, self._number = host, number

    def __call__(self, *arguments: Any) -> Any:
        host = self._host
        host.channel.send({"callback": self._number, "arguments": host._encode(arguments)})
        while "result" not in (message := host.channel.receive()):
            if "raised" in message:
                raise RuntimeError(f"a function of the checks raised {message['raised']}")
            host._reply(message, {})
        return host._decode(message["result"])
