"""The FSDP engine: any Hugging Face causal language model on packed rows, sharded over data and sequences.

The order of `initialize`: model → adapters → checkpointing → compile → shard → weights → optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.config.engine import OptimConfig
from meshrl.config.validate_model import gpu_problem
from meshrl.data.batch import DataProto
from meshrl.data.images import IMAGES
from meshrl.data.packing import PackedRow, keep_padding, pack
from meshrl.engines.batching import (
    add_metrics,
    column_in_batch_order,
    in_batch_order,
    split_by_units,
    split_into_micro_batches,
)
from meshrl.engines.fsdp.fsdp_state import fill, fill_randomly, load_state, take_snapshot
from meshrl.engines.fsdp.sharding import FSDP2, Sharding, Whole, precision_policy
from meshrl.engines.optim import (
    HostMemory,
    LearningRate,
    MasterAdamW,
    build_master_optimizer,
    build_optimizer,
    move_optimizer,
)
from meshrl.engines.packed_model import PackedCausalLM, PackedModel, PackedValueModel
from meshrl.engines.state_files import Snapshot
from meshrl.engines.training_engine import CONTENTS, BatchOutput, Engine, LossFunction, rows_together
from meshrl.models.fp8 import compute_in_8_bits
from meshrl.models.loading import (
    PLAIN_ATTENTION,
    check_training,
    empty_model,
    load_model,
    load_model_config,
    persistent_buffers,
    refuse_misfit,
    refuse_quantized,
    refuse_unread,
    torch_dtype,
)
from meshrl.models.lora import adapter_init, adapter_scaling, adapters_off, add_adapters, merged_params
from meshrl.models.moe_routing import ROUTED_EXPERTS, Routers, over_ranks, packed_routes, unpacked_routes
from meshrl.models.vision import Sight, find_sight, language_model, sees, tower_of
from meshrl.parallel.attention import ATTENTION_NAME, PackedSequences
from meshrl.parallel.mesh import DATA_AXES, SEQUENCE_AXES, new_groups, sample_layout, shard_layout
from meshrl.parallel.sequence import SequenceParallel, SequenceShard
from meshrl.telemetry.time_ledger import booked

WRAPPER_PREFIX = "hf_model."


class FSDPEngine(Engine):
    """The engine for FSDP2 (or FSDP1) × Ulysses × ring.

    With a single rank and no mixed precision the model stays a plain module.
    """

    prefix = WRAPPER_PREFIX

    def lay_out(self) -> None:
        model, engine = self.model_config, self.engine_config
        self.packs = model.use_remove_padding
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.layout = sample_layout(
            self.world_size, engine.context_parallel_size, engine.ulysses_sequence_parallel_size
        )
        self.shards = shard_layout(self.world_size, engine.fsdp_config.fsdp_size)
        self.data_group = new_groups(self.layout, *DATA_AXES)
        self.sequence = SequenceParallel(new_groups(self.layout, "sp"), new_groups(self.layout, "cp"))
        if not self.packs and self.sequence.size > 1:
            raise ValueError(
                f"model.use_remove_padding=false cannot share a sequence over {self.sequence.size} ranks: "
                "set ulysses_sequence_parallel_size and context_parallel_size to 1"
            )
        self.has_adapters = model.has_adapters
        self._host = HostMemory()

    def initialize(self) -> None:
        model = self.model_config
        hf_config = load_model_config(model.path or "", dict(model.override_config), model.trust_remote_code)
        check_training(hf_config, self.packs)
        how = self._placement()
        # FSDP2 shards a model on the meta device and fills it afterwards. Adapters are small and get values at once.
        fills_later = how == "fsdp2" or model.random_init
        self.hf_model = self._model(empty_model if fills_later else load_model)
        if self.engine_config.rounds:
            if self.device.type == "cuda" and (problem := gpu_problem(self.engine_config)):
                raise ValueError(problem)
            compute_in_8_bits(self.hf_model, self.device)
        if self.has_adapters:
            add_adapters(self.hf_model, model)
            self.adapter_scaling = adapter_scaling(self.hf_model)
            if model.lora_adapter_path is None:
                adapter_init(self.hf_model, self.seed)
        if self.optim_config is None:
            self.hf_model.requires_grad_(False)
        elif model.enable_gradient_checkpointing:
            self.hf_model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.engine_config.freeze_vision_tower and sees(self.hf_model.config):
            tower_of(self.hf_model).requires_grad_(False)
        self.sight = self._make_sight()
        self.routers = Routers(self.hf_model) if self.replays_routes else None
        if self.engine_config.use_torch_compile:
            compile_layers(self.hf_model, self.engine_config.activation_memory_budget)
        self.param_names = [name for name, _ in self.hf_model.named_parameters()]
        masters = {n: p.detach() for n, p in self.hf_model.named_parameters()} if how == "whole-bf16" else {}
        self.sharding = self._shard(self._wrap(self.hf_model), how)
        self.module = self.sharding.module
        # Weights that FSDP keeps in host memory are gathered from there.
        home = torch.device("cpu") if self.engine_config.fsdp_config.offload_policy else self.device
        if model.random_init and how != "fsdp":
            fill_randomly(self.module, home)
        elif fills_later and not model.random_init:
            folder, override = Path(model.path or ""), dict(model.override_config)
            refuse_misfit(folder, override)
            check = partial(refuse_unread, folder, model=self.hf_model, override=override)
            fill(self.module, WRAPPER_PREFIX, folder, lambda: self._model(load_model), home, check)
        move_buffers(self.module, self.device, torch_dtype(self.engine_config.fsdp_config.mixed_precision.buffer_dtype))
        if self.optim_config is not None:
            self.optimizer = self._build_optimizer(self.optim_config, how, {} if model.random_init else masters)
            self.learning_rate = LearningRate(self.optimizer, self.optim_config, self.total_steps)

    def _placement(self) -> str:
        """Return the placement of the parameters: `whole` or `whole-bf16` on one rank, otherwise `fsdp2` or `fsdp`."""
        config = self.engine_config.fsdp_config
        if self.engine_config.strategy == "fsdp" and self.shards.size("fsdp") > 1:
            return "fsdp"
        # If nothing is sharded, FSDP1 would not add up the copies' gradients, so both strategies go on below.
        if self.world_size > 1 or config.offload_policy:
            return "fsdp2"
        if precision_policy(config) is None:
            return "whole"
        param, kept = torch_dtype(config.mixed_precision.param_dtype), torch_dtype(config.model_dtype)
        return "whole-bf16" if (param, kept) == (torch.bfloat16, torch.float32) else "fsdp2"

    def _build_optimizer(self, config: OptimConfig, how: str, masters: dict[str, Tensor]) -> torch.optim.Optimizer:
        if how != "whole-bf16":
            return build_optimizer(self.module.parameters(), config)
        reduce_dtype = torch_dtype(self.engine_config.fsdp_config.mixed_precision.reduce_dtype)
        optimizer = build_master_optimizer(self.module.parameters(), config, reduce_dtype == torch.float32)
        for name, param in self.hf_model.named_parameters():
            if param.requires_grad and name in masters:
                optimizer.set_master(param, masters[name])
        return optimizer

    def _model(self, make: Callable[..., PreTrainedModel]) -> PreTrainedModel:
        """Build the configured model with one of the functions of `meshrl.models.loading`."""
        model = self.model_config
        refuse_quantized(model.path or "")
        return make(
            model.path or "",
            ATTENTION_NAME if self.packs else PLAIN_ATTENTION,
            self.head,
            dtype=torch_dtype(self.engine_config.fsdp_config.model_dtype),
            override=dict(model.override_config),
            trust_remote_code=model.trust_remote_code,
        )

    def _make_sight(self) -> Sight | None:
        """Return the image inputs of a VLM, or None for a language model."""
        sight = find_sight(self.hf_model.config, self.model_config)
        if sight is not None and not self.packs:
            raise ValueError("a model that sees images takes packed rows only: set model.use_remove_padding=true")
        return sight

    def _wrap(self, hf_model: PreTrainedModel) -> PackedModel:
        if self.head == "value":
            return PackedValueModel(hf_model)
        # If weights are gathered, all ranks must call the same modules.
        looks_always = self.world_size > 1
        return PackedCausalLM(hf_model, self.engine_config.keep_logits_megabytes << 20, self.sight, looks_always)

    def _shard(self, module: PackedModel, how: str) -> Sharding:
        config = self.engine_config.fsdp_config
        if how.startswith("whole"):
            # A model on the meta device is filled in place later, on the device and in the model's type.
            move_params(module, self.device, torch.bfloat16 if how == "whole-bf16" else None)
            return Whole(module)
        if how == "fsdp":
            from meshrl.engines.fsdp.sharding import FSDP1

            if buffers := persistent_buffers(self.hf_model):
                raise ValueError(
                    f"{type(self.hf_model).__name__} keeps weights in {len(buffers)} buffers, such as "
                    f"'{next(iter(buffers))}', which strategy=fsdp does not carry: use fsdp2"
                )

            if self.model_config.random_init:  # FSDP1 flattens parameters that have memory
                fill_randomly(module, self.device)
            return FSDP1(module.to(self.device), self.hf_model, self.shards, self.device, config)
        return FSDP2(module, self.hf_model, self.shards, self.device.type, config)

    @property
    def is_sharded(self) -> bool:
        """True if the model is anything other than a plain module on this rank."""
        return not isinstance(self.sharding, Whole)

    @property
    def dp_rank(self) -> int:
        return self.layout.index(self.rank, *DATA_AXES)

    @property
    def dp_size(self) -> int:
        return self.layout.size(*DATA_AXES)

    @property
    def is_collect(self) -> bool:
        return self.layout.index(self.rank, *SEQUENCE_AXES) == 0

    @property
    def gradient_ranks(self) -> int:
        return self.world_size

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        if self.data_group is not None:
            with booked("wait_peers"):
                dist.all_reduce(values, group=self.data_group)
        return values

    def forward_backward_batch(
        self, data: DataProto, loss_function: LossFunction | None, forward_only: bool = False
    ) -> BatchOutput:
        if loss_function is None and not forward_only:
            raise ValueError("forward_backward_batch needs a loss_function unless forward_only is set")
        outputs: list[dict[str, Tensor]] = []
        metrics_of: list[dict[str, Tensor]] = []
        routes_of: list[list[np.ndarray]] = []
        places: list[np.ndarray | None] = []
        records = forward_only and data.meta_info.get("record_routes", False)
        mode = self.eval_mode() if forward_only else self.train_mode()
        routing = nullcontext() if self.routers is None else self.routers.routing(records)
        with mode, torch.set_grad_enabled(not forward_only), routing:
            for part in self._prepare(data, loss_function is not None):
                places.append(part.rows)
                if self.routers is not None:
                    self.routers.replay(part.routes)  # until the next call, because the backward may recompute layers
                with nullcontext() if forward_only else booked("update_forward"), self._activations():
                    output = self._run_model(part, data.meta_info)
                    if records:
                        routes_of.append(self._recorded(part))
                    if loss_function is None or part.data is None:
                        outputs.append(output)
                        continue
                    loss, metrics = loss_function(output, part.data)
                if part.rows is None:
                    # A stand-in keeps the collectives of all ranks in step. It must not contribute.
                    loss, metrics = loss * 0.0, {name: value * 0.0 for name, value in metrics.items()}
                metrics_of.append(metrics)
                if forward_only:
                    outputs.append(output)
                else:
                    with booked("update_backward"):
                        loss.backward()
        if getattr(self, "optimizer", None) is None:
            self.sharding.reshard()  # no backward will follow that frees the gathered parameters
        self.count_flops(data, forward_only)
        tensors = in_batch_order(places, outputs) if forward_only else {}
        reduced = add_metrics(metrics_of, self.data_group) if metrics_of else {}
        if ROUTED_EXPERTS in data.non_tensor_batch and self.routers is not None:
            reduced |= self.routers.choice.metrics(self.device)
        return BatchOutput(tensors, reduced, column_in_batch_order(places, routes_of) if records else None)

    def _prepare(self, data: DataProto, with_data: bool) -> Iterator[MicroBatch]:
        """Pack micro-batches and send each to the device while the device still works on earlier ones.

        The batch itself is included only if a loss needs it.
        """
        on_device = DataProto(data.batch.to(self.device), {}, {}) if with_data else None
        make_row = pack if self.packs else keep_padding
        column, images = self.routes_of(data), data.non_tensor_batch.get(IMAGES)
        for rows in self._micro_batches(data):
            picked = np.arange(rows_together(data)) if rows is None else rows
            batch = data.select_idxs(picked).batch
            row = make_row(batch["input_ids"], batch["attention_mask"], batch["response_mask"])
            if images is not None:
                row = self._with_images(row, images[picked])
            row = row.to(self.device)
            shard = None
            if self.packs:
                shard = self.sequence.shard(PackedSequences.of(row.lengths, self.device).ready())
            routes = None
            if column is not None and rows is not None:
                routes = self._local_routes(column[picked], row, shard)
            own = on_device.select_idxs(picked) if on_device is not None else None
            yield MicroBatch(rows, row, shard, own, routes)

    def _with_images(self, row: PackedRow, images: np.ndarray) -> PackedRow:
        """Return the row together with the images of its samples."""
        if self.sight is None:
            raise ValueError(f"a batch has {IMAGES}, but {type(self.hf_model).__name__} does not see any")
        return replace(row, seen=self.sight.look(row.input_ids, row.lengths, [images[at] for at in row.samples]))

    def _local_routes(self, column: np.ndarray, row: PackedRow, shard: SequenceShard | None) -> Tensor | None:
        """Return the routes of this rank's tokens of a row, from the routes of its samples."""
        routes = packed_routes(column, row)
        if routes is None:
            return None
        routes = routes.to(self.device)
        return routes if shard is None else shard.take(routes, torch.iinfo(routes.dtype).max)

    def _recorded(self, part: MicroBatch) -> list[np.ndarray]:
        """Return the routes of a micro-batch's samples, recorded in the last forward."""
        assert self.routers is not None
        routes = self.routers.recorded()
        return unpacked_routes(routes if part.shard is None else over_ranks(routes, part.shard.gather), part.row)

    def _activations(self) -> AbstractContextManager[Any]:
        """Return a context manager that offloads activations to host memory if the config says so."""
        if self.model_config.enable_activation_offload:
            return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        return nullcontext()

    def _micro_batches(self, data: DataProto) -> list[np.ndarray | None]:
        """Return the rows of each of this rank's micro-batches; None marks a stand-in without effect."""
        meta = data.meta_info
        split = partial(
            split_into_micro_batches,
            max_token_len=meta["max_token_len"] * self.layout.size(*SEQUENCE_AXES) if meta["use_dynamic_bsz"] else None,
            micro_batch_size=meta.get("micro_batch_size"),
            agree=self._largest_over_data_parallel,
            kin=self._image_numbers(data),
        )
        return split_by_units(data.batch["attention_mask"].sum(1).numpy(), rows_together(data), split)

    def _image_numbers(self, data: DataProto) -> np.ndarray | None:
        """Return a number per sample that identifies its first image.

        Samples with the same first image share a micro-batch if possible, so that the vision tower encodes it once.
        """
        images = data.non_tensor_batch.get(IMAGES)
        if images is None:
            return None
        numbers: dict[Any, int] = {}
        return np.array([numbers.setdefault(own[0] if own else at, len(numbers)) for at, own in enumerate(images)])

    def _largest_over_data_parallel(self, count: int) -> int:
        if self.data_group is None:
            return count
        value = torch.tensor(count, device=self.device)
        with booked("wait_peers"):
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.data_group)
            return int(value)

    def _run_model(self, part: MicroBatch, meta: dict[str, Any]) -> dict[str, Tensor]:
        answers = self.module(
            part.row,
            part.shard,
            meta.get("temperature", 1.0),
            meta.get("calculate_entropy", False),
            meta.get("calculate_sum_pi_squared", False),
            part.routes is None and not meta.get("record_routes", False),
        )
        return {name: part.row.unpack(values) for name, values in answers.items()}

    def adapters_off(self) -> AbstractContextManager[None]:
        """Return a context manager that disables the adapters, so that the model acts as the reference policy."""
        if not self.has_adapters:
            raise ValueError("this model has no adapters to turn off")
        return adapters_off(self.hf_model)

    @booked("update_optimizer")
    def optimizer_zero_grad(self) -> None:
        self.sharding.zero_grad(self.optimizer)

    @booked("update_optimizer")
    def optimizer_step(self) -> float:
        clips = self.optimizer if isinstance(self.optimizer, MasterAdamW) else self.sharding
        norm = clips.clip_grad_norm(self.engine_config.grad_clip)
        if np.isfinite(norm):
            self.optimizer.step()
        return norm

    def lr_scheduler_step(self) -> float:
        return self.learning_rate.step()

    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        device = torch.device(device)
        held = getattr(self, "optimizer", None)
        if isinstance(held, MasterAdamW):
            held.move(device, params=model, states=optimizer)
            model = model and any(not p.requires_grad for p in self.module.parameters())
        elif optimizer and held is not None:
            move_optimizer(held, device, self._host)
        if model:
            self.sharding.move(device)
        if device.type == "cpu" and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_weights_from(self, other: Engine) -> None:
        for engine in (self, other):
            if isinstance(engine, FSDPEngine):
                engine.sharding.reshard()
        super().copy_weights_from(other)

    def per_tensor_params(self) -> Iterator[tuple[str, Tensor]]:
        params = ((name.removeprefix(WRAPPER_PREFIX), value) for name, value in self._full_params())
        yield from merged_params(params, self.adapter_scaling) if self.has_adapters else params
        yield from persistent_buffers(self.hf_model).items()

    def _full_params(self) -> Iterator[tuple[str, Tensor]]:
        optimizer = getattr(self, "optimizer", None)
        if not isinstance(optimizer, MasterAdamW):
            yield from self.sharding.full_params()
            return
        for name, param in self.module.named_parameters():
            yield name, optimizer.master(param) if param.requires_grad else param.detach()

    def snapshot(self, contents: Sequence[str] = CONTENTS) -> Snapshot:
        return take_snapshot(self, contents)

    def load_checkpoint(self, folder: Path, contents: Sequence[str] = CONTENTS) -> None:
        load_state(self, folder, contents)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch that is ready on the device.

    `rows`: its rows in the batch (None: a stand-in). `row`: the packed row. `shard`: this rank's part of the row (None
    for padded samples). `data`: its samples for the loss, if there is one. `routes`: the experts that this rank's
    tokens are to be routed to.
    """

    rows: np.ndarray | None
    row: PackedRow
    shard: SequenceShard | None
    data: DataProto | None
    routes: Tensor | None


def move_params(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move parameters to a device and type; parameters on the meta device change only their type."""
    for param in module.parameters():
        param.data = param.data.to("meta" if param.is_meta else device, dtype or param.dtype)


def move_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move buffers to a device, and floating-point buffers to a type.

    A 16-bit type would round rotary frequencies, which shifts positions. Buffers that are weights keep their own type.
    """
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                changes = buffer.is_floating_point() and name in owner._non_persistent_buffers_set
                owner._buffers[name] = buffer.to(device, dtype if changes else buffer.dtype)


def compile_layers(hf_model: PreTrainedModel, memory_budget: float) -> None:
    """Compile each decoder layer; layers of one class share the code.

    At the second number of tokens that occurs, the code becomes general.
    """
    # Read when a layer is compiled, at its first call.
    torch._functorch.config.activation_memory_budget = memory_budget
    # Policy, reference and critic may share the code of one class, each with and without gradients.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    classes = set(hf_model._no_split_modules or ())
    for module in language_model(hf_model).modules():
        if type(module).__name__ in classes:
            # The method, not the module: the hooks of sharding and checkpointing stay outside.
            module.forward = torch.compile(module.forward)
