"""The agent loop: one sample from its prompt to the end of its conversation.

    pending → generating → tool_calling ─┐
                  ↑  │                   │
                  │  ├──→ interacting ───┤
                  │  └──→ done           │
                  └──────────────────────┘

Each state is a method that returns the next one. Many loops run on one event loop and end in any order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from meshrl.agents.calling import call
from meshrl.agents.encoding import TurnEncoder
from meshrl.agents.environments import Environment, Step
from meshrl.agents.images import content, image_parts, opening_images, shows, taken
from meshrl.agents.messages import MalformedCall, Message, Sample, ToolAnswer, ToolCall, tool_message
from meshrl.agents.parsers import Call, ToolParser
from meshrl.agents.requests import RequestDesk
from meshrl.agents.toolbox import ToolBox, ToolSession
from meshrl.agents.trajectory import Trajectory
from meshrl.data.seen import Images
from meshrl.rollout.embedded.sampler import derived_seed
from meshrl.rollout.requests import Request, SamplingParams

logger = logging.getLogger(__name__)


class State(StrEnum):
    """Where a sample stands."""

    PENDING = "pending"
    GENERATING = "generating"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    DONE = "done"


@dataclass(frozen=True)
class Limits:
    """How long a conversation may get. Without a number of turns, the response's tokens are the limit."""

    response_length: int
    prompt_length: int | None = None
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1


@dataclass(frozen=True)
class Agent:
    """What all samples of a run share: how turns are written and read, and who answers."""

    encoder: TurnEncoder
    box: ToolBox
    parser: ToolParser
    limits: Limits
    make_environment: Callable[[], Environment] | None = None
    environment_timeout: float = 30.0


