"""A rollout made from a model folder alone, for serving and for offline generation: no trainer sends the weights."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from meshrl.config.engine_arguments import quantization_problem, speculation_problem
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import READERS, ROLLOUTS, SEEING_ROLLOUTS, EngineKwargs, RolloutConfig
from meshrl.data.images import PromptImages
from meshrl.models.buffers import named_weights
from meshrl.models.families import PLAIN_ATTENTION, check_engine
from meshrl.models.loading import load_model, load_model_config, load_tokenizer, stop_token_ids, torch_dtype
from meshrl.models.sight import sees
from meshrl.rollout.base import Rollout
from meshrl.rollout.build import build_rollout
from meshrl.rollout.weight_stream import model_without_memory

# The engines that have arguments of their own.
EXTERNAL = ("vllm", "sglang")


@dataclass(frozen=True)
class EngineOptions:
    """Which engine, and how large. `dtype` auto: float32 on a CPU, the model's own on a GPU.

    `arguments` are vLLM's or SGLang's own.
    """

    engine: str = "embedded"
    dtype: str = "auto"
    device: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.5
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    trust_remote_code: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    """A rollout with the folder's weights as version 0, and what its callers need to know of the model."""

    rollout: Rollout
    tokenizer: Tokenizer
    path: Path
    dtype: torch.dtype
    vocabulary: int
    context: int
    stop_token_ids: tuple[int, ...]
    trust_remote_code: bool = False
    images: PromptImages | None = None


def open_rollout(path: str | Path, options: EngineOptions, image_key: str | None = None) -> Opened:
    """Loads the folder at `path` into an engine; raises ValueError or OSError for what the caller got wrong.

    `image_key` is the column in which rows of prompts have images.
    """
    transformers_logging.disable_progress_bar()
    device = check_options(options)
    config = load_model_config(path, trust_remote_code=options.trust_remote_code)
    check_engine(options.engine, config, device.type == "cuda")
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    if options.max_model_len is not None and length is not None and options.max_model_len > length:
        raise ValueError(f"max_model_len is {options.max_model_len}, but the model's context has {length} tokens")
    dtype = _dtype(options.dtype, device, config)
    tokenizer = load_tokenizer(path, options.trust_remote_code)
    if image_key is not None and not sees(config):
        raise ValueError(f"images in '{image_key}': the model at '{path}' ({config.model_type}) does not see any")
    images = PromptImages(path, tokenizer, image_key, options.trust_remote_code) if sees(config) else None
    if images is not None and options.engine not in SEEING_ROLLOUTS:
        raise ValueError(
            f"not supported yet: a model that sees images ({config.model_type}) in the {options.engine} engine; use "
            f"{' or '.join(SEEING_ROLLOUTS)}"
        )
    rollout = _build(path, options, device, dtype)
    context = getattr(rollout, "max_model_len", None) or options.max_model_len or length
    if context is None:
        raise ValueError(f"the model at '{path}' does not say how long its context is: set max_model_len")
    return Opened(
        rollout=rollout,
        tokenizer=tokenizer,
        path=Path(path),
        dtype=dtype,
        vocabulary=int(text.vocab_size),
        context=int(context),
        stop_token_ids=tuple(stop_token_ids(path, tokenizer)),
        trust_remote_code=options.trust_remote_code,
        images=images,
    )


def check_options(options: EngineOptions) -> torch.device:
    """The device that the options stand for; raises ValueError where they cannot be meant."""
    if options.engine not in ROLLOUTS:
        raise ValueError(f"unknown engine '{options.engine}': use one of {', '.join(ROLLOUTS)}")
    if options.arguments and options.engine not in EXTERNAL:
        raise ValueError(
            f"engine argument '{next(iter(options.arguments))}': the {options.engine} engine takes none, "
            f"only {' and '.join(EXTERNAL)} do"
        )
    for check in (quantization_problem, speculation_problem):
        if problem := check(options.engine, options.arguments, "engine argument "):
            raise ValueError(problem)
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {options.gpu_memory_utilization}")
    for option in fields(EngineOptions):
        value, readers = getattr(options, option.name), READERS.get(option.name, ROLLOUTS)
        if options.engine not in readers and value != option.default:
            raise ValueError(
                f"{option.name} is {value}, but the {options.engine} engine does not read it, only "
                f"{', '.join(readers)} do: leave it out"
            )
    device = _device(options.device)
    if options.engine in EXTERNAL and device.type == "cpu" and torch.cuda.is_available():
        raise ValueError(
            f"device is cpu, but {options.engine} takes a GPU where torch sees one, and it sees "
            f"{torch.cuda.device_count()}: hide them (CUDA_VISIBLE_DEVICES='') or use another engine"
        )
    return device


def _build(path: str | Path, options: EngineOptions, device: torch.device, dtype: torch.dtype) -> Rollout:
    """The engine, with the folder's weights sent to it as a trainer would."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # engines that are not told take the current one
    # A tokenizer of the engine's own: it is used in another thread than the caller's.
    tokenizer = load_tokenizer(path, options.trust_remote_code)
    hf_model = load_model(path, PLAIN_ATTENTION, dtype=dtype, trust_remote_code=options.trust_remote_code)
    config = RolloutConfig(
        name=options.engine,
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        gpu_memory_utilization=options.gpu_memory_utilization,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        free_cache_engine=False,  # nobody trains beside it
        engine_kwargs=EngineKwargs(**({options.engine: options.arguments} if options.arguments else {})),
    )
    model = ModelConfig(path=str(path), trust_remote_code=options.trust_remote_code)
    rollout = build_rollout(config, model, hf_model, tokenizer, device=device, can_share=False)
    try:
        rollout.update_weights(named_weights(hf_model).items(), 0)
    except BaseException:
        rollout.close()
        raise
    return rollout


def folder_weights(path: str | Path, dtype: torch.dtype, trust_remote_code: bool = False) -> dict[str, Tensor]:
    """The weights of a model folder by Hugging Face name, on the CPU."""
    hf_model = load_model(path, PLAIN_ATTENTION, dtype=dtype, trust_remote_code=trust_remote_code)
    return named_weights(hf_model)


def tied_names(config: PretrainedConfig) -> set[str]:
    """Names under which a model's file may hold what is another parameter: they can be left out."""
    hf_model = model_without_memory(config)
    return set(hf_model.state_dict()) - named_weights(hf_model).keys()


def _device(name: str) -> torch.device:
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"unknown device '{name}': use auto, cpu or cuda") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device '{name}': torch sees no GPU here (meshrl doctor says why); use auto or cpu")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device '{name}': torch sees {torch.cuda.device_count()} GPUs, and the first is cuda:0")
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(name: str, device: torch.device, config: PretrainedConfig) -> torch.dtype:
    if name != "auto":
        return torch_dtype(name)
    if device.type == "cpu":
        return torch.float32
    return getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
