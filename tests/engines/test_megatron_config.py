"""From Hugging Face configs to Megatron-Core's: what is passed on, overridden, and refused."""

import pytest
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

pytest.importorskip("megatron.core")

from meshrl.config.engine import MegatronConfig
from meshrl.engines.megatron.megatron_config import check_point_to_point, transformer_config
from meshrl.tools.verify import SMALL


def hf(family, **fields):
    return AutoConfig.for_model(family, **(SMALL | fields))


def test_shape_and_layout_are_passed_on():
    made = transformer_config(
        hf("qwen2"), MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), recompute=True
    )
    assert (made.num_layers, made.hidden_size, made.num_query_groups, made.kv_channels) == (2, 64, 2, 8)
    assert made.add_qkv_bias
    assert not made.add_bias_linear
    assert not made.qk_layernorm
    assert made.sequence_parallel
    assert (made.recompute_granularity, made.recompute_method) == ("full", "uniform")
    assert made.bf16
    assert not transformer_config(hf("llama"), MegatronConfig(), recompute=False).sequence_parallel


@pytest.mark.parametrize("stages", [2, 4])
def test_interleaved_stages_never_batch_their_messages(stages):
    """Batched, they pair wrongly with two stages, and nothing fails: only a check keeps them out."""
    layout = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": 2}
    config = hf("llama", num_hidden_layers=2 * stages)
    made = transformer_config(config, MegatronConfig(**layout), recompute=False)
    assert made.overlap_p2p_comm
    assert not made.batch_p2p_comm
    with pytest.raises(ValueError, match="batch_p2p_comm=true gives wrong numbers"):
        transformer_config(
            config, MegatronConfig(**layout, override_transformer_config={"batch_p2p_comm": True}), recompute=False
        )
    made.batch_p2p_comm = True
    with pytest.raises(ValueError, match=f"on {stages} stages"):
        check_point_to_point(made)


def test_overrides_win_and_unknown_ones_are_refused():
    override = {"recompute_granularity": "selective", "moe_aux_loss_coeff": 0.01}
    config = hf("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    made = transformer_config(config, MegatronConfig(override_transformer_config=override), recompute=True)
    assert made.recompute_granularity == "selective"
    assert made.moe_router_load_balancing_type == "aux_loss"
    assert transformer_config(config, MegatronConfig(), recompute=False).moe_router_load_balancing_type == "none"
    wrong = {"recompute_granularty": "full"}
    with pytest.raises(ValueError, match=r"no field 'recompute_granularty'; did you mean recompute_granularity\?"):
        transformer_config(config, MegatronConfig(override_transformer_config=wrong), recompute=False)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt2", {}, "no Megatron weights for model_type 'gpt2'"),
        ("llama", {"attention_bias": True}, "biases"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "the model chooses 1"),
        ("deepseek_v3", {"topk_group": 2}, r"8 // 2 = 4, the model by their best 2"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
    ],
)
def test_what_cannot_be_expressed_is_refused(family, fields, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(hf(family, **fields), MegatronConfig(), recompute=False)


def test_latent_attention_is_passed_on():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = hf("deepseek_v3", rope_parameters=yarn | {"original_max_position_embeddings": 4096})
    made = transformer_config(config, MegatronConfig(tensor_model_parallel_size=2), recompute=False)
    assert (made.q_lora_rank, made.kv_lora_rank, made.qk_head_dim, made.v_head_dim) == (1536, 512, 128, 128)
    assert made.softmax_scale == pytest.approx(DeepseekV3Attention(config, 0).scaling)
    assert made.softmax_scale > 1.8 * 192**-0.5
    # The routers' bias is loaded and used, never moved.
    assert made.moe_router_enable_expert_bias
    assert made.moe_router_bias_update_rate == 0.0
    alone = MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=False)
    with pytest.raises(ValueError, match=r"latent attention on 2 tensor-parallel ranks needs .*sequence_parallel=true"):
        transformer_config(config, alone, recompute=False)


def test_windows_follow_the_layers():
    kinds = ["full_attention", "sliding_attention"]
    mixed = hf("qwen3", use_sliding_window=True, sliding_window=5, layer_types=kinds)
    made = transformer_config(mixed, MegatronConfig(), recompute=False)
    assert (made.window_size, made.window_attn_skip_freq) == ((4, 0), [0, 1])
    assert transformer_config(hf("qwen3"), MegatronConfig(), recompute=False).window_size is None