class AgentLoop:
    """One sample's way through the states."""

    def __init__(
        self,
        agent: Agent,
        sample: Sample,
        params: SamplingParams,
        desk: RequestDesk,
        name: str,
        gate: asyncio.Semaphore | None = None,
    ):
        self.agent, self.sample, self.params, self.desk, self.name = agent, sample, params, desk, name
        self.tools = ToolSession(agent.box, sample, gate)
        self.environment = agent.make_environment() if agent.make_environment is not None else None
        messages = [dict(m) for m in sample.messages]
        self.trajectory = Trajectory(sample, list(sample.prompt_ids), messages, sample.images)
        self.state, self.states = State.PENDING, [State.PENDING]
        self._calls: list[Call] = []
        self._text = ""

    async def run(self) -> Trajectory:
        """Goes from state to state until done; tools and environment are given back in any case."""
        steps = {
            State.PENDING: self._pending,
            State.GENERATING: self._generating,
            State.TOOL_CALLING: self._tool_calling,
            State.INTERACTING: self._interacting,
        }
        try:
            while self.state is not State.DONE:
                self.state = await steps[self.state]()
                self.states.append(self.state)
        finally:
            await self._close()
        found = self.trajectory
        found.drop_unanswered()
        found.tool_calls, found.tool_errors = self.tools.calls, self.tools.errors
        found.tool_responses_cut = self.tools.cut
        return found

    async def _pending(self) -> State:
        if self.environment is None:
            return State.GENERATING
        messages = await self._ask_environment(self.environment.reset, self.sample)
        images: Images = ()
        sight = self.agent.encoder.sight
        if messages is not None and sight is not None:
            messages = sight.with_places(messages)
        if messages is not None and image_parts(messages):
            images = await self._ask_environment(opening_images, messages, self.sample.images, sight)
        if self.trajectory.ending:
            return State.DONE
        if messages is not None:
            ids, limit = self.agent.encoder.prompt(messages, images), self.agent.limits.prompt_length
            if limit is not None and len(ids) > limit:
                raise ValueError(
                    f"the environment's prompt for sample {self.sample.number} has {len(ids)} tokens, more than "
                    f"data.max_prompt_length={limit}: raise it"
                )
            begun = self.trajectory
            begun.prompt_ids, begun.messages, begun.prompt_images = ids, [dict(m) for m in messages], images
        return State.GENERATING

    async def _generating(self) -> State:
        found, limits = self.trajectory, self.agent.limits
        turn = found.assistant_turns
        room, least = self._room(), 0 if turn else self.params.min_tokens
        params = replace(self.params, max_tokens=room, min_tokens=min(least, room), n=1)
        prompt = (*found.prompt_ids, *found.token_ids)
        # The first turn has the sample's own seed: without a second one all is as in a single-turn rollout.
        seed = derived_seed(self.sample.seed, turn)
        request = Request(f"{self.name}-turn{turn}", prompt, params, seed, found.images)
        answer = await self.desk.complete(request)
        if answer.finish_reason == "error":
            raise RuntimeError(f"sample {self.sample.number}, turn {turn}: the rollout failed: {answer.error}")
        found.add_sampled(answer)
        found.assistant_turns += 1
        text = self.agent.encoder.answer_text(answer.token_ids)
        found.messages.append({"role": "assistant", "content": text})
        if answer.finish_reason != "stop":
            return self._end(answer.finish_reason or "abort")
        parsed = self.agent.parser.parse(text) if self.agent.box.tools else None
        self._calls, self._text = (parsed.calls, parsed.content) if parsed else ([], text)
        if not self._calls and self.environment is None:
            return self._end("stop")
        if found.assistant_turns == limits.max_assistant_turns or found.user_turns == limits.max_user_turns:
            return self._end("turns")
        if self.agent.encoder.image_token in answer.token_ids:
            return self._end("image_token")
        return State.TOOL_CALLING if self._calls else State.INTERACTING

    async def _tool_calling(self) -> State:
        most = self.agent.limits.max_parallel_calls
        answers = list(await asyncio.gather(*map(self._answer, self._calls[:most])))
        answers += [self._too_many(asked, most) for asked in self._calls[most:]]
        self.trajectory.rewards += [answer.reward for answer in answers if answer.reward is not None]
        messages = [tool_message(a.name, content(a.text, a.images)) for a in answers]
        return self._hear(messages, tuple(image for a in answers for image in a.images))

    async def _answer(self, asked: Call) -> ToolAnswer:
        if isinstance(asked, ToolCall):
            return await self.tools.answer(asked)
        self.trajectory.malformed_calls += 1
        return self.tools.refuse("tool", asked.problem)

    def _too_many(self, asked: Call, most: int) -> ToolAnswer:
        self.trajectory.malformed_calls += isinstance(asked, MalformedCall)
        name = asked.name if isinstance(asked, ToolCall) else "tool"
        return self.tools.refuse(name, f"at most {most} calls a turn: this one was not run")

    async def _interacting(self) -> State:
        assert self.environment is not None
        step = await self._ask_environment(self.environment.step, self._text)
        if self.trajectory.ending:
            return State.DONE
        if not isinstance(step, Step):
            raise TypeError(f"{type(self.environment).__name__}.step must return a Step, not {step!r}")
        if step.reward is not None:
            self.trajectory.rewards.append(step.reward)
        if step.done:
            return self._end("environment")
        sight = self.agent.encoder.sight
        images = await self._ask_environment(taken, step.images, sight) if shows(step.images) else ()
        if images is None:
            return State.DONE
        return self._hear([{"role": "user", "content": content(step.observation, images)}], images)

    def _hear(self, messages: Sequence[Message], images: Images) -> State:
        """Appends others' turns, if the model has room left to answer them."""
        found = self.trajectory
        given = self.agent.encoder.following(messages, found.token_ids[-1], images)
        if len(given) >= self._room():
            return self._end("length")
        found.add_given(given, images)
        found.messages += messages
        found.user_turns += 1
        return State.GENERATING

    def _room(self) -> int:
        return self.agent.limits.response_length - len(self.trajectory.token_ids)

    def _end(self, why: str) -> State:
        self.trajectory.ending = why
        return State.DONE

    async def _ask_environment(self, method: Callable[..., Any], *args: Any) -> Any:
        """What the environment says; one that breaks ends the sample, which is counted."""
        try:
            return await call(method, *args, timeout=self.agent.environment_timeout)
        except Exception as error:
            logger.warning("sample %d: the environment failed: %s: %s", self.sample.number, type(error).__name__, error)
            self._end("environment_error")
            return None

    async def _close(self) -> None:
        await self.tools.close()
        if self.environment is not None:
            try:
                await call(self.environment.close, timeout=self.agent.environment_timeout)
            except Exception as error:
                logger.warning("sample %d: the environment did not close: %s", self.sample.number, error)
