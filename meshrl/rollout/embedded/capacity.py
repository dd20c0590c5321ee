"""How large the KV cache is, and which runner a device gets."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from meshrl.models.fp8 import FP8, lacks_products
from meshrl.models.vision import Sight, language_model
from meshrl.parallel.linear_attention import recurrences
from meshrl.rollout.embedded.kv_cache import SlotCache, bytes_of_states
from meshrl.rollout.embedded.layers import FAMILIES, SEEING_FAMILIES, is_plain
from meshrl.rollout.embedded.model_runner import RouteStore, Runner, SlotRunner
from meshrl.rollout.embedded.parallel import Parts
from meshrl.rollout.embedded.scheduler import Rows

CPU_BLOCK, CUDA_BLOCK = 16, 32
# Of a CPU's available memory the cache takes at most this share; a GPU's share is a setting.
CPU_SHARE = 0.25
SCALE_BYTES = 4  # of each head of a token in 8 bits


def cache_shape(hf_model: PreTrainedModel, parallel: Parts | None) -> tuple[int, int, int, int]:
    """Layers that attend, key heads of this rank, and the dims of a key and of a value."""
    config: Any = hf_model.config.get_text_config()
    layers = len(attending_layers(hf_model))
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: what is cached are keys and values of all heads
        dims = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        return layers, heads, *dims
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return layers, parallel.local_kv_heads if parallel is not None else kv_heads, dim, dim


def attending_layers(hf_model: PreTrainedModel) -> list[int]:
    """The numbers of the layers that have keys and values; the others carry a state."""
    stateful = {layer.layer_idx for layer in recurrences(hf_model)}
    return [layer for layer in range(hf_model.config.get_text_config().num_hidden_layers) if layer not in stateful]


def bytes_per_token(hf_model: PreTrainedModel, parallel: Parts | None, dtype: torch.dtype) -> int:
    """Memory of one token's keys and values over all layers, and of their scales."""
    layers, kv_heads, key_dim, value_dim = cache_shape(hf_model, parallel)
    scales = 2 * SCALE_BYTES if dtype == FP8 else 0
    return layers * kv_heads * ((key_dim + value_dim) * dtype.itemsize + scales)


def bytes_of_copies(hf_model: PreTrainedModel) -> int:
    """Memory of the layers' matrices in 8 bits, which are yet to be made."""
    matrices: Any = [module for module in language_model(hf_model).modules() if isinstance(module, torch.nn.Linear)]
    return sum(matrix.weight.numel() for matrix in matrices)


def check_8_bits(hf_model: PreTrainedModel, quantization: str | None, kv_cache_dtype: str) -> None:
    """A `ValueError` where the model or the device cannot have products or a cache of 8-bit floats."""
    device = next(hf_model.parameters()).device
    if quantization is not None and not is_plain(hf_model, FAMILIES + SEEING_FAMILIES):
        kind = f"{type(hf_model).__name__} with {getattr(hf_model.config, 'hidden_act', None)}"
        raise ValueError(
            f"rollout.quantization={quantization} is for {', '.join(FAMILIES + SEEING_FAMILIES)} with silu and without "
            f"adapters, and this is {kind}: leave it out"
        )
    if quantization is not None and hf_model.dtype == torch.float16:
        raise ValueError(
            f"rollout.quantization={quantization} does not go with rollout.dtype=float16, whose largest numbers are "
            "too small for its products: set bfloat16"
        )
    if kv_cache_dtype == "fp8" and device.type != "cuda":
        raise ValueError("rollout.kv_cache_dtype=fp8 is for GPUs: set it to auto")
    if (quantization is not None or kv_cache_dtype == "fp8") and (lacking := lacks_products(device)):
        raise ValueError(f"{lacking}: leave rollout.quantization and rollout.kv_cache_dtype out")


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
    cache_dtype: torch.dtype,
    in_8_bits: bool,
) -> int:
    """As many blocks as memory allows, but no more than all rows could fill."""
    device = next(hf_model.parameters()).device
    if device.type == "cuda":
        copies = bytes_of_copies(hf_model) if in_8_bits else 0
        memory = max(0, torch.cuda.mem_get_info(device)[0] - copies) * memory_share
    else:
        memory = psutil.virtual_memory().available * CPU_SHARE
    states, per_token = bytes_of_states(hf_model), bytes_per_token(hf_model, parallel, cache_dtype)
    for_cache = max(0, memory - states * (rows + 1))
    blocks = int(for_cache // max(1, per_token * block_size))
    if max_model_len is not None:
        blocks = min(blocks, rows * -(-max_model_len // block_size))
    if parallel is not None:  # all ranks hear of it
        blocks = parallel.least(blocks, device)
    longest = -(-(max_model_len or 1) // block_size)
    if states and blocks < longest:
        fits = int((memory - longest * block_size * per_token) // states) - 1
        advice = f"lower rollout.max_num_seqs to {fits}" if fits > 0 else "not even one fits beside one long answer"
        more = ", or raise rollout.gpu_memory_utilization" if device.type == "cuda" else ""
        raise ValueError(
            f"the states of {rows} sequences take {rows * states / 1e9:.1f} GB ({states / 1e6:.1f} MB each) of the "
            f"{memory / 1e9:.1f} GB that the rollout may have, and what is left has no room for one sequence of "
            f"{max_model_len} tokens: {advice}{more}"
        )
    return max(blocks, 1)


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
    in_8_bits: bool,
    cache_dtype: torch.dtype,
    sight: Sight | None,
) -> Runner:
    """The runner of the device that the model lies on."""
    options: dict[str, Any] = {"owns_weights": owns_weights, "vocabulary": vocabulary, "parallel": parallel}
    options |= {"in_8_bits": in_8_bits, "sight": sight}
    if records_routes:
        device = next(hf_model.parameters()).device
        options["routes"] = RouteStore(hf_model, rows, num_blocks, block_size, device)
    if next(hf_model.parameters()).device.type == "cuda":
        # Triton comes with torch's CUDA builds alone.
        from meshrl.rollout.embedded.cuda_runner import PagedRunner
        from meshrl.rollout.embedded.paged_kv_cache import PagedCache

        layers, kv_heads, dim, value_dim = cache_shape(hf_model, parallel)
        if dim != value_dim:
            raise ValueError(
                f"on a GPU the embedded rollout caches keys and values of one size, and those of "
                f"{hf_model.config.model_type} have {dim} and {value_dim}: set rollout.name to vllm, sglang or hf"
            )
        device = next(hf_model.parameters()).device
        pages = PagedCache(num_blocks, block_size, layers, kv_heads, dim, cache_dtype, device)
        pages.place_of = {layer: place for place, layer in enumerate(attending_layers(hf_model))}
        return PagedRunner(hf_model, rows, pages, max_length=max_model_len, **options)
    cache = SlotCache(num_blocks, block_size, max_model_len)
    return SlotRunner(hf_model, rows, cache, **options)
