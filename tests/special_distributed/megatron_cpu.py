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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


class CudaIsCpu(TorchFunctionMode):
    """Sends what is made for CUDA to the CPU, and names the types of CPU tensors as CUDA's."""

    OF_INTEREST = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.to, torch.Tensor.type})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in self.OF_INTEREST:
            return func(*args)  # nearly all: tens of thousands in a step
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0].clone()  # what is freed on the device must live on in the host's copy
        if func is torch.Tensor.to and any(str(argument).startswith("cuda") for argument in args[1:2]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)  # optimizers choose by this name
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class Idle:
    """A stream or event: whatever is asked of it is done at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


_mode: CudaIsCpu | None = None


def install() -> None:
    """Prepares this process; a second call does nothing."""
    global _mode
    if _mode is not None:
        return
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    import_without_fusion()
    _patch_cuda()
    _patch_megatron()
    dist.all_gather, dist.reduce_scatter = uneven_all_gather, uneven_reduce_scatter
    _mode = CudaIsCpu()
    _mode.__enter__()


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
