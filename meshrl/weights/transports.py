"""Transports of a plan's messages from rank to rank: one interface (`Carrier`) and several implementations.

| location of the two ranks | transport |
|---|---|
| the same storage | none: nothing is copied |
| the same process | none: copied in place; `Mailboxes` between threads |
| processes of one host | `SharedMemoryCarrier`, `CudaIpcCarrier` |
| any two hosts of a process group | `ProcessGroupCarrier` (gloo, NCCL) |
| a common folder | `FolderCarrier`: slow, works anywhere |

A transport owns the memory of messages: two outgoing and two incoming slots, so that one slot is filled or emptied
while the other is in transit. All ranks start their messages in the plan's order. Every wait has a deadline, and its
error names the two ranks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from meshrl.data import plain_data
from meshrl.files import write_whole
from meshrl.rollout.weight_files import aligned, take_memory
from meshrl.threads import Threads

# The first and the longest sleep of a polling wait, in seconds.
FIRST_NAP, LONGEST_NAP = 2e-5, 2e-3


class SyncError(RuntimeError):
    """A weight sync failed and was not completed."""


class SyncRefusedError(SyncError):
    """All ranks agreed that a sync failed. Their connections are still usable."""


class SyncTimeoutError(SyncError):
    """A rank waited for another rank until the deadline."""


class Deadline:
    """A point in time, `seconds` from now, by which a whole sync must end."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() > self._end


class Incoming(ABC):
    """A message that this rank has started to receive."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait for the message and return its bytes as a tensor `[bytes]`."""

    @abstractmethod
    def release(self) -> None:
        """Mark the bytes as read, so that the sender may reuse its slot."""


class Carrier(ABC):
    """One rank's end of a transport, with two outgoing slots for messages.

    A message has the same `tag` on both ends, and tags grow from message to message.
    """

    def __init__(self, rank: int, slots: Sequence[Tensor]):
        self.rank = rank
        self.slot_bytes = len(slots[0])
        self.deadline = Deadline(600.0)
        self.broken: str | None = None
        # Each slot has a ticket to wait for before the slot can be filled again.
        self._slots: deque[tuple[Tensor, Any]] = deque((slot, None) for slot in slots)

    def begin(self, deadline: Deadline) -> None:
        """Start a sync with a new deadline; raise a SyncError if an earlier sync broke the connections."""
        if self.broken is not None:
            raise SyncError(f"weight sync: the connections broke in an earlier sync ({self.broken}): make new ones")
        self.deadline = deadline

    def outgoing(self, nbytes: int) -> Tensor:
        """Return memory for the next message, to be passed to `send`.

        Wait first until one of the two slots is free.
        """
        slot, ticket = self._slots[0]
        if ticket is not None:
            self._finish(ticket)
            self._slots[0] = (slot, None)
        return slot[:nbytes]

    def send(self, nbytes: int, to: int, tag: int) -> None:
        """Start sending the bytes that were written into the memory of `outgoing`."""
        slot, _ = self._slots.popleft()
        self._slots.append((slot, self._post(slot, nbytes, to, tag)))

    def flush(self) -> None:
        """Wait until the receivers have taken everything that was sent."""
        for _ in range(len(self._slots)):
            self.outgoing(0)
            self._slots.rotate(-1)

    @abstractmethod
    def receive(self, origin: int, nbytes: int, tag: int) -> Incoming:
        """Start receiving a message of `nbytes` bytes from rank `origin`."""

    @abstractmethod
    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> Any:
        """Start sending a slot, and return a ticket for `_finish`."""

    @abstractmethod
    def _finish(self, ticket: Any) -> None:
        """Wait until the receiver has read the slot of a ticket."""

    def abort(self, reason: str) -> None:
        """Mark the transport as broken and, if the transport allows it, notify the other ranks."""
        self.broken = reason

    def close(self) -> None:
        """Free the slots; subclasses also close their connections."""
        self._slots.clear()

    def memory_bytes(self) -> int:
        """Return the bytes of memory held for messages on this rank."""
        return len(self._slots) * self.slot_bytes

    def late(self, peer: int, what: str) -> SyncTimeoutError:
        return SyncTimeoutError(
            f"weight sync: rank {self.rank} waited for rank {peer} {what} until the deadline of "
            f"{self.deadline.seconds:g} s"
        )


class Naps:
    """A backoff whose sleeps grow longer between two polls."""

    def __init__(self) -> None:
        self.length = FIRST_NAP

    def nap(self) -> None:
        time.sleep(self.length)
        self.length = min(LONGEST_NAP, self.length * 1.5)


