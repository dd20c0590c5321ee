"""Environments that respond when the model calls no tool, and users simulated by a function or by a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshrl.agents.messages import Message, Sample
from meshrl.agents.tools import beside
from meshrl.rollout.base import Rollout
from meshrl.rollout.requests import Completion, Request, SamplingParams

Reply = Callable[[list[Message]], str | Awaitable[str | None] | None]


@dataclass(frozen=True)
class Step:
    """The result of a model's turn in an environment: an observation for the next turn, a reward, or the end.

    `images` of an observation have the same form as those of a `ToolResult`.
    """

    observation: str = ""
    reward: float | None = None
    done: bool = False
    images: Any = ()


class Environment(ABC):
    """An environment for one sample: `reset` is called once, `step` after each turn of the model, `close` at the end.

    All three methods may be plain or `async`.
    """

    def reset(self, sample: Sample) -> Any:
        """Begin an episode. May return messages (role and content) to use as the prompt instead of the data's own.

        An image in a message is a content part `{"type": "image", "image": ...}`. A part without `image` stands for the
        next image of the data's row.
        """
        return None

    @abstractmethod
    def step(self, text: str) -> Any:
        """Process a turn of the model, given as text without tool calls; return a `Step`."""

    def close(self) -> Any:
        """Release the resources that `reset` has acquired."""
        return None


class UserSimulator(Environment):
    """A user simulated by a function of the conversation's messages.

    The function returns None to end the conversation.
    """

    def __init__(self, reply: Reply):
        self.reply = reply
        self.messages: list[Message] = []

    def reset(self, sample: Sample) -> None:
        self.messages = [dict(message) for message in sample.messages]

    async def step(self, text: str) -> Step:
        self.messages.append({"role": "assistant", "content": text})
        said = await beside(self.reply, self.messages)
        if said is None:
            return Step(done=True)
        self.messages.append({"role": "user", "content": said})
        return Step(said)


class ScriptedUser(UserSimulator):
    """A user whose turns are listed in the data's row under `extra_info["user_turns"]`."""

    def __init__(self) -> None:
        super().__init__(self._next)
        self._turns: list[str] = []

    def reset(self, sample: Sample) -> None:
        super().reset(sample)
        self._turns = list(sample.extra_info.get("user_turns", ()))

    def _next(self, messages: list[Message]) -> str | None:
        return self._turns.pop(0) if self._turns else None


class ModelUser(UserSimulator):
    """A user simulated by a model in a separate rollout engine, with a role given by `instructions`.

    The roles are swapped: the trained model's turns are the simulator's input. A reply that contains `goodbye` ends the
    conversation.
    """

    def __init__(
        self,
        rollout: Rollout,
        encode: Callable[[Sequence[Message]], list[int]],
        decode: Callable[[Sequence[int]], str],
        instructions: str,
        params: SamplingParams,
        goodbye: str = "###STOP###",
    ):
        super().__init__(self._ask)
        self.rollout, self.encode, self.decode, self.params = rollout, encode, decode, params
        self.instructions, self.goodbye = instructions, goodbye
        self._sample: Sample | None = None

    def reset(self, sample: Sample) -> None:
        super().reset(sample)
        self._sample = sample

    async def _ask(self, messages: list[Message]) -> str | None:
        assert self._sample is not None
        swapped: list[Message] = [{"role": "system", "content": self.instructions}]
        other = {"user": "assistant", "assistant": "user"}
        swapped += [{"role": other[m["role"]], "content": m["content"]} for m in messages if m["role"] in other]
        name = f"user-{id(self)}-{len(messages)}"
        seed = self._sample.seed + len(messages)
        request = Request(name, tuple(self.encode(swapped)), replace(self.params, n=1), seed)
        answer = Completion(name, 0)
        async for chunk in self.rollout.generate([request]):
            answer.add(chunk)
        if answer.finish_reason == "error":
            raise RuntimeError(f"the user's model failed: {answer.error}")
        said = self.decode(answer.token_ids)
        return None if self.goodbye in said else said
