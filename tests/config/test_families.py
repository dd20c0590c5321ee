"""Models that Megatron-Core would compute differently are refused before a worker starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.config import PPOConfig
from meshrl.config.validate import check_config

MakeModel = Callable[..., Path]
MakePPO = Callable[..., PPOConfig]

MEGATRON = ("actor_rollout_ref.actor.strategy=megatron",)
CASES = [
    ({"model_type": "gpt2", "attn_pdrop": 0.0}, "no Megatron weights for model_type 'gpt2'"),
    ({"model_type": "llama", "attention_bias": True}, "biases megatron-core cannot place"),
    ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act=gelu"),
    ({"model_type": "qwen2", "attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"model_type": "qwen2_moe"}, "its shared expert's gate is not built"),
    ({"model_type": "deepseek_v3", "norm_topk_prob": False}, "norm_topk_prob=False"),
    ({"model_type": "deepseek_v3", "topk_group": 2}, "8 // 2 = 4, the model by their best 2"),
    ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave=false"),
]


@pytest.mark.parametrize(("fields", "words"), CASES, ids=str)
def test_what_cannot_be_computed_is_refused(fine: MakePPO, make_model: MakeModel, fields: dict, words: str) -> None:
    config, other = fine(*MEGATRON), fine()
    make_model(**fields)
    assert any(words in problem for problem in check_config(config))
    # The FSDP engine runs Hugging Face's own modules, but for their attention.
    assert [problem for problem in check_config(other) if "set actor_rollout_ref.model.override" not in problem] == []


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3"])
def test_the_families_themselves_are_taken(fine: MakePPO, make_model: MakeModel, family: str) -> None:
    config = fine(*MEGATRON)
    make_model(model_type=family, intermediate_size=48)
    assert check_config(config) == []
