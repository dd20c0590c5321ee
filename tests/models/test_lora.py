"""Which parameters learn beside adapters."""

import pytest
import torch

from meshrl.config.model import ModelConfig
from meshrl.models.loading import load_model
from meshrl.models.lora import add_adapters
from meshrl.trainer.verify import small_config, write_model

pytest.importorskip("peft")


def test_the_head_of_a_value_model_learns_by_itself(tmp_path):
    write_model(small_config("qwen3"), tmp_path)
    model = load_model(str(tmp_path), "sdpa", "value")
    add_adapters(model, ModelConfig(path=str(tmp_path), lora_rank=4))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"score.weight", "score.bias"}
    assert not any("score" in name and "lora_" in name for name, _ in model.named_parameters())
    values = model(torch.arange(1, 9)[None]).logits
    assert not values.any()  # a new head says 0 of everything
    values.sum().backward()
    assert model.score.weight.grad.any()


def test_of_a_language_model_only_adapters_learn(tmp_path):
    write_model(small_config("qwen3"), tmp_path)
    model = load_model(str(tmp_path), "sdpa", "lm")
    add_adapters(model, ModelConfig(path=str(tmp_path), lora_rank=4))
    assert all("lora_" in name for name, param in model.named_parameters() if param.requires_grad)
