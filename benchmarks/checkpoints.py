"""What a checkpoint holds training up for, and what a conversion needs in memory, beside torch's own ways.

    python benchmarks/checkpoints.py [--hidden 512] [--layers 12] [--device cpu] [--repeats 3]

One process, weights and AdamW's two moments. `held` is how long training stands still, `written` when the files are
complete (ours with checksums and fsync, torch's without), `CPU` what both took of the process's time. Memory of
conversions is anonymous memory above the start, in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import Qwen3Config

from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.engines.state_files import record_file, write_index, write_snapshot
from meshrl.models.saving import save_configs
from meshrl.parallel.mesh import init_process_group
from meshrl.trainer.checkpoints import FORMAT
from meshrl.trainer.convert import to_hf

MIB = 1 << 20


def make_engine(folder: Path, arguments: argparse.Namespace) -> FSDPEngine:
    Qwen3Config(
        vocab_size=16000,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=arguments.hidden // 8,
    ).save_pretrained(folder)
    config = EngineConfig()
    config.fsdp_config.mixed_precision.param_dtype = "fp32"
    device = torch.device(arguments.device)
    engine = FSDPEngine(
        ModelConfig(path=str(folder), random_init=True), config, OptimConfig(), device=device, total_steps=1
    )
    engine.initialize()
    for param in engine.module.parameters():
        param.grad = torch.zeros_like(param)
    engine.optimizer_step()
    engine.optimizer_zero_grad()
    return engine


def state_of(engine: FSDPEngine) -> dict[str, Any]:
    return {"model": engine.module.state_dict(), "optimizer": engine.optimizer.state_dict()}


def ours(engine: FSDPEngine, folder: Path, background: bool) -> tuple[float, float]:
    started = time.perf_counter()
    snapshot = engine.snapshot()
    if background:
        snapshot = snapshot.copied()
    held = time.perf_counter() - started
    part = write_snapshot(snapshot, folder, 0)
    part.records(folder)
    record_file(write_index(folder, [part.entries]), folder)
    written = time.perf_counter() - started
    return (held if background else written), written


def in_memory(engine: FSDPEngine, folder: Path) -> tuple[float, float]:
    """As `trainer.memory_copy_freq` does it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        times = ours(engine, Path(memory), False)
        for file in Path(memory).iterdir():
            (folder / file.name).touch()
            os.truncate(folder / file.name, file.stat().st_size)
    return times


def torch_save(engine: FSDPEngine, folder: Path) -> tuple[float, float]:
    started = time.perf_counter()
    torch.save(state_of(engine), folder / "state.pt")
    return (time.perf_counter() - started,) * 2


def torch_dcp(engine: FSDPEngine, folder: Path, background: bool) -> tuple[float, float]:
    started = time.perf_counter()
    if not background:
        dcp.save(state_of(engine), checkpoint_id=str(folder))
        return (time.perf_counter() - started,) * 2
    future = dcp.async_save(state_of(engine), checkpoint_id=str(folder))
    held = time.perf_counter() - started
    future.result()
    return held, time.perf_counter() - started


def time_saves(engine: FSDPEngine, root: Path, repeats: int) -> None:
    ways: dict[str, Callable[[Path], tuple[float, float]]] = {
        "torch.save": lambda folder: torch_save(engine, folder),
        "torch DCP": lambda folder: torch_dcp(engine, folder, False),
        "torch DCP async": lambda folder: torch_dcp(engine, folder, True),
        "ours": lambda folder: ours(engine, folder, False),
        "ours, async_save": lambda folder: ours(engine, folder, True),
        "ours, in memory": lambda folder: in_memory(engine, folder),
    }
    found: dict[str, list[tuple[float, float, float, int]]] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            folder = root / "save"
            folder.mkdir()
            before = time.process_time()
            held, written = way(folder)
            used = time.process_time() - before
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            found.setdefault(name, []).append((held, written, used, size))
            shutil.rmtree(folder)
    print(f"{'way':<18}{'held s':>9}{'written s':>11}{'CPU s':>8}{'MiB':>8}")
    for name, runs in found.items():
        held, written, used, size = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:<18}{held:>9.3f}{written:>11.3f}{used:>8.2f}{size / MIB:>8.0f}")


def peak_of(work: Callable[..., None], *arguments: Any) -> tuple[float, float]:
    """Seconds, and MiB of anonymous memory above the start, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours_end, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, work, arguments))
    process.start()
    answer = ours_end.recv()
    process.join()
    return answer


def _measure(pipe: Any, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

    torch.set_num_threads(1)
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    work(*arguments)
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    pipe.send((seconds, float(peak)))


def convert(checkpoint: Path, out: Path, shard: int) -> None:
    to_hf(checkpoint, out, shard_bytes=shard * MIB)


def write_checkpoint(engine: FSDPEngine, path: Path) -> None:
    import json
    from dataclasses import asdict

    part = write_snapshot(engine.snapshot(("model",)), path / "actor", 0)
    files = [*part.files, write_index(path / "actor", [part.entries])]
    save_configs(path / "actor" / "huggingface", engine.hf_model)
    files += list((path / "actor" / "huggingface").iterdir())
    records = [asdict(record_file(file, path)) for file in files]
    (path / "manifest.json").write_text(json.dumps({"format": FORMAT, "step": 1, "files": records}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shard", type=int, default=32, help="MiB of a shard in conversions")
    arguments = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}.items():
        os.environ.setdefault(name, value)
    init_process_group(torch.device(arguments.device), 60.0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        engine = make_engine(root / "model", arguments)
        count = sum(p.numel() for p in engine.module.parameters())
        print(f"{count / 1e6:.0f} M parameters on {arguments.device}")
        time_saves(engine, root, arguments.repeats)
        write_checkpoint(engine, root / "global_step_1")
        del engine
        print(f"\n{'conversion':<44}{'seconds':>9}{'peak MiB':>10}")
        for shard in (arguments.shard, 4 * arguments.shard):
            seconds, peak = peak_of(convert, root / "global_step_1", root / f"hf{shard}", shard)
            print(f"{f'checkpoint to shards of {shard} MiB':<44}{seconds:>9.2f}{peak:>10.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
