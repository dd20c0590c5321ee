"""Inside vLLM's workers: takes buckets of weights, by Hugging Face name, into the model that is running.

Registers itself as a backend of vLLM's weight transfer when imported, which `worker_extension_cls` makes every worker
do. Buckets come as tensors where the worker lives in the sender's process, and otherwise as a file in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from meshrl.rollout.vllm.arguments import BACKEND, Parallel, parallel_of
from meshrl.rollout.vllm.expert_routes import Computed, StepRoutes
from meshrl.rollout.weight_files import Entry, read_tensors
from meshrl.weights.vllm_parts import own_parts, owners_of_weights, unsent


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing has to be agreed upon beforehand."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of the weights: tensors themselves, or a file with a list of what lies where."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    path: str = ""
    entries: list[Entry] = field(default_factory=list)


class Receiver(WeightTransferEngine[NoInit, Bucket]):
    """vLLM collects the tensors of a layer until it is complete, then brings them into its own form in place."""

    init_info_cls, update_info_cls = NoInit, Bucket

    @property
    def hf_config(self) -> Any:
        return self.model_config.hf_text_config

    @cached_property
    def parallel(self) -> Parallel | None:
        """What this rank keeps of every tensor."""
        return parallel_of(self.parallel_config, get_tensor_model_parallel_rank(), self.hf_config)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """From here until the end the model must not run."""
        self.owners = owners_of_weights(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One bucket."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Bucket) -> None:
        """Loads a bucket's tensors."""
        # Copies, since a layer's tensors wait for each other while the sender fills the file anew.
        found = read_tensors(update_info.path, update_info.entries) if update_info.path else []
        if self.parallel is not None:
            copies = own_parts(found, self.parallel, self.hf_config, self.device)
        else:
            copies = ((name, tensor.to(self.device, copy=True)) for name, tensor in found)
        self.model.load_weights([*copies, *update_info.tensors])

    def finish_weight_update(self) -> None:
        """The model may run again."""
        self.passed_over = [name for name, layers in self.owners.items() if all(map(_took_nothing, layers))]
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_tied_layers()
            self._repack_experts()

    def _repack_tied_layers(self) -> None:
        """On CPUs every layer computes with a packed copy, and vLLM renews it only where a weight was loaded by name.

        A tied output projection shares the embedding's weight, but would go on with a copy of the old one.
        """
        users: dict[int, list[torch.nn.Module]] = {}
        for module in self.model.modules():
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            if weight is not None:
                users.setdefault(id(weight), []).append(module)
        for modules in users.values():
            for module in modules if len(modules) > 1 else ():
                method = getattr(module, "quant_method", None)
                if method is not None:
                    method.process_weights_after_loading(module)

    def _repack_experts(self) -> None:
        """The experts of a layer are packed as well, but vLLM does it only once: it would read new ones as packed."""
        for module in self.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


def _took_nothing(layer: torch.nn.Module) -> bool:
    """Whether a layer still waits for the first of its weights: one that has them all no longer waits.

    Of embeddings it cannot be told: vLLM's count for those that are padded and shared may be 0 where they were loaded.
    """
    info = get_layerwise_info(layer)
    return info.can_load() and not info.load_numel and not hasattr(layer, "num_embeddings")


class WorkerExtension:
    """What we add to vLLM's worker; naming this class makes it import this module."""

    def unsent_weights(self: Any) -> list[str]:
        """Parameters in which this rank has kept something that it was not sent, after an update."""
        return unsent(self.get_model()) if self.parallel_config.tensor_parallel_size > 1 else []

    def passed_over(self: Any) -> list[str]:
        """Parameters of layers that took nothing in the last update, with which vLLM goes on as they were."""
        return self.weight_transfer_engine.passed_over

    def record_routes(self: Any) -> None:
        """From now on it is noted which experts tokens go to."""
        self.step_routes = StepRoutes(self)

    def routes_of_step(self: Any) -> list[Computed]:
        """What the last step computed, and where its tokens went."""
        return self.step_routes.of_step()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
