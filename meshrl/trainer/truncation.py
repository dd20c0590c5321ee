"""Answers that the length limit cut off, kept out of the losses (`algorithm.mask_truncated_responses`)."""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.config.algorithm import AlgorithmConfig
from meshrl.data.proto import DataProto

ENDING, CUT_OFF = "ending", "length"


def truncated_rows(batch: DataProto, algorithm: AlgorithmConfig) -> Tensor:
    """Which samples were cut off and are to be masked, [samples] bool; none unless the config asks for it."""
    if not algorithm.mask_truncated_responses:
        return torch.zeros(len(batch), dtype=torch.bool)
    cut_off = torch.from_numpy((batch.non_tensor_batch[ENDING] == CUT_OFF).astype(bool))
    return cut_off & batch.batch["response_mask"].any(1)


def without_rows(batch: DataProto, rows: Tensor) -> DataProto:
    """The batch as the losses see it: no token of these rows counts. What is given stays as it is."""
    if not rows.any():
        return batch
    tensors = batch.batch.clone(recurse=False)
    for name in ("response_mask", "advantages", "returns"):
        tensors[name] = tensors[name].masked_fill(rows[:, None], 0)
    return DataProto(tensors, batch.non_tensor_batch, batch.meta_info)
