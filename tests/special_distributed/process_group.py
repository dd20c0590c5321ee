"""Warm groups of real processes, joined by gloo or NCCL, that run a test's functions.

A test asks the session's `ranks` fixture for a group and hands it a function, which every rank runs with the same
arguments. The results come back in the order of the ranks:

    def sum_of_ranks(start: int) -> float:          # at the top of the test's own module
        value = torch.tensor(float(start + dist.get_rank()))
        dist.all_reduce(value)
        return float(value)

    def test_sum(ranks):
        assert ranks(4).run(sum_of_ranks, 10) == [46.0] * 4

What to know:

- The function travels by its name, arguments and results by pickle: it must stand at the top of an importable module
  (the test module is one); tensors and tiny models may be arguments, fixtures may not. Tensors in lists and dicts come
  back on the host.
- In the function `torch.distributed` is initialised with all ranks of the group as the default group, and torch has
  one thread. Further groups are the function's own business: `subgroups` splits the ranks into them and keeps them.
- With `MESHRL_TEST_DEVICE=cuda` in the environment they have NCCL as well, and `own_device()` is a GPU: the rank's own,
  or one that several ranks share, for which each passes for a host of its own.
- The processes are forked, within milliseconds, from a server that has imported torch and Transformers once. They stay
  for the whole session, so a function should leave no global state behind.
- If a rank raises, `run` raises `RankFailedError` with the traceback of every rank that had one. If the deadline
  passes, it raises `RankTimeoutError`, which names the ranks that did not answer and shows where each of them is. After
  either the processes are replaced at the next call: a case that failed cannot disturb the one after it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import megatron_cpu
import torch
import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.utils._pytree import tree_map_only

from meshrl.parallel.mesh import outlive_other_groups

PRELOAD = [
    "pytest",
    "hypothesis",
    "peft",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    "meshrl.engines.fsdp.fsdp_engine",
    "meshrl.engines.fsdp.sharding",
    "meshrl.models.preloaded",
    "meshrl.models.saving",
    "meshrl.models.tiny",
    "meshrl.rollout.embedded.embedded_rollout",
    "meshrl.tools.verify",
    "meshrl.weights.colocated",
    "meshrl.weights.disaggregated",
    "meshrl.weights.session",
    "process_group",
    *megatron_cpu.PRELOAD,
]
ON_GPU = os.environ.get("MESHRL_TEST_DEVICE", "cpu") == "cuda"
START_SECONDS = 120.0
RUN_SECONDS = 60.0
LARGEST = 8  # ranks of a test, in one pool
# How long the other ranks may still answer once one has failed: those that wait for it in a collective never do.
GRACE_SECONDS = 0.5


class RankFailedError(AssertionError):
    """A function raised on some ranks, or a rank's process died."""


class RankTimeoutError(AssertionError):
    """Some ranks did not answer in time."""


class ProcessGroup:
    """`world_size` processes that form one group; started at the first call and again after a failure.

    `prepare` runs first in each of them, such as the shim by which Megatron-Core runs on a CPU.
    """

    def __init__(self, world_size: int, prepare: Callable[[], None] | None = None):
        self.world_size, self.prepare = world_size, prepare
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_SECONDS, **kwargs: Any) -> list[Any]:
        """Runs `function(*args, **kwargs)` on every rank and returns their results in the order of the ranks."""
        if not self._processes:
            self._start()
        task = pickle.dumps((sys.path, pickle.dumps((function, args, kwargs))))
        for connection in self._connections:
            connection.send_bytes(task)
        return self._collect(f"{function.__module__}.{function.__qualname__}", timeout)

    def close(self) -> None:
        """Ends the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        if self._processes:
            self._stacks.cleanup()
        self._processes, self._connections, self._store = [], [], None

    def _start(self) -> None:
        context = _fork_server()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    self.world_size,
                    self._store.port,
                    theirs,
                    Path(self._stacks.name, str(rank)),
                    self.prepare,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect("the start of the processes", START_SECONDS)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """One answer of every rank; after a failure or the deadline the group is closed and the error raised."""
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    failure, results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    self._processes[rank].join()
                    failure = f"the process ended with exit code {self._processes[rank].exitcode}\n"
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            self.close()
            parts = [f"--- rank {rank} of {self.world_size}\n{text}" for rank, text in failures.items()]
            raise RankFailedError(f"{what} failed on ranks {sorted(failures)}\n" + "".join(parts))
        if waiting:
            late = sorted(waiting.values())
            stacks = "".join(f"--- rank {rank} of {self.world_size}\n{self._stack(rank)}" for rank in late)
            self.close()
            raise RankTimeoutError(f"{what}: no answer from ranks {late} within {timeout:g} s\n{stacks}")
        return [results[rank] for rank in range(self.world_size)]

    def _stack(self, rank: int) -> str:
        """Where a rank's process is now, as its fault handler tells."""
        pid, path = self._processes[rank].pid, Path(self._stacks.name, str(rank))
        if pid is None or not path.exists():
            return "it had not started yet\n"
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        return path.read_text()


