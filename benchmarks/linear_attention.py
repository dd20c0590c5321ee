"""Models of which most layers carry a state (Qwen3.5): training, log-probs and generation beside plain transformers.

    python benchmarks/linear_attention.py [--parts train log-probs generate] [--profile]

One GPU, a shape like Qwen3.5-2B (three of four layers are gated delta nets), random weights in bf16, with the kernels
of flash-linear-attention on both sides (pip install 'meshrl[linear]'). Plain transformers pads samples, as it must;
ours lie end to end. Generation is beside transformers' `generate`, with the same requests.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import numpy as np
import rollout
import torch
import train
from rich.console import Console
from rich.table import Table

SHAPE = "like Qwen3.5-2B"
TOKENS, MICRO_BATCH = 65536, 16384
console = Console(width=120)


def config() -> Any:
    """The shape."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )


def training(parts: list[str]) -> None:
    """Even and RL-like lengths."""
    even, ragged = train.even_lengths(TOKENS, 2048), train.ragged_lengths(TOKENS)
    table = Table(title=f"{SHAPE}, one GPU", title_justify="left")
    for column in ("", "tokens/s", "", "of 790 TFLOP/s", "peak GiB"):
        table.add_column(column, justify="right" if column else "left")
    for part, trains in (("train", True), ("log-probs", False)):
        if part not in parts:
            continue
        for kind, lengths in (("even", even), ("ragged", ragged)):
            first = 0.0
            for side in ("plain", "meshrl"):

                def make(side: str = side, lengths: np.ndarray = lengths, trains: bool = trains) -> Any:
                    if side == "plain":
                        return train.plain_step(SHAPE, lengths, "cuda", checkpointing=trains, train=trains)
                    options = {"keep_logits_megabytes": 9000} if trains else {}
                    return train.engine_step(SHAPE, lengths, "cuda", MICRO_BATCH, trains, **options)

                label = f"{part}, {kind} lengths: {side}" + (", checkpointing" if trains and side == "plain" else "")
                row = train.measure(label, make, SHAPE, lengths, trains, "cuda")
                if "failed" in row:
                    table.add_row(label, row["failed"], "", "", "")
                    console.print(row)
                    continue
                speed = row["tokens_per_s"]
                first = first or speed
                cells = f"{speed:,.0f}", f"{speed / first:.2f}x", f"{row['utilisation']:.1%}", f"{row['peak_gib']:.1f}"
                table.add_row(label, *cells)
                console.print(label, *cells, f"graphs {row['compiled_graphs']}", f"{row['whole_s']:.0f} s")
    console.print(table)


def generation(with_profile: bool) -> None:
    """256 requests at once."""
    work = rollout.make_work("256 x (128 + 256)", 256, (128, 128), (256, 256), 248320)
    run: Any = rollout.embedded(SHAPE, "cuda", max_num_batched_tokens=1 << 16, memory_share=0.8)
    ours = rollout.measured(run, work, "cuda", 3)[0]
    console.print(f"{work.name}: meshrl {ours:,.0f} tok/s")
    if with_profile:
        rollout.profile(run, work)
    del run
    gc.collect()
    torch.cuda.empty_cache()
    theirs = work.tokens / rollout.seconds_of(rollout.generate(SHAPE, "cuda"), work, "cuda")
    console.print(f"{work.name}: meshrl {ours:,.0f} tok/s, transformers' generate {theirs:,.0f}: {ours / theirs:.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["generate", "log-probs", "train"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    train.OTHERS[SHAPE] = rollout.OTHERS[SHAPE] = config
    if "generate" in args.parts:
        generation(args.profile)
    training(args.parts)


if __name__ == "__main__":
    main()
