"""The receiver of weights inside vLLM's workers: loads buckets, by Hugging Face name, into the running model.

The module registers itself as a backend of vLLM's weight transfer when it is imported. `worker_extension_cls` makes
every worker import it. Buckets come as tensors if the worker lives in the sender's process, and otherwise as a file in
shared memory.
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
    """Empty initialisation data: the transfer needs no agreement beforehand."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of the weights: the tensors themselves, or a file with a list of its entries."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    path: str = ""
    entries: list[Entry] = field(default_factory=list)


class Receiver(WeightTransferEngine[NoInit, Bucket]):
    """The weight transfer engine that meshrl registers with vLLM.

    vLLM collects the tensors of a layer until the layer is complete, then converts them in place into its own form.
    """

    init_info_cls, update_info_cls = NoInit, Bucket

    @property
    def hf_config(self) -> Any:
        return self.model_config.hf_text_config

    @cached_property
    def parallel(self) -> Parallel | None:
        """The shard that this rank keeps of every tensor, or None if it keeps all or its shard is not known."""
        return parallel_of(self.parallel_config, get_tensor_model_parallel_rank(), self.hf_config)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: there is no connection to set up."""

    def start_weight_update(self) -> None:
        """Begin an update. The model must not run until `finish_weight_update`."""
        self.owners = owners_of_weights(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket, given as a dict of its fields."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Bucket) -> None:
        """Load a bucket's tensors into the model."""
        # Copies, because a layer's tensors wait until the layer is complete while the sender overwrites the file.
        found = read_tensors(update_info.path, update_info.entries) if update_info.path else []
        if self.parallel is not None:
            copies = own_parts(found, self.parallel, self.hf_config, self.device)
        else:
            copies = ((name, tensor.to(self.device, copy=True)) for name, tensor in found)
        self.model.load_weights([*copies, *update_info.tensors])

    def finish_weight_update(self) -> None:
        """End an update, so that the model may run again."""
        self.passed_over = [name for name, layers in self.owners.items() if all(map(_took_nothing, layers))]
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_tied_layers()
            self._repack_experts()

    def _repack_tied_layers(self) -> None:
        """Repack layers that share a weight with another layer, on CPUs.

        There every layer computes with a packed copy, which vLLM renews only if a weight was loaded by name. A tied
        output projection shares the embedding's weight, and would otherwise keep a packed copy of the old weight.
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
        """Repack the experts of every layer, on CPUs.

        vLLM packs them only once, and would otherwise read new weights as if they were packed.
        """
        for module in self.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""


def _took_nothing(layer: torch.nn.Module) -> bool:
    """Return whether a layer still waits for the first of its weights.

    A layer that has all its weights no longer waits. Embeddings always give False: vLLM's count for padded and shared
    embeddings may be 0 although they were loaded.
    """
    info = get_layerwise_info(layer)
    return info.can_load() and not info.load_numel and not hasattr(layer, "num_embeddings")


class WorkerExtension:
    """The methods that meshrl adds to vLLM's worker. Naming this class makes the worker import this module."""

    def unsent_weights(self: Any) -> list[str]:
        """Return the parameters in which this rank has kept elements that it was not sent in an update."""
        return unsent(self.get_model()) if self.parallel_config.tensor_parallel_size > 1 else []

    def passed_over(self: Any) -> list[str]:
        """Return the parameters of layers that took nothing in the last update; vLLM goes on with their old values."""
        return self.weight_transfer_engine.passed_over

    def record_routes(self: Any) -> None:
        """Start to record the experts to which tokens are routed."""
        self.step_routes = StepRoutes(self)

    def routes_of_step(self: Any) -> list[Computed]:
        """Return (request, first position, expert routes) of each request in the last step."""
        return self.step_routes.of_step()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
