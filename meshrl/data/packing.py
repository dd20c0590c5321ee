"""Packing of a padded batch into one row of documents without padding, and unpacking of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshrl.data.images import Seen


@dataclass(frozen=True)
class PackedRow:
    """The tokens of a padded batch without its padding, longest document first.

    The output at position `predictors[i]` of the row predicts `targets[i]`. `slots[i]` is the position of that result
    in the flattened rectangle of targets, whose `shape` is `[batch, columns]`. `lengths` has the tokens of each
    document, and `samples` its sample in the batch. A row made by `keep_padding` has the batch's order and an
    `attention_mask` `[batch, width]`. A row with images has them in `seen`.
    """

    input_ids: Tensor
    lengths: list[int]
    predictors: Tensor
    targets: Tensor
    slots: Tensor
    shape: tuple[int, int]
    samples: Sequence[int]
    attention_mask: Tensor | None = None
    seen: Seen | None = None

    def to(self, device: torch.device) -> PackedRow:
        """Copy the row to a device. Pinned memory lets the host continue without waiting for the device."""
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).pin_memory().to(device, non_blocking=True)
            for name in ("input_ids", "predictors", "targets", "slots", "attention_mask")
            if getattr(self, name) is not None
        }
        return replace(self, **moved, seen=None if self.seen is None else self.seen.to(device))

    def unpack(self, values: Tensor) -> Tensor:
        """Scatter one value per target `[targets]` into the rectangle `[batch, columns]`, with zeros elsewhere.

        The operation is differentiable.
        """
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.slots,), values).view(self.shape)


def pack(input_ids: Tensor, attention_mask: Tensor, target_mask: Tensor) -> PackedRow:
    """Pack a padded batch into one row.

    `input_ids` and `attention_mask` are `[batch, width]`. `target_mask` `[batch, columns]` covers the last `columns` of
    them and marks the tokens to predict.
    """
    batch, columns = _check_shapes(input_ids, attention_mask, target_mask)
    keep = attention_mask.bool()
    lengths = keep.sum(1)
    if len(lengths) and int(lengths.min()) == 0:
        raise ValueError("a sample without any token cannot be packed: its attention_mask is all zeros")
    # Sorting makes documents of equal length neighbours, which attention computes in one call.
    order = None
    if bool((lengths[1:] > lengths[:-1]).any()):
        order = torch.argsort(lengths, descending=True, stable=True)
        lengths, keep, input_ids, target_mask = (x[order] for x in (lengths, keep, input_ids, target_mask))
    wanted = target_mask.bool() & keep[:, -columns:]
    _check_first_tokens(keep, wanted)
    slots = wanted.flatten().nonzero()[:, 0]
    rows = slots.div(columns, rounding_mode="floor")
    if int(lengths.sum()) == keep.numel():
        row_ids, places = input_ids.flatten(), slots + (rows + 1) * (keep.shape[1] - columns)
    else:
        row_ids = input_ids[keep]
        place = (keep.flatten().cumsum(0) - 1).view(keep.shape)
        places = place[:, -columns:][wanted]
    if order is not None:
        slots += (order[rows] - rows) * columns
    samples = range(batch) if order is None else order.tolist()
    return PackedRow(row_ids, lengths.tolist(), places - 1, row_ids[places], slots, (batch, columns), samples)


def _check_first_tokens(keep: Tensor, wanted: Tensor) -> None:
    """Raise `ValueError` if a document's first token is a target, because no output predicts it."""
    first = keep.int().argmax(1) - (keep.shape[1] - wanted.shape[1])
    inside = (first >= 0).nonzero()[:, 0]
    if bool(wanted[inside, first[inside]].any()):
        raise ValueError("a document's first token cannot be predicted: every prompt needs at least one token")


def keep_padding(input_ids: Tensor, attention_mask: Tensor, target_mask: Tensor) -> PackedRow:
    """Make a row from a padded batch without removing the padding, for models that cannot compute packed documents.

    The arguments are those of `pack`. Only columns that no sample uses are cut off.
    """
    batch, columns = _check_shapes(input_ids, attention_mask, target_mask)
    width = input_ids.shape[1]
    # Columns that no sample uses are cut off on both sides, so that they cost nothing.
    used = attention_mask.any(0).nonzero()[:, 0]
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, width)
    rows, places = (target_mask.bool() & attention_mask[:, -columns:].bool()).nonzero(as_tuple=True)
    target_column = places + width - columns
    before = attention_mask.bool().cumsum(1)[rows, target_column] - 1
    if bool((before == 0).any()):
        raise ValueError("a document's first token cannot be predicted: every prompt needs at least one token")
    # A target's predictor is the last real token to its left, because tool calls may leave holes in the mask.
    columns_of = torch.arange(width).expand_as(attention_mask).masked_fill(~attention_mask.bool(), -1)
    previous = torch.cat([columns_of.new_full((batch, 1), -1), columns_of.cummax(1).values[:, :-1]], 1)
    predictors = rows * (last - first) + previous[rows, target_column] - first
    return PackedRow(
        input_ids[:, first:last].flatten(),
        attention_mask.sum(1).tolist(),
        predictors,
        input_ids[rows, target_column],
        rows * columns + places,
        (batch, columns),
        range(batch),
        attention_mask[:, first:last],
    )


def _check_shapes(input_ids: Tensor, attention_mask: Tensor, target_mask: Tensor) -> tuple[int, int]:
    batch, columns = target_mask.shape
    if attention_mask.shape != input_ids.shape or columns > input_ids.shape[1] or batch != input_ids.shape[0]:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)}, attention_mask {tuple(attention_mask.shape)} and target_mask "
            f"{tuple(target_mask.shape)} do not belong together"
        )
    return batch, columns
