"""Whether samples can share a row of a model: its layers know where each ends, its angles do not depend on others."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

ATTENDED = "_meshrl_attended"  # of modules that have called our attention
INSTEAD = "model.use_remove_padding=false pads samples instead, and rollout.name=vllm, sglang or hf generates"


def note_attended(module: nn.Module) -> None:
    """Remembers that this layer asks for the row's borders; `check_layers` looks at it after a first forward."""
    if ATTENDED not in module.__dict__:
        module.__dict__[ATTENDED] = True


def check_layers(hf_model: PreTrainedModel) -> None:
    """A `ValueError` if layers of a model that has run on a packed row mix tokens without asking where samples end."""
    config: Any = hf_model.config.get_text_config()
    modules = list(hf_model.base_model.modules())
    attended, layers = sum(ATTENDED in module.__dict__ for module in modules), int(config.num_hidden_layers)
    convolve = [owner for owner in modules if any(isinstance(m, nn.Conv1d) for m in owner.children())]
    mixers = [type(owner).__name__ for owner in convolve if ATTENDED not in owner.__dict__]
    if attended >= layers and not mixers:
        return
    found = f"{type(hf_model).__name__} has {layers} layers, of which {attended} go through meshrl's attention"
    also = f" and {len(mixers)} convolutions over tokens (in {mixers[0]})" if mixers else ""
    raise ValueError(f"{found}{also}: the others take a row of several samples for one. {INSTEAD}")


def longest_fixed_rotation(hf_model: PreTrainedModel) -> int | None:
    """Up to how many tokens the angles of positions are the same whatever else is in the row; None: always."""
    config: Any = hf_model.config.get_text_config()
    kinds = {getattr(module, "rope_type", None) for module in hf_model.modules() if _has_one_rotation(module)}
    if "longrope" in kinds:
        return int(config.rope_parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings) if "dynamic" in kinds else None


def _has_one_rotation(module: nn.Module) -> bool:
    return isinstance(getattr(module, "rope_type", None), str)
