"""The FSDP engine: any Hugging Face causal language model, sharded over data-parallel ranks, on packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshrl.config.engine import EngineConfig
from meshrl.config.model import ModelConfig
from meshrl.config.optim import OptimConfig
from meshrl.data.packing import pack
from meshrl.data.proto import DataProto
from meshrl.engines.base import Engine, LossFunction
from meshrl.engines.fsdp.sharding import precision_policy, shard
from meshrl.engines.micro_batches import split_into_micro_batches
from meshrl.engines.optim import LearningRate, build_optimizer
from meshrl.engines.packed_lm import PackedCausalLM
from meshrl.models.loading import load_causal_lm, torch_dtype
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.parallel.packed import PackedSequences

WRAPPER_PREFIX = "hf_model."


class FSDPEngine(Engine):
    """FSDP2 over one data-parallel axis. With a single rank and no mixed precision the model stays a plain module."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None,
        *,
        device: torch.device,
        total_steps: int = 0,
    ):
        self.model_config, self.engine_config, self.optim_config = model, engine, optim
        self.device, self.total_steps = device, total_steps
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def initialize(self) -> None:
        """Load → checkpointing → shard → optimizer, in this order."""
        config = self.engine_config.fsdp_config
        self.hf_model = load_causal_lm(
            self.model_config.path or "",
            ATTENTION_NAME,
            dtype=torch_dtype(config.model_dtype),
            override=dict(self.model_config.override_config),
            trust_remote_code=self.model_config.trust_remote_code,
        ).to(self.device)  # type: ignore[arg-type]
        if self.optim_config is None:
            self.hf_model.requires_grad_(False)
        elif self.model_config.enable_gradient_checkpointing:
            self.hf_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module = PackedCausalLM(self.hf_model)
        self.is_sharded = self.world_size > 1 or precision_policy(config) is not None
        if self.is_sharded:
            mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("fsdp",))
            shard(self.module, self.hf_model, mesh, config)
        if self.optim_config is not None:
            self.optimizer = build_optimizer(self.module.parameters(), self.optim_config)
            self.learning_rate = LearningRate(self.optimizer, self.optim_config, self.total_steps)

    @property
    def dp_rank(self) -> int:
        return self.rank

    @property
    def dp_size(self) -> int:
        return self.world_size

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def forward(self, data: DataProto) -> dict[str, Tensor]:
        parts, places = [], []
        with self.eval_mode(), torch.no_grad():
            for micro_batch, index in self._micro_batches(data):
                output = self._run_model(micro_batch, data.meta_info)
                if index is not None:
                    parts.append(output)
                    places.append(index)
        order = torch.from_numpy(np.concatenate(places)).argsort()
        return {name: torch.cat([part[name] for part in parts]).cpu()[order] for name in parts[0]}

    def forward_backward_batch(self, data: DataProto, loss_function: LossFunction) -> dict[str, float]:
        parts: list[dict[str, Tensor]] = []
        with self.train_mode():
            for micro_batch, index in self._micro_batches(data):
                output = self._run_model(micro_batch, data.meta_info)
                loss, metrics = loss_function(output, micro_batch)
                if index is None:
                    # A stand-in that keeps the collectives of all ranks in step: it must count for nothing.
                    loss, metrics = loss * 0.0, {name: value * 0.0 for name, value in metrics.items()}
                loss.backward()
                parts.append(metrics)
        return self._reduce(parts)

    def _reduce(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        """Adds metrics over micro-batches and ranks; of those whose name ends in `_max` it takes the largest."""
        names = sorted(parts[0], key=lambda name: name.endswith("_max"))
        sums = sum(not name.endswith("_max") for name in names)
        table = torch.stack([torch.stack([part[name].detach().double() for name in names]) for part in parts])
        added, largest = table[:, :sums].sum(0), table[:, sums:].amax(0)
        if self.world_size > 1:
            dist.all_reduce(added)
            if len(largest):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(names, [*added.tolist(), *largest.tolist()], strict=True))

    def _micro_batches(self, data: DataProto) -> Iterator[tuple[DataProto, np.ndarray | None]]:
        """This rank's micro-batches with the rows they came from; None marks a stand-in (see above)."""
        meta = data.meta_info
        lengths = data.batch["attention_mask"].sum(1).numpy()
        plan = split_into_micro_batches(
            lengths,
            max_token_len=meta["max_token_len"] if meta["use_dynamic_bsz"] else None,
            micro_batch_size=meta.get("micro_batch_size"),
            agree=self._max_over_data_parallel,
        )
        for index in plan:
            if index is None:
                yield data.select_idxs([0]), None
            else:
                yield data.select_idxs(index), index

    def _max_over_data_parallel(self, count: int) -> int:
        if self.world_size == 1:
            return count
        value = torch.tensor(count, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def _run_model(self, micro_batch: DataProto, meta: dict[str, Any]) -> dict[str, Tensor]:
        micro_batch = micro_batch.to(self.device)
        batch = micro_batch.batch
        row = pack(batch["input_ids"], batch["attention_mask"], batch["response_mask"])
        packed = PackedSequences.of(row.lengths, self.device)
        log_probs, entropy = self.module(
            row.input_ids,
            packed,
            row.predictors,
            row.targets,
            meta["temperature"],
            meta.get("calculate_entropy", False),
        )
        output = {"log_probs": row.unpack(log_probs)}
        if entropy is not None:
            output["entropys"] = row.unpack(entropy)
        return output

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.engine_config.grad_clip, foreach=True)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if np.isfinite(value):
            self.optimizer.step()
        return value

    def lr_scheduler_step(self) -> float:
        return self.learning_rate.step()

    def per_tensor_params(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self.module.named_parameters():
            value = param.detach()
            yield name.removeprefix(WRAPPER_PREFIX), value.full_tensor() if isinstance(value, DTensor) else value
