"""Between many loops and one rollout: requests that come up together are handed over together.

A rollout takes requests in between two of its steps. Handing over one by one, each in its own such gap, would keep
the batches that it computes small; so the next ones wait until the last ones have their first tokens.
"""

from __future__ import annotations

import asyncio

from meshrl.rollout.base import Rollout
from meshrl.rollout.requests import Completion, Request

Asked = tuple[Request, asyncio.Future[Completion]]


class RequestDesk:
    """Loops ask for one completion each; the rollout gets them in batches and its chunks find their way back."""

    def __init__(self, rollout: Rollout):
        self.rollout = rollout
        self.batches = 0
        self._waiting: list[Asked] = []
        self._is_entering = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def complete(self, request: Request) -> Completion:
        """The whole answer to a request."""
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
        """Drops what is still running; the rollout aborts it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
