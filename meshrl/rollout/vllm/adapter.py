"""LoRA adapters on their way into vLLM: it reads them from a folder, which lies in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from meshrl.config.rollout import VLLM_ADAPTER_RANKS

# The name that requests ask for it by.
ADAPTER = "policy"


def adapter_arguments(rank: int, device_type: str) -> dict[str, Any]:
    """vLLM's arguments for one adapter of this rank, replaced again and again."""
    room = next((most for most in VLLM_ADAPTER_RANKS if most >= rank), None)
    if room is None:
        raise ValueError(
            f"vLLM takes adapters up to rank {VLLM_ADAPTER_RANKS[-1]}, not {rank}: set "
            "actor_rollout_ref.rollout.update_weights_adapters=merged"
        )
    # On CPUs requests without an adapter would go through the last place.
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1 if device_type == "cuda" else 2}


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Writes peft's two files; returns their folder."""
    folder.mkdir(exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)))
    return folder
