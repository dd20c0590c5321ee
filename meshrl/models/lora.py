"""LoRA by peft: adapters inside the model's linear layers, and their merge into plain weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.config.engine import ModelConfig
from meshrl.config.model_folder import pickle_problem
from meshrl.files import write_json
from meshrl.models.loading import is_value_head

ADAPTER = "default"
ADAPTER_CONFIG = "adapter_config.json"
SCALING_FILE = "adapter_scaling.json"
# All experts of a layer as one tensor, not `experts.0.`.
FUSED_EXPERTS = re.compile(r"\.experts\.(?!\d)")
# Names that an adapter may add: its two matrices, and the original weight or module under a longer name.
MERGEABLE = re.compile(rf"\.lora_[AB]\.{ADAPTER}\.weight$|\.base_layer\.|\.original_module\.")


def add_adapters(hf_model: PreTrainedModel, config: ModelConfig) -> None:
    """Add adapters to the target modules (or load them from `lora_adapter_path`) and freeze all other weights.

    The model may be on the meta device; its adapters get memory.
    """
    try:
        from peft import LoraConfig, PeftConfig, PeftType, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("model.lora_rank > 0 needs peft: pip install 'meshrl[lora]'") from error
    if config.lora_adapter_path is not None:
        if not Path(config.lora_adapter_path).is_dir():
            raise FileNotFoundError(f"model.lora_adapter_path: no folder '{config.lora_adapter_path}'")
        lora = PeftConfig.from_pretrained(config.lora_adapter_path)
        if (kind := PeftType(lora.peft_type)) != PeftType.LORA:
            raise ValueError(
                f"model.lora_adapter_path={config.lora_adapter_path} has peft_type {kind.value}: only LORA can be "
                "merged into the weights that rollouts get"
            )
    else:
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
            target_modules=target_names(hf_model, list(config.target_modules)),
            exclude_modules=excluded(config.exclude_modules),
            bias="none",
            task_type="CAUSAL_LM",
        )
    hf_model.requires_grad_(False)
    own_names = {name for name, _ in hf_model.named_parameters()}
    inject_adapter_in_model(lora, hf_model, adapter_name=ADAPTER)
    _give_memory(hf_model)
    _refuse_unmergeable(hf_model, own_names)
    if config.lora_adapter_path is not None:
        _load_adapters(hf_model, config.lora_adapter_path)
    for name, param in hf_model.named_parameters():
        # A value model's head starts at zero. If it stayed frozen there, no adapter would get a gradient.
        param.requires_grad_("lora_" in name or is_value_head(name))


def _give_memory(hf_model: PreTrainedModel) -> None:
    """Give adapters in a model on the meta device memory at once, because they are small; they start at zero.

    The memory is on torch's default device, which is the meta device in planning.
    """
    for name, module in hf_model.named_modules():
        for own, param in module._parameters.items():
            if param is not None and param.is_meta and ".lora_" in f"{name}.":
                module._parameters[own] = nn.Parameter(torch.zeros(param.shape, dtype=param.dtype))


def plain_name(name: str) -> str:
    """Return the name that a parameter of a model with adapters has in the plain model."""
    return name.replace(".base_layer.", ".")


def _refuse_unmergeable(hf_model: PreTrainedModel, own_names: set[str]) -> None:
    """Raise a `ValueError` unless every trained tensor can be merged.

    Rollouts get a linear layer's weight plus the product of its two adapter matrices, and no other trained tensor.
    """
    head: Any = hf_model.get_output_embeddings()
    if hasattr(head, "lora_A"):
        raise ValueError(
            "model.target_modules (or those of model.lora_adapter_path) put an adapter on the head, whose own weight "
            "is what log-probs are computed with: take it out of them"
        )
    for name, module in hf_model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        # In some models peft matches the names of an MLP's projections also in fused experts.
        if FUSED_EXPERTS.search(f"{name}."):
            raise ValueError(
                f"model.target_modules puts an adapter on fused experts ('{name}'), which cannot be merged: name the "
                f"attention's projections of {type(hf_model).__name__} instead"
            )
        layer: Any = module
        if not isinstance(layer.get_base_layer(), nn.Linear):
            raise ValueError(
                f"model.target_modules (or those of model.lora_adapter_path) put an adapter on '{name}', a "
                f"{type(layer.get_base_layer()).__name__}: only those of linear layers can be merged, take it out"
            )
        if variants := getattr(layer, "lora_variant", None):
            raise ValueError(
                f"model.lora_adapter_path: the adapter of '{name}' is a {type(variants[ADAPTER]).__name__}, which "
                "cannot be merged: train one without use_dora and other variants of LoRA"
            )
    for name, _ in hf_model.named_parameters():
        if name not in own_names and not MERGEABLE.search(name):
            raise ValueError(
                f"model.lora_adapter_path trains '{name}' beside lora_A and lora_B, which cannot be merged: train one "
                "without lora_bias, modules_to_save and trainable_token_indices"
            )


def _load_adapters(hf_model: PreTrainedModel, folder: str) -> None:
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    if problem := pickle_problem(Path(folder)):
        raise ValueError(f"model.lora_adapter_path: {problem}")
    found = load_peft_weights(folder, device="cpu")
    result: Any = set_peft_model_state_dict(hf_model, found, adapter_name=ADAPTER)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"model.lora_adapter_path={folder} does not fit {type(hf_model).__name__}: {len(missing)} of the model's "
            f"adapter tensors are missing and {len(result.unexpected_keys)} of its {len(found)} are unexpected (first: "
            f"'{[*missing, *result.unexpected_keys][0]}'); it must be of a model with the same modules and layers"
        )


def excluded(names: list[str]) -> str | None:
    """Return a pattern of the dotted names that get no adapter, or None.

    Each given name matches a dotted name as a whole or as its last part.
    """
    return "|".join(rf"(?:.*\.)?(?:{name})" for name in names) or None


def target_names(hf_model: PreTrainedModel, wanted: list[str]) -> list[str]:
    """Return the modules that get an adapter: the named ones or, for `all-linear`, every linear layer except the head.

    Experts that a model keeps as one fused tensor are not linear layers and get no adapter.
    """
    if wanted != ["all-linear"]:
        return wanted
    head = hf_model.get_output_embeddings()
    linears = ((name, module) for name, module in hf_model.named_modules() if isinstance(module, nn.Linear))
    return [name for name, module in linears if module is not head and not is_value_head(name)]


@contextmanager
def adapters_off(hf_model: nn.Module) -> Iterator[None]:
    """Disable the adapters for the duration of the context, which gives the reference policy without a second model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in hf_model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


