"""Training speed on one GPU: our FSDP engine beside plain transformers, same shapes, data and loss, in the same run.

    python benchmarks/train.py [--shapes 1.7B 4B] [--parts even ragged log-probs fp8] [--out results.json]
    python benchmarks/train.py --cpu          # a tiny model: packed against padded, and what each axis costs

Qwen3 shapes, random weights, bf16 compute. Plain: bf16 weights and moments, SDPA, padded micro-batches of 16,384,
with or without gradient checkpointing. Ours: float32 master weights and moments, packed micro-batches; with the part
`fp8` once more with products of 8-bit floats (`mixed_precision.product_dtype`). Utilisation is
of the model's own operations (6 per parameter and token, causal attention by real lengths) against 790 TFLOP/s,
the rate of large bf16 matrix products on an H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

PEAK_FLOPS = 790e12
VOCABULARY = 151936
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
# Shapes of other families, by name: what makes their config.
OTHERS: dict[str, Callable[[], Any]] = {}
# Tokens of a batch, length of its sequences, and our tokens per micro-batch.
EVEN = {"0.6B": (65536, 2048, 16384), "1.7B": (65536, 2048, 8192), "4B": (32768, 4096, 4096)}
# At 4B memory is short: micro-batches add up in bf16, and a part of the activations is computed again.
OPTIONS: dict[str, dict[str, Any]] = {"4B": {"reduce_dtype": "bf16", "activation_memory_budget": 0.75}}


def shape_config(name: str) -> Any:
    """The Qwen3 config of a shape, or another family's."""
    from transformers import Qwen3Config

    if name in OTHERS:
        return OTHERS[name]()
    tiny = name == "tiny"
    return Qwen3Config(
        vocab_size=1000 if tiny else VOCABULARY,
        num_key_value_heads=4 if tiny else 8,
        head_dim=16 if tiny else 128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        rope_theta=1e6,
        **SHAPES[name],
    )


def even_lengths(tokens: int, length: int) -> np.ndarray:
    """Documents of one length."""
    return np.full(tokens // length, length)


def ragged_lengths(tokens: int, cap: int = 8192, mean: float = 800.0) -> np.ndarray:
    """RL-like lengths: log-normal, a few very long, about `tokens` in all."""
    rng = np.random.default_rng(0)
    spread = 1.0
    lengths = rng.lognormal(np.log(mean) - spread**2 / 2, spread, size=4 * int(tokens / mean))
    lengths = np.clip(lengths, 16, cap).astype(np.int64)
    return lengths[: int(np.searchsorted(lengths.cumsum(), tokens)) + 1]


def count_flops(config: Any, lengths: np.ndarray, passes: int) -> float:
    """Operations of the model on these documents; `passes` is 3 for training (backward is twice forward), else 1."""
    if getattr(config, "linear_num_value_heads", None):
        from meshrl.telemetry.flops import ModelShape

        shape = ModelShape.of(config)
        assert shape is not None
        return passes * shape.forward(lengths)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = hidden * (query + 2 * key) + query * hidden + 3 * hidden * inner
    matrices = 2.0 * (layers * layer + hidden * config.vocab_size) * lengths.sum()
    attention = 2.0 * layers * query * float((lengths.astype(np.float64) ** 2).sum())
    return passes * (matrices + attention)


def make_batch(lengths: np.ndarray, vocabulary: int) -> Any:
    """A padded batch of random tokens, every token but the first of a document to be predicted."""
    from meshrl.data.batch import DataProto

    ids = torch.randint(0, vocabulary, (len(lengths), int(lengths.max())), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]).long()
    targets = mask.clone()
    targets[:, 0] = 0
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "response_mask": targets})


