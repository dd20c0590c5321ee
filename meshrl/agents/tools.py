"""Tools: decorated Python functions, or classes with `create`, `execute` and `release`.

    @tool
    def search(query: str, limit: int = 3) -> str:
        \"\"\"Finds pages.

        Args:
            query: what to look for
        \"\"\"

    class Notebook(Tool):                      # keeps something for as long as a sample lives
        def create(self, sample): return []
        def execute(self, state, line: str): state.append(line); return "\\n".join(state)

All methods may be plain or `async`. Plain methods run in a thread, so that they do not block the event loop.
"""

from __future__ import annotations

import _thread
import asyncio
import inspect
import json
import types
from collections.abc import Callable, Mapping
from typing import Any

from meshrl.agents.messages import Sample, ToolResult
from meshrl.config.user_code import function_schema, read_docstring


class Tool:
    """A tool with a separate state for each sample, created at the sample's first call and released at its end.

    Name, description and parameters are inferred from the class and from the signature and docstring of `execute`,
    unless the class sets them. `timeout` (seconds) replaces the configured one.
    """

    name: str = ""
    description: str = ""
    parameters: dict[str, Any] | None = None
    timeout: float | None = None

    def __init__(self) -> None:
        self._complete()

    def _complete(self) -> None:
        """Infer the name, description and parameters that the class does not set."""
        self.name = self.name or type(self).__name__.lower()
        if not self.description:
            class_says = read_docstring(type(self))[0] if type(self).__doc__ else ""
            self.description = class_says or read_docstring(self.execute)[0]
        if self.parameters is None:
            self.parameters = function_schema(self.execute, skip=("state",))

    def create(self, sample: Sample) -> Any:
        """Create the state for one sample. The default has none."""
        return None

    def execute(self, state: Any, **arguments: Any) -> Any:
        """Runs one call; gives a text, a number, something that JSON can hold, or a `ToolResult`."""
        raise TypeError(f"the tool '{self.name}' does not define execute")

    def release(self, state: Any) -> Any:
        """Release the state that `create` made for one sample."""

    def schema(self) -> dict[str, Any]:
        """Return the tool's schema in the form that chat templates show to the model."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class FunctionTool(Tool):
    """A plain function as a tool. The function can still be called directly."""

    def __init__(self, function: Callable[..., Any], name: str | None = None, timeout: float | None = None):
        self.function = function
        self.name = name or function.__name__
        self.description, _ = read_docstring(function)
        self.parameters = function_schema(function)
        self.timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def execute(self, state: Any, **arguments: Any) -> Any:
        return self.function(**arguments)


def tool(function: Callable[..., Any] | None = None, *, name: str | None = None, timeout: float | None = None) -> Any:
    """Turn a function into a tool: `@tool`, or `@tool(name="web_search", timeout=5)`."""
    if function is not None:
        return FunctionTool(function, name, timeout)
    return lambda function: FunctionTool(function, name, timeout)


def as_result(value: Any) -> ToolResult:
    """Convert a tool's return value to text: strings stay unchanged, None is empty, other values become JSON."""
    if isinstance(value, ToolResult):
        reward = None if value.reward is None else float(value.reward)
        return ToolResult(as_result(value.text).text, reward, value.images)
    if value is None or isinstance(value, str):
        return ToolResult(value or "")
    return ToolResult(json.dumps(value, ensure_ascii=False, default=str))


# Calls of users' code with a time limit.


async def call(
    function: Callable[..., Any], *args: Any, timeout: float, late: Callable[[Any], None] | None = None
) -> Any:
    """Return the result of a plain or `async` function; raise TimeoutError after `timeout` seconds.

    Any other failure is raised as an `Exception`. A plain function runs in a daemon thread of its own. If the function
    never returns, the thread is left behind and cannot keep the process from ending. If the function returns after the
    timeout, its result is passed to `late` in a thread.
    """
    return await asyncio.wait_for(beside(function, *args, late=late), timeout)


async def beside(function: Callable[..., Any], *args: Any, late: Callable[[Any], None] | None = None) -> Any:
    """Return the result of a plain or `async` function without blocking the event loop and without a time limit."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        value = await _in_thread(function, args, late)
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:  # would end the event loop and with it all other samples
        raise RuntimeError(f"SystemExit: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # raised by the function itself, not a cancellation of this task
        raise RuntimeError(f"CancelledError: {error}") from error


async def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], late: Callable[[Any], None] | None) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if done.done():  # the caller has stopped waiting
            if late is not None and error is None:
                _thread.start_new_thread(late, (value,))
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)

    def work() -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = function(*args)
        except StopIteration as error:  # a future does not accept StopIteration
            failure = RuntimeError(f"StopIteration: {error}")
        except Exception as error:
            failure = error
        except BaseException as error:  # such as `sys.exit()`, which must not reach our event loop
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:  # the loop is closed because the result came too late
            if late is not None and failure is None:
                late(value)

    # Not `threading.Thread`, whose `start` waits until the thread runs and would block the event loop.
    _thread.start_new_thread(work, ())
    return await done


# Checks of a tool call's arguments against the JSON schema of the tool's parameters.


def argument_problem(arguments: Any, schema: Mapping[str, Any]) -> str | None:
    """Return an error message for the model if a call's arguments do not fit the schema, or None."""
    if not isinstance(arguments, Mapping):
        return f"the arguments must be a JSON object, not {_json_name(arguments)}"
    properties: Mapping[str, Any] = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in arguments]
    if missing:
        return f"missing argument '{missing[0]}'"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument '{name}': it takes {', '.join(properties) or 'none'}"
        if not fits(value, properties[name]) and not (value is None and name not in schema.get("required", ())):
            wanted = properties[name].get("type") or properties[name].get("enum") or "another type"
            wanted = " or ".join(map(str, wanted)) if isinstance(wanted, list) else wanted
            return f"argument '{name}' must be {wanted}, not {_json_name(value)}"
    return None


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value read from JSON has the type that a schema requires."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return any(fits(value, {**schema, "type": option}) for option in kind)
    if kind == "array":
        return isinstance(value, list) and all(fits(item, schema.get("items", {})) for item in value)
    if kind in ("integer", "number"):
        numbers = int if kind == "integer" else int | float
        return isinstance(value, numbers) and not isinstance(value, bool)
    wanted: dict[str, Any] = {"string": str, "boolean": bool, "object": Mapping, "null": types.NoneType}
    return isinstance(value, wanted.get(str(kind), object))  # values of unknown types always fit


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)
