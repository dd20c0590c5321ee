"""The model and the sequence lengths of a planned run.

- `PlannedModel`: a recipe's model as its real Hugging Face modules on the meta device, without memory.
  Its shape comes from the model's folder, a config file or a known name.
- `Lengths`: tokens of prompts and responses, read from a file or drawn.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from meshrl.config.engine import ModelConfig
from meshrl.config.model_folder import stateful_layers
from meshrl.engines.megatron.weight_map import hf_tensors, is_sparse_layer
from meshrl.files import read_json
from meshrl.models.lora import add_adapters
from meshrl.models.names import expert_count, head_dim, is_of_tower
from meshrl.models.vision import tower_of
from meshrl.parallel.attention import ATTENTION_NAME


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> dict:
    return {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": 32768,
    }  # fmt: skip


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool, **others: Any) -> dict:
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": tied, "max_position_embeddings": 40960, **others,
    }  # fmt: skip


def _llama(hidden: int, inner: int, layers: int, heads: int) -> dict:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    }  # fmt: skip


# Built-in shapes, by the names that recipes use, for planning before a model is downloaded.
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": _qwen2(2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, 152064, False),
    "Qwen2.5-72B": _qwen2(8192, 29568, 80, 64, 8, 152064, False),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, False),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, False),
    "Qwen3-30B-A3B": _qwen3(
        2048, 6144, 48, 32, False, model_type="qwen3_moe", num_key_value_heads=4,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "Qwen3-235B-A22B": _qwen3(
        4096, 12288, 94, 64, False, model_type="qwen3_moe", num_key_value_heads=4,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
    ),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Llama-3.3-70B": _llama(8192, 28672, 80, 64),
    "DeepSeek-V3": {"model_type": "deepseek_v3"},
}  # fmt: skip


# Recurrent layer types, as they are named in `layer_types` of configs.
WITH_STATES = {"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"}
# Vision-language models, and the model types of their language models.
READING = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}


@dataclass(frozen=True)
class PlannedModel:
    """A model's config, a description of where the config comes from, and the model's modules on the meta device."""

    config: PretrainedConfig
    source: str
    lora: ModelConfig | None = None
    seeing: PretrainedConfig | None = None  # the whole VLM's config; `config` is its language model's
    # Cache for results that callers compute from this model.
    notes: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def modules(self) -> Any:
        """The language model on the meta device, with adapters if the recipe has any."""
        return self.build("lm")

    def build(self, head: str) -> Any:
        """Build the modules on the meta device, with a language-model head (`lm`) or else a critic's head."""
        kind: Any = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
        config = AutoConfig.for_model(**self.config.to_dict()) if head != "lm" else self.config
        if head != "lm":
            config.num_labels = 1
        with torch.device("meta"):
            made = kind.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
            made.tie_weights()
            if self.seeing is not None and head == "lm":
                _add_tower(made, self.seeing)
            if self.lora is not None:
                add_adapters(made, self.lora)
        return made

    @cached_property
    def num_params(self) -> int:
        """The number of the model's parameters, without its adapters."""
        return sum(p.numel() for name, p in self.modules.named_parameters() if ".lora_" not in name)

    @cached_property
    def tower_tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the vision tower's weights, by name."""
        named = {name.replace(".base_layer.", "."): p for name, p in self.modules.named_parameters()}
        return {name: tuple(p.shape) for name, p in named.items() if is_of_tower(name) and ".lora_" not in name}

    @cached_property
    def tower_params(self) -> int:
        """The number of parameters in the vision tower."""
        return sum(map(math.prod, self.tower_tensors.values()))

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def is_latent(self) -> bool:
        """True if attention caches one latent vector a token instead of keys and values (MLA)."""
        return self.config.model_type == "deepseek_v3"

    def heads(self) -> tuple[int, int, int]:
        """Return the number of query heads, the number of key-value heads and the head dimension."""
        heads = int(self.config.num_attention_heads)
        return heads, int(getattr(self.config, "num_key_value_heads", None) or heads), int(head_dim(self.config))

    @cached_property
    def layer_kinds(self) -> tuple[bool, ...]:
        """One entry a layer: True if the layer has experts."""
        return tuple(is_sparse_layer(self.config, layer) for layer in range(self.num_layers))

    def sparse_layers(self) -> int:
        """Return the number of layers that have experts."""
        return sum(self.layer_kinds)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors in the model's files, by name, with one tensor for each expert's matrix."""
        return hf_tensors(self.config) | self.tower_tensors

    @cached_property
    def expert_params(self) -> int:
        """The number of parameters in routed experts."""
        named = self.modules.named_parameters()
        return sum(p.numel() for name, p in named if ".experts." in name and expert_count(self.config))

    @cached_property
    def shape(self) -> dict[str, Any]:
        """The config as a dict, in the form that the config checks read."""
        return self.config.to_dict()


def is_found(model: ModelConfig) -> bool:
    """Return whether a model's shape is known, from its folder or from its name."""
    if not model.path:
        return False
    return (Path(model.path) / "config.json").is_file() or known_name(model.path) is not None


def find_model(
    model: ModelConfig, config_file: str | None = None, key: str = "actor_rollout_ref.model.path"
) -> PlannedModel:
    """Find a recipe's model: in `config_file` if given, else in its folder, else among the known names.

    `key` is the recipe's key for the model's path, for error messages.
    """
    lora = model if model.has_adapters else None
    override = dict(model.override_config)
    if config_file is not None:
        if not Path(config_file).is_file():
            raise ValueError(f"--model-config: there is no file {config_file}")
        return _planned(read_json(Path(config_file)), override, config_file, config_file, lora)
    file = Path(model.path or "") / "config.json"
    if model.path and file.is_file():
        return _planned(read_json(file), override, str(file), str(file), lora)
    if not model.path:
        raise ValueError(f"the recipe names no model: set {key}, or give --model-config FILE")
    name = known_name(model.path)
    if name is None:
        raise ValueError(
            f"there is no folder '{model.path}', and its name is none of {', '.join(KNOWN)}: give --model-config FILE"
        )
    words = f"the built-in shape of {name} (there is no folder '{model.path}')"
    return _planned(KNOWN[name], override, name, words, lora)


