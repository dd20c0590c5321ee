"""Lets Megatron-Core run on a CPU with gloo, for tests: what it asks of CUDA, the CPU does.

`install()` changes torch for the whole process, so it is called in the processes of a test's group only (the fixture
`megatron_ranks` does it), never in the package and never in pytest's own process.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import queue
import warnings
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# For the server that test processes are forked from: importing Megatron-Core takes seconds.
PRELOAD = ["megatron_cpu_imports"]
MODULES = [
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing.serialization",
]


def import_without_fusion() -> None:
    """Imports Megatron-Core with its fused functions left as they are: torch.compile cannot see through the mode."""
    compile_function = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda given: given)  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in MODULES:
                importlib.import_module(name)
    finally:
        torch.compile = compile_function


# What makes tensors and may be told to make them on CUDA.
FACTORIES = "arange as_tensor empty eye full linspace ones rand randint randn tensor zeros"
FACTORIES += " empty_like full_like ones_like rand_like randn_like zeros_like"
METHODS = "new_empty new_full new_ones new_tensor new_zeros"


def on_cpu(function: Any) -> Any:
    """The function, with what it is asked to make for CUDA made for the CPU."""

    @wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return made


def _patch_tensors() -> None:
    """Sends what is made for CUDA to the CPU, and names the types of CPU tensors as CUDA's.

    Name by name: a `TorchFunctionMode` would do, but looks at each of the tens of thousands of calls in a step.
    """
    tensor: Any = torch.Tensor
    for name in FACTORIES.split():
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in METHODS.split():
        setattr(tensor, name, on_cpu(getattr(tensor, name)))
    to, kind = on_cpu(tensor.to), tensor.type

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and str(args[0]).startswith("cuda"):
            args = ("cpu", *args[1:])
        return to(self, *args, **kwargs)

    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Optimizers choose by this name.
        return kind(self, *args, **kwargs) if args or kwargs else kind(self).replace("torch.", "torch.cuda.", 1)

    tensor.to, tensor.type = moved, type_of
    tensor.cuda = lambda self, *args, **kwargs: self
    # What is freed on the device must live on in the host's copy.
    tensor.pin_memory = lambda self, *args: self.clone()


class Idle:
    """A stream or event: whatever is asked of it is done at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


_is_installed = False


def install() -> None:
    """Prepares this process; a second call does nothing."""
    global _is_installed
    if _is_installed:
        return
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    import_without_fusion()
    _patch_cuda()
    _patch_megatron()
    dist.all_gather, dist.reduce_scatter = uneven_all_gather, uneven_reduce_scatter
    _patch_tensors()
    _is_installed = True


def _patch_cuda() -> None:
    cuda: Any = torch.cuda

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "set_device", "_lazy_call"):
        setattr(cuda, name, nothing)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: Idle()
    cuda.stream = lambda *args: contextlib.nullcontext()
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args: self


def _patch_megatron() -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # The original makes lists of split sizes only from CUDA tensors.
    def as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_numpy

    # The writer of checkpoints starts processes of its own, and a server for a queue that one process alone uses.
    filesystem_async._results_queue = queue.Queue()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def uneven_all_gather(outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """gloo gathers equal sizes only: others are padded to the largest."""
    longest = max(len(output) for output in outputs)
    if all(len(output) == longest for output in outputs):
        return _all_gather(outputs, tensor, group=group, async_op=async_op)
    padded = [_padded(tensor, longest).clone() for _ in outputs]
    _all_gather(padded, _padded(tensor, longest), group=group)
    for output, whole in zip(outputs, padded, strict=True):
        output.copy_(whole[: len(output)])
    return None


def uneven_reduce_scatter(
    output: Tensor, inputs: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """The same for the way back."""
    longest = max(len(tensor) for tensor in inputs)
    if all(len(tensor) == longest for tensor in inputs):
        return _reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
    padded = [_padded(tensor, longest) for tensor in inputs]
    whole = torch.empty_like(padded[0])
    _reduce_scatter(whole, padded, op=op, group=group)
    output.copy_(whole[: len(output)])
    return None


def _padded(tensor: Tensor, length: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros((length - len(tensor), *tensor.shape[1:]))])
