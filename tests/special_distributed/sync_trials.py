"""What the tests of weight sync share: engines, rollouts and the reference of one process."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from process_group import own_device

from meshrl.config.engine import EngineConfig, FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig

# Buckets of a few messages for models this small.
BUCKET = 1 << 14
IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35]])
SYNC_FAMILIES = ("qwen2", "qwen3", "qwen3_moe")


def changed(name: str, value: torch.Tensor, version: int) -> torch.Tensor:
    """Each version's weights: a rule that every rank can apply to its own rows."""
    return value * (1 + 0.1 * version)


def one_process_logits(folder, version):
    """The reference: the whole model, changed by the same rule."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(changed(name, param, version))
    return logits_of(model.to(own_device()))


def fsdp_engine(folder, **engine):
    from meshrl.engines.fsdp.fsdp_engine import FSDPEngine

    precision = MixedPrecisionConfig(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32")
    size = engine.pop("fsdp_size", -1)
    lora_rank = engine.pop("lora_rank", 0)
    config = EngineConfig(
        fsdp_config=FSDPConfig(model_dtype="fp32", mixed_precision=precision, fsdp_size=size), **engine
    )
    model = ModelConfig(path=str(folder), lora_rank=lora_rank, lora_alpha=16, enable_gradient_checkpointing=False)
    made = FSDPEngine(model, config, OptimConfig(lr=1e-3), device=own_device())
    made.initialize()
    return made


def multiply(engine, factor):
    with torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(factor)


@contextmanager
def multiplied(engine, factor):
    """Other weights inside; afterwards the same as before to the bit, which dividing would not give."""
    before = [param.detach().clone() for param in engine.module.parameters()]
    multiply(engine, factor)
    try:
        yield
    finally:
        with torch.no_grad():
            for param, value in zip(engine.module.parameters(), before, strict=True):
                param.copy_(value)


def blank_lm(folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model.to(own_device()).eval()


def logits_of(model):
    """What a module of this rank says, on the host."""
    with torch.no_grad():
        return model(IDS.to(own_device())).logits.cpu()


class PlainRollout:
    """As little of a rollout as a sync asks for."""

    def __init__(self):
        self.version, self.released = -1, ()

    def update_weights(self, weights, version):
        for _ in weights:
            pass
        self.version = version

    def release(self, tags):
        self.released = tuple(tags)

    def resume(self, tags):
        self.released = ()
