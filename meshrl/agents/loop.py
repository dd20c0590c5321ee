"""The agent loop, which runs one sample from its prompt to the end of its conversation.

    pending → generating → tool_calling ─┐
                  ↑  │                   │
                  │  ├──→ interacting ───┤
                  │  └──→ done           │
                  └──────────────────────┘

Each state is a method that returns the next one. Many loops run on one event loop and end in any order.

Parts: `AgentLoop`, its result `Trajectory`, and `RequestDesk`, which batches the requests of many loops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from meshrl.agents.encoding import TurnEncoder
from meshrl.agents.environments import Environment, Step
from meshrl.agents.messages import MalformedCall, Message, Sample, ToolAnswer, ToolCall, tool_message
from meshrl.agents.parsers import Call, ToolParser
from meshrl.agents.toolbox import ToolBox, ToolSession, content, image_parts, opening_images, shows, taken
from meshrl.agents.tools import call
from meshrl.data.images import Images
from meshrl.rollout.base import Rollout
from meshrl.rollout.embedded.sampler import derived_seed
from meshrl.rollout.requests import Completion, Request, SamplingParams

logger = logging.getLogger(__name__)


class State(StrEnum):
    """The states of an agent loop, as in the diagram above."""

    PENDING = "pending"
    GENERATING = "generating"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    DONE = "done"


@dataclass(frozen=True)
class Limits:
    """The limits of a conversation. Without limits on turns, only the response's tokens are limited."""

    response_length: int
    prompt_length: int | None = None
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1


@dataclass(frozen=True)
class Agent:
    """The parts that all samples of a run share: encoder, tools, parser, limits and the environment's factory."""

    encoder: TurnEncoder
    box: ToolBox
    parser: ToolParser
    limits: Limits
    make_environment: Callable[[], Environment] | None = None
    environment_timeout: float = 30.0


class AgentLoop:
    """The state machine of one sample's conversation."""

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
        """Run the states until `DONE` and return the trajectory. Tools and environment are closed in any case."""
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
        # The first turn has the sample's own seed, so a conversation of one turn equals a single-turn rollout.
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
        """Append tool or user turns, if the model has room left to respond."""
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
        """Call a method of the environment; on an exception, end the sample with `environment_error`."""
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


# The result of a loop: the tokens of all turns after the prompt, a mask of sampled tokens, and counts.

NO_VERSION = -1
# Why a sample ended. stop: the model has finished. length, turns: the limit on tokens or turns was reached.
# environment, environment_error: the environment ended it or failed. abort: the rollout was stopped. image_token: the
# model sampled the image token, which cannot be distinguished from the places of later images.
ENDINGS = ("stop", "length", "turns", "environment", "environment_error", "abort", "image_token")


@dataclass
class Trajectory:
    """One sample's conversation, with token lists, rewards and counts.

    The four lists over tokens are parallel. `mask` is 1 for tokens that the model sampled.
    """

    sample: Sample
    prompt_ids: list[int]
    messages: list[Message]
    prompt_images: Images = ()
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    assistant_turns: int = 0
    user_turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    malformed_calls: int = 0
    tool_responses_cut: int = 0
    ending: str = ""
    # Images that tools or the environment showed later, each with the number of response tokens before it.
    shown: list[tuple[int, bytes]] = field(default_factory=list)
    routes: np.ndarray | None = None  # MoE routes of the tokens of prompt and conversation, as far as computed

    @property
    def images(self) -> Images:
        """All images that the model sees, in the order of their places."""
        return (*self.prompt_images, *(image for _, image in self.shown))

    def add_sampled(self, answer: Completion) -> None:
        """Append a turn of the model, with its log-probs, versions and routes."""
        self.token_ids += answer.token_ids
        self.log_probs += answer.log_probs
        self.versions += answer.versions
        self.mask += [1] * len(answer.token_ids)
        if answer.routes is not None:
            self.routes = answer.routes if self.routes is None else _continued(self.routes, answer.routes)

    def add_given(self, token_ids: Sequence[int], images: Images = ()) -> None:
        """Append tokens and images of tools or the environment, with mask 0."""
        self.shown += [(len(self.token_ids), image) for image in images]
        self.token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [NO_VERSION] * len(token_ids)
        self.mask += [0] * len(token_ids)

    def drop_unanswered(self) -> None:
        """Remove a last tool or user turn without response, because the reward must be on a token of the model."""
        kept = len(self.mask)
        while kept and not self.mask[kept - 1]:
            kept -= 1
        for tokens in (self.token_ids, self.mask, self.log_probs, self.versions):
            del tokens[kept:]
        self.shown = [(before, image) for before, image in self.shown if before < kept]


def _continued(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Extend MoE routes by those of a longer conversation. Known routes stay, because they produced the tokens."""
    return np.concatenate([before, now[len(before) :]])


# The link between many loops and one rollout, which submits requests in batches.
#
# A rollout accepts requests between two of its steps. If requests were submitted one by one, each between two other
# steps, the rollout's batches would stay small. So further requests wait until the last submitted ones have their first
# tokens.

Asked = tuple[Request, asyncio.Future[Completion]]


class RequestDesk:
    """A batcher of the loops' requests. It submits them to the rollout in batches and distributes the chunks."""

    def __init__(self, rollout: Rollout):
        self.rollout = rollout
        self.batches = 0
        self._waiting: list[Asked] = []
        self._is_entering = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def complete(self, request: Request) -> Completion:
        """Submit a request and wait for its whole completion."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._hand_over)
        answer: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, answer))
        return await answer

    def _hand_over(self) -> None:
        if self._is_entering or not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        self._is_entering = True
        self.batches += 1
        task = asyncio.create_task(self._serve(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, batch: list[Asked]) -> None:
        answers = {request.request_id: (Completion(request.request_id, 0), future) for request, future in batch}
        has_entered = False
        try:
            async for chunk in self.rollout.generate([request for request, _ in batch]):
                if not has_entered:
                    has_entered = True
                    self._entered()
                completion, future = answers[chunk.request_id]
                completion.add(chunk)
                if chunk.finish_reason is not None and not future.done():
                    future.set_result(completion)
            missing = [name for name, (_, future) in answers.items() if not future.done()]
            if missing:
                raise RuntimeError(f"the rollout ended without an answer to {len(missing)} requests ({missing[0]})")
        except Exception as error:
            for _, future in answers.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            if not has_entered:
                self._entered()

    def _entered(self) -> None:
        self._is_entering = False
        asyncio.get_running_loop().call_soon(self._hand_over)

    async def close(self) -> None:
        """Cancel all running requests, which the rollout then aborts."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
