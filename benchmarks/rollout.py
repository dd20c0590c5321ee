"""Generation speed: the embedded rollout beside transformers' generate, its continuous batching, and vLLM if installed.

    python benchmarks/rollout.py                          CPU: tiny and 33 M models on one thread, 64 to 4,096 requests
    python benchmarks/rollout.py --gpu [--shapes 0.6B 1.7B] [--profile]
    python benchmarks/rollout.py --growth [--gpu]         64 to 4,096 requests alone

With vLLM beside it: `make test-vllm` once, then `.venv-vllm/bin/python benchmarks/rollout.py --rounds 5`.

The same random weights, prompts and lengths on all sides, log-probs on. On the CPU a figure is tokens per second of the
process's own time on one thread, with oneDNN off (it slows small matrices down on all sides); the best of the
rounds, in which the sides take turns.
`generate` takes the requests in batches of 256, padded, and runs each batch to its longest answer, as it must.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when vLLM is imported: everything in this process, on any core, nothing compiled.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4},
    "33M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
}
# Shapes of other families, by name: what makes their config.
OTHERS: dict[str, Callable[[], Any]] = {}
KV_HEADS = {"tiny": 2, "33M": 4}
HEAD_DIM = {"tiny": 32, "33M": 64}
VOCABULARY = {"tiny": 64, "33M": 8192}
# Bytes that an H200 reads in a second.
BANDWIDTH = 4.3e12
console = Console(width=120)


@dataclass(frozen=True)
class Work:
    """Prompts and how many tokens each gets."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.new_tokens)


def make_work(name: str, count: int, prompt: tuple[int, int], new: tuple[int, int], vocabulary: int) -> Work:
    """Random prompts with lengths in `prompt` and answers with lengths in `new`."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt[0], prompt[1] + 1, count)
    prompts = [rng.integers(2, vocabulary, n).tolist() for n in lengths]
    return Work(name, prompts, rng.integers(new[0], new[1] + 1, count).tolist())


def make_model(shape: str, attention: str, device: str) -> Any:
    """A Qwen3 of this shape, or another family's, with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = (
        OTHERS[shape]()
        if shape in OTHERS
        else Qwen3Config(
            vocab_size=VOCABULARY.get(shape, 151936),
            num_key_value_heads=KV_HEADS.get(shape, 8),
            head_dim=HEAD_DIM.get(shape, 128),
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=None,
            pad_token_id=0,
            rope_theta=1e6,
            **SHAPES[shape],
        )
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def embedded(shape: str, device: str, **settings: Any) -> Callable[[Work], list[int]]:
    """Our engine; answers with the number of tokens of each request."""
    import meshrl.parallel.attention
    from meshrl.data.batch import DataProto
    from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
    from meshrl.rollout.requests import Request, SamplingParams

    model = make_model(shape, meshrl.parallel.attention.ATTENTION_NAME, device)
    rollout = EmbeddedRollout(model, pad_token_id=0, **settings)
    rollout.update_weights(model.named_parameters(), 0)

    def run(work: Work) -> list[int]:
        requests = [
            Request(f"r{i}", tuple(p), SamplingParams(n), i)
            for i, (p, n) in enumerate(zip(work.prompts, work.new_tokens, strict=True))
        ]
        rollout.blocks.flush()  # rounds must not find each other's prompts
        return [len(answer.token_ids) for answer in rollout.complete(requests)]

    def run_batch(work: Work) -> list[int]:
        """The same as one batch of prompts for training, which takes answers of one length only."""
        ids = torch.tensor(work.prompts)
        fields = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": torch.arange(len(ids))}
        output = rollout.generate_sequences(DataProto.from_dict(fields), SamplingParams(work.new_tokens[0]))
        return output.batch["response_mask"].sum(1).tolist()

    run.rollout, run.batch = rollout, run_batch  # type: ignore[attr-defined]
    return run


def generate(shape: str, device: str) -> Callable[[Work], list[int]]:
    """Transformers' own loop, with the log-probs of its tokens."""
    model = make_model(shape, "sdpa", device)

    @torch.no_grad()
    def run(work: Work) -> list[int]:
        for start in range(0, len(work.prompts), 256):
            prompts, longest = work.prompts[start : start + 256], max(work.new_tokens[start : start + 256])
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=device == "cpu",
            )
            if device == "cpu":
                model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
        return work.new_tokens

    return run


