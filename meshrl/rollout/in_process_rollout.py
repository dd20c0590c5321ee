"""The base class of rollouts that run in this process and advance step by step: embedded, in-process vLLM, HF.

`complete` runs steps in the caller's thread. For `generate`, one background thread runs steps while there is work and
passes chunks to the event loops that wait for them. One lock serialises steps and all calls that change the engine.

Parts: `SteppingRollout`, the lock `FairLock`, and `TokenGaps`, which measures the time between tokens.
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
# How often a wait checks the state again, and how long the last step may take in `close`.
POLL_SECONDS = 1.0
CLOSE_SECONDS = 10.0
# How long `longest_gap` waits for the token that ends a gap. The caller that updates the weights waits as long.
GAP_SECONDS = 1.0


class SteppingRollout(Rollout):
    """A rollout whose subclasses keep requests and advance all of them by one step.

    Every call into a subclass holds `self.lock`.
    """

    def __init__(self) -> None:
        self.lock = FairLock()
        self._work = threading.Condition(self.lock)  # type: ignore[arg-type]
        self._deliver: dict[str, Deliver] = {}
        self._left: dict[str, int] = {}
        self.streaming: set[str] = set()  # ids of requests whose tokens are delivered as they are sampled
        self._paused = self._closed = False
        self._num_steps = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.gaps = TokenGaps()

    @abstractmethod
    def add(self, request: Request) -> str | None:
        """Accept a request and return None, or return the reason why the request cannot be served."""

    @abstractmethod
    def step(self) -> list[Chunk]:
        """Advance all requests that can run by one step and return their new chunks."""

    @abstractmethod
    def has_work(self) -> bool:
        """Return whether any request is waiting or running in the engine."""

    @abstractmethod
    def drop(self, request_ids: Sequence[str] | None) -> list[Chunk]:
        """Remove requests (None: all) from the engine; return their last chunks, with finish_reason `abort`."""

    def num_generated(self) -> int:
        """Return the number of tokens sampled so far. The default counts steps."""
        return self._num_steps

    def longest_gap(self) -> float:
        """Return the longest gap between tokens since `gaps.restart()`, in seconds.

        If a gap is still open, wait up to `GAP_SECONDS` for its end, unless the rollout is paused or suspended.
        """
        return self.gaps.settle(0.0 if self._paused or self.is_suspended() else GAP_SECONDS)

    def is_suspended(self) -> bool:
        """Return whether no step can run until released memory is taken back or weights are sent."""
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
                        with booked(IDLE):  # until new weights arrive
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
                        with booked(IDLE):  # until new weights arrive
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
            if not loop.is_closed():  # the consumer's loop may have ended without closing the iterator
                loop.call_soon_threadsafe(queue.put_nowait, chunk)

        unfinished = sum(request.params.n for request in requests)
        # Taking the lock may have to wait for a step, so this runs outside the event loop. A consumer that leaves
        # before then has still submitted its requests.
        entering = asyncio.ensure_future(asyncio.to_thread(self._enter, requests, deliver, streams=True))
        try:
            await asyncio.shield(entering)
            if self._thread is None:
                # Outside the event loop as well. The ledger is visible in this thread only, so it is passed on.
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
                # else these names belong to another caller's requests
                if entering.done() and entering.exception() is None:
                    await asyncio.to_thread(self.abort, names)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._work:
            wanted = list(self._left) if request_ids is None else [name for name in request_ids if name in self._left]
            if wanted and self._failure is not None:  # consumers that wait for these requests raise the failure
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
                    with booked(IDLE):  # no step can run before memory and weights are back
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
        """Allocate again what `release` freed. The default does nothing, for engines that free nothing."""

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
        """Run one step. The caller holds the lock."""
        if self.has_work():
            try:
                chunks = self.step()
            except Exception as error:  # raised in every later caller and in every waiting consumer as well
                self._failure = error
                raise
            self._hand_out(chunks)
            self._num_steps += 1
            # Not `has_work`: a step launched ahead for completions that have since ended yields no tokens.
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
        except BaseException as error:  # raised in every caller that waits
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the rollout's engine failed while generating") from self._failure


# A reentrant lock that serves its callers in turn.
#
# A thread that steps an engine in a loop releases the lock and acquires it again at once. With a plain lock that thread
# nearly always wins, and a caller of `pause`, `abort` or `update_weights` waits until all requests have ended.


class FairLock:
    """A fair `threading.RLock` that works with `threading.Condition`.

    A thread that has released the lock cannot acquire it again while another thread waits.
    """

    def __init__(self) -> None:
        self._turnstile, self._inside = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> bool:
        """Wait until the threads before this one have had the lock, then take it. Reentrant."""
        if not self._is_owned():
            # The next thread in line holds the turnstile, so the last owner must wait behind it.
            with self._turnstile:
                self._inside.acquire()
            self._owner = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Undo one `acquire`; the last one lets the next thread in."""
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

    # Methods that `threading.Condition` calls on a reentrant lock.

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


# The time for which an engine with work produces no token: the cost of a weight update to consumers of completions.

# How often, in seconds, `settle` checks for the next token.
LOOK_EVERY = 0.001


class TokenGaps:
    """The longest time between two steps that produced tokens, since `restart`. Time without work does not count."""

    def __init__(self) -> None:
        self._count = 0
        self._last: float | None = None  # time of the last token, or None if there is no more work
        self._longest = 0.0

    def note(self, count: int, *, goes_on: bool) -> None:
        """Record the state after a step: `count` is the total number of tokens, `goes_on` whether work is left."""
        if count != self._count:
            now = time.perf_counter()
            if self._last is not None:
                self._longest = max(self._longest, now - self._last)
            self._count, self._last = count, now
        if not goes_on:
            self._last = None

    def restart(self) -> None:
        """Forget all gaps so far. An open gap counts from now on."""
        self._longest = 0.0
        if self._last is not None:
            self._last = time.perf_counter()

    def longest(self) -> float:
        """Return the longest gap in seconds, including an open gap."""
        last = self._last
        return self._longest if last is None else max(self._longest, time.perf_counter() - last)

    def settle(self, deadline: float) -> float:
        """Wait until the open gap has ended, then return `longest`.

        The gap ends by a token, by the end of all work, or after `deadline` seconds.
        """
        count, end = self._count, time.perf_counter() + deadline
        while self._last is not None and self._count == count and time.perf_counter() < end:
            time.sleep(LOOK_EVERY)
        return self.longest()
