"""A rollout that lives in this process and advances step by step: embedded, in-process vLLM, HF.

`complete` steps in the caller's thread. `generate` is served by one thread that steps while there is work and hands
chunks to the event loops that wait for them. One lock orders steps and everything that changes the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from meshrl.rollout.base import PAUSE_MODES, Rollout
from meshrl.rollout.requests import Chunk, Completion, Request, gather
from meshrl.telemetry.time_ledger import IDLE, Ledger, booked, current_ledger, served_method, working_for

Deliver = Callable[[Chunk], None]
# How long a wait lasts before it looks around again, and how long the last step may take at the end.
POLL_SECONDS = 1.0
CLOSE_SECONDS = 10.0
# How long to wait for the token that ends a gap; whoever updates weights waits as long.
GAP_SECONDS = 1.0


class SteppingRollout(Rollout):
    """Subclasses keep requests and advance all of them by one step; every call to them holds `self.lock`."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self._work = threading.Condition(self.lock)  # type: ignore[arg-type]
        self._deliver: dict[str, Deliver] = {}
        self._left: dict[str, int] = {}
        self.streaming: set[str] = set()  # requests whose tokens are wanted as they come
        self._paused = self._closed = False
        self._num_steps = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.gaps = TokenGaps()

    @abstractmethod
    def add(self, request: Request) -> str | None:
        """Takes a request in, or says why it cannot be served."""

    @abstractmethod
    def step(self) -> list[Chunk]:
        """Advances what can run and returns what it gave."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""

    @abstractmethod
    def drop(self, request_ids: Sequence[str] | None) -> list[Chunk]:
        """Takes requests (None: all) out of the engine; returns their last chunks, with finish_reason `abort`."""

    def num_generated(self) -> int:
        """How many tokens have been sampled so far."""
        return self._num_steps

    def longest_gap(self) -> float:
        """Seconds of the largest gap between tokens since `gaps.restart()`; waits for the end of one that is open."""
        return self.gaps.settle(0.0 if self._paused or self.is_suspended() else GAP_SECONDS)

    def is_suspended(self) -> bool:
        """Whether nothing can run until something is taken back or sent."""
        return False

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        chunks: list[Chunk] = []
        unfinished = sum(request.params.n for request in requests)

        def deliver(chunk: Chunk) -> None:
            nonlocal unfinished
            chunks.append(chunk)
            unfinished -= chunk.finish_reason is not None

        self._enter(requests, deliver)
        try:
            while unfinished:
                with self._work:
                    self._raise_failure()
                    if self._paused or self.is_suspended():
                        with booked(IDLE):  # new weights have to come
                            self._work.wait(POLL_SECONDS)
                    elif unfinished:
                        self._advance()
        finally:
            if unfinished:
                self.abort([request.request_id for request in requests])
        return gather(requests, chunks)

    def as_they_end(self, requests: Sequence[Request]) -> Iterator[Completion]:
        open_answers = {(r.request_id, i): Completion(r.request_id, i) for r in requests for i in range(r.params.n)}
        ended: deque[Completion] = deque()

        def deliver(chunk: Chunk) -> None:
            place = chunk.request_id, chunk.index
            open_answers[place].add(chunk)
            if chunk.finish_reason is not None:
                ended.append(open_answers.pop(place))

        self._enter(requests, deliver)
        try:
            while open_answers or ended:
                with self._work:
                    self._raise_failure()
                    if self._paused or self.is_suspended():
                        with booked(IDLE):  # new weights have to come
                            self._work.wait(POLL_SECONDS)
                    elif open_answers:
                        self._advance()
                while ended:
                    yield ended.popleft()
        finally:
            if open_answers:
                self.abort([request.request_id for request in requests])

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Chunk] = asyncio.Queue()
        names = [request.request_id for request in requests]

        def deliver(chunk: Chunk) -> None:
            if not loop.is_closed():  # whoever asked may have left without a word
                loop.call_soon_threadsafe(queue.put_nowait, chunk)

        unfinished = sum(request.params.n for request in requests)
        # Taking the lock may mean waiting for a step: not on the event loop. Whoever leaves meanwhile has still asked.
        entering = asyncio.ensure_future(asyncio.to_thread(self._enter, requests, deliver, streams=True))
        try:
            await asyncio.shield(entering)
            if self._thread is None:
                # Beside the loop as well; the ledger is known to this thread only.
                await asyncio.to_thread(self._start_thread, current_ledger(), served_method())
            while unfinished:
                try:
                    item = await asyncio.wait_for(queue.get(), POLL_SECONDS)
                except TimeoutError:
                    self._raise_failure()
                    if self._closed:
                        raise RuntimeError("the rollout was closed while requests were running") from None
                    continue
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            if unfinished:
                await asyncio.wait([entering], timeout=CLOSE_SECONDS)
                if entering.done() and entering.exception() is None:  # else none of these names is ours
                    await asyncio.to_thread(self.abort, names)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._work:
            wanted = list(self._left) if request_ids is None else [name for name in request_ids if name in self._left]
            if wanted and self._failure is not None:  # whoever waits for them is told of it
                for name in wanted:
                    self._forget_request(name)
            elif wanted:
                self._hand_out(self.drop(wanted))
                self.gaps.note(self.num_generated(), goes_on=bool(self._left))
            self._work.notify_all()

    def pause(self, mode: str = "keep") -> None:
        if mode not in PAUSE_MODES:
            raise ValueError(f"unknown pause mode '{mode}': use one of {', '.join(PAUSE_MODES)}")
        if mode == "abort":
            self.abort()
        while True:
            with self._work:
                if mode != "wait" or not (self._left or self.has_work()):
                    self._paused = True
                    return
                self._raise_failure()
                if self.is_suspended():
                    with booked(IDLE):  # no step before everything is back
                        self._work.wait(POLL_SECONDS)
                else:
                    self._advance()

    def resume(self, tags: Sequence[str] | None = None) -> None:
        if tags is not None:
            self.take_back(tags)
            return
        with self._work:
            self._paused = False
            self._work.notify_all()

    def take_back(self, tags: Sequence[str]) -> None:
        """Undoes `release`; engines that give nothing up have nothing to do."""

    def close(self) -> None:
        self.abort()
        with self._work:
            self._closed = True
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)

    def _enter(self, requests: Sequence[Request], deliver: Deliver, streams: bool = False) -> None:
        names = [request.request_id for request in requests]
        with self._work:
            if self._closed:
                raise RuntimeError("the rollout is closed: nothing can be generated with it any more")
            taken = next((name for name in names if name in self._left), None)
            if taken is None and len(set(names)) < len(names):
                taken = next(name for name in names if names.count(name) > 1)
            if taken is not None:
                raise ValueError(f"request id '{taken}' is already running: every request needs an id of its own")
            for request in requests:
                name, count = request.request_id, request.params.n
                if streams:
                    self.streaming.add(name)
                try:
                    problem = self.add(request)
                except BaseException:
                    self.streaming.discard(name)
                    raise
                if problem is None:
                    self._deliver[name], self._left[name] = deliver, count
                    continue
                self.streaming.discard(name)
                for index in range(count):
                    deliver(Chunk(name, index, [], [], [], finish_reason="error", error=problem))
            self._work.notify_all()

    def _advance(self) -> None:
        """One step, with the lock held."""
        if self.has_work():
            try:
                chunks = self.step()
            except Exception as error:  # whoever steps next, and whoever waits, must hear of it too
                self._failure = error
                raise
            self._hand_out(chunks)
            self._num_steps += 1
            # Not `has_work`: a step that was launched ahead for answers that have ended gives no token to anybody.
            self.gaps.note(self.num_generated(), goes_on=bool(self._left))

    def _hand_out(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            name = chunk.request_id
            self._deliver[name](chunk)
            if chunk.finish_reason is not None:
                self._left[name] -= 1
                if self._left[name] == 0:
                    self._forget_request(name)

    def _forget_request(self, name: str) -> None:
        del self._left[name], self._deliver[name]
        self.streaming.discard(name)

    def _start_thread(self, ledger: Ledger | None, method: str) -> None:
        with self.lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(ledger, method), name="rollout", daemon=True)
                self._thread.start()

    def _run(self, ledger: Ledger | None, method: str) -> None:
        try:
            while True:
                with self._work:
                    if self._closed or self._failure is not None:
                        return
                    if self._paused or self.is_suspended() or not self.has_work():
                        self._work.wait(POLL_SECONDS)
                    else:
                        with working_for(ledger, method, "generate"):
                            self._advance()
        except BaseException as error:  # handed to every caller that waits
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the rollout's engine failed while generating") from self._failure


# A reentrant lock that serves its callers in turn.
#
# A thread that steps an engine in a loop lets go of the lock and takes it again at once; with a plain lock it nearly
# always wins, and whoever wants to pause, abort or update waits until all requests have ended.


class FairLock:
    """Like `threading.RLock`, and fit for `threading.Condition`; no caller gets it twice while another waits."""

    def __init__(self) -> None:
        self._turnstile, self._inside = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> bool:
        """Waits for its turn."""
        if not self._is_owned():
            # Whoever waits for the lock holds the turnstile, which the last owner must pass again.
            with self._turnstile:
                self._inside.acquire()
            self._owner = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Lets the next one in, once for each time it was acquired."""
        if not self._is_owned():
            raise RuntimeError("a lock can only be released by the thread that holds it")
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._inside.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What a condition asks of a reentrant lock.

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


