"""The data types of a conversation: messages, samples, tool calls and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.data.images import Images

# A message as chat templates read it: `role` and `content`, and for a tool's response `name` and `tool_call_id`.
Message = dict[str, Any]
# Some templates require an id of nine characters. Ids in the model's own text are not parsed.
CALL_ID = "000000000"


def tool_message(name: str, content: str | list[dict[str, str]]) -> Message:
    """Return a tool's response as a message of the conversation."""
    return {"role": "tool", "name": name, "content": content, "tool_call_id": CALL_ID}


@dataclass(frozen=True)
class Sample:
    """One prompt with one conversation: the prompt's tokens and the fields of its data row."""

    number: int
    prompt_ids: tuple[int, ...]
    seed: int = 0
    messages: tuple[Message, ...] = ()
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    images: Images = ()  # images of the prompt, as encoded files


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model, with the arguments as the model wrote them."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A tool call that cannot be parsed, with an error message for the model."""

    problem: str


@dataclass(frozen=True)
class ToolResult:
    """The return value of a tool that returns more than text.

    `images`, for a VLM, are bytes, paths, data URLs or PIL images. They are shown in place of `<image>` in the text, or
    before the text.
    """

    text: str
    reward: float | None = None
    images: Any = ()


@dataclass(frozen=True)
class ToolAnswer:
    """A tool's turn in the conversation. `error` is true if the call failed, was refused or could not be parsed."""

    name: str
    text: str
    reward: float | None = None
    error: bool = False
    images: Images = ()