class ProcessGroups:
    """The session's groups by size: `ranks(4)` is always the same four processes."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._groups: dict[int, ProcessGroup] = {}
        self._prepare = prepare

    def __call__(self, world_size: int) -> ProcessGroup:
        if world_size not in self._groups:
            self._groups[world_size] = ProcessGroup(world_size, self._prepare)
        return self._groups[world_size]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def _fork_server() -> Any:
    """What forks ranks off a server that has imported all of `PRELOAD`, this folder's modules too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # Before Python 3.13 the server looks for modules where its environment says, and is silent about what it misses.
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([given] if given else [])])
    # Megatron-Core's import asks torch for a GPU: unless torch asks NVML, no rank that is forked after it has one.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.ensure_running()
    os.environ.pop("PYTHONPATH") if given is None else os.environ.update(PYTHONPATH=given)
    return context


def subgroups(*sizes: int) -> list[dist.ProcessGroup]:
    """For use in a rank: its group along each axis of a row-major grid of all ranks; the same grid is made only once.

    `dp, sp = subgroups(2, 2)` on four ranks gives `sp` groups [0, 1], [2, 3] and `dp` groups [0, 2], [1, 3].
    """
    if sizes not in _grids:
        grid = torch.arange(dist.get_world_size()).view(sizes)
        own: list[dist.ProcessGroup] = []
        for axis in range(len(sizes)):
            for members in grid.movedim(axis, -1).reshape(-1, sizes[axis]).tolist():
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    own.append(group)
        _grids[sizes] = own
    return _grids[sizes]


_grids: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}


def own_device() -> torch.device:
    """For use in a rank: where its models are."""
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")


def _take_gpu(rank: int) -> None:
    """Gives the rank a GPU; NCCL refuses two ranks of one host on the same GPU, so that each gets a host's name."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    outlive_other_groups()
    if torch.cuda.device_count() < LARGEST:
        os.environ.update(NCCL_HOSTID=f"{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


class OneDevice:
    """In the place of torch's gloo groups: all groups of a process on one device.

    By default each has its own, whose thread wakes up a hundred times a second; Megatron-Core makes dozens of groups.
    """

    def __init__(self) -> None:
        self.made: Any = dist.ProcessGroupGloo
        self.device = self.made.create_default_device()

    def __call__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        options = self.made._Options()
        options._devices, options._timeout = [self.device], timeout
        return self.made(store, rank, size, options)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.made)


def _serve(
    rank: int,
    world_size: int,
    port: int,
    connection: Connection,
    stack_path: Path,
    prepare: Callable[[], None] | None,
) -> None:
    """A rank's life: join the group, then run one function after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test run's business, which then ends us
    stack_file = stack_path.open("w")
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if ON_GPU:
        _take_gpu(rank)
    dist.distributed_c10d.ProcessGroupGloo = OneDevice()  # type: ignore[assignment,misc]

    def join() -> None:
        if prepare is not None:
            prepare()
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if ON_GPU else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=START_SECONDS),
        )

    connection.send_bytes(_answer(join))
    gc.freeze()  # what is imported stays: looking for garbage need not look at it
    while True:
        try:
            path, task = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        sys.path[:] = path
        connection.send_bytes(_answer(lambda task=task: _call(task)))


def _call(task: bytes) -> Any:
    _leave_groups()
    function, args, kwargs = pickle.loads(task)
    return function(*args, **kwargs)


def _leave_groups() -> None:
    """Ends the process groups of the function before, and their threads.

    Not right after it: a rank that was done would wait for the others here and not be told from those that hang.
    """
    dist.barrier()
    for remembered in _remembered():
        remembered.cache_clear()
    gc.collect()  # a group's threads end with the last object that holds it, such as a sharded module
    # Remembered results of operations would bring back meshes whose groups are gone.
    debug._clear_sharding_prop_cache()
    kept = {dist.group.WORLD, *(group for grid in _grids.values() for group in grid)}
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in kept:
            dist.destroy_process_group(group)


def _remembered() -> list[Any]:
    """Methods of Megatron-Core's modules that remember results, and with them the modules and their groups."""
    rotary = sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding")
    yarn = sys.modules.get("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    classes = [made for module in (rotary, yarn) if module is not None for made in vars(module).values()]
    return [m for made in classes if isinstance(made, type) for m in vars(made).values() if hasattr(m, "cache_clear")]


def _answer(function: Callable[[], Any]) -> bytes:
    """The pickled (traceback or None, result)."""
    try:
        return pickle.dumps((None, tree_map_only(torch.Tensor, torch.Tensor.cpu, function())))
    except BaseException:
        return pickle.dumps((traceback.format_exc(), None))