def continuous(shape: str, device: str) -> Callable[[Work], list[int]]:
    """Transformers' continuous batching; one length for all requests of a call."""
    from transformers import GenerationConfig

    model = make_model(shape, "sdpa", device)

    def run(work: Work) -> list[int]:
        how = GenerationConfig(
            max_new_tokens=max(work.new_tokens), do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        model.generate_batch(inputs=work.prompts, generation_config=how)
        return work.new_tokens

    return run


def vllm(shape: str, device: str) -> Callable[[Work], list[int]]:
    """vLLM in this process, from the same weights in a folder."""
    import tempfile

    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from vllm import LLM
    from vllm import SamplingParams as Params

    if device == "cpu":
        # As for the other sides: plain BLAS, which is also faster for vLLM at these sizes.
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False
    folder = tempfile.mkdtemp()
    make_model(shape, "sdpa", "cpu").save_pretrained(folder)
    options: dict[str, Any] = {}
    if device == "cpu":
        options = {"kv_cache_memory_bytes": 1 << 28, "enforce_eager": True, "dtype": "float32"}
    engine = LLM(folder, skip_tokenizer_init=True, max_num_seqs=256, max_model_len=4096, **options)

    def run(work: Work) -> list[int]:
        params = [
            Params(max_tokens=n, min_tokens=n, logprobs=0, detokenize=False, ignore_eos=True) for n in work.new_tokens
        ]
        inputs = [{"prompt_token_ids": p} for p in work.prompts]
        return [len(o.outputs[0].token_ids) for o in engine.generate(inputs, params, use_tqdm=False)]

    return run


def seconds_of(run: Callable[[Work], list[int]], work: Work, device: str) -> float:
    """Seconds (of the process on a CPU) that a side takes for all requests."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    started = clock()
    lengths = run(work)
    if device == "cuda":
        torch.cuda.synchronize()
    assert lengths == work.new_tokens
    return clock() - started


def measured(run: Callable[[Work], list[int]], work: Work, device: str, rounds: int) -> tuple[float, float]:
    """Tokens a second and seconds of the best round, after one to warm up."""
    run(work)
    best = min(seconds_of(run, work, device) for _ in range(rounds))
    return work.tokens / best, best


def held_memory(device: str) -> float:
    """GiB that are in use: the most so far on a GPU, at present on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return psutil.Process().memory_info().rss / 2**30


def compare(title: str, shape: str, works: list[Work], device: str, sides: dict[str, Any], rounds: int) -> None:
    """One table: a row for each side, a column for each kind of work. On a CPU the sides take turns."""
    table = Table(title=title, title_justify="left")
    for column in ("", *(f"{work.name}\ntok/s" for work in works), "ms a token", "GiB", "against first"):
        table.add_column(column, justify="right" if column else "left")
    best: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    runs: dict[str, Callable[[Work], list[int]]] = {}

    def take_turns() -> None:
        for _ in range(rounds):
            for name, run in runs.items():
                seconds = [seconds_of(run, work, device) for work in works]
                best[name] = [min(pair) for pair in zip(best.get(name, seconds), seconds, strict=True)]

    for name, side in sides.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = held_memory(device)
        try:
            runs[name] = side(shape, device)
        except ImportError as error:
            table.add_row(name, *(["not installed"] * len(works)), str(error)[:30], "", "")
            continue
        for work in works:
            runs[name](work)
        memory[name] = held_memory(device) - (before if device == "cpu" else 0)
        if device == "cuda":  # one at a time has the memory
            take_turns()
            del runs[name]
            gc.collect()
            torch.cuda.empty_cache()
    take_turns()
    first = next(iter(best.values()))
    for name, seconds in best.items():
        speeds = [f"{work.tokens / took:,.0f}" for work, took in zip(works, seconds, strict=True)]
        ratios = " ".join(f"{own / this:.2f}x" for own, this in zip(first, seconds, strict=True))
        gap = 1e3 * seconds[-1] / max(works[-1].new_tokens)
        table.add_row(name, *speeds, f"{gap:.2f}", f"{memory[name]:.2f}", ratios)
    console.print(table)


def limit(shape: str, work: Work) -> float:
    """Tokens a second if nothing but the bytes of weights and cache had to move."""
    s = SHAPES[shape]
    layer = s["hidden_size"] * (4096 + 2048)
    weights = 2 * (28 * (layer + 3 * s["hidden_size"] * s["intermediate_size"]) + 151936 * s["hidden_size"])
    cache = sum((len(p) + n / 2) * n for p, n in zip(work.prompts, work.new_tokens, strict=True)) * 28 * 2 * 1024 * 2
    return work.tokens / ((max(work.new_tokens) * weights + cache) / BANDWIDTH)


def profile(run: Callable[[Work], list[int]], work: Work) -> None:
    """Where the device's time goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        started = time.perf_counter()
        run(work)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    rows = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:16]
    busy = sum(e.self_device_time_total for e in found.key_averages()) / 1e6
    console.print(f"device busy {busy:.3f} s of {seconds:.3f} s")
    for row in rows:
        console.print(f"{row.self_device_time_total / 1e3:9.1f} ms {row.count:7d} x  {row.key[:90]}")


def gpu(shapes: list[str], with_profile: bool, others: bool, rounds: int) -> None:
    for shape in shapes:
        prompt = 128 if shape == "0.6B" else 256
        even = make_work(f"256 x ({prompt} + 256)", 256, (prompt, prompt), (256, 256), 151936)
        works = [even]
        if shape == "0.6B":
            works.append(make_work("256 x (100-1024 + 100-1024)", 256, (100, 1024), (100, 1024), 151936))
        run = embedded(shape, "cuda", max_num_batched_tokens=1 << 16)
        for work in works:
            speed, seconds = measured(run, work, "cuda", rounds)
            bound = limit(shape, work)
            console.print(f"{shape} {work.name}: {speed:,.0f} tok/s in {seconds:.3f} s; bytes allow {bound:,.0f}")
            if work is even:
                speed, seconds = measured(run.batch, work, "cuda", rounds)  # type: ignore[attr-defined]
                console.print(f"{shape} {work.name} as a batch for training: {speed:,.0f} tok/s in {seconds:.3f} s")
        if with_profile:
            profile(run, even)
        del run
        gc.collect()
        torch.cuda.empty_cache()
        if others:
            sides = {"generate": generate, "continuous batching": continuous, "vLLM": vllm}
            compare(f"{shape}, other engines", shape, [even], "cuda", sides, 1)


def growth(device: str) -> None:
    """The cost of more requests."""
    shape = "tiny" if device == "cpu" else "0.6B"
    run = embedded(shape, device)
    table = Table(title=f"{shape}: requests of 16 + 8-64 tokens", title_justify="left")
    for column in ("requests", "tokens", "seconds", "tok/s", "against 64"):
        table.add_column(column, justify="right")
    first = 0.0
    for count in (64, 256, 1024, 4096):
        work = make_work("", count, (16, 16), (8, 64), VOCABULARY.get(shape, 151936))
        speed, seconds = measured(run, work, device, 2)
        first = first or speed
        table.add_row(f"{count:,}", f"{work.tokens:,}", f"{seconds:.2f}", f"{speed:,.0f}", f"{speed / first:.2f}x")
    console.print(table)


def cpu(rounds: int, with_continuous: bool) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    sides: dict[str, Any] = {"embedded": embedded, "generate": generate, "vLLM": vllm}
    if with_continuous:
        sides["continuous batching"] = continuous
    works = [
        make_work("256 x (16 + 64)", 256, (16, 16), (64, 64), 64),
        make_work("256 x (4-32 + 8-120)", 256, (4, 32), (8, 120), 64),
    ]
    compare("tiny (0.6 M)", "tiny", works, "cpu", sides, rounds)
    works = [make_work("64 x (4-32 + 8-64)", 64, (4, 32), (8, 64), 8192)]
    compare("33 M", "33M", works, "cpu", sides, max(1, rounds - 2))
    growth("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "1.7B"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--others", action="store_true", help="also transformers and vLLM on the GPU (slow)")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--continuous", action="store_true", help="also transformers' continuous batching (very slow)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.growth:
        torch.set_num_threads(1)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        growth("cuda" if args.gpu else "cpu")
    elif args.gpu:
        gpu(args.shapes, args.profile, args.others, args.rounds)
    else:
        cpu(args.rounds, args.continuous)


if __name__ == "__main__":
    main()
