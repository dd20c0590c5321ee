"""How large the KV cache is, and which runner a device gets."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from meshrl.rollout.embedded.parts import Parts
from meshrl.rollout.embedded.route_store import RouteStore
from meshrl.rollout.embedded.rows import Rows
from meshrl.rollout.embedded.runner import Runner, SlotRunner
from meshrl.rollout.embedded.slots import SlotCache

CPU_BLOCK, CUDA_BLOCK = 16, 32
# Of a CPU's available memory the cache takes at most this share; a GPU's share is a setting.
CPU_SHARE = 0.25


def cache_shape(hf_model: PreTrainedModel, parallel: Parts | None) -> tuple[int, int, int, int]:
    """Layers, key heads of this rank, and the dims of a key and of a value."""
    config: Any = hf_model.config.get_text_config()
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: what is cached are keys and values of all heads
        dims = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        return config.num_hidden_layers, heads, *dims
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return config.num_hidden_layers, parallel.local_kv_heads if parallel is not None else kv_heads, dim, dim


def bytes_per_token(hf_model: PreTrainedModel, parallel: Parts | None) -> int:
    """Memory of one token's keys and values over all layers."""
    layers, kv_heads, key_dim, value_dim = cache_shape(hf_model, parallel)
    return layers * kv_heads * (key_dim + value_dim) * hf_model.dtype.itemsize


def context_length(hf_model: PreTrainedModel) -> int | None:
    """The longest sequence the model was made for, if its config says."""
    return getattr(hf_model.config.get_text_config(), "max_position_embeddings", None)


def default_num_blocks(
    hf_model: PreTrainedModel,
    block_size: int,
    rows: int,
    max_model_len: int | None,
    memory_share: float,
    parallel: Parts | None,
) -> int:
    """As many blocks as memory allows, but no more than all rows could fill."""
    device = next(hf_model.parameters()).device
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[0] * memory_share
    else:
        memory = psutil.virtual_memory().available * CPU_SHARE
    blocks = int(memory // (bytes_per_token(hf_model, parallel) * block_size))
    if max_model_len is not None:
        blocks = min(blocks, rows * -(-max_model_len // block_size))
    blocks = max(blocks, 1)
    return blocks if parallel is None else parallel.least(blocks, device)


def build_runner(
    hf_model: PreTrainedModel,
    rows: Rows,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    owns_weights: bool,
    vocabulary: int,
    parallel: Parts | None,
    records_routes: bool,
) -> Runner:
    """The runner of the device that the model lies on."""
    options: dict[str, Any] = {"owns_weights": owns_weights, "vocabulary": vocabulary, "parallel": parallel}
    if records_routes:
        device = next(hf_model.parameters()).device
        options["routes"] = RouteStore(hf_model, rows, num_blocks, block_size, device)
    if next(hf_model.parameters()).device.type == "cuda":
        # Triton comes with torch's CUDA builds alone.
        from meshrl.rollout.embedded.cuda_runner import PagedRunner
        from meshrl.rollout.embedded.paged import PagedCache

        layers, kv_heads, dim, value_dim = cache_shape(hf_model, parallel)
        if dim != value_dim:
            raise ValueError(
                f"on a GPU the embedded rollout caches keys and values of one size, and those of "
                f"{hf_model.config.model_type} have {dim} and {value_dim}: set rollout.name to vllm, sglang or hf"
            )
        device = next(hf_model.parameters()).device
        pages = PagedCache(num_blocks, block_size, layers, kv_heads, dim, hf_model.dtype, device)
        return PagedRunner(hf_model, rows, pages, max_length=max_model_len, **options)
    cache = SlotCache(num_blocks, block_size, max_model_len)
    return SlotRunner(hf_model, rows, cache, **options)
