"""Tiny models and a character tokenizer, generated for the demo, tests and benchmarks without any download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
)

from meshrl.models.saving import save_hf_folder

PAD, EOS = "<pad>", "<eos>"
# The tokens around and in place of an image in a prompt, as in Qwen's models.
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
PATCH, MERGE = 4, 2


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of `alphabet`, after a padding token (0) and an end token (1)."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    inner = FastTokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=EOS)


def make_tiny_model(folder: str | Path, alphabet: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a small randomly initialised Qwen3 (0.4 M parameters) with its tokenizer into `folder`."""
    folder = Path(folder)
    tokenizer = char_tokenizer(alphabet)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**(shape | overrides)), dtype=torch.float32)
    save_hf_folder(folder, model.named_parameters(), model)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_seeing_model(
    folder: str | Path, alphabet: str, seed: int = 0, family: str = "qwen3_vl", **overrides: Any
) -> Path:
    """Write a small randomly initialised VLM, with its tokenizer and image processor, into `folder`.

    A square of 8 x 8 pixels is one token. `overrides` change the language model's config.
    """
    folder = Path(folder)
    tokenizer = char_tokenizer(alphabet)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    start, image, end, video = map(tokenizer.convert_tokens_to_ids, VISION_TOKENS)
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    if family == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    text |= overrides
    text["rope_parameters"]["mrope_interleaved"] = family.startswith("qwen3")  # other libraries read it
    patches = {"patch_size": PATCH, "temporal_patch_size": 1, "spatial_merge_size": MERGE, "depth": 2, "num_heads": 2}
    vision: dict[str, dict[str, Any]] = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2},
        "qwen2_5_vl": {
            "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": text["hidden_size"], "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
    }  # fmt: skip
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=patches | vision[family.removesuffix("_moe")],
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save_hf_folder(folder, model.named_parameters(), model)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 64 * (PATCH * MERGE) ** 2},
    ).save_pretrained(folder)
    return folder
