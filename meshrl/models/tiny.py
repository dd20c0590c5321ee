"""A tiny model and a character tokenizer made on the spot for demo, tests and benchmarks: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from meshrl.models.saving import save_hf_folder

PAD, EOS = "<pad>", "<eos>"


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character of `alphabet`, after a padding (0) and an end token (1)."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    inner = FastTokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=EOS)


def make_tiny_model(folder: str | Path, alphabet: str, seed: int = 0, **overrides: Any) -> Path:
    """Writes a small randomly initialised Qwen3 (0.4 M parameters) with its tokenizer into `folder`."""
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
