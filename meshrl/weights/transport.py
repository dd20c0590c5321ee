"""How messages of a plan get from rank to rank: one interface, several carriers.

| where the two ends are | carrier |
|---|---|
| the same storage | none: nothing is copied |
| the same process | none: copied in place; `Mailboxes` between threads |
| processes of one host | `SharedMemoryCarrier`, `CudaIpcCarrier` |
| any two hosts of a process group | `ProcessGroupCarrier` (gloo, NCCL) |
| a common folder | `FolderCarrier`: slow, works anywhere |

A carrier owns the memory of messages: two outgoing and two incoming slots, so that one is filled or emptied while the
other is on its way. All ranks start their messages in the plan's order; every wait has a deadline and names who waits.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# How long to sleep before looking again, at first and at most.
FIRST_NAP, LONGEST_NAP = 2e-5, 2e-3


class SyncError(RuntimeError):
    """A weight sync failed."""


class SyncRefusedError(SyncError):
    """All ranks agreed that a sync failed; their connections are still good."""


class SyncTimeoutError(SyncError):
    """A rank waited for another until the deadline."""


class Deadline:
    """A point in time for a whole sync."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() > self._end


class Incoming(ABC):
    """A message that was asked for."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Its bytes, once they are here."""

    @abstractmethod
    def release(self) -> None:
        """Says that the bytes have been read."""


class Carrier(ABC):
    """One rank's end. `tag` is the same on both ends of a message and grows from message to message."""

    def __init__(self, rank: int, slots: Sequence[Tensor]):
        self.rank = rank
        self.slot_bytes = len(slots[0])
        self.deadline = Deadline(600.0)
        self.broken: str | None = None
        # Each with what to wait for before it can be filled again.
        self._slots: deque[tuple[Tensor, Any]] = deque((slot, None) for slot in slots)

    def begin(self, deadline: Deadline) -> None:
        """Starts a sync."""
        if self.broken is not None:
            raise SyncError(f"weight sync: the connections broke in an earlier sync ({self.broken}): make new ones")
        self.deadline = deadline

    def outgoing(self, nbytes: int) -> Tensor:
        """Memory for the next message, to be handed to `send`; waits until one of the two slots is free."""
        slot, ticket = self._slots[0]
        if ticket is not None:
            self._finish(ticket)
            self._slots[0] = (slot, None)
        return slot[:nbytes]

    def send(self, nbytes: int, to: int, tag: int) -> None:
        """Starts sending what was written into the memory of `outgoing`."""
        slot, _ = self._slots.popleft()
        self._slots.append((slot, self._post(slot, nbytes, to, tag)))

    def flush(self) -> None:
        """Waits until everything sent has been taken."""
        for _ in range(len(self._slots)):
            self.outgoing(0)
            self._slots.rotate(-1)

    @abstractmethod
    def receive(self, origin: int, nbytes: int, tag: int) -> Incoming:
        """Starts taking in a message."""

    @abstractmethod
    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> Any:
        """Starts sending a slot; gives what `_finish` waits for."""

    @abstractmethod
    def _finish(self, ticket: Any) -> None:
        """Waits until a slot has been read."""

    def abort(self, reason: str) -> None:
        """Gives up, and tells the others where that is possible."""
        self.broken = reason

    def close(self) -> None:
        """Gives memory and connections back."""
        self._slots.clear()

    def memory_bytes(self) -> int:
        """Memory held for messages on this rank."""
        return len(self._slots) * self.slot_bytes

    def late(self, peer: int, what: str) -> SyncTimeoutError:
        return SyncTimeoutError(
            f"weight sync: rank {self.rank} waited for rank {peer} {what} until the deadline of "
            f"{self.deadline.seconds:g} s"
        )


class Naps:
    """Sleeps longer and longer between looks."""

    def __init__(self) -> None:
        self.length = FIRST_NAP

    def nap(self) -> None:
        time.sleep(self.length)
        self.length = min(LONGEST_NAP, self.length * 1.5)


def new_slots(slot_bytes: int, device: torch.device | str = "cpu") -> list[Tensor]:
    """Two slots; on the host they are pinned where a GPU is to copy from them."""
    pinned = torch.device(device).type == "cpu" and torch.cuda.is_available()
    return [torch.empty(slot_bytes, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(2)]


class Mailboxes:
    """What the carriers of one process share: the messages that have been sent and not yet read."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int], Tensor] = {}
        self.given_up: dict[int, str] = {}

    def carrier(self, rank: int, slot_bytes: int) -> ThreadCarrier:
        return ThreadCarrier(self, rank, slot_bytes)


class ThreadCarrier(Carrier):
    """Between threads of one process: a message is read where it was written."""

    def __init__(self, boxes: Mailboxes, rank: int, slot_bytes: int):
        super().__init__(rank, new_slots(slot_bytes))
        self.boxes = boxes

    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> tuple[int, int]:
        with self.boxes.changed:
            self.boxes.messages[to, tag] = slot[:nbytes]
            self.boxes.changed.notify_all()
        return to, tag

    def _finish(self, ticket: tuple[int, int]) -> None:
        self._wait(lambda: ticket not in self.boxes.messages, ticket[0], "to read a message")

    def receive(self, origin: int, nbytes: int, tag: int) -> Incoming:
        return _FromThread(self, origin, tag)

    def _wait(self, condition: Callable[[], bool], peer: int, what: str) -> None:
        boxes = self.boxes
        with boxes.changed:
            done = boxes.changed.wait_for(lambda: condition() or bool(boxes.given_up), self.deadline.left())
            if not condition() and boxes.given_up:
                who, why = next(iter(boxes.given_up.items()))
                raise SyncError(f"weight sync: rank {who} gave up: {why}")
        if not done:
            raise self.late(peer, what)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        with self.boxes.changed:
            self.boxes.given_up[self.rank] = reason
            self.boxes.changed.notify_all()


class _FromThread(Incoming):
    def __init__(self, carrier: ThreadCarrier, origin: int, tag: int):
        self.carrier, self.origin, self.key = carrier, origin, (carrier.rank, tag)

    def wait(self) -> Tensor:
        boxes = self.carrier.boxes
        self.carrier._wait(lambda: self.key in boxes.messages, self.origin, "to send a message")
        return boxes.messages[self.key]

    def release(self) -> None:
        boxes = self.carrier.boxes
        with boxes.changed:
            del boxes.messages[self.key]
            boxes.changed.notify_all()
