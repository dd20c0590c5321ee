"""Generation that runs beside the worker's calls: what has ended is handed out while the rest goes on."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from meshrl.agents.batch import AgentRollout, as_rectangle, as_samples
from meshrl.controller import PADDING_ROWS_KEY
from meshrl.data.proto import DataProto
from meshrl.rollout.base import Rollout, as_batch, as_requests
from meshrl.rollout.requests import SamplingParams
from meshrl.telemetry.ledger import Ledger, current_ledger, served_method, working_for

# A row of the worker's own part of the batch, and the answer to it.
Ended = tuple[int, Any]


class Generation:
    """One batch on its way: a thread generates, `take` gives what has ended since it was last asked."""

    def __init__(self, ended: Iterator[Ended], expected: int, as_part: Callable[[np.ndarray, list[Any]], DataProto]):
        self.left, self._as_part = expected, as_part
        self._box: queue.SimpleQueue[Ended | BaseException] = queue.SimpleQueue()
        call = current_ledger(), served_method()
        threading.Thread(target=self._run, args=(ended, *call), daemon=True, name="generation").start()

    def _run(self, ended: Iterator[Ended], ledger: Ledger | None, method: str) -> None:
        try:
            with working_for(ledger, method, "generate"):
                for item in ended:
                    self._box.put(item)
        except BaseException as error:  # handed to whoever asks next
            self._box.put(error)

    def take(self, seconds: float) -> tuple[np.ndarray, DataProto] | None:
        """Rows that have ended and their answers, waiting up to `seconds` for a first; None if there is none yet."""
        found: dict[int, Any] = {}
        while self.left > len(found):
            try:
                item = self._box.get_nowait() if found else self._box.get(timeout=seconds)
            except queue.Empty:
                break
            if isinstance(item, BaseException):
                raise item
            found[item[0]] = item[1]
        self.left -= len(found)
        if not found:
            return None
        rows = np.array(sorted(found))
        return rows, self._as_part(rows, [found[row] for row in rows.tolist()])


def start_generation(
    rollout: Rollout, agents: AgentRollout | None, prompts: DataProto, params: SamplingParams
) -> Generation:
    """Begins to answer every prompt of a batch once, by the rollout or over several turns."""
    if rollout.version < 0:
        raise RuntimeError("the rollout has no weights yet: sync them before generating")
    prompts = prompts.slice(0, len(prompts) - prompts.meta_info.get(PADDING_ROWS_KEY, 0))
    width, pad = params.max_tokens, rollout.pad_token_id
    if agents is None:
        return Generation(
            _answers(rollout, prompts, params),
            len(prompts),
            lambda rows, answers: as_batch(prompts.select_idxs(rows), answers, width, pad),
        )
    own_prompts = agents.agent.limits.prompt_length if agents.agent.make_environment is not None else None
    return Generation(
        _conversations(agents, prompts, params),
        len(prompts),
        lambda rows, found: as_rectangle(prompts.select_idxs(rows), found, width, pad, own_prompts),
    )


def _answers(rollout: Rollout, prompts: DataProto, params: SamplingParams) -> Iterator[Ended]:
    requests = as_requests(prompts, params)
    row_of = {request.request_id: row for row, request in enumerate(requests)}
    for answer in rollout.as_they_end(requests):
        if answer.finish_reason == "error":
            raise RuntimeError(f"a prompt failed; {answer.request_id}: {answer.error}")
        yield row_of[answer.request_id], answer


def _conversations(agents: AgentRollout, prompts: DataProto, params: SamplingParams) -> Iterator[Ended]:
    """Trajectories as they end, from the event loop that runs all of them."""
    loop = asyncio.new_event_loop()
    found = agents.run(as_samples(prompts), params)
    try:
        while True:
            try:
                trajectory = loop.run_until_complete(anext(found))
            except StopAsyncIteration:
                return
            yield trajectory.sample.number, trajectory
    finally:
        loop.run_until_complete(found.aclose())  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
