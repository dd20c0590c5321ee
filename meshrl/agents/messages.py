"""What is passed around in a conversation: messages, tool calls, the sample that a loop works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.data.images import Images

# `role` and `content`, and `name` and `tool_call_id` for the answer of a tool: as chat templates read them.
Message = dict[str, Any]
# Some templates want an id of nine characters. The model's own ids are in its text, which is not read for them.
CALL_ID = "000000000"


def tool_message(name: str, content: str | list[dict[str, str]]) -> Message:
    """The answer of a tool as a turn of the conversation."""
    return {"role": "tool", "name": name, "content": content, "tool_call_id": CALL_ID}


@dataclass(frozen=True)
class Sample:
    """One prompt to be answered once: its tokens, and what its row of the data says."""

    number: int
    prompt_ids: tuple[int, ...]
    seed: int = 0
    messages: tuple[Message, ...] = ()
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    images: Images = ()  # of the prompt


@dataclass(frozen=True)
class ToolCall:
    """A tool the model asked for, with the arguments as it wrote them."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """Something that was meant as a tool call but cannot be read, in words for the model."""

    problem: str


@dataclass(frozen=True)
class ToolResult:
    """What a tool gives back where a plain text is not enough.

    `images`, for a model that sees: bytes, paths, data URLs or PIL images, shown where the text has `<image>`, or
    before it.
    """

    text: str
    reward: float | None = None
    images: Any = ()


@dataclass(frozen=True)
class ToolAnswer:
    """A tool's turn in the conversation; `error` where the call failed, was refused or could not be read."""

    name: str
    text: str
    reward: float | None = None
    error: bool = False
    images: Images = ()
