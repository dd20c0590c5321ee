"""Messages point to point over a `torch.distributed` process group of their own, between any hosts."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.threads import Threads
from meshrl.weights.transport import Carrier, Incoming, SyncError, new_slots

logger = logging.getLogger(__name__)

# A process group, or one backend of it alone.
Group = Any


class ProcessGroupCarrier(Carrier):
    """Ranks are those of `group`, by default all ranks of the default one. Every rank of it must make a carrier.

    `owns`: the group is the carrier's alone. Gloo moves host memory only: with GPUs, slots are in pinned host memory;
    NCCL moves them on the GPU.
    """

    def __init__(self, slot_bytes: int, device: torch.device | str = "cpu", group: Group = None, owns: bool = False):
        everyone: Group = dist.group.WORLD
        self.group: Group = group or everyone
        # Whether the group ends with the carrier. Left alone, NCCL's kernels would wait for a lost rank for ever.
        self.owns_nccl = owns and torch.device(device).type == "cuda"
        # NCCL remembers by thread which calls belong together, and one that fails leaves that open: later connections
        # of the same thread are never made. So every connection has a thread, which goes with it.
        self._caller = Threads(1, "meshrl-weight-sync") if self.owns_nccl else None
        super().__init__(self.group.rank(), new_slots(slot_bytes, device))
        self._in_slots = new_slots(slot_bytes, device)
        self._in_use: deque[_FromGroup | None] = deque([None, None])

    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> tuple[dist.Work | None, int]:
        return self.posted(lambda: self.group.send([slot[:nbytes]], to, 0), to), to

    def _finish(self, ticket: tuple[dist.Work | None, int]) -> None:
        work, to = ticket
        self.wait_for(work, to, "to take a message")

    def receive(self, origin: int, nbytes: int, tag: int) -> Incoming:
        previous = self._in_use.popleft()
        slot = self._in_slots.pop(0)
        self._in_slots.append(slot)
        if previous is not None and not previous.released:
            raise AssertionError("a third message was asked for before the first of two was read")
        asked = _FromGroup(self, slot[:nbytes], origin)
        self._in_use.append(asked)
        return asked

    def posted(self, post: Callable[[], dist.Work | None], peer: int) -> dist.Work | None:
        """Begins a send or receive; a peer that is gone already is seen here."""
        try:
            if self._caller is None:
                return post()
            # NCCL's first message to a peer waits for that peer.
            return self._caller.submit(on_stream(post)).result(max(0.001, self.deadline.left()))
        except TimeoutError as error:
            raise self.late(peer, "to connect") from error
        except RuntimeError as error:
            raise SyncError(f"weight sync: rank {self.rank} lost rank {peer} before a message: {error}") from error

    def wait_for(self, work: dist.Work | None, peer: int, what: str) -> None:
        """Waits for a send or receive until the deadline; gloo's own errors become ours."""
        if work is None:
            return
        try:
            work.wait(timedelta(seconds=max(0.001, self.deadline.left())))
        except RuntimeError as error:
            if self.deadline.passed():
                raise self.late(peer, what) from error
            raise SyncError(
                f"weight sync: rank {self.rank} lost rank {peer} while it waited for it {what}: {error}"
            ) from error

    def abort(self, reason: str) -> None:
        was_broken = self.broken is not None
        super().abort(reason)
        if not self.owns_nccl or was_broken:
            return
        try:
            self.group.abort()
            # Left to the garbage collector, its threads and the interpreter could wait for each other.
            self.group.shutdown()
        except RuntimeError as error:  # what made us give up is to be told, not this
            logger.warning("weight sync: rank %d could not end its NCCL group: %s", self.rank, error)
        self._end_thread()

    def close(self) -> None:
        super().close()
        if self.owns_nccl and self.broken is None:
            self.group.shutdown()
        self._end_thread()

    def _end_thread(self) -> None:
        if self._caller is not None:
            self._caller.close()

    def memory_bytes(self) -> int:
        return super().memory_bytes() + len(self._in_slots) * self.slot_bytes


def on_stream(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call in any thread, after what the stream of this one has been asked to do."""
    stream = torch.cuda.current_stream()

    def made() -> Any:
        with torch.cuda.stream(stream):
            return call()

    return made


class _FromGroup(Incoming):
    def __init__(self, carrier: ProcessGroupCarrier, buffer: Tensor, origin: int):
        self.carrier, self.buffer, self.origin = carrier, buffer, origin
        self.released = self.arrived = False
        self.work = carrier.posted(lambda: carrier.group.recv([buffer], origin, 0), origin)

    def wait(self) -> Tensor:
        if not self.arrived:
            self.carrier.wait_for(self.work, self.origin, "to send a message")
            self.arrived = True
        return self.buffer

    def release(self) -> None:
        self.released = True
