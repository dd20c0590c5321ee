"""The training engines: `strategy`, `fsdp_config.*`, `megatron.*`, as the actor, the critic and `sft` have them."""

from dataclasses import dataclass
from typing import Any

from meshrl.config.conditions import equals
from meshrl.config.key import MOST_MEGABYTES, MOST_RANKS, key, section

DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
STRATEGIES = ("fsdp2", "fsdp", "megatron")
# How a role's micro-batches are cut.
BY_TOKENS, BY_SAMPLES = equals(".use_dynamic_bsz", True), equals(".use_dynamic_bsz", False)
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def short_dtype(name: str) -> str:
    """One name of each dtype: bf16, fp16 or fp32."""
    return SHORT_DTYPES.get(name, name)


@dataclass
class MixedPrecisionConfig:
    param_dtype: str = key("bf16", "Dtype of the parameters while they compute.", choices=DTYPES)
    reduce_dtype: str = key("fp32", "Dtype in which gradients are reduced.", choices=DTYPES)
    buffer_dtype: str = key(
        "fp32", "Dtype of the buffers; rounding rotary frequencies shifts positions.", choices=DTYPES
    )
    product_dtype: str | None = key(
        None, "fp8: the layers' products, and gradients of their inputs, from 8-bit floats.", choices=("fp8",)
    )


@dataclass
class WrapPolicyConfig:
    transformer_layer_cls_to_wrap: list[str] = key(
        [], "Layer classes sharded one by one; empty: the model's own _no_split_modules."
    )
    min_num_params: int = key(0, "Shard by size instead: modules of at least this many parameters.", low=0, high=10**13)
    disable: bool = key(False, "Shard the model as one unit.")


@dataclass
class FSDPConfig:
    fsdp_size: int = key(
        -1,
        "Ranks that one copy of the weights is cut over, also those of one sequence; -1: all, fewer: copies (hybrid).",
        low=-1,
        high=MOST_RANKS,
    )
    reshard_after_forward: bool = key(True, "Free the gathered weights after forward and gather again for backward.")
    forward_prefetch: bool = key(False, "Gather the next layer while this one computes.")
    model_dtype: str = key("fp32", "Dtype in which the sharded weights are kept.", choices=DTYPES)
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, "Dtypes of compute and reduction.")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig, "What is sharded as one unit.")
    param_offload: bool = key(False, "Keep the weights in host memory between phases.")
    optimizer_offload: bool = key(False, "Keep the optimizer states in host memory between updates.")
    offload_policy: bool = key(
        False, "Keep weights, gradients and optimizer in host memory always (FSDP's own offload)."
    )
    use_orig_params: bool = key(False, "FSDP1: keep the original parameters (always so with LoRA).")


@dataclass
class MegatronConfig:
    tensor_model_parallel_size: int = key(1, "Tensor-parallel ranks (tp).", low=1, high=MOST_RANKS)
    pipeline_model_parallel_size: int = key(1, "Pipeline stages (pp).", low=1, high=MOST_RANKS)
    virtual_pipeline_model_parallel_size: int | None = key(
        None, "Model chunks per stage (vpp); null: one.", low=1, high=MOST_RANKS
    )
    context_parallel_size: int = key(1, "Context-parallel ranks (cp).", low=1, high=MOST_RANKS)
    expert_model_parallel_size: int = key(1, "Expert-parallel ranks (ep).", low=1, high=MOST_RANKS)
    expert_tensor_parallel_size: int | None = key(
        None, "Tensor-parallel ranks of an expert (etp); null: tp.", low=1, high=MOST_RANKS
    )
    sequence_parallel: bool = key(True, "Shard the activations between tensor-parallel regions (with tp > 1).")
    dtype: str = key("bf16", "Dtype of the weights while they compute; optimizers keep float32.", choices=DTYPES[:4])
    use_distributed_optimizer: bool = key(True, "Shard the optimizer states over data-parallel ranks.")
    overlap_grad_reduce: bool = key(False, "Reduce gradients while the backward pass still computes.")
    overlap_param_gather: bool = key(False, "Gather updated weights while the next forward pass computes.")
    param_offload: bool = key(False, "Keep the weights in host memory between phases.")
    grad_offload: bool = key(False, "Give the memory of the gradients back between updates.")
    optimizer_offload: bool = key(False, "Keep the optimizer states in host memory between updates.")
    use_dist_checkpointing: bool = key(
        False,
        "Load weights from a Megatron distributed checkpoint.",
        pending="weights are read from Hugging Face files; meshrl convert makes them",
    )
    make_vocab_size_divisible_by: int = key(
        128, "Pad the vocabulary to a multiple of this on each tp rank.", low=1, high=2**20
    )
    use_transformer_engine: bool | None = key(
        None, "TransformerEngine's layers instead of Megatron-Core's own; null: where it is installed."
    )
    override_transformer_config: dict[str, Any] = key({}, "Fields of Megatron's TransformerConfig to set.")
    schedule_type: str = key("auto", "Pipeline schedule.", choices=("auto", "1f1b", "interleaved", "no-pipelining"))
    balance_algorithm: str = key(
        "kk",
        "How micro-batches are balanced over a pipeline.",
        choices=("kk", "greedy", "greedy_improved", "lpt", "dp", "auto"),
    )


@dataclass
class EngineConfig:
    """What every trained model has: how it is sharded and how its gradient is bounded."""

    strategy: str = key("fsdp2", "Training engine.", choices=STRATEGIES)
    fsdp_config: FSDPConfig = section(FSDPConfig, "Settings of strategy=fsdp2.")
    megatron: MegatronConfig = section(MegatronConfig, "Settings of strategy=megatron.")
    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that share one sequence by exchanging heads (Ulysses).", low=1, high=MOST_RANKS
    )
    context_parallel_size: int = key(
        1, "Ranks that share one sequence by ring attention (fsdp2 and fsdp).", low=1, high=MOST_RANKS
    )
    grad_clip: float = key(1.0, "Largest gradient norm of an optimizer step.", low=1e-9, high=1e9)
    activation_memory_budget: float = key(
        1.0, "With use_torch_compile: share of the activations to keep; the rest is computed again.", low=0, high=1
    )
    keep_logits_megabytes: int = key(
        4096,
        "Keep a micro-batch's 16-bit logits for backward up to this size; beyond, compute them twice.",
        low=0,
        high=MOST_MEGABYTES,
    )
    use_torch_compile: bool = key(False, "Compile the layers (on GPUs).")
    freeze_vision_tower: bool = key(False, "Don't train what looks at images, of a model that does (fsdp2 and fsdp).")

    @property
    def rounds(self) -> bool:
        """Whether products are of 8-bit floats, so that the policy is not quite that of its weights."""
        return self.strategy != "megatron" and self.fsdp_config.mixed_precision.product_dtype is not None

    def whole_dtype(self, ranks: int) -> str | None:
        """The dtype of the plain module that a single rank trains; None where the weights are sharded."""
        config, mixed = self.fsdp_config, self.fsdp_config.mixed_precision
        if self.strategy == "megatron" or ranks > 1 or config.offload_policy:
            return None
        param, reduced, kept = map(short_dtype, (mixed.param_dtype, mixed.reduce_dtype, config.model_dtype))
        if param == reduced == kept:
            return kept
        return "bf16" if (param, kept) == ("bf16", "fp32") else None