def timed(step: Callable[[], None], device: str, warm: int = 2, repeat: int = 3) -> tuple[float, float]:
    """Seconds of one step and peak GiB, after warming up."""
    for _ in range(warm):
        step()
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    started = time.perf_counter()
    for _ in range(repeat):
        step()
    synchronize()
    seconds = (time.perf_counter() - started) / repeat
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def plain_step(name: str, lengths: np.ndarray, device: str, checkpointing: bool, train: bool) -> Callable[[], None]:
    """Plain transformers: padded micro-batches of about 16,384 tokens with padding, float32 log-softmax."""
    from transformers import AutoModelForCausalLM

    config = shape_config(name)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True) if train else None
    data = make_batch(lengths, config.vocab_size).batch
    budget = 16384 if device == "cuda" else 4096
    even = len(set(lengths.tolist())) == 1
    size = max(1, budget // int(lengths.max()))
    total = int(data["response_mask"].sum())

    def step() -> None:
        with torch.set_grad_enabled(train):
            for i in range(0, len(lengths), size):
                width = int(lengths[i : i + size].max())
                ids, mask, targets = (
                    data[k][i : i + size, :width].to(device) for k in ("input_ids", "attention_mask", "response_mask")
                )
                logits = model(input_ids=ids, attention_mask=None if even else mask, use_cache=False).logits
                log_p = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
                loss = -(log_p * targets[:, 1:]).sum() / total
                if train:
                    loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def engine_step(
    name: str, lengths: np.ndarray, device: str, tokens: int, train: bool, **options: Any
) -> Callable[[], None]:
    """Our engine on packed rows; float32 master weights and moments. Ranks take equal shares of the samples."""
    import torch.distributed as dist

    from meshrl.algorithms import BatchStats, agg_loss
    from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
    from meshrl.engines.engine_class import engine_class

    if not dist.is_initialized():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    config = shape_config(name)
    folder = Path(tempfile.mkdtemp())
    config.save_pretrained(folder)
    engine_config = EngineConfig(use_torch_compile=device == "cuda")
    if device == "cpu":
        engine_config.fsdp_config.mixed_precision.param_dtype = "fp32"
    for key, value in options.items():
        owners = (engine_config, engine_config.fsdp_config, engine_config.fsdp_config.mixed_precision)
        if key != "checkpointing":
            setattr(next(owner for owner in owners if hasattr(owner, key)), key, value)
    model = ModelConfig(
        path=str(folder), random_init=True, enable_gradient_checkpointing=options.get("checkpointing", False)
    )
    engine = engine_class(engine_config)(
        model, engine_config, OptimConfig() if train else None, device=torch.device(device)
    )
    engine.initialize()
    whole = make_batch(lengths, config.vocab_size)
    stats = BatchStats(engine.gradient_ranks, int(whole.batch["response_mask"].sum()), len(lengths))
    data = whole.select_idxs(np.arange(engine.dp_rank, len(lengths), engine.dp_size))
    data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": tokens}

    def loss_function(output: dict[str, torch.Tensor], micro_batch: Any) -> Any:
        loss = agg_loss(-output["log_probs"], micro_batch.batch["response_mask"], "token-mean", stats=stats)
        return loss, {"loss": loss.detach()}

    def run(batch: Any) -> None:
        if not train:
            engine.forward(batch)
            return
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss_function)

    def step() -> None:
        run(data)
        if train:
            engine.optimizer_step()

    # A run's batches differ, this one's do not: what compiles anew for every number of documents must show.
    for documents in range(2, 12):
        small = make_batch(np.arange(documents) % 5 + 60, config.vocab_size)
        small.meta_info = data.meta_info
        run(small)
    return step


def measure(
    label: str, make: Callable[[], Callable[[], None]], name: str, lengths: np.ndarray, train: bool, device: str
) -> dict[str, Any]:
    """One row of the table; running out of memory is a result too."""
    row: dict[str, Any] = {"case": label, "shape": name, "tokens": int(lengths.sum())}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        started = time.perf_counter()
        step = make()
        seconds, peak = timed(step, device)
        flops = count_flops(shape_config(name), lengths, 3 if train else 1)
        row |= {
            "tokens_per_s": lengths.sum() / seconds,
            "utilisation": flops / seconds / PEAK_FLOPS,
            "peak_gib": peak,
            "compiled_graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
            "whole_s": time.perf_counter() - started,
        }
        del step
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return row


def cases(
    shapes: list[str], parts: list[str], device: str, strategy: str = "fsdp2"
) -> list[tuple[str, str, np.ndarray, bool, Callable[..., Any]]]:
    """What is measured: (label, shape, lengths, train, how to make the step)."""
    found: list[tuple[str, str, np.ndarray, bool, Callable[..., Any]]] = []

    def plain(name: str, lengths: np.ndarray, checkpointing: bool, train: bool = True) -> Callable[..., Any]:
        return lambda: plain_step(name, lengths, device, checkpointing, train)

    def ours(name: str, lengths: np.ndarray, tokens: int, train: bool = True, **options: Any) -> Callable[..., Any]:
        options = OPTIONS.get(name, {}) | options | {"strategy": strategy}
        return lambda: engine_step(name, lengths, device, tokens, train, **options)

    def with_8_bits(
        label: str, name: str, lengths: np.ndarray, tokens: int, train: bool = True, **options: Any
    ) -> Iterator[tuple[str, str, np.ndarray, bool, Callable[..., Any]]]:
        yield label, name, lengths, train, ours(name, lengths, tokens, train, **options)
        if "fp8" in parts:
            eight = ours(name, lengths, tokens, train, product_dtype="fp8", **options)
            yield f"{label}, products in 8 bits", name, lengths, train, eight

    for name in shapes:
        tokens, length, budget = EVEN.get(name, (4096, 256, 1024))
        even = even_lengths(tokens, length)
        if "even" in parts:
            found.append(("even: plain, checkpointing", name, even, True, plain(name, even, True)))
            found.append(("even: plain", name, even, True, plain(name, even, False)))
            found += with_8_bits(f"even: meshrl, {budget} a micro-batch", name, even, budget)
        ragged = ragged_lengths(tokens, cap=8192 if device == "cuda" else 512, mean=800.0 if device == "cuda" else 64.0)
        if "ragged" in parts:
            found.append(("ragged: plain, checkpointing", name, ragged, True, plain(name, ragged, True)))
            wide = max(budget, 16384) if device == "cuda" else budget
            found += with_8_bits(
                f"ragged: meshrl, {wide} a micro-batch", name, ragged, wide, keep_logits_megabytes=6000
            )
        if "log-probs" in parts:
            found.append(("log-probs: plain", name, even, False, plain(name, even, False, train=False)))
            found += with_8_bits("log-probs: meshrl", name, even, max(budget, 32768), train=False)
        if "log-probs" in parts and "ragged" in parts:
            found.append(("ragged log-probs: plain", name, ragged, False, plain(name, ragged, False, train=False)))
            found += with_8_bits("ragged log-probs: meshrl", name, ragged, 32768, train=False)
    return found


