"""What the table of model families says of a loaded model, and what follows from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.config.families import (
    UNSCALED,
    Family,
    LogitScaling,
    engine_problem,
    family_of,
    gpu_problem,
    logit_scaling,
    packing_problem,
    padding_problem,
)

# Stands for the one of Transformers' attention functions that computes a family right.
PLAIN_ATTENTION = "plain"


def shape_of(hf_config: Any) -> dict[str, Any]:
    """The fields of a model's config as `read_model_config` reads them: a language model's fields win."""
    whole, text = hf_config.to_dict(), hf_config.get_text_config().to_dict()
    return {**whole, **text, "model_type": hf_config.model_type}


def check_engine(engine: str, hf_config: Any, on_gpu: bool) -> None:
    """A `ValueError` if a rollout engine would compute the model otherwise than Transformers."""
    why = engine_problem(engine, shape_of(hf_config))
    if why is None and on_gpu and engine == "embedded":
        why = gpu_problem(shape_of(hf_config))
    if why is not None:
        raise ValueError(f"the {engine} engine cannot generate with a {hf_config.model_type} model: {why}")


def check_training(hf_config: Any, packs: bool) -> None:
    """A `ValueError` if packed (or padded) samples would have other log-probs than each has alone."""
    if (why := (packing_problem if packs else padding_problem)(shape_of(hf_config))) is not None:
        how = "share a row" if packs else "be padded"
        raise ValueError(f"samples of a {hf_config.model_type} model cannot {how}: {why}")


def logit_scaling_of(hf_config: Any) -> LogitScaling:
    """What the model does to the product of its head."""
    return logit_scaling(shape_of(hf_config))


def attention_name(hf_config: Any, attention: str) -> str:
    """The name of an attention function; for `PLAIN_ATTENTION` that of the family's row."""
    if attention != PLAIN_ATTENTION:
        return attention
    return (family_of({"model_type": hf_config.model_type}) or Family()).attention


def body_of(hf_model: PreTrainedModel) -> nn.Module:
    """The model without its head; some families' own name for it is that of a model around them."""
    body = hf_model.base_model
    return hf_model.model if body is hf_model else body


@torch.no_grad()
def scale_logits_(logits: Tensor, scaling: LogitScaling) -> Tensor:
    """Scale and soft-cap the product of the head in place."""
    if scaling == UNSCALED:
        return logits
    if scaling.cap is None:
        return logits.mul_(scaling.factor)
    return logits.mul_(scaling.factor / scaling.cap).tanh_().mul_(scaling.cap)
