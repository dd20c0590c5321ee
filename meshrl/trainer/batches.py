"""The batches a run trained on, as they were generated: the newest ones, up to a size."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.data.proto import DataProto

NEWS = "metrics"
NAME = re.compile(r"step_(\d+)\.dataproto")


class KeptBatches:
    """`megabytes` of batches at most, but always the newest; 0 keeps none, None all. `last` stays in memory."""

    def __init__(self, folder: Path, megabytes: int | None):
        self.folder, self.megabytes = folder, megabytes
        self.last: DataProto | None = None

    def keep(self, batch: DataProto, metrics: Mapping[str, Any], step: int) -> None:
        """Keeps a batch before anything is added to it, with what was measured while it was generated."""
        self.last = copy.copy(batch)
        self.last.meta_info = {**batch.meta_info, NEWS: dict(metrics)}
        if self.megabytes == 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, file in batch_files(self.folder).items():
            if number > step:  # of an attempt that this run has gone back behind
                file.unlink()
        self.last.save_to_disk(self.folder / f"step_{step}.dataproto")
        self._delete_old()

    def _delete_old(self) -> None:
        if self.megabytes is None:
            return
        room = self.megabytes << 20
        for number, file in enumerate(reversed(batch_files(self.folder).values())):
            room -= file.stat().st_size
            if room < 0 and number > 0:
                file.unlink()


def batch_files(folder: Path) -> dict[int, Path]:
    """The kept batches by step, in order."""
    found = {int(match[1]): file for file in folder.glob("*.dataproto") if (match := NAME.fullmatch(file.name))}
    return dict(sorted(found.items()))


def load_batch(file: Path) -> tuple[DataProto, dict[str, Any]]:
    """A kept batch, and what was measured while it was generated."""
    batch = DataProto.load_from_disk(file)
    return batch, dict(batch.meta_info.pop(NEWS, {}))