# Axes over two or four ranks, and the same tokens a rank and micro-batch.
AXES: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "fsdp 2": (2, {}),
    "ddp 2": (2, {"fsdp_size": 1}),
    "sp 2": (2, {"ulysses_sequence_parallel_size": 2}),
    "cp 2": (2, {"context_parallel_size": 2}),
    "fsdp 2 x sp 2": (4, {"ulysses_sequence_parallel_size": 2}),
    "fsdp 2 x cp 2": (4, {"context_parallel_size": 2}),
}


def axis_rank(rank: int, world: int, options: dict[str, int], store: str, out: str) -> None:
    """One rank of an axis's measurement: CPU-seconds of a training step, written to `out`."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    lengths = ragged_lengths(8192, cap=512, mean=64.0)
    lengths = lengths[: len(lengths) // 4 * 4]
    step = engine_step("tiny", lengths, "cpu", 1024, True, **options)
    step()
    dist.barrier()
    used = time.process_time()
    for _ in range(3):
        step()
    Path(f"{out}-{rank}").write_text(str((time.process_time() - used) / 3 / lengths.sum()))
    dist.barrier()
    dist.destroy_process_group()


def axis_costs() -> None:
    """What each axis costs in CPU time: all ranks together, on the same tokens."""
    import torch.multiprocessing as mp

    table = Table(title="cost of each axis on CPU processes (gloo), tiny model, packed ragged lengths")
    for heading in ("axis", "ranks", "CPU-µs a token, all ranks", "against one process"):
        table.add_column(heading, justify="left" if heading == "axis" else "right")
    first = 0.0
    for name, (world, options) in AXES.items():
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(axis_rank, (world, options, f"{folder}/store", f"{folder}/out"), nprocs=world)
            cost = sum(float(Path(f"{folder}/out-{rank}").read_text()) for rank in range(world)) * 1e6
        first = first or cost
        table.add_row(name, str(world), f"{cost:.0f}", f"{cost / first:.2f}x")
    Console(width=130).print(table)


def show(rows: list[dict[str, Any]], device: str) -> None:
    """The table."""
    from meshrl.parallel.attention import has_flash_4

    kernel = "FlashAttention 4" if has_flash_4(torch.device(device)) else "torch's own kernel"
    by = f"; our attention of unequal lengths by {kernel}" if device == "cuda" else ""
    table = Table(title=f"training on one {device}, Qwen3 shapes, random weights{by}")
    for heading in ("shape", "case", "tokens", "tokens/s", "utilisation", "peak GiB", "graphs"):
        table.add_column(heading, justify="left" if heading in ("shape", "case") else "right")
    for row in rows:
        numbers = [row.get("failed", "")] + [""] * 3
        if "failed" not in row:
            use = f"{row['utilisation']:.1%}" if device == "cuda" else "–"
            numbers = [f"{row['tokens_per_s']:,.0f}", use, f"{row['peak_gib']:.1f}", str(row["compiled_graphs"])]
        table.add_row(row["shape"], row["case"], f"{row['tokens']:,}", *numbers)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=None)
    parser.add_argument("--parts", nargs="+", default=["even", "ragged", "log-probs"])
    parser.add_argument(
        "--cpu", action="store_true", help="a tiny model on the CPU: packed against padded, and each axis"
    )
    parser.add_argument("--engine", default="fsdp2", choices=("fsdp2", "megatron"), help="our side's training engine")
    parser.add_argument("--only", default="", help="only cases whose label contains this")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON")
    args = parser.parse_args()
    device = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
    shapes = args.shapes or (["tiny"] if device == "cpu" else ["0.6B", "1.7B", "4B"])
    known = cases(shapes, args.parts, device, args.engine)
    wanted = [case for case in known if args.only in case[0]]
    if not wanted:
        parser.error(f"no case has {args.only!r} in its label; there are: {'; '.join(case[0] for case in known)}")
    rows = []
    for label, name, lengths, train, make in wanted:
        rows.append(measure(label, make, name, lengths, train, device))
        Console(stderr=True).print(rows[-1])
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1))
    show(rows, device)
    if device == "cpu":
        axis_costs()


if __name__ == "__main__":
    main()
