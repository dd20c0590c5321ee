"""Messages between processes of one host, through memory that they share: the receiver reads where the sender wrote.

Every rank has one file: numbers (its process, whether it gave up, and for each slot the message in it) and two slots. A
slot says whom it is for and by which tag; the reader answers by writing the tag beside it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshrl.rollout.shared_file import aligned, take_memory
from meshrl.weights.transport import Carrier, Incoming, Naps, SyncError

PROCESS, GAVE_UP, SLOT = 0, 1, 8  # places of numbers; those of a slot follow from SLOT on, SLOT apart
TAG, TO, READ, SIZE = range(4)
HEADER_BYTES = 4096
# How often a waiting rank asks whether the process it waits for is still alive.
LOOK_EVERY = 0.2


class SharedMemoryCarrier(Carrier):
    """One rank of a group of processes that share `folder`, best in a file system that lives in memory."""

    def __init__(self, folder: str | Path, rank: int, slot_bytes: int):
        self.folder, slot_bytes = Path(folder), aligned(slot_bytes)
        self.numbers, memory = self._own(rank, slot_bytes)
        self._peers: dict[int, tuple[np.ndarray, list[Tensor]]] = {}
        super().__init__(rank, self._own_slots(memory, slot_bytes))
        self._order = {slot.data_ptr(): number for number, (slot, _) in enumerate(self._slots)}
        self._taken = [0] * len(self._slots)  # bytes of each slot that have memory

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}"

    def _own(self, rank: int, slot_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Makes this rank's file complete under another name first: whoever finds it can use it."""
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
        """Another rank's numbers and slots; waits for its file."""
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
        """Only now: a rank that sends little takes little."""
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
        """Waits until what was written to a slot is there for other processes."""

    def _finish(self, ticket: tuple[int, int, int]) -> None:
        at, to, tag = ticket
        self.until(lambda: int(self.numbers[at + READ]) == tag, to, "to read a message")

    def receive(self, origin: int, nbytes: int, tag: int) -> Incoming:
        return _FromMemory(self, origin, nbytes, tag)

    def until(self, condition: Callable[[], bool], peer: int, what: str) -> None:
        """Waits; a peer that died or gave up ends it."""
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
        """Takes the name off this rank's memory, which those who have opened it keep."""
        self._path(self.rank).unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        self._peers.clear()
        self._file.close()
        self.unlink()


def open_together(carrier: SharedMemoryCarrier, world_size: int, barrier: Callable[[], object]) -> None:
    """Opens the memory of all ranks, which all do together, and takes the names off.

    From then on memory goes with the last process that has it, however that ends.
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
        # Without this rank no other gets through either, and one that died leaves its file to the others.
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
        # A child that ended but was not waited for still has a number.
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[-1].split()[0] != "Z"
    except (OSError, IndexError):
        return True
