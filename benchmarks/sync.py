"""Weight sync by a plan beside gathering every tensor whole on every rank, on real processes in the same run.

    python benchmarks/sync.py [--hidden 256] [--layers 8] [--bucket-megabytes 4] [--repeats 5]

Both ways move float32 over gloo between the same processes and must leave the same bits; the gathering way broadcasts
every shard of every tensor to all ranks and cuts out what each needs. Bytes are those received, over all rollout ranks.
The plan's way is timed with its sums of both sides (the default) and without; `shm` is the same over shared memory. The
second table feeds 1, 2 and 4 copies of a rollout from one trainer over links of a fixed speed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import hf_tensors
from meshrl.parallel.layout import fsdp_layout
from meshrl.weights.boxes import BOX_FIELDS, numbered
from meshrl.weights.placement import Placement, fsdp2, megatron, replicas
from meshrl.weights.plan import ReshardPlan, plan_reshard
from meshrl.weights.process_group import ProcessGroupCarrier
from meshrl.weights.rollout_placement import RolloutLayout, rollout
from meshrl.weights.shards import Shards, local_tensors
from meshrl.weights.shared_memory import SharedMemoryCarrier
from meshrl.weights.sync import WORD_BYTES, WeightSync

MIB = 1 << 20
LINK_BYTES_PER_SECOND = 64 * MIB


def model(arguments: argparse.Namespace, moe: bool = False) -> SimpleNamespace:
    hidden = arguments.hidden
    fields: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": 32 * hidden,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": hidden // 8,
        "tie_word_embeddings": False,
    }
    if moe:
        fields |= {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": hidden}
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return SimpleNamespace(**fields)


def pairs(arguments: argparse.Namespace) -> dict[str, tuple[Placement, Placement]]:
    """The five pairs of layouts."""
    dense, sparse = model(arguments), model(arguments, moe=True)
    tensors, experts = hf_tensors(dense), hf_tensors(sparse)
    pipeline = megatron(dense, ParallelRanks(world_size=4, tp=2, pp=2))
    return {
        "FSDP4 -> TP2xDP2": (fsdp2(tensors, fsdp_layout(4)), rollout(tensors, dense, RolloutLayout(2, 2))),
        "TP2xPP2 -> TP2": (pipeline, rollout(tensors, dense, RolloutLayout(2))),
        "TP2xPP2 -> TP4": (pipeline, rollout(tensors, dense, RolloutLayout(4))),
        "EP4 -> TP2": (
            megatron(sparse, ParallelRanks(world_size=4, ep=4)),
            rollout(experts, sparse, RolloutLayout(2, form="packed")),
        ),
        "PP2xVPP2 -> replicas": (
            megatron(dense, ParallelRanks(world_size=2, pp=2, vpp=2)),
            replicas(tensors, 2),
        ),
    }


class Gathering:
    """Every box of every tensor is broadcast from the first rank that holds it; then each rank cuts out its slices."""

    def __init__(self, plan: ReshardPlan, source: Shards | None, destination: Shards | None):
        self.plan, self.source, self.destination = plan, source, destination
        slices = plan.source.slices
        _, first = numbered(slices, ("tensor", *BOX_FIELDS))
        self.boxes: dict[int, list[np.ndarray]] = {}
        for index in first.tolist():
            self.boxes.setdefault(int(slices["tensor"][index]), []).append(slices[index])
        self.wanted: dict[str, list[np.ndarray]] = {}
        if destination is not None:
            names = list(plan.destination.tensors)
            for held in plan.destination.of_rank(destination.rank):
                self.wanted.setdefault(names[held["tensor"]], []).append(held)

    @torch.no_grad()
    def run(self) -> None:
        for number, boxes in self.boxes.items():
            name = self.plan.names[number]
            shape = self.plan.source.tensors[name]
            whole = torch.empty(shape[0], int(np.prod(shape[1:], dtype=np.int64)))
            for box in boxes:
                place = whole[box["row"] : box["row"] + box["rows"], box["col"] : box["col"] + box["cols"]]
                part = torch.empty(place.shape)
                if dist.get_rank() == box["rank"] and self.source is not None:
                    part.copy_(self.source.region(box))
                dist.broadcast(part, src=int(box["rank"]))
                place.copy_(part)
            for held in self.wanted.get(name, []):
                assert self.destination is not None
                rows, cols = (slice(int(held[n]), int(held[n] + held[n + "s"])) for n in ("row", "col"))
                self.destination.region(held).copy_(whole[rows, cols])


def seconds_of(function: Callable[[int], object], repeats: int) -> float:
    """The median over repeats of the time until the last rank is done."""
    found = []
    for number in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        function(number)
        dist.barrier()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def compare(rank: int, folder: str, plan: ReshardPlan, repeats: int) -> dict[str, Any]:
    """One rank's part in both ways."""
    world = len(plan.ranks)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in plan.source.tensors.items()}
    blank = {name: torch.zeros(1).expand(shape) for name, shape in plan.destination.tensors.items()}
    source = Shards(plan.source, rank, local_tensors(plan.source, rank, whole))
    del whole
    destination = None
    if rank < plan.destination.world_size:
        destination = Shards(plan.destination, rank, local_tensors(plan.destination, rank, blank))
    slot = max(plan.slot_bytes, WORD_BYTES)
    found: dict[str, Any] = {}
    results: list[dict[str, Tensor]] = []
    gathering = Gathering(plan, source, destination)
    found["gather"] = seconds_of(lambda _: gathering.run(), repeats)
    results.append(kept(destination))
    for name, carrier, verify in (
        ("plan", ProcessGroupCarrier(slot), True),
        ("plan, no sums", ProcessGroupCarrier(slot), False),
        ("plan, shm", SharedMemoryCarrier(folder, rank, slot), True),
    ):
        for tensor in destination.tensors.values() if destination is not None else ():
            tensor.zero_()
        dtypes = dict.fromkeys(plan.names, torch.float32)
        sync = WeightSync(
            plan, rank, source=source, destination=destination, dtypes=dtypes, carrier=carrier, verify=verify
        )
        found[name] = seconds_of(lambda number, sync=sync: sync.run(number + 1), repeats)
        results.append(kept(destination))
    found["same"] = all(torch.equal(r[n], results[0][n]) for r in results for n in results[0])
    return found


