"""Weight sync by a plan beside gathering every tensor whole on every rank, on real processes in the same run.

    python benchmarks/sync.py [--hidden 256] [--layers 8] [--bucket-megabytes 4] [--repeats 5] [--only layouts]

Both ways move float32 over gloo between the same processes and must leave the same bits; the gathering way broadcasts
every shard of every tensor to all ranks and cuts out what each needs. Bytes are those received, over all rollout ranks.
The plan's way is timed with its sums of both sides (the default) and without; `shm` is the same over shared memory. The
second table feeds 1, 2 and 4 copies of a rollout from one trainer over links of a fixed speed. The third does so from a
real engine to real embedded rollouts in another pool, which generate meanwhile: the stall is the largest time without a
token. The fourth trains the demo by GRPO on two processes with a rollout in bfloat16, and counts bytes with and without
delta mode.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import hf_tensors
from meshrl.parallel.mesh import shard_layout
from meshrl.rollout.requests import Request, SamplingParams
from meshrl.weights.disaggregated import MeetingPoint
from meshrl.weights.placement import Placement, RolloutLayout, Shards, fsdp2, local_tensors, megatron, replicas, rollout
from meshrl.weights.planner import ReshardPlan, plan_reshard
from meshrl.weights.rectangles import BOX_FIELDS, numbered
from meshrl.weights.session import WORD_BYTES, WeightSync
from meshrl.weights.transports import ProcessGroupCarrier, SharedMemoryCarrier

MIB = 1 << 20


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
        "FSDP4 -> TP2xDP2": (fsdp2(tensors, shard_layout(4)), rollout(tensors, dense, RolloutLayout(2, 2))),
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

    bytes_per_second = 64 * MIB

    def _post(self, slot: Tensor, nbytes: int, to: int, tag: int) -> Any:
        time.sleep(nbytes / self.bytes_per_second)
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


def write_lm(folder: Path, arguments: argparse.Namespace) -> None:
    """A model of the benchmark's sizes, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    disable_progress_bar()
    fields = {name: value for name, value in vars(model(arguments)).items() if name != "model_type"}
    Qwen3ForCausalLM(Qwen3Config(**fields, max_position_embeddings=4096)).save_pretrained(folder)


def pool_rank(rank: int, folder: str, address: str, copies: int, staged: bool, link: int) -> tuple[float, float]:
    """One process of two pools, a trainer and rollouts: seconds of a sync, and the stall of one while generating."""
    from meshrl.config.engine import EngineConfig, FSDPConfig, ModelConfig
    from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
    from meshrl.models.loading import load_model
    from meshrl.parallel.attention import ATTENTION_NAME
    from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
    from meshrl.weights import disaggregated

    disable_progress_bar()
    SlowLink.bytes_per_second = link
    disaggregated.SharedMemoryCarrier = SlowLink  # type: ignore[misc]
    group = disaggregated.PoolGroup.join(address, rank, copies + 1)
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = EngineConfig(fsdp_config=FSDPConfig(model_dtype="fp32"))
        engine = FSDPEngine(ModelConfig(path=folder), config, None, device=torch.device("cpu"))
        engine.initialize()
        sync = disaggregated.connect_trainer(engine, group, copies, bucket_megabytes=2, verify=False)
        reports = [sync(None, version) for version in (1, 2, 3)]
        return reports[1].seconds, 0.0
    rollout = EmbeddedRollout(load_model(folder, ATTENTION_NAME), pad_token_id=0, max_model_len=2048)
    sync = disaggregated.connect_rollout(rollout, group, 1, staged=staged)
    seconds = [sync(rollout, version).seconds for version in (1, 2)][1]
    ask = Request("r", tuple(range(3, 35)), SamplingParams(2000), seed=rank)
    thread = threading.Thread(target=lambda: rollout.complete([ask]), daemon=True)
    thread.start()
    while rollout.num_generated() < 8:
        time.sleep(0.001)
    stall = sync(rollout, 3).stall_seconds
    rollout.abort()
    thread.join()
    return seconds, stall