# How long an engine with work to do gives no token: what an update of the weights costs those who wait for answers.

# How often a wait for the next token looks.
LOOK_EVERY = 0.001


class TokenGaps:
    """The largest time between two steps that gave tokens, since `restart`; pauses without work do not count."""

    def __init__(self) -> None:
        self._count = 0
        self._last: float | None = None  # when the last token came, while there is more to do
        self._longest = 0.0

    def note(self, count: int, *, goes_on: bool) -> None:
        """After every step: how many tokens there are in all, and whether there is more to do."""
        if count != self._count:
            now = time.perf_counter()
            if self._last is not None:
                self._longest = max(self._longest, now - self._last)
            self._count, self._last = count, now
        if not goes_on:
            self._last = None

    def restart(self) -> None:
        """Forgets the gaps so far; one that is open counts from now on."""
        self._longest = 0.0
        if self._last is not None:
            self._last = time.perf_counter()

    def longest(self) -> float:
        """Seconds, an open gap included."""
        last = self._last
        return self._longest if last is None else max(self._longest, time.perf_counter() - last)

    def settle(self, deadline: float) -> float:
        """As `longest`, once the open gap has ended: by a token, the end of all work, or after `deadline` seconds."""
        count, end = self._count, time.perf_counter() + deadline
        while self._last is not None and self._count == count and time.perf_counter() < end:
            time.sleep(LOOK_EVERY)
        return self.longest()
