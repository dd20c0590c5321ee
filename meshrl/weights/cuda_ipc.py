"""Messages between processes of one host through GPU memory that one opens to the others (CUDA IPC)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from meshrl.data import plain
from meshrl.files import write_whole
from meshrl.rollout.shared_file import aligned
from meshrl.weights.shared_memory import SharedMemoryCarrier


class CudaIpcCarrier(SharedMemoryCarrier):
    """As shared memory, but the slots lie on the sender's GPU; the file holds only the numbers and the GPU's handle."""

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
        """The GPU's is there from the beginning."""

    def _peer_slots(self, rank: int, memory: np.ndarray) -> list[Tensor]:
        both = _opened(json.loads((self.folder / f"rank{rank}.handle").read_text()))
        return list(both.split(len(both) // 2))

    def _written(self) -> None:
        # The other process knows nothing of this one's stream.
        self.stream.synchronize()

    def unlink(self) -> None:
        super().unlink()
        (self.folder / f"rank{self.rank}.handle").unlink(missing_ok=True)


def _handle_of(slots: Tensor) -> Any:
    """What another process opens flat bytes of this GPU by, as plain data."""
    _, (_, size, _, _, _, _, *handles) = reduce_tensor(slots)
    return plain.to_json([int(size[0]), *handles])


def _opened(handle: Any) -> Tensor:
    size, *handles = plain.from_json(handle)
    kinds = torch.storage.TypedStorage, torch.uint8
    found: Tensor = rebuild_cuda_tensor(Tensor, torch.Size([size]), (1,), 0, *kinds, *handles)
    return found
