"""Putting samples of several generations into one batch: prompts of unequal width, columns that some of them lack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from meshrl.data.proto import DataProto

# Fields that begin with the prompt's columns, padded on the left, and what the padding holds (None: the pad token).
LEFT_PADDED = {"prompts": None, "input_ids": None, "attention_mask": 0, "position_ids": 0}


def concat_samples(parts: Sequence[DataProto], pad_token_id: int) -> DataProto:
    """All samples, one part after the other; prompts get one width, and a column that a part lacks is None there."""
    width = max(part.batch["prompts"].shape[1] for part in parts)
    columns = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    return DataProto.concat([_with_width(part, width, list(columns), pad_token_id) for part in parts])


def _with_width(part: DataProto, width: int, columns: Sequence[str], pad_token_id: int) -> DataProto:
    more = width - part.batch["prompts"].shape[1]
    tensors = dict(part.batch.items())
    for name, fill in LEFT_PADDED.items():
        if more and name in tensors:
            tensors[name] = _padded_left(tensors[name], more, pad_token_id if fill is None else fill)
    nothing = np.full(len(part), None, dtype=object)
    return DataProto.from_dict(tensors, {name: part.non_tensor_batch.get(name, nothing) for name in columns})


def _padded_left(values: Tensor, more: int, fill: int) -> Tensor:
    return torch.cat([values.new_full((len(values), more), fill), values], 1)
