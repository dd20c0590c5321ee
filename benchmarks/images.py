"""A policy that sees, on one GPU: generation and an update beside Transformers' own model, in the same run.

    python benchmarks/images.py [--shape 2B] [--parts generate turns update]
    python benchmarks/images.py --cpu         # a tiny model

Qwen3-VL's shapes, random weights. Every prompt has one image of its own (512 x 512 pixels are 256 tokens) and 64 tokens
of text. Transformers pads, and looks at the image of every sample; ours packs, and looks at an image once for all
answers to its prompt that share a row. `turns` are conversations in which every turn shows another image.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "text": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        "vision": {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2},
        "head_dim": 16, "kv_heads": 2, "vocabulary": 1000, "deep": [0], "sections": [4, 2, 2],
    },
    "2B": {
        "text": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
        "vision": {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16},
        "head_dim": 128, "kv_heads": 8, "vocabulary": 151936, "deep": [5, 11, 17], "sections": [24, 20, 20],
    },
}  # fmt: skip
# Prompts, answers to each, longest answer, text of a prompt, side of an image.
WORK = {"tiny": (4, 4, 12, 5, 64), "2B": (32, 8, 256, 64, 512)}
PATCH, MERGE = 16, 2
console = Console(width=120)


def make_folder(shape: str) -> Path:
    """A folder with the config, and with how images are read."""
    from transformers import Qwen3VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    own, folder = SHAPES[shape], Path(tempfile.mkdtemp())
    size = own["vocabulary"]
    text = own["text"] | {
        "vocab_size": size,
        "num_key_value_heads": own["kv_heads"],
        "head_dim": own["head_dim"],
        "max_position_embeddings": 4096,
        "eos_token_id": None,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": own["sections"]},
    }
    vision = own["vision"] | {
        "out_hidden_size": own["text"]["hidden_size"],
        "deepstack_visual_indexes": own["deep"],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
    }
    Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=size - 1,
        video_token_id=size - 2,
        vision_start_token_id=size - 3,
        vision_end_token_id=size - 4,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": 1024, "longest_edge": 1 << 24}
    ).save_pretrained(folder)
    return folder


class Work:
    """Prompts with an image each, and how long the answers to them are."""

    def __init__(self, shape: str, folder: Path):
        from meshrl.data.images import ImageReader, as_png

        prompts, self.n, self.longest, text, side = WORK[shape]
        rng = np.random.default_rng(0)
        images = [as_png(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(prompts)]
        reader, size = ImageReader(folder), SHAPES[shape]["vocabulary"]
        self.image_token = size - 1
        tokens = reader.num_tokens(images[0])
        around = [size - 3, *[size - 1] * tokens, size - 4]
        words = [rng.integers(2, size - 5, text).tolist() for _ in range(prompts)]
        self.prompts = [around + own for own in words for _ in range(self.n)]
        self.images = [(image,) for image in images for _ in range(self.n)]
        self.pixels = [reader.pixels(image) for image in images for _ in range(self.n)]
        count = len(self.prompts)
        # RL-like answers: most are short, a few as long as can be.
        self.lengths = np.clip(rng.lognormal(np.log(self.longest / 3), 0.8, count), 4, self.longest).astype(int)
        self.vocabulary = size

    def padded(self, answers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, mask and mask of answers of prompts, which are all of one length, with random answers behind them."""
        width, longest = len(self.prompts[0]), int(answers.max())
        tail = torch.randint(
            2, self.vocabulary - 5, (len(answers), longest), generator=torch.Generator().manual_seed(0)
        )
        kept = torch.arange(longest) < torch.from_numpy(answers)[:, None]
        ids = torch.cat([torch.tensor(self.prompts), torch.where(kept, tail, 0)], 1)
        mask = torch.cat([torch.ones(len(answers), width, dtype=torch.bool), kept], 1).long()
        asked = mask.clone()
        asked[:, :width] = 0
        return ids, mask, asked

    def image_inputs(self, rows: slice, ids: torch.Tensor, device: str) -> dict[str, torch.Tensor]:
        """What Transformers takes for the images of some rows."""
        pixels = self.pixels[rows]
        return {
            "pixel_values": torch.cat([one.values for one in pixels]).to(device),
            "image_grid_thw": torch.tensor([one.grid for one in pixels], device=device),
            "mm_token_type_ids": (ids == self.image_token).int(),
        }


