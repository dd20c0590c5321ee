"""Cutting batches (DataProto, TensorDict or dict of tensors) into micro-batches, and putting results back in order."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from meshrl.balance.micro_batches import order_micro_batches, plan_micro_batches
from meshrl.balance.workload import Workload


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    fixed_num_micro_batches: int | None = None,
    sort_strategy: str = "sum_sq",
    small_at_both_ends: bool = True,
    workload: Workload | None = None,
) -> tuple[list[Any], list[list[int]]]:
    """Micro-batches of `batch` with at most `max_token_len` tokens each, and the sample numbers of each.

    With `dp_group` and `same_micro_num_in_dp` all its ranks get the same number (one all-reduce); a rank whose samples
    break the cap makes all ranks raise. `use_dynamic_bsz_balance` orders them by `sort_strategy`, small ones at both
    ends for pipelines. `force_group_size` consecutive samples stay together.
    """
    lengths = sequence_lengths(batch)
    options: dict[str, Any] = {
        "num_batches_divided_by": num_batches_divided_by or 1,
        "min_num_micro_batch": min_num_micro_batch or 1,
        "fixed_count": fixed_num_micro_batches,
        "group_size": force_group_size,
        "workload": workload,
    }
    if dp_group is not None and same_micro_num_in_dp:
        plan = _plan_together(lengths, max_token_len, dp_group, options)
    else:
        plan = plan_micro_batches(lengths, max_token_len, **options)
    if use_dynamic_bsz_balance:
        plan = order_micro_batches(plan, lengths, sort_strategy, small_at_both_ends)
    return [select_samples(batch, part) for part in plan], [part.tolist() for part in plan]


def _plan_together(
    lengths: np.ndarray, max_token_len: int, dp_group: dist.ProcessGroup, options: dict[str, Any]
) -> list[np.ndarray]:
    """Plan alone, agree on the largest number, and split further where this rank had fewer."""
    error: ValueError | None = None
    plan: list[np.ndarray] = []
    try:
        plan = plan_micro_batches(lengths, max_token_len, **options)
    except ValueError as raised:
        # Raised only after the all-reduce: the other ranks wait in it and must learn of the failure.
        error = raised
    on_gpu = "nccl" in dist.get_backend(dp_group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    agreed = torch.tensor([len(plan), int(error is not None)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dp_group)
    count, failed = (int(number) for number in agreed.tolist())
    if error is not None:
        try:
            raise error
        finally:
            # Its traceback holds this frame, and with it the group and its threads until the process ends.
            error = None
    if failed:
        raise ValueError(
            f"another data-parallel rank cannot keep max_token_len={max_token_len}; its error names the sample"
        )
    if count == len(plan):
        return plan
    return plan_micro_batches(lengths, max_token_len, **options | {"min_count": count})


def prepare_dynamic_batch(
    data: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    **options: Any,
) -> tuple[list[Any], list[list[int]]]:
    """`rearrange_micro_batches` under the name that code with a DataProto uses; `restore_dynamic_batch` undoes it."""
    return rearrange_micro_batches(
        data,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
        **options,
    )


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """Results of the micro-batches, concatenated in their order, back in the order of the original samples."""
    order = np.asarray([index for part in batch_idx_list for index in part], dtype=np.int64)
    count = len(data.unbind()) if data.is_nested else data.shape[0]
    if len(order) != count or not np.array_equal(np.sort(order), np.arange(count)):
        raise ValueError(f"batch_idx_list with {len(order)} entries is no permutation of the {count} rows of data")
    back = np.empty_like(order)
    back[order] = np.arange(count)
    return _select_rows(data, back)


def sequence_lengths(batch: Any) -> np.ndarray:
    """Tokens of each sample: of nested `input_ids`, or the ones of `attention_mask`."""
    tensors = batch.batch if hasattr(batch, "select_idxs") else batch
    ids = tensors["input_ids"] if "input_ids" in tensors.keys() else None
    if ids is not None and ids.is_nested:
        return ids.offsets().diff().cpu().numpy().astype(np.int64)
    if "attention_mask" not in tensors.keys():
        raise ValueError(f"the batch needs attention_mask or nested input_ids; it has {sorted(tensors.keys())}")
    return tensors["attention_mask"].sum(-1).cpu().numpy().astype(np.int64)


def select_samples(batch: Any, samples: np.ndarray) -> Any:
    """The given samples of a DataProto (by its `select_idxs`), a TensorDict or a dict; other values pass through."""
    if hasattr(batch, "select_idxs"):
        return batch.select_idxs(torch.from_numpy(samples))
    rows = {key: _select_value(batch[key], samples) for key in batch.keys()}
    if isinstance(batch, dict):
        return rows
    return type(batch)(rows, batch_size=[len(samples)])


def _select_value(value: Any, samples: np.ndarray) -> Any:
    if isinstance(value, torch.Tensor):
        return _select_rows(value, samples) if value.dim() else value
    if isinstance(value, np.ndarray):
        return value[samples] if value.ndim else value
    if isinstance(value, Mapping):
        return {key: _select_value(inner, samples) for key, inner in value.items()}
    return value


def _select_rows(data: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    if not data.is_nested:
        return data[torch.from_numpy(rows).to(data.device)]
    if len(rows) == 0 and data.layout is torch.jagged:  # torch makes no nested tensor of no rows
        no_rows = torch.zeros(1, dtype=torch.int64, device=data.device)
        return torch.nested.nested_tensor_from_jagged(data.values()[:0], no_rows)
    parts = data.unbind()
    return torch.nested.as_nested_tensor([parts[row] for row in rows.tolist()], layout=data.layout)


def pad_sequences_to_fixed_length(batch: Any, target_length: int, pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Pad the last dim of every sequence tensor on the right to `target_length`, so that all batches have one shape.

    `input_ids`, `attention_mask`, `position_ids` and whatever else has their width are padded: ids with
    `pad_token_id`, positions by counting on, the rest with 0.
    """
    width = batch["attention_mask"].shape[-1]
    if width > target_length:
        raise ValueError(f"sequences are padded to {width} already, more than target_length={target_length}")
    extra = target_length - width
    padded: dict[str, torch.Tensor] = {}
    for key in batch.keys():
        value = batch[key]
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[-1] != width:
            padded[key] = value
        elif key == "position_ids":
            steps = torch.arange(1, extra + 1, device=value.device, dtype=value.dtype)
            padded[key] = torch.cat([value, value[..., -1:] + steps], dim=-1)
        else:
            padded[key] = torch.nn.functional.pad(value, (0, extra), value=pad_token_id if key == "input_ids" else 0)
    return padded