def kept(destination: Shards | None) -> dict[str, Tensor]:
    return {} if destination is None else {name: tensor.clone() for name, tensor in destination.tensors.items()}


class SlowLink(SharedMemoryCarrier):
    """Each rank sends over one link of a fixed speed."""

    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> Any:
        time.sleep(nbytes / LINK_BYTES_PER_SECOND)
        return super()._post(slot, nbytes, to, tag)


def feed(rank: int, folder: str, plan: ReshardPlan, repeats: int) -> float:
    """Seconds until this rank was done feeding or being fed."""
    blank = {name: torch.zeros(shape) for name, shape in plan.source.tensors.items()}
    theirs = plan.destination_ranks.tolist()
    sync = WeightSync(
        plan,
        rank,
        source=Shards(plan.source, 0, local_tensors(plan.source, 0, blank)) if rank == 0 else None,
        destination=Shards(
            plan.destination, theirs.index(rank), local_tensors(plan.destination, theirs.index(rank), blank)
        )
        if rank in theirs
        else None,
        dtypes=dict.fromkeys(plan.names, torch.float32),
        carrier=SlowLink(folder, rank, max(plan.slot_bytes, WORD_BYTES)),
        verify=False,
    )
    return statistics.median(sync.run(version + 1).seconds for version in range(repeats))


def on_processes(function: Callable[..., Any], plan: ReshardPlan, repeats: int) -> list[Any]:
    """Runs a function on every rank of a plan, one forked process each."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        started = []
        for rank in plan.ranks:
            ours, theirs = context.Pipe()

            def work(rank: int = rank, end: Any = theirs) -> None:
                torch.set_num_threads(1)
                end.send(function(rank, folder, plan, repeats))

            process = context.Process(target=work)
            process.start()
            started.append((process, ours))
        answers = [connection.recv() for _, connection in started]
        for process, _ in started:
            process.join()
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-megabytes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    bucket = arguments.bucket_megabytes * MIB
    print(
        f"{'layouts':<22} {'model':>8} {'plan MiB':>9} {'gather MiB':>11} {'plan s':>8} {'no sums':>8} {'shm s':>8} "
        f"{'gather s':>9} {'faster':>7}"
    )
    for name, sides in pairs(arguments).items():
        plan = plan_reshard(*sides, itemsize=4, bucket_bytes=bucket)
        found = on_processes(compare, plan, arguments.repeats)
        if not all(answer["same"] for answer in found):
            raise SystemExit(f"{name}: the two ways left different bits")
        # Gathering is done by all ranks of the trainer; only those of the rollout are counted.
        slowest = {key: max(answer[key] for answer in found) for key in found[0]}
        size = sides[0].elements() * 4 / MIB
        print(
            f"{name:<22} {size:>7.0f}M {plan.received().sum() / MIB:>9.1f} {plan.gathered().sum() / MIB:>11.1f} "
            f"{slowest['plan']:>8.3f} {slowest['plan, no sums']:>8.3f} {slowest['plan, shm']:>8.3f} "
            f"{slowest['gather']:>9.3f} {slowest['gather'] / slowest['plan']:>6.1f}x"
        )
    print(f"\none trainer, links of {LINK_BYTES_PER_SECOND / MIB:.0f} MiB/s")
    print(f"{'copies':>7} {'chain s':>8} {'direct s':>9}")
    tensors = hf_tensors(model(arguments))
    for copies in (1, 2, 4):
        times = {}
        for kind in ("chain", "direct"):
            plan = plan_reshard(
                replicas(tensors, 1), replicas(tensors, copies), itemsize=4, bucket_bytes=2 * MIB,
                destination_ranks=range(1, copies + 1), feed=kind,
            )  # fmt: skip
            times[kind] = max(on_processes(feed, plan, 2))
        print(f"{copies:>7} {times['chain']:>8.2f} {times['direct']:>9.2f}")


if __name__ == "__main__":
    main()
