"""Which rollout a config asks for: the one place where an engine is chosen by name."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.engine_arguments import engine_gpus
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.models.families import PLAIN_ATTENTION
from meshrl.models.loading import empty_causal_lm, new_causal_lm, torch_dtype
from meshrl.models.sight import find_sight, sees
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.rollout.base import Rollout
from meshrl.rollout.remote.client import EngineClient
from meshrl.rollout.vllm.adapter import adapter_arguments

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
    """The rollout of one trainer rank, without weights until the first sync.

    `hf_model` is the trainer's module; with `can_share` (unsharded, without adapters, on the device) the embedded
    rollout generates with it and needs no copy. The others have copies of their own, cut over the ranks of a
    `rank_group`. Of those the first has an engine in processes of its own, which takes the GPUs of all. `adapter_rank`:
    of LoRA adapters that come by themselves, for an engine that can take them (vllm); 0: none do. `records_routes`:
    answers say which experts their tokens went to.
    """
    ranks = 1 if rank_group is None else dist.get_world_size(rank_group)
    if config.is_elsewhere and rank_group is not None and dist.get_rank(rank_group) > 0:
        from meshrl.rollout.remote.bystander import Bystander

        takes = config.name == "vllm" and adapter_rank > 0
        return Bystander(pad_token_id=int(tokenizer.pad_token_id), replica_ranks=ranks, takes_adapters=takes)
    if config.name == "vllm":
        wanted: dict[str, Any] = {"load_format": config.load_format}
        if sees(hf_model.config):
            # No videos are taken. And its dummies are not for these models: also what no weight tells would be one.
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
    from meshrl.rollout.embedded.engine import EmbeddedRollout
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
        # vLLM can give memory up on GPUs only.
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
    from meshrl.rollout.vllm.engine import VllmRollout

    return VllmRollout(
        model.path or "",
        pad_token_id=int(tokenizer.pad_token_id),
        bucket_bytes=config.update_weights_bucket_megabytes * MEBIBYTE // 2,  # as the parts of a sync
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
        # As vLLM, it can give memory up on GPUs only.
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
        from meshrl.rollout.sglang.engine import SglangEngine

        return _remote(SglangEngine(model.path or "", arguments=wanted), config, tokenizer, ranks)
    from meshrl.rollout.sglang.server import SglangServer

    seen = own_gpus(device, engine_gpus("sglang", wanted))
    return _remote(SglangServer(model.path or "", arguments=wanted, environment=seen), config, tokenizer, ranks)


def own_gpus(device: torch.device, count: int) -> dict[str, str]:
    """The environment in which a server sees this rank's GPU, and those after it that it needs, not the first ones.

    A rank itself sees the GPUs of all ranks of its node, in their order: the next ones are those of its replica.
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
    from meshrl.rollout.remote.rollout import RemoteRollout

    return RemoteRollout(
        client,
        pad_token_id=int(tokenizer.pad_token_id),
        bucket_bytes=config.update_weights_bucket_megabytes * MEBIBYTE // 2,  # as the parts of a sync
        max_concurrency=config.max_num_seqs,
        replica_ranks=ranks,
    )
