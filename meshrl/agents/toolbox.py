"""The tools of a run, and a sample's use of them. Every call has a response, whatever the tool does.

Parts: `ToolBox`, `ToolSession`, loading of tools by import path, and images of tools and environments.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from meshrl.agents.messages import Message, Sample, ToolAnswer, ToolCall
from meshrl.agents.tools import FunctionTool, Tool, argument_problem, as_result, beside, call
from meshrl.config.keys import count
from meshrl.config.rollout import MultiTurnConfig
from meshrl.config.user_code import load_by_path
from meshrl.config.validate_rollout import read_tool_config
from meshrl.data.images import Images
from meshrl.data.prompt_images import PLACE, PromptImages, encoded, in_parts

logger = logging.getLogger(__name__)
GAP = "..."


class ToolBox:
    """Tools by name, with limits on a call's time in seconds and on a response's characters.

    With a `sight`, tools may show images.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        timeout: float = 30.0,
        max_response_length: int = 256,
        side: str = "middle",
        sight: PromptImages | None = None,
    ):
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self.tools:
                raise ValueError(f"two tools have the name '{tool.name}': give one of them another")
            self.tools[tool.name] = tool
        self.timeout, self.max_response_length, self.side, self.sight = timeout, max_response_length, side, sight

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of all tools as chat templates show them."""
        return [tool.schema() for tool in self.tools.values()]


class ToolSession:
    """One sample's tools. Their states are created at the first call and released at the end."""

    def __init__(self, box: ToolBox, sample: Sample, gate: asyncio.Semaphore | None = None):
        self.box, self.sample = box, sample
        self.gate: AbstractAsyncContextManager[None] = gate or nullcontext()
        self.calls = self.errors = self.cut = 0
        self._states: dict[str, asyncio.Task[Any]] = {}

    async def answer(self, asked: ToolCall) -> ToolAnswer:
        """Run a call. The response is an error message if the tool raises, times out or gets wrong arguments."""
        self.calls += 1
        tool = self.box.tools.get(asked.name)
        if tool is None:
            offered = ", ".join(self.box.tools) or "none"
            return self.refuse(asked.name, f"there is no tool '{asked.name}'; there are: {offered}")
        timeout = self.box.timeout if tool.timeout is None else tool.timeout
        try:
            problem = argument_problem(asked.arguments, tool.parameters or {})
            if problem is not None:
                return self.refuse(asked.name, problem)
            async with self.gate:
                run = await self._bound(tool, timeout)
                # `functools.partial`, because the tool's parameters may have the same names as the parameters of
                # `call`.
                result = as_result(await call(functools.partial(run, **asked.arguments), timeout=timeout))
                shown = shows(result.images)
                images = await call(taken, result.images, self.box.sight, timeout=timeout) if shown else ()
        except TimeoutError:
            return self.refuse(asked.name, f"'{asked.name}' took longer than {timeout:g} seconds")
        except Exception as error:
            logger.debug("tool %s failed", asked.name, exc_info=error)
            return self.refuse(asked.name, f"{type(error).__name__}: {error}")
        return ToolAnswer(asked.name, self._fit(result.text), result.reward, images=images)

    def refuse(self, name: str, problem: str) -> ToolAnswer:
        """Return an error message as the tool's response and count the error."""
        self.errors += 1
        return ToolAnswer(name, self._fit(f"Error: {problem}"), error=True)

    def _fit(self, text: str) -> str:
        fitted = truncate_text(text, self.box.max_response_length, self.box.side)
        self.cut += fitted != text
        return fitted

    async def _bound(self, tool: Tool, timeout: float) -> Callable[..., Any]:
        """Return the tool's function, bound to this sample's state if the tool has one."""
        if isinstance(tool, FunctionTool):
            return tool.function
        if type(tool).create is Tool.create:
            return functools.partial(tool.execute, None)
        return functools.partial(tool.execute, await asyncio.shield(self._state(tool, timeout)))

    def _state(self, tool: Tool, timeout: float) -> asyncio.Task[Any]:
        """Return the task that creates the tool's state for this sample. Parallel calls share one task."""
        made = self._states.get(tool.name)
        if made is None or (made.done() and (made.cancelled() or made.exception() is not None)):
            release = functools.partial(_release_late, tool)
            made = asyncio.create_task(call(tool.create, self.sample, timeout=timeout, late=release))
            self._states[tool.name] = made
        return made

    async def close(self) -> None:
        """Release every state that this sample's calls have created."""
        for name, made in self._states.items():
            tool = self.box.tools[name]
            timeout = self.box.timeout if tool.timeout is None else tool.timeout
            try:
                state = await made
            except Exception:
                continue  # never created: the call that needed it has returned an error
            try:
                await call(tool.release, state, timeout=timeout)
            except Exception as error:
                self.errors += 1
                logger.warning("tool %s could not be released: %s: %s", name, type(error).__name__, error)
        self._states.clear()


