"""Messages as files in a folder that all ranks see: slow, but it needs nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshrl.files import write_whole
from meshrl.weights.transport import Carrier, Incoming, Naps, SyncError, new_slots


class FolderCarrier(Carrier):
    """A message is a file named by its ends and tag, complete from the moment it has that name."""

    def __init__(self, folder: str | Path, rank: int, slot_bytes: int):
        super().__init__(rank, new_slots(slot_bytes))
        self.folder = Path(folder)

    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> None:
        path = self.folder / f"{self.rank}-{to}-{tag}"
        draft = path.with_suffix(".new")
        slot[:nbytes].numpy().tofile(draft)
        draft.rename(path)

    def _finish(self, ticket: None) -> None:
        """A file needs no reader to be finished."""

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
