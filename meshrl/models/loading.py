"""Hugging Face models and tokenizers from a folder."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.model import ModelConfig
from meshrl.config.model_files import misfit_problems, unread_problem, unread_tensors
from meshrl.config.model_folder import TOKENIZER_FILES, damage_of, pickle_problem, quantized_problem
from meshrl.config.names import count
from meshrl.files import read_json
from meshrl.models.buffers import persistent_buffers
from meshrl.models.empty import without_memory
from meshrl.models.families import attention_name
from meshrl.models.sight import sees

# What Transformers calls the head of its token classifiers.
VALUE_HEAD = "score"
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type for a config's word such as `bf16` or `float32`."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype '{name}': use one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def naming_what_is_damaged(folder: str | Path) -> Iterator[None]:
    """Libraries say what is wrong with a file, not with which: a `ValueError` names the one that cannot be read."""
    try:
        yield
    except Exception as error:
        if (problem := damage_of(Path(folder))) is None:
            raise
        raise ValueError(problem) from error


def load_model_config(
    path: str | Path, override: dict[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Reads a model folder's config.json, sets `override` in it and refuses fields the model does not know."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model at '{path}': expected a folder with config.json")
    with naming_what_is_damaged(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for name, value in (override or {}).items():
        # Of a model that sees, most fields are its language model's.
        owner = config if hasattr(config, name) else config.get_text_config()
        if not hasattr(owner, name):
            raise ValueError(f"model.override_config.{name}: {type(config).__name__} has no field '{name}'")
        setattr(owner, name, value)
    return config


def refuse_quantized(path: str | Path) -> None:
    """A `ValueError` for a folder with quantized weights: read as they are, they would be other numbers."""
    if problem := quantized_problem(Path(path)):
        raise ValueError(problem)


def load_model(
    path: str | Path,
    attention: str,
    head: str = "lm",
    *,
    dtype: torch.dtype = torch.float32,
    override: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Loads a model on the CPU with this attention function and head; every weight must be in the folder.

    A value head that the folder does not have starts at zero: so do the values. What of the folder does not fit the
    model is a `ValueError` that names it.
    """
    if problem := pickle_problem(Path(path)):
        raise ValueError(problem)
    refuse_misfit(path, override)
    config = _config_for(head, path, override, trust_remote_code)
    with naming_what_is_damaged(path), holding_load_reports() as reports:
        loaded: Any = _auto_class(config, head).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=_attention_of(config, attention),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    model, info = loaded
    new_head = [name for name in info["missing_keys"] if is_value_head(name)]
    missing = sorted(set(info["missing_keys"]) - set(new_head))
    if missing:
        raise ValueError(f"the model at '{path}' lacks {count(len(missing), 'weight')}, first of all '{missing[0]}'")
    if mismatched := sorted(tuple(entry) for entry in info["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise ValueError(
            f"the model at '{path}' has {count(len(mismatched), 'weight')} of another shape, first of all '{name}': it "
            f"is {list(found)} in the files, and the model needs {list(wanted)}"
        )
    refuse_unread(path, info["unexpected_keys"], model, override)
    for name in new_head:
        torch.nn.init.zeros_(model.get_parameter(name))
    if not new_head or not all(name.startswith("lm_head.") for name in info["unexpected_keys"]):
        for report in reports:
            logging.getLogger(report.name).handle(report)
    return model


def refuse_misfit(path: str | Path, override: Mapping[str, Any] | None = None) -> None:
    """A `ValueError` for a folder whose tensors are not those of its config.json, as far as their headers tell."""
    if problem := next(iter(misfit_problems(Path(path), override or {})), None):
        raise ValueError(problem)


def refuse_unread(
    path: str | Path, names: Collection[str], model: PreTrainedModel, override: Mapping[str, Any] | None = None
) -> None:
    """A `ValueError` for tensors of a folder that a model has no place for, but for those left out on purpose."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    shape = model.config.get_text_config().to_dict()
    if problem := unread_problem(unread_tensors(names, shape, ignored, override or {})):
        raise ValueError(f"{path}: {problem}")


def load_pickled_model(path: str | Path) -> PreTrainedModel:
    """Loads a model whose weights are pickles alone, which torch reads as `weights_only`, in the type they have."""
    config = load_model_config(path)
    scores = any("Classification" in kind for kind in config.architectures or [])
    auto_class = _auto_class(config, "value" if scores else "lm")
    model: PreTrainedModel = auto_class.from_pretrained(path, config=config, dtype="auto", use_safetensors=False)
    return model


@contextmanager
def holding_load_reports() -> Iterator[list[logging.LogRecord]]:
    """Keeps Transformers' reports of weights that do not match back: a value head in place of the language model's is
    new to it, and no news to us."""
    reports: list[logging.LogRecord] = []

    def passes(record: logging.LogRecord) -> bool:
        if is_report := "LOAD REPORT" in record.getMessage():
            reports.append(record)
        return not is_report

    source = logging.getLogger(modeling_utils.__name__)
    source.addFilter(passes)
    try:
        yield reports
    finally:
        source.removeFilter(passes)


def empty_model(
    path: str | Path,
    attention: str,
    head: str = "lm",
    *,
    dtype: torch.dtype = torch.float32,
    override: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a folder without memory for its parameters; its buffers are real: most are in no file."""
    refuse_quantized(path)
    config = _config_for(head, path, override, trust_remote_code)
    model = _without_memory(_auto_class(config, head), config, attention, dtype, trust_remote_code)
    if (Path(path) / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def empty_causal_lm(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model of this shape without memory for its parameters."""
    return _without_memory(_auto_class(config, "lm"), copy.deepcopy(config), attention, dtype)


def _without_memory(
    auto_class: Any, config: PretrainedConfig, attention: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    with without_memory():
        model = auto_class.from_config(
            config,
            dtype=dtype,
            attn_implementation=_attention_of(config, attention),
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()
    return _with_exact_buffers(model)


def _with_exact_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """Buffers that are weights are float32 whatever the model's type, as trainers read them."""
    for buffer in persistent_buffers(model).values():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return model


def _auto_class(config: PretrainedConfig, head: str) -> Any:
    if head == "value":
        if sees(config):
            raise ValueError(f"not supported yet: values of a model that sees images (model_type {config.model_type})")
        return AutoModelForTokenClassification
    return causal_lm_class(config)


def causal_lm_class(config: PretrainedConfig) -> Any:
    """What builds a model with a language model's head of this config; one that sees is of another kind."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def _attention_of(config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """The same for all layers, but for those that look at images: they see all of an image at once."""
    attention = attention_name(config, attention)
    return {"": attention, "text_config": attention, "vision_config": "sdpa"} if sees(config) else attention


def _config_for(
    head: str, path: str | Path, override: dict[str, Any] | None, trust_remote_code: bool
) -> PretrainedConfig:
    config = load_model_config(path, override, trust_remote_code)
    if head == "value":
        config.num_labels = 1
        # A value model's two ends are different things.
        config.tie_word_embeddings = False
    return config


def is_value_head(name: str) -> bool:
    """Whether a parameter belongs to the head of a value or reward model."""
    return name.split(".")[0] == VALUE_HEAD


def new_causal_lm(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model of this shape with fresh random weights."""
    # A copy: Transformers notes the attention in the config, where the layers of another model of it would read it.
    made = _auto_class(config, "lm").from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation=_attention_of(config, attention)
    )
    return _with_exact_buffers(made)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Loads a tokenizer and makes sure that it has a padding and an end token."""
    if not Path(path).is_dir():
        raise FileNotFoundError(f"no tokenizer at '{path}': expected a folder with tokenizer files")
    if not any((Path(path) / file).is_file() for file in TOKENIZER_FILES):
        raise FileNotFoundError(f"'{path}' has no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    with naming_what_is_damaged(path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer at '{path}' has no eos_token: RL needs one to know where an answer ends")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def run_tokenizer(model: ModelConfig) -> Tokenizer:
    """Load the tokenizer of a run's model, with the chat template that the config gives it."""
    tokenizer = load_tokenizer(model.tokenizer_path or model.path or "", model.trust_remote_code)
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def stop_token_ids(path: str | Path, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an answer: the tokenizer's end token and those of the generation config, if there is one."""
    stops = {int(tokenizer.eos_token_id)}
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        stops.update(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    return sorted(stops)
