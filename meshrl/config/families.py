"""Which models Megatron-Core's GPT model, as we build it, would compute differently: by what their config.json says."""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3")
# Keys that are looked at, and what a config.json without them means.
DEFAULTS: dict[str, Any] = {
    "model_type": "",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}
ROUTER_DEFAULTS: dict[str, Any] = {
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "topk_group": 4,
    "n_group": 8,
    "rope_interleave": True,
}


def facts_of(hf_config: Any) -> dict[str, Any]:
    """The same facts of a Hugging Face config."""
    return {name: getattr(hf_config, name) for name in DEFAULTS | ROUTER_DEFAULTS if hasattr(hf_config, name)}


def unmapped(facts: Mapping[str, Any]) -> list[str]:
    """Whether Megatron has a place for every weight of the model."""
    known = {**DEFAULTS, **facts}
    family = known["model_type"]
    if family not in FAMILIES:
        return [f"no Megatron weights for model_type '{family}': use one of {', '.join(FAMILIES)}"]
    # Qwen2 has biases on queries, keys and values only; this flag also puts one on the output projection.
    if known["attention_bias"] or known["mlp_bias"]:
        return [f"{family} with attention_bias or mlp_bias has biases megatron-core cannot place one by one"]
    return []


def megatron_problems(facts: Mapping[str, Any]) -> list[str]:
    """What strategy=megatron cannot compute of a model."""
    if problems := unmapped(facts):
        return problems
    known = {**DEFAULTS, **facts}
    if known["model_type"] == "qwen2_moe":
        problems.append("strategy=megatron cannot train qwen2_moe: its shared expert's gate is not built; use fsdp2")
    if known["hidden_act"] not in ("silu", "swish"):
        act = known["hidden_act"]
        problems.append(f"strategy=megatron computes SwiGLU only, the model has hidden_act={act}: use fsdp2")
    if known["attention_dropout"]:
        dropout = known["attention_dropout"]
        problems.append(f"the model's attention_dropout={dropout} is not supported: override it with 0")
    if known["model_type"] == "deepseek_v3":
        problems += _router_problems({**ROUTER_DEFAULTS, **facts})
    return problems


def _router_problems(known: Mapping[str, Any]) -> list[str]:
    """What Megatron-Core's router and latent attention fix, and Hugging Face's DeepSeek-V3 leaves open."""
    problems = []
    chosen, groups, is_normed = known["num_experts_per_tok"], known["topk_group"], known["norm_topk_prob"]
    if not is_normed or chosen < 2:
        problems.append(
            f"strategy=megatron makes the weights of 2 or more chosen experts sum to one; the model chooses {chosen} "
            f"with norm_topk_prob={is_normed}: use fsdp2"
        )
    if known["n_group"] > 1 and chosen // groups != 2:
        problems.append(
            f"strategy=megatron ranks groups of experts by their best num_experts_per_tok // topk_group = {chosen} // "
            f"{groups} = {chosen // groups}, the model by their best 2: use fsdp2"
        )
    if not known["rope_interleave"]:
        problems.append("strategy=megatron rotates interleaved pairs, the model has rope_interleave=false: use fsdp2")
    return problems
