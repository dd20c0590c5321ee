"""Putting together what the micro-batches and the ranks of a batch gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.data.proto import object_array
from meshrl.telemetry.ledger import booked


def in_batch_order(rows: Sequence[np.ndarray | None], outputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The outputs of all micro-batches but stand-ins (None), on the host, in the order of the batch."""
    real = [(part, output) for part, output in zip(rows, outputs, strict=True) if part is not None]
    order = torch.from_numpy(np.concatenate([part for part, _ in real])).argsort()
    return {name: torch.cat([output[name] for _, output in real]).cpu()[order] for name in real[0][1]}


def column_in_batch_order(rows: Sequence[np.ndarray | None], columns: Sequence[Sequence[Any]]) -> np.ndarray:
    """The same of what is no tensor: one value a sample."""
    real = [(part, column) for part, column in zip(rows, columns, strict=True) if part is not None]
    together = np.empty(sum(len(part) for part, _ in real), object)
    for part, column in real:
        together[part] = object_array(column)
    return together


def add_metrics(parts: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Adds metrics over micro-batches and the group's ranks; of names that end in `_max` it takes the largest."""
    names = sorted(parts[0], key=lambda name: name.endswith("_max"))
    sums = sum(not name.endswith("_max") for name in names)
    table = torch.stack([torch.stack([part[name].detach().double() for name in names]) for part in parts])
    added, largest = table[:, :sums].sum(0), table[:, sums:].amax(0)
    if group is not None:
        with booked("wait_peers"):
            dist.all_reduce(added, group=group)
            if len(largest):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(names, [*added.tolist(), *largest.tolist()], strict=True))
