"""Worker classes for the controller's tests: worker processes import them from here."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshrl.controller import Dispatch, Execute, Worker, nd_dispatch, register, register_dispatch_mode

if TYPE_CHECKING:
    from meshrl.data.batch import DataProto

if "pytest" not in sys.modules:
    # tensordict marks its functions for torch.compile, which nobody uses here: that alone would import all of dynamo.
    torch.compiler.allow_in_graph = lambda function: function


def _reverse_dispatch(group: Any, values: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (list(reversed(values)),), {"size": [group.world_size] * group.world_size}


def _sum_collect(group: Any, answers: list[int]) -> int:
    return sum(answers)


REVERSED = register_dispatch_mode("TEST_REVERSED", _reverse_dispatch, _sum_collect)


def has_ended(pid: int, within: float = 5.0) -> bool:
    """Whether a process is gone, or only waits to be reaped."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def _proto() -> type[DataProto]:
    """Imported where it is made: most processes of these tests never see one, and it takes seconds."""
    from meshrl.data.batch import DataProto

    return DataProto


class Probe(Worker):
    def __init__(self, base: int = 0, fail_on: int | None = None, sleep_in_init: float = 0) -> None:
        time.sleep(sleep_in_init)
        if fail_on == self.rank:
            raise OSError(f"no model at rank {self.rank}")
        self.base = base
        self.log: list[Any] = []
        self.released = threading.Event()

    # --- one per dispatch mode ---

    @register(Dispatch.RANK_ZERO)
    def on_rank_zero(self, x: int) -> tuple[int, int]:
        return self.rank, x + self.base

    @register(Dispatch.ONE_TO_ALL)
    def broadcast(self, x: Any) -> tuple[int, Any]:
        return self.rank, x

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def broadcast_to_zero(self, x: Any) -> tuple[int, Any]:
        return self.rank, x

    @register(Dispatch.ALL_TO_ALL)
    def scatter(self, x: int, *, factor: int) -> int:
        return x * factor + self.rank

    @register(Dispatch.DP_COMPUTE)
    def per_rank(self, x: list[int]) -> int:
        return sum(x)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def shard(self, data: DataProto, other: DataProto | None = None, scale: int = 1) -> DataProto:
        """Scale x, and say which rank saw each row."""
        x = data.batch["x"] * scale
        if other is not None:
            x = x + other.batch["y"]
        ranks = torch.full((len(data),), self.rank)
        names = [f"{name}@{self.rank}" for name in data.non_tensor_batch["name"]]
        return _proto().from_dict({"x": x, "rank": ranks}, {"name": names}, dict(data.meta_info))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def repeat_rows(self, data: DataProto, times: int) -> DataProto:
        return data.repeat(times, interleave=True)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def one_row_each(self, data: DataProto) -> DataProto:
        return data.slice(0, 1)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def multiply_in_place(self, data: DataProto) -> DataProto:
        data.batch["x"].mul_(3)
        data.pop(non_tensor_batch_keys=["name"])
        return data

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> dict[str, float]:
        return {"sum": float(data.batch["x"].sum()), "padding": data.meta_info.get("padding_rows", 0)}

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def release(self, note: str) -> tuple[int, str]:
        self.released.set()
        return self.rank, note

    @register(REVERSED)
    def custom(self, value: int, size: int) -> int:
        return value * 10**self.rank + size * 0

    # --- meshes ---

    @register(Dispatch.ONE_TO_ALL)
    def lay_out(self, mesh: str, sizes: dict[str, int]) -> None:
        """Order of axes from slowest to fastest as in `sizes`; dp is one of them, the first of all others answers."""
        coordinates, rest = {}, self.rank
        for axis, size in reversed(sizes.items()):
            coordinates[axis], rest = rest % size, rest // size
        first = all(coordinate == 0 for axis, coordinate in coordinates.items() if axis != "dp")
        self.register_mesh(mesh, coordinates["dp"], sizes["dp"], first)

    @register(Dispatch.ONE_TO_ALL)
    def lay_out_short(self, mesh: str) -> None:
        self._register_dispatch_collect_info(mesh, dp_rank=self.rank // 2, is_collect=self.rank % 2 == 1)

    @register(nd_dispatch("grid"))
    def on_grid(self, data: DataProto, offset: int = 0) -> DataProto:
        self.log.append(data.batch["x"].tolist())
        rank = torch.full((len(data),), self.rank)
        return _proto().from_dict({"x": data.batch["x"] + offset, "rank": rank})

    @register(nd_dispatch("short", pad=False))
    def on_short(self, data: DataProto) -> DataProto:
        return _proto().from_dict({"rank": torch.full((len(data),), self.rank)})

    # --- futures ---

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def slow_shard(self, data: DataProto, seconds: float) -> DataProto:
        time.sleep(seconds)
        return _proto().from_dict({"x": data.batch["x"] + 100})

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def note(self, value: Any) -> int:
        self.log.append(value)
        return len(self.log)

    def read_log(self) -> list[Any]:
        return self.log

    # --- the outside world ---

    @register(Dispatch.ONE_TO_ALL)
    def about(self) -> dict[str, Any]:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TEST_EXTRA"]
        return {
            "info": (self.rank, self.world_size, self.local_rank, self.local_world_size, self.node_rank, self.role),
            "env": {name: os.environ.get(name) for name in names},
            "master": (self.master_addr, self.master_port),
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
        }

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="env://")
        total = torch.tensor([float(2**self.rank)])
        dist.all_reduce(total)
        return total.item()

    # --- faults ---

    @register(Dispatch.ONE_TO_ALL)
    def reduce_sizes(self, sizes: list[int], warning: str = "") -> None:
        dist.all_reduce(torch.ones(sizes[self.rank]))
        if warning:
            os.write(2, warning.encode())
        dist.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, ranks: list[int]) -> str:
        if self.rank in ranks:
            raise KeyError(f"missing on {self.rank}")
        return "fine"

    @register(Dispatch.ONE_TO_ALL)
    def fail_before_collective(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("bad sample 17")
        dist.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def stuck_in_collective(self) -> None:
        if self.rank == 0:
            time.sleep(300)
        dist.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float, ranks: list[int] | None = None) -> None:
        if ranks is None or self.rank in ranks:
            time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep_later(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for_release(self) -> bool:
        return self.released.wait(20)

    def fork_a_sleeper(self) -> int:
        return subprocess.Popen(["sleep", "20"], close_fds=False).pid

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def cancelled(self) -> None:
        raise asyncio.CancelledError("by itself")

    def close(self) -> None:
        self.log.append("closed")

    def square_on_gpu(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_device(self.local_rank)
        return x.cuda() ** 2

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(Dispatch.ONE_TO_ALL)
    def unsendable(self) -> Any:
        return lambda: 1

    @register(Dispatch.ONE_TO_ALL)
    def exit_with(self, code: int) -> None:
        if self.rank == 0:
            os._exit(code)
        time.sleep(60)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def first_field(self, data: DataProto) -> DataProto:
        return data.select(batch_keys=["x"])

    @register(Dispatch.ONE_TO_ALL)
    async def in_a_while(self, x: int, then_fail: bool = False) -> tuple[int, int, bool]:
        thread = threading.get_ident()
        found = await asyncio.gather(*(self._later(x + i) for i in range(3)))
        if then_fail and self.rank == 0:
            raise ValueError("after the wait")
        return self.rank, sum(found), threading.get_ident() == thread

    async def _later(self, x: int) -> int:
        await asyncio.sleep(0.01)
        return x

    @register(nd_dispatch("grid"))
    async def on_grid_in_a_while(self, data: DataProto) -> DataProto:
        return _proto().from_dict({"x": await self._later(1) + data.batch["x"]})

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    async def asked_in_a_while(self) -> int:
        return await self._later(self.rank)

    async def unregistered_in_a_while(self, x: int) -> int:
        return await self._later(x)

    @register(Dispatch.ONE_TO_ALL)
    def numbers(self) -> Any:
        return (number for number in range(3))


class Counter(Worker):
    """A second role, for colocation."""

    def __init__(self, start: int) -> None:
        self.count = start

    @register(Dispatch.ONE_TO_ALL)
    def add(self, amount: int) -> tuple[int, str, int]:
        self.count += amount
        return self.count, self.role, os.getpid()
