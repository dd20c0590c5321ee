"""Generation in 8 bits on a GPU: how much faster, and how far from the trainer's log-probs.

    python benchmarks/eight_bits.py [--shapes 1.7B 8B] [--profile]

The same random weights and requests with each of the two options, both, and neither. The trainer's side is Hugging
Face's own module in bfloat16 on the finished sequences, and the same one with products of 8-bit floats.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rollout import SHAPES, Work, embedded, make_model, make_work, measured, profile, seconds_of

# Qwen3's; the shorter ones are in benchmarks/rollout.py.
SHAPES["8B"] = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "kv_cache_dtype=fp8": {"kv_cache_dtype": "fp8"},
    "quantization=fp8": {"quantization": "fp8"},
    "both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
# Samples whose log-probs are compared.
COMPARED = 32
console = Console(width=120)


@torch.no_grad()
def log_prob_differences(run: Any, shape: str, work: Work) -> list[float]:
    """Mean differences of the answers' log-probs to Hugging Face's own module, in 16 bits and in 8."""
    from meshrl.data.batch import DataProto
    from meshrl.models.fp8 import compute_in_8_bits
    from meshrl.rollout.requests import SamplingParams

    ids = torch.tensor(work.prompts[:COMPARED])
    fields = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": torch.arange(len(ids))}
    made = run.rollout.generate_sequences(DataProto.from_dict(fields), SamplingParams(work.new_tokens[0])).batch
    model = make_model(shape, "sdpa", "cuda")
    parts = list(zip(made["input_ids"].cuda().split(4), made["rollout_log_probs"].cuda().split(4), strict=True))

    def difference() -> float:
        found = []
        for tokens, said in parts:
            width = said.shape[1]
            logits = model(tokens, use_cache=False, logits_to_keep=width + 1).logits[:, :-1].float()
            wanted = logits.log_softmax(-1).gather(-1, tokens[:, -width:, None])[..., 0]
            found.append((said - wanted).abs())
        return float(torch.cat(found).mean())

    differences = [difference()]
    compute_in_8_bits(model, torch.device("cuda"))
    return [*differences, difference()]


def compare(shape: str, ways: list[str], rounds: int, with_profile: bool) -> None:
    """A table of the ways."""
    work = make_work("256 x (256 + 256)", 256, (256, 256), (256, 256), 151936)
    long = make_work("256 x (256 + 1024)", 256, (256, 256), (1024, 1024), 151936)
    table = Table(title=f"{shape}, one GPU, 256 requests at once", title_justify="left")
    differs = ("nats a token from a trainer in 16 bits", "in 8")
    for column in ("", "256 + 256, tok/s", "", "256 + 1,024, tok/s", "", *differs):
        table.add_column(column, justify="right" if column else "left")
    first: list[float] = []
    for name in ways:
        settings = WAYS[name]
        run: Any = embedded(shape, "cuda", max_num_batched_tokens=1 << 16, memory_share=0.8, **settings)
        speeds = [measured(run, work, "cuda", rounds)[0], long.tokens / seconds_of(run, long, "cuda")]
        nats = [f"{difference:.4f}" for difference in log_prob_differences(run, shape, work)]
        first = first or speeds
        cells = [
            text
            for ours, theirs in zip(speeds, first, strict=True)
            for text in (f"{ours:,.0f}", f"{ours / theirs:.2f}x")
        ]
        table.add_row(name, *cells, *nats)
        console.print(shape, name, *cells, *nats)
        if with_profile:
            console.print(name)
            profile(run, work)
        del run
        gc.collect()
        torch.cuda.empty_cache()
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.7B", "8B"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    for shape in args.shapes:
        compare(shape, args.ways, args.rounds, args.profile)


if __name__ == "__main__":
    main()
