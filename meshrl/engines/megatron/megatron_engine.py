"""The Megatron engine: Megatron-Core's GPT model, schedules, data parallelism and optimizer behind `Engine`.

The order of `initialize`: process groups → chunks of the model → weights → gradient buffers → optimizer.
`move_weights`, `move_gradients` and `move_states` offload to host memory between phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn
from transformers import PretrainedConfig

from meshrl.data.batch import DataProto
from meshrl.data.packing import pack
from meshrl.engines.batching import (
    add_metrics,
    column_in_batch_order,
    in_batch_order,
    split_by_units,
    split_for_pipeline,
)
from meshrl.engines.megatron.megatron_config import (
    build_optimizer,
    clip_and_step,
    has_transformer_engine,
    transformer_config,
    with_gradients,
)
from meshrl.engines.megatron.model import (
    RouterPadding,
    auxiliary_tokens,
    balancing_losses,
    build_chunks,
    take_balancing_metrics,
)
from meshrl.engines.megatron.packed_rows import RowSharing, SharedRow
from meshrl.engines.megatron.parallel_state import enter_parallel_state
from meshrl.engines.megatron.ranks import ranks_of
from meshrl.engines.megatron.routes import MegatronRouters
from meshrl.engines.megatron.schedule import Answer, MicroBatch, Pass, choose_schedule, run_schedule
from meshrl.engines.megatron.weight_map import as_module_params, padded_vocab_size
from meshrl.engines.megatron.weights import export_hf_weights, load_hf_weights
from meshrl.engines.optim import HostMemory, LearningRate, move_optimizer
from meshrl.engines.state_files import Snapshot
from meshrl.engines.training_engine import CONTENTS, BatchOutput, Engine, LossFunction, rows_together
from meshrl.models.loading import empty_model, torch_dtype
from meshrl.models.moe_routing import ROUTED_EXPERTS
from meshrl.models.names import expert_count
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.telemetry.pipeline_timeline import booking_pipeline
from meshrl.telemetry.time_ledger import booked


class MegatronEngine(Engine):
    """The engine for tensor, sequence, pipeline, context, expert and data parallelism on packed rows.

    The pipeline may be plain or interleaved.
    """

    def lay_out(self) -> None:
        model, self.megatron = self.model_config, self.engine_config.megatron
        self._host = HostMemory()
        # On the meta device: only its config, its class and the names of its parameters are used.
        self.hf_model = empty_model(
            model.path or "",
            ATTENTION_NAME,
            self.head,
            dtype=torch_dtype(self.megatron.dtype),
            override=dict(model.override_config),
            trust_remote_code=model.trust_remote_code,
        )
        self.hf_config: PretrainedConfig = self.hf_model.config
        self.ranks = ranks_of(self.megatron, dist.get_rank(), dist.get_world_size())
        self.transformer_engine = has_transformer_engine(self.megatron)

    def initialize(self) -> None:
        enter_parallel_state(self.ranks, self.seed + 1)
        model, ranks = self.model_config, self.ranks
        trains = self.optim_config is not None
        self.transformer = transformer_config(
            self.hf_config,
            self.megatron,
            recompute=trains and model.enable_gradient_checkpointing,
        )
        self.padded_vocab_size = padded_vocab_size(
            self.hf_config.vocab_size, ranks.tp, self.megatron.make_vocab_size_divisible_by
        )
        chunks = build_chunks(
            self.transformer,
            self.hf_config,
            ranks,
            padded_vocab_size=self.padded_vocab_size,
            head=self.head,
            transformer_engine=self.transformer_engine,
        )
        self.routers = MegatronRouters(chunks, self.transformer, ranks) if self.replays_routes else None
        if not model.random_init:
            folder, is_value = Path(model.path or ""), self.head == "value"
            load_hf_weights(chunks, self.hf_config, folder, ranks, value_head=is_value, override=model.override_config)
        self.schedule = choose_schedule(self.transformer, self.megatron.schedule_type)
        self.sharing = RowSharing(
            cp=ranks.cp,
            cp_rank=ranks.cp_rank,
            cp_group=parallel_state.get_context_parallel_group(),
            tp=ranks.tp if self.transformer.sequence_parallel else 1,
        )
        self.gradients_are_summed = False
        self._train(chunks) if trains else self._freeze(chunks)
        self.module = nn.ModuleList(self.model)

    def _train(self, chunks: list[nn.Module]) -> None:
        assert self.optim_config is not None
        self.model = with_gradients(chunks, self.transformer, self.megatron)
        grad_clip = self.engine_config.grad_clip
        self.optimizer = build_optimizer(self.model, self.optim_config, self.megatron, grad_clip)
        self.learning_rate = LearningRate(self.optimizer, self.optim_config, self.total_steps)
        if self.megatron.overlap_grad_reduce:
            waits = [chunk.no_sync for chunk in self.model]
            self.transformer.no_sync_func = waits if len(waits) > 1 else waits[0]

    def _freeze(self, chunks: list[nn.Module]) -> None:
        self.model = chunks
        for chunk in chunks:
            chunk.requires_grad_(False)

    @property
    def dp_rank(self) -> int:
        return self.ranks.dp_rank

    @property
    def dp_size(self) -> int:
        return self.ranks.dp

    @property
    def is_collect(self) -> bool:
        return self.ranks.is_collect

    @property
    def gradient_ranks(self) -> int:
        """Always 1, because gradients are summed, not averaged; a loss is already its share of the global loss."""
        return 1

    @property
    def _data_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    @property
    def _is_last_stage(self) -> bool:
        return self.ranks.pp_rank == self.ranks.pp - 1

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        with booked("wait_peers"):
            dist.all_reduce(values, group=self._data_group)
        return values

    def forward_backward_batch(
        self, data: DataProto, loss_function: LossFunction | None, forward_only: bool = False
    ) -> BatchOutput:
        if loss_function is None and not forward_only:
            raise ValueError("forward_backward_batch needs a loss_function unless forward_only is set")
        self.count_flops(data, forward_only)
        if not forward_only:
            self._begin_gradients()
        parts = self._prepare(data)
        todo = self._pass(data, parts, loss_function, forward_only)
        records = forward_only and data.meta_info.get("record_routes", False)
        if self.routers is not None:
            self.routers.made = {} if records else None
        mode = self.eval_mode() if forward_only else self.train_mode()
        with mode, torch.set_grad_enabled(not forward_only), booking_pipeline(self.model, forward_only):
            answers = run_schedule(self.schedule, self.model, parts, todo)
        tensors: dict[str, Tensor] = {}
        if forward_only and self.is_collect:
            tensors = in_batch_order([part.rows for part in parts], [answer.outputs for answer in answers])
        metrics = self._reduce(answers) if loss_function is not None else {}
        if not forward_only:
            metrics |= take_balancing_metrics(self.transformer, len(parts), self.dp_size)
        routes = None
        if self.routers is not None:
            self.routers.enter(None)
            if ROUTED_EXPERTS in data.non_tensor_batch:
                metrics |= self.routers.choice.metrics(self.device)
            if records:
                found = [self.routers.whole(part.made_routes, part.row) for part in parts]
                routes = column_in_batch_order([part.rows for part in parts], found) if self.is_collect else None
        return BatchOutput(tensors, metrics, routes)

    def _begin_gradients(self) -> None:
        if self.optim_config is None:
            raise ValueError("this model has no optimizer and only answers: call forward")
        if self.gradients_are_summed:
            raise ValueError("the gradients are summed over the ranks already: call optimizer_zero_grad first")
        self.gradients_are_summed = True

    def _pass(
        self, data: DataProto, parts: list[MicroBatch], loss_function: LossFunction | None, forward_only: bool
    ) -> Pass:
        balances = bool(balancing_losses(self.transformer)) and not forward_only
        meta = data.meta_info
        return Pass(
            self.head,
            meta.get("temperature", 1.0),
            meta.get("calculate_entropy", False),
            loss_function,
            forward_only,
            RouterPadding(self.transformer, self.ranks) if balances else None,
            auxiliary_tokens(parts) if balances else 1.0,
            self.routers,
        )

    def _prepare(self, data: DataProto) -> list[MicroBatch]:
        """Pack and send every micro-batch before the first one runs, so that the device never waits for the host."""
        meta = data.meta_info
        split = partial(
            split_for_pipeline,
            max_token_len=meta["max_token_len"] * self.ranks.cp if meta["use_dynamic_bsz"] else None,
            micro_batch_size=meta.get("micro_batch_size"),
            stages=self.ranks.pp,
            multiple=self.transformer.microbatch_group_size_per_vp_stage if self.ranks.vpp > 1 else 1,
            algorithm=self.megatron.balance_algorithm,
            largest=self._largest_over_data_parallel,
        )
        plan = split_by_units(data.batch["attention_mask"].sum(1).numpy(), rows_together(data), split)
        on_device = DataProto(data.batch.to(self.device), {}, {})
        # Unless rotary embeddings are fused kernels, they read the document borders on the host.
        cu_seqlens_on = self.device if self.transformer_engine else torch.device("cpu")
        column = self.routes_of(data)
        prepared = []
        for rows in plan:
            picked = np.arange(rows_together(data)) if rows is None else rows
            batch = data.select_idxs(picked).batch
            row = pack(batch["input_ids"], batch["attention_mask"], batch["response_mask"]).to(self.device)
            shared = SharedRow(row, self.sharing, self.device, cu_seqlens_on)
            routes = None
            if self.routers is not None and column is not None and rows is not None:
                routes = self.routers.local(column[picked], shared)
            prepared.append(MicroBatch(rows, shared, on_device.select_idxs(picked), routes))
        return prepared

    def _largest_over_data_parallel(self, count: int) -> int:
        value = torch.tensor(count, device=self.device)
        with booked("wait_peers"):
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._data_group)
            return int(value)

    def _reduce(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return the last stage's metrics over all micro-batches and data-parallel ranks, broadcast to all stages."""
        told: list[dict[str, float] | None] = [None]
        if self._is_last_stage:
            told = [add_metrics([answer.metrics for answer in answers], self._data_group)]
        if self.ranks.pp > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            last = dist.get_global_rank(group, self.ranks.pp - 1)
            dist.broadcast_object_list(told, src=last, group=group, device=self.device)
        assert told[0] is not None
        return told[0]

    @booked("update_optimizer")
    def optimizer_zero_grad(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.gradients_are_summed = False

    @booked("update_optimizer")
    def optimizer_step(self) -> float:
        return clip_and_step(self.optimizer, self.engine_config.grad_clip)

    def lr_scheduler_step(self) -> float:
        return self.learning_rate.step()

    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        device = torch.device(device)
        if self.device.type == "cpu":
            return  # one memory: nothing to move
        if model:
            move_weights(self.model, device)
        if optimizer and self.optim_config is not None:
            move_states(self.optimizer, device, self.transformer.bf16, self._host)
            if self.megatron.grad_offload:
                move_gradients(self.model, device)
        torch.cuda.synchronize()
        if device.type == "cpu":
            torch.cuda.empty_cache()

    def copy_weights_from(self, other: Engine) -> None:
        if isinstance(other, MegatronEngine):
            other._finish_param_gather()
        super().copy_weights_from(other)

    def per_tensor_params(self) -> Iterator[tuple[str, Tensor]]:
        self._finish_param_gather()
        files = export_hf_weights(self.model, self.hf_config, self.ranks, value_head=self.head == "value")
        return as_module_params(files, expert_count(self.hf_config))

    def _finish_param_gather(self) -> None:
        """Gather updated weights now: under `overlap_param_gather` the next forward pass would do so."""
        if self.optim_config is not None and self.megatron.overlap_param_gather:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)

    def snapshot(self, contents: Sequence[str] = CONTENTS) -> Snapshot:
        from meshrl.engines.megatron.megatron_state import take_snapshot

        self._finish_param_gather()
        return take_snapshot(self, contents)

    def load_checkpoint(self, folder: Path, contents: Sequence[str] = CONTENTS) -> None:
        from meshrl.engines.megatron.megatron_state import load_state

        load_state(self, folder, contents)