def _release_late(tool: Tool, state: Any) -> None:
    """Release a state whose `create` returned after its timeout.

    Runs in a thread, possibly after all samples have ended.
    """

    async def release() -> None:
        await beside(tool.release, state)

    try:
        asyncio.run(release())
    except Exception as error:
        logger.warning("tool %s could not be released: %s: %s", tool.name, type(error).__name__, error)


def truncate_text(text: str, limit: int, side: str) -> str:
    """Cut text to `limit` characters on one `side` or in the middle, with dots for the missing part if they fit."""
    if len(text) <= limit:
        return text
    gap = GAP if limit > 2 * len(GAP) else ""
    left = limit - len(gap)
    if side == "left":
        return gap + text[len(text) - left :]
    if side == "right":
        return text[:left] + gap
    head = left // 2
    return text[:head] + gap + text[len(text) - (left - head) :]


def load_tools(paths: Sequence[str], config_path: str | None = None) -> list[Tool]:
    """Load tools by import path (`module:name` or `file.py:name`), and those listed in a YAML file."""
    entries: list[Mapping[str, Any]] = [{"path": path} for path in paths]
    if config_path is not None:
        entries += read_tool_config(config_path)
    return [load_tool(entry) for entry in entries]


def tool_schemas(config: MultiTurnConfig) -> list[dict[str, Any]]:
    """Return the schemas of all tools of a run for the prompt, or an empty list if multi-turn is off."""
    return [tool.schema() for tool in load_tools(config.tools, config.tool_config_path)] if config.enable else []


def load_tool(entry: Mapping[str, Any]) -> Tool:
    """Load the tool of one entry: a decorated or plain function, or a class instantiated with `config`."""
    path = str(entry.get("path") or entry["class_name"])
    found: Any = load_by_path(path)
    config = dict(entry.get("config") or {})
    if isinstance(found, type) and issubclass(found, Tool):
        made: Tool = found(**config)
    elif config:
        raise ValueError(f"the tool {path} is no class: 'config' has no effect on it")
    else:
        made = found if isinstance(found, Tool) else FunctionTool(found)
    if "name" in entry or "timeout" in entry:
        if isinstance(made, FunctionTool):
            # a copy, because other entries may share the decorated function
            made = FunctionTool(made.function, made.name, made.timeout)
        made.name = str(entry.get("name", made.name))
        made.timeout = entry.get("timeout", made.timeout)
    return made


# Images that tools and environments show the model in addition to text.


def shows(images: Any) -> bool:
    """Return whether `images`, which may be one image, several or none, has any image."""
    return images is not None and not (isinstance(images, list | tuple) and not images)


def taken(images: Any, sight: PromptImages | None) -> Images:
    """Return one image or several, in any form that data rows accept, as bytes of files that the model can read.

    Raises ValueError if the model accepts no images.
    """
    several = images if isinstance(images, list | tuple) else [images]
    if several and sight is None:
        raise ValueError(f"the model sees no images, but was given {count(len(several), 'image')}")
    found = tuple(encoded(image) for image in several)
    for image in found:
        assert sight is not None
        sight.reader.pixels(image)  # decodes the image, which is cached for the rollout
    return found


def content(text: str, images: Images) -> str | list[dict[str, str]]:
    """Return text and images as message content. Images replace `<image>` in the text, or come before the text."""
    if not images:
        return text
    if text.count(PLACE) == len(images):
        return in_parts(text)
    return [{"type": "image"}] * len(images) + ([{"type": "text", "text": text}] if text else [])


def image_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the content parts of messages that are images."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]


def opening_images(messages: Sequence[Message], own: Images, sight: PromptImages | None) -> Images:
    """Return the images of the first messages. A part without its own image stands for the next image of `own`."""
    parts, left = image_parts(messages), iter(own)
    images = [part["image"] if "image" in part else next(left, None) for part in parts]
    if any(image is None for image in images):
        raise ValueError(f"the prompt has {count(len(parts), 'image')}, but its row has only {len(own)}")
    return taken(images, sight)