def timed(step: Callable[[], Any], device: str, repeat: int = 2) -> tuple[float, float]:
    """Seconds of the best of some rounds after one to warm up, and peak GiB."""
    step()
    best = float("inf")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeat):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def hf_model(folder: Path, device: str, attention: str = "sdpa") -> Any:
    """Transformers' own model with random weights."""
    from meshrl.models.loading import load_model_config, new_causal_lm

    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return new_causal_lm(load_model_config(folder), attention, dtype).eval()


def embedded(folder: Path, work: Work, device: str, with_images: bool) -> Callable[[], int]:
    """Our rollout; without images the same tokens are text."""
    from meshrl.config.engine import ModelConfig
    from meshrl.data.batch import DataProto
    from meshrl.data.images import IMAGES
    from meshrl.models.vision import find_sight
    from meshrl.parallel.attention import ATTENTION_NAME
    from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
    from meshrl.rollout.requests import SamplingParams

    model = hf_model(folder, device, ATTENTION_NAME)
    sight = find_sight(model.config, ModelConfig(path=str(folder)))
    rollout = EmbeddedRollout(
        model, pad_token_id=0, sight=sight, max_num_batched_tokens=1 << 15, memory_share=0.5, max_model_len=1024
    )
    rollout.update_weights(model.named_parameters(), 0)
    ids = torch.tensor(work.prompts)
    fields = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": torch.arange(len(ids))}
    images = np.empty(len(ids), dtype=object)
    images[:] = work.images
    batch = DataProto.from_dict(tensors=fields, non_tensors={IMAGES: images} if with_images else {})

    def step() -> int:
        output = rollout.generate_sequences(batch, SamplingParams(work.longest))
        return int(output.batch["response_mask"].sum())

    return step


TURNS = 4


def conversations(folder: Path, work: Work, device: str, caching: bool) -> Callable[[], int]:
    """One conversation for each prompt: turns of a prompt's words and an image, answers of an eighth of the longest."""
    from meshrl.config.engine import ModelConfig
    from meshrl.models.vision import find_sight
    from meshrl.parallel.attention import ATTENTION_NAME
    from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
    from meshrl.rollout.requests import Request, SamplingParams

    model = hf_model(folder, device, ATTENTION_NAME)
    rollout = EmbeddedRollout(
        model, pad_token_id=0, sight=find_sight(model.config, ModelConfig(path=str(folder))), shares_weights=True,
        max_num_batched_tokens=1 << 15, memory_share=0.5, max_model_len=4096, enable_prefix_caching=caching,
    )  # fmt: skip
    params = SamplingParams(max(work.longest // 8, 4))
    shown = work.prompts[:: work.n]
    images = [own[0] for own in work.images[:: work.n]]

    def step() -> int:
        rollout.update_weights([], rollout.version + 1)  # nothing is left of the round before
        talks: list[list[int]] = [[] for _ in shown]
        seen: list[tuple[bytes, ...]] = [() for _ in shown]
        tokens = 0
        for turn in range(TURNS):
            for at, talk in enumerate(talks):
                other = (at + turn) % len(shown)
                talk += shown[other]
                seen[at] = (*seen[at], images[other])
            requests = [
                Request(f"{turn}-{at}", tuple(talk), params, at, own)
                for at, (talk, own) in enumerate(zip(talks, seen, strict=True))
            ]
            for talk, answer in zip(talks, rollout.complete(requests), strict=True):
                assert answer.error is None, answer.error
                talk += [token if token != work.image_token else 1 for token in answer.token_ids]
                tokens += len(answer.token_ids)
        return tokens

    return step


def hf_generate(folder: Path, work: Work, device: str) -> Callable[[], int]:
    """Transformers' own loop; it looks at the image of every sample."""
    model = hf_model(folder, device)
    ids = torch.tensor(work.prompts, device=device)

    @torch.no_grad()
    def step() -> int:
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=work.longest,
            min_new_tokens=work.longest, pad_token_id=0, **work.image_inputs(slice(None), ids, device),
        )  # fmt: skip
        return int(out.shape[0] * (out.shape[1] - ids.shape[1]))

    return step


def hf_update(folder: Path, work: Work, device: str, checkpointing: bool) -> Callable[[], int]:
    """Transformers' own model on padded micro-batches; bf16 weights and moments."""
    model = hf_model(folder, device).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    ids, mask, asked = (x.to(device) for x in work.padded(work.lengths))
    size, total = max(1, 16384 // ids.shape[1]), int(asked.sum())

    def step() -> int:
        for at in range(0, len(ids), size):
            rows = slice(at, at + size)
            width = int(mask[rows].sum(1).max())
            own, targets = ids[rows, :width], asked[rows, :width]
            logits = model(
                input_ids=own,
                attention_mask=mask[rows, :width],
                use_cache=False,
                **work.image_inputs(rows, own, device),
            ).logits
            log_p = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, own[:, 1:, None])[..., 0]
            (-(log_p * targets[:, 1:]).sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        return int(mask.sum())

    return step


def our_update(folder: Path, work: Work, device: str, checkpointing: bool, frozen: bool = False) -> Callable[[], int]:
    """Our FSDP engine on packed rows; float32 master weights and moments."""
    import torch.distributed as dist

    from meshrl.algorithms import BatchStats, agg_loss
    from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
    from meshrl.data.batch import DataProto
    from meshrl.data.images import IMAGES
    from meshrl.engines.engine_class import engine_class

    if not dist.is_initialized():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    config = EngineConfig(use_torch_compile=device == "cuda", freeze_vision_tower=frozen)
    if device == "cpu":
        config.fsdp_config.mixed_precision.param_dtype = "fp32"
    model = ModelConfig(path=str(folder), random_init=True, enable_gradient_checkpointing=checkpointing)
    engine = engine_class(config)(model, config, OptimConfig(), device=torch.device(device))
    engine.initialize()
    ids, mask, asked = work.padded(work.lengths)
    images = np.empty(len(ids), dtype=object)
    images[:] = work.images
    data = DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "response_mask": asked}, non_tensors={IMAGES: images}
    )
    data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 16384}
    stats = BatchStats(1, int(asked.sum()), len(ids))

    def loss_function(output: dict[str, torch.Tensor], micro_batch: Any) -> Any:
        loss = agg_loss(-output["log_probs"], micro_batch.batch["response_mask"], "token-mean", stats=stats)
        return loss, {"loss": loss.detach()}

    def step() -> int:
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss_function)
        engine.optimizer_step()
        return int(mask.sum())

    return step