def known_name(path: str) -> str | None:
    """Return the longest built-in name that the last part of a path begins with, or None."""
    last = Path(path).name.lower()
    found = [name for name in KNOWN if last.startswith(name.lower())]
    return max(found, key=len) if found else None


def _planned(
    fields: dict[str, Any], override: dict[str, Any], file: str, source: str, lora: ModelConfig | None
) -> PlannedModel:
    config, seeing = _config(fields, file), None
    shape = config.get_text_config().to_dict()
    kinds = shape.get("layer_types")
    if stateful_layers(shape) if kinds is None else WITH_STATES & set(kinds):
        raise ValueError(
            f"{source}: layers of {config.model_type} carry a state from token to token, whose memory and time are not "
            "planned yet"
        )
    if config.model_type in READING:
        seeing, config = config, _reading_part(config)
        source = f"{source}, with the weights of what looks at images and without its work"
    for name, value in override.items():
        if not hasattr(config, name):
            raise ValueError(f"model.override_config.{name}: {type(config).__name__} has no field '{name}'")
        setattr(config, name, value)
    return PlannedModel(config, source, lora, seeing)


def _config(fields: dict[str, Any], source: str) -> PretrainedConfig:
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"{source} has no model_type: give a Hugging Face config.json")
    if fields["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"{source}: this version of transformers knows no model_type '{fields['model_type']}'")
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:  # each config class raises its own exceptions
        raise ValueError(f"{source} is refused by transformers: {' '.join(str(error).split())}") from error


def _reading_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of a vision-language model's language model, as a model of its own."""
    fields = config.get_text_config().to_dict()
    fields.get("rope_parameters", {}).pop("mrope_section", None)
    fields |= {"model_type": READING[config.model_type], "tie_word_embeddings": config.tie_word_embeddings}
    return AutoConfig.for_model(**fields)


def _add_tower(language_model: Any, seeing: PretrainedConfig) -> None:
    """Put the vision tower of a vision-language model into its language model.

    The language model is then sharded into the same FSDP units as the whole vision-language model.
    """
    short = copy.deepcopy(seeing)
    text = short.get_text_config()
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    whole = AutoModelForImageTextToText.from_config(short, dtype=torch.float32)
    language_model.base_model.visual = tower_of(whole)
    language_model._no_split_modules = [*language_model._no_split_modules, *whole._no_split_modules]


# ---- lengths of prompts and responses

# Drawn response lengths are log-normal with this standard deviation of the logarithm, cut at the longest allowed.
SPREAD = 0.6
MEAN_SHARE = 0.5


@dataclass(frozen=True)
class Lengths:
    """Tokens of every sample of a step, and a description of where the numbers come from."""

    prompts: np.ndarray
    responses: np.ndarray
    source: str
    # Cache for micro-batch budgets that callers compute from these samples.
    notes: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def totals(self) -> np.ndarray:
        return self.prompts + self.responses

    @property
    def response_share(self) -> float:
        """The share of response tokens (which are predicted) among all tokens."""
        return float(self.responses.sum() / self.totals.sum())

    def part(self, number: int, parts: int, samples: int) -> Lengths:
        """Return every `parts`-th of the first `samples` samples: the part of data-parallel rank `number`."""
        rows = slice(number, samples, parts)
        return Lengths(self.prompts[rows], self.responses[rows], self.source)

    def cut(self, longest: int) -> Lengths:
        """Cut samples after `longest` tokens, and leave at least one token to each response."""
        prompts = np.minimum(self.prompts, max(longest - 1, 0))
        return Lengths(prompts, np.minimum(self.responses, longest - prompts), self.source)


def drawn_lengths(samples: int, per_prompt: int, longest_prompt: int, longest_response: int, mean: int) -> Lengths:
    """Draw lengths for a step; samples of the same prompt are neighbours.

    Prompts are uniform between a quarter of `longest_prompt` and `longest_prompt`. Responses are log-normal around
    `mean` and cut at `longest_response`.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(max(1, longest_prompt // 4), longest_prompt + 1, -(-samples // per_prompt))
    responses = np.exp(rng.normal(np.log(mean) - SPREAD**2 / 2, SPREAD, samples))
    return Lengths(
        np.repeat(prompts, per_prompt)[:samples].astype(np.int64),
        np.clip(responses, 1, longest_response).astype(np.int64),
        f"drawn: responses log-normal, mean {mean}, cut at {longest_response}",
    )


def read_lengths(file: str, samples: int, longest_prompt: int, longest_response: int) -> Lengths:
    """Read lines of two numbers, tokens of prompt and response, and repeat them until there are `samples`."""
    rows = []
    if not Path(file).is_file():
        raise ValueError(f"--lengths: there is no file {file}")
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdigit() for word in words):
            raise ValueError(f"{file}:{number}: expected two numbers, tokens of prompt and response, got '{line}'")
        rows.append((int(words[0]), int(words[1])))
    if not rows:
        raise ValueError(f"{file} has no lengths: lines of two numbers, tokens of prompt and response")
    table = np.resize(np.array(rows, np.int64), (samples, 2))
    return Lengths(
        np.clip(table[:, 0], 1, longest_prompt), np.clip(table[:, 1], 1, longest_response), f"{len(rows)} of {file}"
    )