def adapter_scaling(hf_model: nn.Module) -> dict[str, float]:
    """Return each layer's factor on its adapter's output; call this before sharding changes the names."""
    layers = {n: m for n, m in hf_model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "scaling")}
    return {name: float(module.scaling[ADAPTER]) for name, module in layers.items()}


def adapter_rank(hf_model: nn.Module) -> int:
    """Return the largest rank of a model's adapters."""
    return max(int(module.r[ADAPTER]) for module in hf_model.modules() if hasattr(module, "lora_A"))  # type: ignore


def save_adapter_config(folder: Path, hf_model: PreTrainedModel, scaling: dict[str, float], base: str) -> list[Path]:
    """Write the files needed to merge stored adapters or to export them as a peft folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(hf_model.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(folder)
    write_json(folder / SCALING_FILE, scaling)
    return [folder / ADAPTER_CONFIG, folder / SCALING_FILE]


def merged_params(
    named_params: Iterator[tuple[str, Tensor]], scaling: dict[str, float]
) -> Iterator[tuple[str, Tensor]]:
    """Turn a stream of (name, whole tensor) of a model with adapters into the stream of the merged plain model.

    The stream must be in order: a layer's base weight comes before its two adapter matrices.
    """
    waiting: dict[str, tuple[str, Tensor]] = {}
    down: dict[str, Tensor] = {}
    for name, tensor in named_params:
        layer, _, rest = name.partition(".base_layer.")
        if ".lora_A." in name:
            down[name.split(".lora_A.")[0]] = tensor
        elif ".lora_B." in name:
            layer = name.split(".lora_B.")[0]
            if layer not in waiting or layer not in down:
                raise ValueError(f"adapter '{name}' did not follow its layer's own weight in the stream")
            base_name, base = waiting.pop(layer)
            delta = (tensor.float() @ down.pop(layer).float()) * scaling[layer]
            yield plain_name(base_name), (base.float() + delta).to(base.dtype)
        elif rest == "weight" and layer in scaling:
            waiting[layer] = (name, tensor)
        else:
            yield plain_name(name), tensor
    if waiting:
        raise ValueError(f"the adapter of '{next(iter(waiting))}' is missing in the stream")


def adapter_init(hf_model: nn.Module, seed: int) -> None:
    """Draw the adapters' initial values from the seed alone, so that every rank and layout starts with the same."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in hf_model.named_parameters():
        if ".lora_A." in name:
            bound = param.shape[1] ** -0.5
            param.data.copy_((torch.rand(param.shape, generator=generator) * 2 - 1) * bound)