def compare(title: str, sides: dict[str, Callable[[], Callable[[], int]]], device: str) -> None:
    """A table of the sides; ratios are to the first. Running out of memory is a result too."""
    table = Table(title=title, title_justify="left")
    for column in ("", "tok/s", "against first", "seconds", "GiB"):
        table.add_column(column, justify="right" if column else "left")
    first = 0.0
    for name, make in sides.items():
        try:
            step = make()
            tokens = step()
            seconds, memory = timed(step, device)
        except torch.OutOfMemoryError:
            console.print(f"{title}: {name}: out of memory")
            table.add_row(name, "out of memory")
        else:
            first = first or tokens / seconds
            cells = (f"{tokens / seconds:,.0f}", f"{tokens / seconds / first:.2f}x", f"{seconds:.2f}", f"{memory:.1f}")
            console.print(f"{title}: {name}", *cells)
            table.add_row(name, *cells)
        step = make = None  # type: ignore[assignment]
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2B", choices=list(SHAPES))
    parts = ["generate", "turns", "update"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: use --cpu")
    device, shape = ("cpu", "tiny") if args.cpu else ("cuda", args.shape)
    folder = make_folder(shape)
    work = Work(shape, folder)
    prompts, n, longest, *_ = WORK[shape]
    what = f"{prompts} prompts of {len(work.prompts[0])} tokens with an image x {n} answers"
    if "generate" in args.parts:
        sides = {
            "Transformers, generate": lambda: hf_generate(folder, work, device),
            "embedded": lambda: embedded(folder, work, device, True),
            "embedded, no images": lambda: embedded(folder, work, device, False),
        }
        compare(f"generate: {what} of {longest} tokens, {shape}", sides, device)
    if "turns" in args.parts:
        sides = {
            "embedded, nothing kept": lambda: conversations(folder, work, device, False),
            "embedded": lambda: conversations(folder, work, device, True),
        }
        compare(f"{prompts} conversations of {TURNS} turns with an image each, {shape}", sides, device)
    if "update" in args.parts:
        sides = {
            "Transformers, padded": lambda: hf_update(folder, work, device, False),
            "Transformers, checkpointing": lambda: hf_update(folder, work, device, True),
            "FSDP engine": lambda: our_update(folder, work, device, False),
            "FSDP engine, checkpointing": lambda: our_update(folder, work, device, True),
            "FSDP engine, frozen tower": lambda: our_update(folder, work, device, False, frozen=True),
        }
        compare(f"update: {what} of {int(work.lengths.mean())} tokens on average, {shape}", sides, device)


if __name__ == "__main__":
    main()