# Offload of a Megatron model's weights, gradients and optimizer states to host memory between phases, and back.


def move_weights(model: Sequence[nn.Module], device: torch.device) -> None:
    """Move the parameters to a device; parameters that are views of a common buffer remain views of it."""
    for chunk in model:
        buffered: set[nn.Parameter] = set()
        if isinstance(chunk, DistributedDataParallel):
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                if buffer.param_data is not None:
                    buffered |= set(buffer.params)
                    move = buffer.offload_to_cpu if device.type == "cpu" else buffer.reload_from_cpu
                    move(move_params=True, move_grads=False)
        for param in chunk.parameters():
            if param not in buffered:
                param.data = param.data.to(device, non_blocking=True)


def move_gradients(model: Sequence[nn.Module], device: torch.device) -> None:
    """Free the gradients' memory, or allocate it again; the gradients come back as zeros."""
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                move = buffer.offload_to_cpu if device.type == "cpu" else buffer.reload_from_cpu
                move(move_params=False, move_grads=True)


def move_states(optimizer: Any, device: torch.device, separate_masters: bool, host: HostMemory) -> None:
    """Move the optimizer's states to a device, and the float32 master weights if they have memory of their own."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False) or part.optimizer is None:
            continue
        move_optimizer(part.optimizer, device, host)
        if separate_masters:
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    param.data = host.move(id(param), param.data, device)
