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

All methods may be plain or `async`; plain ones run in a thread beside the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from meshrl.agents.messages import Sample, ToolResult
from meshrl.config.tool_schema import function_schema, read_docstring


class Tool:
    """A tool with a state of its own for each sample, made at the sample's first call and released at its end.

    Name, description and parameters are inferred from the class and from the signature and docstring of `execute`,
    unless the class says them. `timeout` (seconds) replaces the configured one.
    """

    name: str = ""
    description: str = ""
    parameters: dict[str, Any] | None = None
    timeout: float | None = None

    def __init__(self) -> None:
        self._complete()

    def _complete(self) -> None:
        """Fills in what the class does not say."""
        self.name = self.name or type(self).__name__.lower()
        if not self.description:
            class_says = read_docstring(type(self))[0] if type(self).__doc__ else ""
            self.description = class_says or read_docstring(self.execute)[0]
        if self.parameters is None:
            self.parameters = function_schema(self.execute, skip=("state",))

    def create(self, sample: Sample) -> Any:
        """The state for one sample."""
        return None

    def execute(self, state: Any, **arguments: Any) -> Any:
        """Runs one call; gives a text, a number, something that JSON can hold, or a `ToolResult`."""
        raise TypeError(f"the tool '{self.name}' does not define execute")

    def release(self, state: Any) -> Any:
        """Gives up what `create` made."""

    def schema(self) -> dict[str, Any]:
        """The tool as chat templates show it to the model."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class FunctionTool(Tool):
    """A plain function as a tool; it can still be called as before."""

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
    """Makes a function a tool: `@tool`, or `@tool(name="web_search", timeout=5)`."""
    if function is not None:
        return FunctionTool(function, name, timeout)
    return lambda function: FunctionTool(function, name, timeout)


def as_result(value: Any) -> ToolResult:
    """What a tool returned, as text: strings as they are, other things as JSON, None as nothing."""
    if isinstance(value, ToolResult):
        reward = None if value.reward is None else float(value.reward)
        return ToolResult(as_result(value.text).text, reward, value.images)
    if value is None or isinstance(value, str):
        return ToolResult(value or "")
    return ToolResult(json.dumps(value, ensure_ascii=False, default=str))
