"""Hugging Face files -> real Megatron-Core models on real processes -> Hugging Face tensors, bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from meshrl.config.engine import EngineConfig, MegatronConfig, ModelConfig

BASE = {
    "hidden_size": 16,
    "vocab_size": 37,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 7,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 3,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 3,
}
CONFIGS = {
    "qwen2": Qwen2Config(**BASE | {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    "qwen3": Qwen3Config(**BASE, head_dim=6),
    "qwen3_moe": Qwen3MoeConfig(**BASE, **MOE, head_dim=6, mlp_only_layers=[0, 5]),
    "mixtral": MixtralConfig(**BASE, num_local_experts=4, head_dim=6),
    "deepseek_v3": DeepseekV3Config(**BASE | LATENT, q_lora_rank=13),
    "deepseek_whole_queries": DeepseekV3Config(**BASE | LATENT, q_lora_rank=None),
}
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST = {"num_layers_in_first_pipeline_stage": 2}
CASES = [
    ("qwen3", 1, {}, "fp32"),
    ("qwen2", 4, {TP: 2, PP: 2}, "fp32"),
    ("qwen3", 4, {TP: 4, "make_vocab_size_divisible_by": 16}, "bf16"),
    ("qwen3", 4, {PP: 4, VPP: 2}, "fp32"),
    ("qwen2", 2, {PP: 2, "override_transformer_config": FIRST}, "fp32"),
    ("qwen3_moe", 4, {TP: 2, EP: 4, ETP: 1}, "bf16"),
    ("qwen3_moe", 4, {TP: 2, EP: 2, ETP: 2}, "fp32"),
    ("qwen3_moe", 8, {TP: 2, PP: 2, VPP: 2, CP: 2, EP: 2, ETP: 2}, "fp32"),
    ("mixtral", 4, {PP: 2, EP: 2}, "fp32"),
    ("deepseek_v3", 4, {TP: 2, PP: 2, VPP: 2, EP: 2, ETP: 1}, "bf16"),
    ("deepseek_whole_queries", 4, {TP: 4, EP: 2, ETP: 2}, "fp32"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(0)
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_config(config)
        for tensor in model.parameters():
            # Numbers that bfloat16 holds exactly, so that every dtype must give them back.
            tensor.data.copy_(torch.randn_like(tensor).bfloat16())
        for tensor_name, tensor in model.named_buffers():
            if tensor_name.endswith("e_score_correction_bias"):
                tensor.normal_()  # stays float32 in every model
        model.save_pretrained(found[name])
    return found


def round_trip(folder: Path, sizes: dict, dtype: str, perturb: bool = False) -> tuple[list[str], int]:
    """On each rank: build, load, export; the names that differ from the files, and how many parameters it holds."""
    from meshrl.engines.megatron.megatron_engine import MegatronEngine
    from meshrl.engines.megatron.parallel_state import leave_parallel_state
    from meshrl.engines.megatron.weights import export_hf_weights

    config = EngineConfig(strategy="megatron", megatron=MegatronConfig(**sizes, dtype=dtype))
    engine = MegatronEngine(ModelConfig(path=str(folder)), config, None, device=torch.device("cpu"))
    try:
        engine.initialize()
        if perturb and dist.get_rank() == 1:
            next(engine.module.parameters()).data.view(-1)[5] += 1.0
        weights = load_file(folder / "model.safetensors")
        wrong = []
        for name, tensor in export_hf_weights(engine.model, engine.hf_config, engine.ranks, bucket_bytes=4096):
            if not torch.equal(tensor.float(), weights.pop(name)):
                wrong.append(name)
        return wrong + list(weights), sum(p.numel() for p in engine.module.parameters())
    finally:
        leave_parallel_state()


@pytest.mark.parametrize(("family", "world", "sizes", "dtype"), CASES)
def test_round_trip(megatron_ranks, folders, family, world, sizes, dtype):
    found = megatron_ranks(world).run(round_trip, folders[family], sizes, dtype)
    assert [wrong for wrong, _ in found] == [[]] * world


def test_a_changed_number_is_seen_on_every_rank_and_shards_are_parts(megatron_ranks, folders):
    exact = {"make_vocab_size_divisible_by": 1}
    found = megatron_ranks(2).run(round_trip, folders["qwen3"], {TP: 2, **exact}, "fp32", perturb=True)
    assert [len(wrong) for wrong, _ in found] == [1, 1]
    (whole,) = megatron_ranks(1).run(round_trip, folders["qwen3"], exact, "fp32")
    assert found[0][1] < 0.56 * whole[1]
