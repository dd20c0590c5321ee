"""The size of the embedded rollout's KV cache, checks of FP8 settings, and the choice of a runner for a device."""

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
# The cache takes at most this share of a CPU's available memory. The share of a GPU's memory is a setting.
CPU_SHARE = 0.25
SCALE_BYTES = 4  # for each head of a token in FP8


def cache_shape(hf_model: PreTrainedModel, parallel: Parts | None) -> tuple[int, int, int, int]:
    """Return the number of attention layers, key heads of this rank, and the dims of a key and of a value."""
    config: Any = hf_model.config.get_text_config()
    layers = len(attending_layers(hf_model))
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention: keys and values of all heads are cached
        dims = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        return layers, heads, *dims
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return layers, parallel.local_kv_heads if parallel is not None else kv_heads, dim, dim


def attending_layers(hf_model: PreTrainedModel) -> list[int]:
    """Return the indices of layers that cache keys and values. All other layers have a recurrent state."""
    stateful = {layer.layer_idx for layer in recurrences(hf_model)}
    return [layer for layer in range(hf_model.config.get_text_config().num_hidden_layers) if layer not in stateful]


def bytes_per_token(hf_model: PreTrainedModel, parallel: Parts | None, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys, values and scales over all layers."""
    layers, kv_heads, key_dim, value_dim = cache_shape(hf_model, parallel)
    scales = 2 * SCALE_BYTES if dtype == FP8 else 0
    return layers * kv_heads * ((key_dim + value_dim) * dtype.itemsize + scales)


def bytes_of_copies(hf_model: PreTrainedModel) -> int:
    """Return the bytes that FP8 copies of the layers' matrices will take."""
    matrices: Any = [module for module in language_model(hf_model).modules() if isinstance(module, torch.nn.Linear)]
    return sum(matrix.weight.numel() for matrix in matrices)


def check_8_bits(hf_model: PreTrainedModel, quantization: str | None, kv_cache_dtype: str) -> None:
    """Raise ValueError if the model or the device does not support FP8 matmuls or an FP8 cache."""
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
    """Return the maximum sequence length in the model's config, or None."""
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
    """Return as many blocks as memory allows, but at most what all rows can fill."""
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
    if parallel is not None:  # all ranks must have the same number
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
    """Build the runner for the device of the model."""
    options: dict[str, Any] = {"owns_weights": owns_weights, "vocabulary": vocabulary, "parallel": parallel}
    options |= {"in_8_bits": in_8_bits, "sight": sight}
    if records_routes:
        device = next(hf_model.parameters()).device
        options["routes"] = RouteStore(hf_model, rows, num_blocks, block_size, device)
    if next(hf_model.parameters()).device.type == "cuda":
        # Triton is only installed with CUDA builds of torch.
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
