"""Construction of rollouts: the one place that selects an engine by name.

`build_rollout` makes the rollout of a trainer rank from a config. `open_rollout` loads a model folder into an engine
without a trainer, for serving and for offline generation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from meshrl.config.engine import ModelConfig
from meshrl.config.rollout import READERS, ROLLOUTS, SEEING_ROLLOUTS, EngineKwargs, RolloutConfig
from meshrl.config.validate_rollout import engine_gpus, quantization_problem, speculation_problem
from meshrl.data.prompt_images import PromptImages
from meshrl.models.loading import (
    PLAIN_ATTENTION,
    check_engine,
    empty_causal_lm,
    load_model,
    load_model_config,
    load_tokenizer,
    named_weights,
    new_causal_lm,
    stop_token_ids,
    torch_dtype,
)
from meshrl.models.vision import find_sight, sees
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.rollout.base import Rollout
from meshrl.rollout.remote import EngineClient
from meshrl.rollout.vllm.arguments import adapter_arguments
from meshrl.rollout.weight_files import model_without_memory

MEBIBYTE = 1 << 20


def build_rollout(
    config: RolloutConfig,
    model: ModelConfig,
    hf_model: PreTrainedModel,
    tokenizer: Tokenizer,
    *,
    device: torch.device,
    can_share: bool,
    rank_group: dist.ProcessGroup | None = None,
    adapter_rank: int = 0,
    records_routes: bool = False,
) -> Rollout:
    """Build the rollout of one trainer rank. The rollout has no weights until the first sync.

    `hf_model` is the trainer's module. If `can_share` is true (unsharded, without adapters, on the device), the
    embedded rollout may generate with `hf_model` itself and needs no copy. Every other rollout has its own copy,
    sharded over the ranks of `rank_group`. If the engine runs in separate processes, the group's first rank starts that
    engine, which uses the GPUs of all ranks in the group. `adapter_rank` is the rank of LoRA adapters that are synced
    separately, to an engine that accepts adapters (vllm). 0 means that no adapters are synced. With `records_routes`,
    completions report the experts that processed their tokens.
    """
    ranks = 1 if rank_group is None else dist.get_world_size(rank_group)
    if config.is_elsewhere and rank_group is not None and dist.get_rank(rank_group) > 0:
        from meshrl.rollout.remote import Bystander

        takes = config.name == "vllm" and adapter_rank > 0
        return Bystander(pad_token_id=int(tokenizer.pad_token_id), replica_ranks=ranks, takes_adapters=takes)
    if config.name == "vllm":
        wanted: dict[str, Any] = {"load_format": config.load_format}
        if sees(hf_model.config):
            # The engine accepts no videos. vLLM's `dummy` loader does not suit these models, because it would also fill
            # values that no weight sync sends.
            wanted = {"limit_mm_per_prompt": {"video": 0}, "load_format": "auto"}
        return _vllm(config, model, tokenizer, device, rank_group, adapter_rank, records_routes, wanted)
    if config.name == "sglang":
        return _sglang(config, model, tokenizer, device, ranks, records_routes)
    dtype = torch_dtype(config.dtype)
    pad = int(tokenizer.pad_token_id)
    if config.name == "hf":
        from meshrl.rollout.hf import HFRollout

        own: Any = new_causal_lm(hf_model.config, PLAIN_ATTENTION, dtype)
        return HFRollout(
            own.to(device),
            pad_token_id=pad,
            tokenizer=tokenizer,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            records_routes=records_routes,
        )
    from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
    from meshrl.rollout.embedded.layers import rounds_in_forward, takes_contexts

    shares = can_share and hf_model.dtype == dtype and rank_group is None
    shares = shares and takes_contexts(hf_model) and not rounds_in_forward(hf_model)
    if rank_group is not None:
        module: Any = empty_causal_lm(hf_model.config, ATTENTION_NAME, dtype)
    else:
        module = hf_model if shares else new_causal_lm(hf_model.config, ATTENTION_NAME, dtype).to(device)  # type: ignore[arg-type]
    return EmbeddedRollout(
        module,
        pad_token_id=pad,
        tokenizer=tokenizer,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        memory_share=config.gpu_memory_utilization,
        shares_weights=shares,
        rank_group=rank_group,
        spreads_experts=config.expert_parallel_size > 1,
        records_routes=records_routes,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        sight=find_sight(hf_model.config, model),
        device=None if rank_group is None else device,
    )


def _vllm(
    config: RolloutConfig,
    model: ModelConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    rank_group: dist.ProcessGroup | None,
    adapter_rank: int,
    records_routes: bool,
    wanted: dict[str, Any],
) -> Rollout:
    wanted = wanted | {
        "dtype": str(torch_dtype(config.dtype)).removeprefix("torch."),
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        # vLLM can release memory on GPUs only.
        "enable_sleep_mode": config.free_cache_engine and device.type == "cuda",
        "enable_expert_parallel": config.expert_parallel_size > 1,
    }
    if adapter_rank:
        wanted |= adapter_arguments(adapter_rank, device.type)
    wanted |= {"trust_remote_code": model.trust_remote_code} | dict(config.engine_kwargs.vllm)
    if config.as_server:
        from meshrl.rollout.vllm.server import VllmServer

        ranks = 1 if rank_group is None else dist.get_world_size(rank_group)
        if ranks > 1:
            wanted["tensor_parallel_size"] = ranks
        seen = own_gpus(device, engine_gpus("vllm", wanted))
        return _remote(VllmServer(model.path or "", arguments=wanted, environment=seen), config, tokenizer, ranks)
    from meshrl.rollout.vllm.vllm_rollout import VllmRollout

    return VllmRollout(
        model.path or "",
        pad_token_id=int(tokenizer.pad_token_id),
        bucket_bytes=config.update_weights_bucket_megabytes * MEBIBYTE // 2,  # half, as for a part of a sync
        rank_group=rank_group,
        records_routes=records_routes,
        **wanted,
    )


def _sglang(
    config: RolloutConfig,
    model: ModelConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    ranks: int,
    records_routes: bool,
) -> Rollout:
    wanted: dict[str, Any] = {
        "dtype": str(torch_dtype(config.dtype)).removeprefix("torch."),
        "load_format": config.load_format,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "mem_fraction_static": config.gpu_memory_utilization,
        "disable_cuda_graph": config.enforce_eager,
        "disable_radix_cache": not config.enable_prefix_caching,
        # Like vLLM, SGLang can release memory on GPUs only.
        "enable_memory_saver": config.free_cache_engine and device.type == "cuda",
        "trust_remote_code": model.trust_remote_code,
    }
    if config.as_server is False and device.type == "cuda":
        wanted["base_gpu_id"] = device.index or 0
    wanted |= dict(config.engine_kwargs.sglang)
    if records_routes:
        wanted["enable_return_routed_experts"] = True
    if ranks > 1:
        wanted["tp_size"] = ranks
    if config.as_server is False:
        from meshrl.rollout.sglang.sglang_engine import SglangEngine

        return _remote(SglangEngine(model.path or "", arguments=wanted), config, tokenizer, ranks)
    from meshrl.rollout.sglang.sglang_engine import SglangServer

    seen = own_gpus(device, engine_gpus("sglang", wanted))
    return _remote(SglangServer(model.path or "", arguments=wanted, environment=seen), config, tokenizer, ranks)


def own_gpus(device: torch.device, count: int) -> dict[str, str]:
    """Return environment variables that show a server this rank's GPU and the next `count - 1` GPUs.

    Without these variables the server would use the node's first GPUs. A rank sees the GPUs of all ranks of its node in
    rank order, so the next GPUs belong to the other ranks of its replica.
    """
    if device.type != "cuda":
        return {}
    first = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if first + count > len(names):
        shown = f"CUDA_VISIBLE_DEVICES={visible} shows" if visible else "the node has"
        raise ValueError(
            f"the engine of the rank with GPU {first} needs {count} GPUs, but {shown} {len(names)}: lower its tensor "
            "parallelism, or start fewer ranks on the node"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + count])}


def _remote(client: EngineClient, config: RolloutConfig, tokenizer: Tokenizer, ranks: int) -> Rollout:
    from meshrl.rollout.remote import RemoteRollout

    return RemoteRollout(
        client,
        pad_token_id=int(tokenizer.pad_token_id),
        bucket_bytes=config.update_weights_bucket_megabytes * MEBIBYTE // 2,  # half, as for a part of a sync
        max_concurrency=config.max_num_seqs,
        replica_ranks=ranks,
    )


# A rollout made from a model folder alone, for serving and for offline generation. No trainer sends weights.

# The engines that accept `EngineOptions.arguments`.
EXTERNAL = ("vllm", "sglang")


@dataclass(frozen=True)
class EngineOptions:
    """The choice of an engine and its size limits. `dtype` auto: float32 on a CPU, the model's own dtype on a GPU.

    `arguments` are passed to vLLM or SGLang unchanged.
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
    """A rollout that holds a model folder's weights as version 0, with the facts about the model that callers need."""

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
    """Load the model folder at `path` into an engine.

    Raises ValueError or OSError for mistakes of the caller. `image_key` is the column that holds the images of prompt
    rows.
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
    """Check the options and return their device; raise ValueError for unknown or conflicting options."""
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
    """Build the engine and send it the folder's weights in the same way as a trainer does."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # an engine without a device argument uses the current device
    # The engine has its own tokenizer, because another thread than the caller's uses it.
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
        free_cache_engine=False,  # no trainer shares the device
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
    """Load the weights of a model folder onto the CPU, by Hugging Face name."""
    hf_model = load_model(path, PLAIN_ATTENTION, dtype=dtype, trust_remote_code=trust_remote_code)
    return named_weights(hf_model)


def tied_names(config: PretrainedConfig) -> set[str]:
    """Return the state-dict names that alias another parameter (tied weights). Such names can be left out of a sync."""
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