def pool_table(arguments: argparse.Namespace) -> None:
    print(f"\none trainer to another pool's rollouts, which generate; links of {arguments.link_megabytes} MiB/s")
    print(f"{'copies':>7} {'sync s':>8} {'stall s':>8} {'stall s, weights not staged':>28}")
    with tempfile.TemporaryDirectory() as folder:
        write_lm(Path(folder), arguments)
        for copies in (1, 2, 4):
            found = {}
            for staged in (True, False):
                point = MeetingPoint()
                same = (folder, point.address, copies, staged, SlowLink.bytes_per_second)
                calls = [(pool_rank, rank, *same) for rank in range(copies + 1)]
                found[staged] = run_all(calls)
            seconds = max(seconds for seconds, _ in found[True])
            stalls = [max(stall for _, stall in found[staged]) for staged in (True, False)]
            print(f"{copies:>7} {seconds:>8.2f} {stalls[0]:>8.3f} {stalls[1]:>28.3f}")


def grpo_bytes(folder: Path, task: dict[str, str], model_path: Path, *overrides: str) -> float:
    """Bytes that all ranks received in a sync of a real GRPO run, on the average of its steps."""
    from rich.console import Console

    from meshrl.config.load import load_config
    from meshrl.trainer.launch import train

    common = [
        f"data.train_files=[{task['prompts']}]",
        f"data.val_files=[{task['held_out']}]",
        f"actor_rollout_ref.model.path={model_path}",
        f"trainer.default_local_dir={folder}",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=4",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.free_cache_engine=false",
    ]
    path = train(load_config("demo_grpo", [*common, *overrides]).config, console=Console(quiet=True))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    found = [row["weight_sync/received_bytes"] for row in rows if "weight_sync/received_bytes" in row]
    return statistics.mean(found)


def delta_table() -> None:
    from rich.console import Console

    from meshrl.models.tiny import make_tiny_model
    from meshrl.trainer.demo import ALPHABET, sft_run, write_data

    print("\nGRPO on the demo's task, 2 FSDP2 ranks, rollout in bfloat16: bytes received in a sync")
    print(f"{'learning rate':>14} {'all':>10} {'delta':>10} {'saved':>7}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "assets" / "model", ALPHABET)
        task = write_data(folder / "assets", seed=0)
        warm = sft_run(folder, task, 0, Console(quiet=True))
        whole = grpo_bytes(folder / "whole", task, warm)
        for rate in ("1e-6", "1e-5", "1e-4"):
            part = grpo_bytes(
                folder / rate,
                task,
                warm,
                f"actor_rollout_ref.actor.optim.lr={rate}",
                "actor_rollout_ref.rollout.update_weights_delta=true",
            )
            print(f"{rate:>14} {whole:>10.0f} {part:>10.0f} {1 - part / whole:>6.1%}")


def run_all(calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Runs functions with their arguments, a new process each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(calls), context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [future.result(timeout=600) for future in [pool.submit(*call) for call in calls]]


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
    parser.add_argument("--link-megabytes", type=int, default=64, help="speed of a link, a second")
    parser.add_argument("--only", choices=("layouts", "copies", "pools", "delta"))
    arguments = parser.parse_args()
    SlowLink.bytes_per_second = arguments.link_megabytes * MIB
    tables: dict[str, Callable[[], None]] = {
        "layouts": lambda: layout_table(arguments),
        "copies": lambda: copies_table(arguments),
        "pools": lambda: pool_table(arguments),
        "delta": delta_table,
    }
    for name, table in tables.items():
        if arguments.only in (None, name):
            table()


def layout_table(arguments: argparse.Namespace) -> None:
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


def copies_table(arguments: argparse.Namespace) -> None:
    print(f"\none trainer, links of {arguments.link_megabytes} MiB/s")
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
