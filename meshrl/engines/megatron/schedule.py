"""One mini-batch through Megatron-Core's pipeline schedules, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from meshrl.data.batch import DataProto
from meshrl.engines.megatron.megatron_config import check_point_to_point
from meshrl.engines.megatron.packed_rows import SharedRow
from meshrl.engines.megatron.routes import MegatronRouters
from meshrl.engines.training_engine import LossFunction

OUTPUT_NAMES = {"lm": ("log_probs", "entropys"), "value": ("values",)}
SCHEDULES = {
    "forward_backward_no_pipelining": "no-pipelining",
    "forward_backward_pipelining_without_interleaving": "1f1b",
    "forward_backward_pipelining_with_interleaving": "interleaved",
}


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch that is ready on the device.

    `rows`: its rows in the batch (None: a stand-in). `row`: the packed row. `data`: its samples for the loss.
    """

    rows: np.ndarray | None
    row: SharedRow
    data: DataProto
    routes: Tensor | None = None  # the experts that this rank's tokens are to be routed to
    made_routes: dict[int, Tensor] = field(default_factory=dict)  # recorded routes, by layer


@dataclass(frozen=True)
class Answer:
    """The last stage's outputs and metrics for one micro-batch."""

    outputs: dict[str, Tensor]
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class Pass:
    """The settings of a pass over a mini-batch.

    `auxiliary_tokens` is the divisor of the routers' balancing losses (see `model`).
    """

    head: str
    temperature: float
    with_entropy: bool
    loss_function: LossFunction | None
    forward_only: bool
    router_padding: Callable[[MicroBatch], Tensor] | None = None
    auxiliary_tokens: float = 1.0
    routers: MegatronRouters | None = None


def choose_schedule(config: TransformerConfig, wanted: str) -> Callable[..., list[Any]]:
    """Return Megatron-Core's schedule for this layout; raise a `ValueError` if another one is wanted (`auto`: any)."""
    check_point_to_point(config)
    schedule = get_forward_backward_func()
    found = SCHEDULES[schedule.__name__]
    if wanted not in ("auto", found):
        raise ValueError(
            f"megatron.schedule_type={wanted} does not fit pipeline_model_parallel_size="
            f"{config.pipeline_model_parallel_size} with virtual_pipeline_model_parallel_size="
            f"{config.virtual_pipeline_model_parallel_size}: that layout runs {found}; set auto"
        )
    return schedule


def run_schedule(
    schedule: Callable[..., list[Any]], model: Sequence[Any], parts: Sequence[MicroBatch], todo: Pass
) -> list[Answer]:
    """Run all micro-batches forward and, unless `forward_only`, backward.

    The last stage returns an `Answer` per micro-batch, in order; other stages return an empty list.
    """
    config = model[0].config
    # A loss that is already a share of the global loss must reach the parameters unscaled.
    scale = todo.auxiliary_tokens
    config.grad_scale_func = None if scale == 1.0 else lambda loss: loss / scale
    config.finalize_model_grads_func = _finalize
    several = len(model) > 1
    iterators = [iter(parts) for _ in model]
    return schedule(
        forward_step_func=partial(_forward_step, todo=todo),
        data_iterator=iterators if several else iterators[0],
        model=list(model) if several else model[0],
        num_microbatches=len(parts),
        # Only for buffers of a fixed shape, which packed rows do not use.
        seq_length=max(part.row.documents.num_tokens for part in parts),
        micro_batch_size=1,
        forward_only=todo.forward_only,
    )


def _finalize(model: Sequence[Any], num_tokens: Tensor | None = None, **others: Any) -> None:
    """Sum the gradients over the ranks; the loss is already normalised, so nothing is divided by a token count."""
    finalize_model_grads(list(model), None, **others)


def _forward_step(
    parts: Iterator[MicroBatch], model: Any, *, todo: Pass
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Answer]]]:
    part = next(parts)
    question = part.row.question(todo.temperature, todo.with_entropy)
    extra = {} if todo.router_padding is None else {"padding_mask": todo.router_padding(part)}
    if todo.routers is not None:
        todo.routers.enter(part.routes)
    output = model(
        part.row.input_ids,
        part.row.position_ids,
        None,
        labels=question,
        packed_seq_params=part.row.packed,
        **extra,
    )
    if todo.routers is not None:
        todo.routers.enter_again_with_gradient(output, part.routes)
        if todo.routers.made is not None:
            part.made_routes.update(todo.routers.take_made())

    def finish(answers: Tensor) -> tuple[Tensor, Tensor, Answer]:
        names = OUTPUT_NAMES[todo.head][: len(answers)]
        outputs = {
            name: part.row.row.unpack(part.row.answers(values, question.places))
            for name, values in zip(names, answers, strict=True)
        }
        return _finish(part, outputs, todo)

    return output, finish


def _finish(part: MicroBatch, outputs: dict[str, Tensor], todo: Pass) -> tuple[Tensor, Tensor, Answer]:
    """Return the loss in the schedule's form, and the outputs and metrics to keep of the micro-batch."""
    first = next(iter(outputs.values()))
    nothing = torch.zeros((), dtype=torch.int, device=first.device)
    if todo.loss_function is None:
        return first.sum() * 0.0, nothing, Answer(outputs, {})
    loss, metrics = todo.loss_function(outputs, part.data)
    if part.rows is None:
        # A stand-in keeps the collectives of all ranks in step. It must not contribute.
        loss, metrics = loss * 0.0, {name: value * 0.0 for name, value in metrics.items()}
    metrics = {name: value.detach() for name, value in metrics.items()}
    return loss * todo.auxiliary_tokens, nothing, Answer(outputs if todo.forward_only else {}, metrics)
