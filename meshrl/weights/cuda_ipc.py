"""Messages between processes of one host through GPU memory that one opens to the others (CUDA IPC)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from meshrl.files import write_whole
from meshrl.rollout.shared_file import aligned
from meshrl.weights.shared_memory import SharedMemoryCarrier


class CudaIpcCarrier(SharedMemoryCarrier):
    """As shared memory, but the slots lie on the sender's GPU; the file holds only the numbers and the GPU's handle."""

    def __init__(self, folder: str | Path, rank: int, slot_bytes: int, device: torch.device):
        self.cuda_slots = torch.empty(2 * aligned(slot_bytes), dtype=torch.uint8, device=device)
        self.stream = torch.cuda.current_stream(device)
        write_whole(Path(folder) / f"rank{rank}.handle", pickle.dumps(reduce_tensor(self.cuda_slots)))
        super().__init__(folder, rank, slot_bytes)

    def _own(self, rank: int, slot_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        return super()._own(rank, 0)

    def _own_slots(self, memory: np.ndarray, slot_bytes: int) -> list[Tensor]:
        return list(self.cuda_slots.split(slot_bytes))

    def _take_memory(self, number: int, nbytes: int) -> None:
        """The GPU's is there from the beginning."""

    def _peer_slots(self, rank: int, memory: np.ndarray) -> list[Tensor]:
        rebuild: Callable[..., Tensor]
        arguments: tuple[Any, ...]
        rebuild, arguments = pickle.loads((self.folder / f"rank{rank}.handle").read_bytes())
        both = rebuild(*arguments)
        return list(both.split(len(both) // 2))

    def _written(self) -> None:
        # The other process knows nothing of this one's stream.
        self.stream.synchronize()

    def unlink(self) -> None:
        super().unlink()
        (self.folder / f"rank{self.rank}.handle").unlink(missing_ok=True)