def new_slots(slot_bytes: int, device: torch.device | str = "cpu") -> list[Tensor]:
    """Allocate two slots of `slot_bytes`. Host slots are pinned if there is a GPU that could copy from them."""
    pinned = torch.device(device).type == "cpu" and torch.cuda.is_available()
    return [torch.empty(slot_bytes, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(2)]


class Mailboxes:
    """The in-process queues that the `ThreadCarrier`s of one process share: messages sent and not yet read."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int], Tensor] = {}
        self.given_up: dict[int, str] = {}

    def carrier(self, rank: int, slot_bytes: int) -> ThreadCarrier:
        return ThreadCarrier(self, rank, slot_bytes)


class ThreadCarrier(Carrier):
    """A transport between threads of one process: a message is read where it was written."""

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


# Messages between processes of one host, through shared memory: the receiver reads where the sender wrote.
#
# Every rank has one file with a header of numbers and two slots. The numbers are the process id, whether the rank gave
# up, and for each slot its message: tag, receiver and size. The reader acknowledges by writing the tag to READ.

PROCESS, GAVE_UP, SLOT = 0, 1, 8  # indices of the numbers; slot i has its numbers from SLOT * (1 + i) on
TAG, TO, READ, SIZE = range(4)
HEADER_BYTES = 4096
# Seconds between two checks of a waiting rank that the process it waits for is still alive.
LOOK_EVERY = 0.2


class SharedMemoryCarrier(Carrier):
    """One rank of a group of processes that share `folder`, preferably in a file system in memory."""

    def __init__(self, folder: str | Path, rank: int, slot_bytes: int):
        self.folder, slot_bytes = Path(folder), aligned(slot_bytes)
        self.numbers, memory = self._own(rank, slot_bytes)
        self._peers: dict[int, tuple[np.ndarray, list[Tensor]]] = {}
        super().__init__(rank, self._own_slots(memory, slot_bytes))
        self._order = {slot.data_ptr(): number for number, (slot, _) in enumerate(self._slots)}
        self._taken = [0] * len(self._slots)  # bytes of each slot for which memory is allocated

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}"

    def _own(self, rank: int, slot_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Create this rank's file and return its numbers and memory.

        The file is created under a temporary name and then renamed, so that peers only see complete files.
        """
        path, draft = self._path(rank), self._path(rank).with_suffix(".new")
        self._file = draft.open("wb")
        take_memory(self._file, 0, HEADER_BYTES)
        self._file.truncate(HEADER_BYTES + 2 * slot_bytes)
        memory = np.memmap(draft, np.uint8, "r+")
        numbers = memory[:HEADER_BYTES].view(np.int64)
        numbers[PROCESS] = os.getpid()
        draft.rename(path)
        return numbers, memory

    def _own_slots(self, memory: np.ndarray, slot_bytes: int) -> list[Tensor]:
        return _slots_of(memory, slot_bytes)

    def _peer_slots(self, rank: int, memory: np.ndarray) -> list[Tensor]:
        return _slots_of(memory, (len(memory) - HEADER_BYTES) // 2)

    def peer(self, rank: int) -> tuple[np.ndarray, list[Tensor]]:
        """Return another rank's numbers and slots, after waiting for its file."""
        if rank not in self._peers:
            naps = Naps()
            while not self._path(rank).exists():
                if self.deadline.passed():
                    raise self.late(rank, "to open its shared memory")
                naps.nap()
            memory = np.memmap(self._path(rank), np.uint8, "r+")
            self._peers[rank] = memory[:HEADER_BYTES].view(np.int64), self._peer_slots(rank, memory)
        return self._peers[rank]

    def outgoing(self, nbytes: int) -> Tensor:
        slot = super().outgoing(nbytes)
        self._take_memory(self._order[self._slots[0][0].data_ptr()], nbytes)
        return slot

    def _take_memory(self, number: int, nbytes: int) -> None:
        """Allocate the slot's memory at its first use, so that a rank that sends little takes little memory."""
        if nbytes > self._taken[number]:
            take_memory(self._file, HEADER_BYTES + number * self.slot_bytes, nbytes)
            self._taken[number] = nbytes

    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> tuple[int, int, int]:
        number = self._order[slot.data_ptr()]
        at = SLOT * (1 + number)
        self._written()
        self.numbers[at + TO], self.numbers[at + SIZE] = to, nbytes
        self.numbers[at + TAG] = tag  # last: from here on the receiver reads
        return at, to, tag

    def _written(self) -> None:
        """Wait until the data written to a slot is visible to other processes; a no-op in host memory."""

    def _finish(self, ticket: tuple[int, int, int]) -> None:
        at, to, tag = ticket
        self.until(lambda: int(self.numbers[at + READ]) == tag, to, "to read a message")

    def receive(self, origin: int, nbytes: int, tag: int) -> Incoming:
        return _FromMemory(self, origin, nbytes, tag)

    def until(self, condition: Callable[[], bool], peer: int, what: str) -> None:
        """Wait for `condition`, and raise a SyncError if the peer died or gave up or the deadline has passed."""
        naps, next_look = Naps(), time.monotonic() + LOOK_EVERY
        while not condition():
            numbers, _ = self.peer(peer)
            if numbers[GAVE_UP]:
                raise SyncError(f"weight sync: rank {peer} gave up while rank {self.rank} waited for it {what}")
            if time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_EVERY
                if not _is_alive(int(numbers[PROCESS])):
                    raise SyncError(f"weight sync: rank {peer} died while rank {self.rank} waited for it {what}")
                if self.deadline.passed():
                    raise self.late(peer, what)
            naps.nap()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.numbers[GAVE_UP] = 1

    def unlink(self) -> None:
        """Remove the name of this rank's memory. Processes that have opened the memory keep it."""
        self._path(self.rank).unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        self._peers.clear()
        self._file.close()
        self.unlink()


def open_together(carrier: SharedMemoryCarrier, world_size: int, barrier: Callable[[], object]) -> None:
    """Open the memory of all ranks and remove the names. All ranks must call it together.

    Afterwards the memory is freed with the last process that has it open, however that process ends.
    """
    try:
        for rank in range(world_size):
            if rank != carrier.rank:
                carrier.peer(rank)
        barrier()
        carrier.unlink()
        barrier()
        if carrier.rank == 0:
            carrier.folder.rmdir()
    except BaseException:
        # Without this rank no other rank gets past the barrier, and a dead rank cannot remove its own file.
        shutil.rmtree(carrier.folder, ignore_errors=True)
        raise


class _FromMemory(Incoming):
    def __init__(self, carrier: SharedMemoryCarrier, origin: int, nbytes: int, tag: int):
        self.carrier, self.origin, self.nbytes, self.tag = carrier, origin, nbytes, tag
        self.place = -1

    def _look(self) -> bool:
        numbers, _ = self.carrier.peer(self.origin)
        for number in range(2):
            at = SLOT * (1 + number)
            if numbers[at + TAG] == self.tag and numbers[at + TO] == self.carrier.rank:
                self.place = number
                return True
        return False

    def wait(self) -> Tensor:
        if self.place < 0:
            self.carrier.until(self._look, self.origin, "to send a message")
        numbers, slots = self.carrier.peer(self.origin)
        size = int(numbers[SLOT * (1 + self.place) + SIZE])
        if size != self.nbytes:
            raise SyncError(
                f"weight sync: rank {self.origin} sent {size} bytes where rank {self.carrier.rank} expected "
                f"{self.nbytes}: the two have different plans"
            )
        return slots[self.place][: self.nbytes]

    def release(self) -> None:
        numbers, _ = self.carrier.peer(self.origin)
        self.carrier._written()
        numbers[SLOT * (1 + self.place) + READ] = self.tag


def _slots_of(memory: np.ndarray, slot_bytes: int) -> list[Tensor]:
    both = torch.from_numpy(memory[HEADER_BYTES : HEADER_BYTES + 2 * slot_bytes])
    return list(both.split(slot_bytes))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # A child that has ended but was not waited for (a zombie) still has a process id.
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[-1].split()[0] != "Z"
    except (OSError, IndexError):
        return True


# Messages between processes of one host through GPU memory that the sender shares with its peers (CUDA IPC).


class CudaIpcCarrier(SharedMemoryCarrier):
    """A shared-memory transport whose slots are in the sender's GPU memory.

    The file holds only the numbers. A second file holds the GPU memory's IPC handle.
    """

    def __init__(self, folder: str | Path, rank: int, slot_bytes: int, device: torch.device):
        self.cuda_slots = torch.empty(2 * aligned(slot_bytes), dtype=torch.uint8, device=device)
        self.stream = torch.cuda.current_stream(device)
        write_whole(Path(folder) / f"rank{rank}.handle", json.dumps(_handle_of(self.cuda_slots)))
        super().__init__(folder, rank, slot_bytes)

    def _own(self, rank: int, slot_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        return super()._own(rank, 0)

    def _own_slots(self, memory: np.ndarray, slot_bytes: int) -> list[Tensor]:
        return list(self.cuda_slots.split(slot_bytes))

    def _take_memory(self, number: int, nbytes: int) -> None:
        """Do nothing: the GPU memory is allocated from the beginning."""

    def _peer_slots(self, rank: int, memory: np.ndarray) -> list[Tensor]:
        both = _opened(json.loads((self.folder / f"rank{rank}.handle").read_text()))
        return list(both.split(len(both) // 2))

    def _written(self) -> None:
        # The other process cannot wait for this process's CUDA stream.
        self.stream.synchronize()

    def unlink(self) -> None:
        super().unlink()
        (self.folder / f"rank{self.rank}.handle").unlink(missing_ok=True)


def _handle_of(slots: Tensor) -> Any:
    """Return the IPC handle with which another process opens these flat bytes of GPU memory, as plain data."""
    _, (_, size, _, _, _, _, *handles) = reduce_tensor(slots)
    return plain_data.to_json([int(size[0]), *handles])


def _opened(handle: Any) -> Tensor:
    size, *handles = plain_data.from_json(handle)
    kinds = torch.storage.TypedStorage, torch.uint8
    found: Tensor = rebuild_cuda_tensor(Tensor, torch.Size([size]), (1,), 0, *kinds, *handles)
    return found


# Point-to-point messages over a `torch.distributed` process group of their own, between any hosts.

logger = logging.getLogger(__name__)

# A process group, or a single backend of one.
Group = Any


class ProcessGroupCarrier(Carrier):
    """A transport over the ranks of `group`, by default of the default group. Every rank of the group must make one.

    `owns`: the group belongs to the transport alone. Gloo moves host memory only: with GPUs, its slots are in pinned
    host memory. NCCL moves slots on the GPU.
    """

    def __init__(self, slot_bytes: int, device: torch.device | str = "cpu", group: Group = None, owns: bool = False):
        everyone: Group = dist.group.WORLD
        self.group: Group = group or everyone
        # Whether the group ends with the transport. Otherwise NCCL's kernels would wait for a lost rank for ever.
        self.owns_nccl = owns and torch.device(device).type == "cuda"
        # NCCL groups calls by thread, and a failed call leaves its group open: later connections of the same thread are
        # never made. So every connection has its own thread, which ends with it.
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
        """Start a send or receive. Raise a SyncError if the peer is already gone."""
        try:
            if self._caller is None:
                return post()
            # NCCL's first message to a peer blocks until the peer connects.
            return self._caller.submit(on_stream(post)).result(max(0.001, self.deadline.left()))
        except TimeoutError as error:
            raise self.late(peer, "to connect") from error
        except RuntimeError as error:
            raise SyncError(f"weight sync: rank {self.rank} lost rank {peer} before a message: {error}") from error

    def wait_for(self, work: dist.Work | None, peer: int, what: str) -> None:
        """Wait for a send or receive until the deadline; errors of the backend are raised as SyncErrors."""
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
            # If the garbage collector ended the group, its threads and the interpreter could wait for each other.
            self.group.shutdown()
        except RuntimeError as error:  # the reason of the abort is the error to report, not this one
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
    """Wrap a call for another thread, so that its GPU work is queued on the current stream of this thread."""
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


# Messages as files in a folder that all ranks share: slow, but without any other requirement.


class FolderCarrier(Carrier):
    """A transport whose messages are files named `<sender>-<receiver>-<tag>`.

    A file gets this name by a rename, after it is complete.
    """

    def __init__(self, folder: str | Path, rank: int, slot_bytes: int):
        super().__init__(rank, new_slots(slot_bytes))
        self.folder = Path(folder)

    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> None:
        path = self.folder / f"{self.rank}-{to}-{tag}"
        draft = path.with_suffix(".new")
        slot[:nbytes].numpy().tofile(draft)
        draft.rename(path)

    def _finish(self, ticket: None) -> None:
        """Do nothing: a message is complete as a file, whether or not it has been read."""

    def receive(self, origin: int, nbytes: int, tag: int) -> Incoming:
        return _FromFolder(self, origin, nbytes, tag)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        write_whole(self.folder / f"{self.rank}-gave-up", reason)


class _FromFolder(Incoming):
    def __init__(self, carrier: FolderCarrier, origin: int, nbytes: int, tag: int):
        self.carrier, self.origin, self.nbytes = carrier, origin, nbytes
        self.path = carrier.folder / f"{origin}-{carrier.rank}-{tag}"

    def wait(self) -> Tensor:
        naps = Naps()
        while not self.path.exists():
            for note in self.carrier.folder.glob("*-gave-up"):
                raise SyncError(f"weight sync: rank {note.name.split('-')[0]} gave up: {note.read_text()}")
            if self.carrier.deadline.passed():
                raise self.carrier.late(self.origin, "to send a message")
            naps.nap()
        found = np.fromfile(self.path, np.uint8)
        if len(found) != self.nbytes:
            raise SyncError(
                f"weight sync: rank {self.origin} sent {len(found)} bytes where rank {self.carrier.rank} expected "
                f"{self.nbytes}: the two have different plans"
            )
        return torch.from_numpy(found)

    def release(self) -> None:
        self.path.unlink()
