"""Config sections that all trained models share.

* `EngineConfig` (`strategy`, `fsdp_config.*`, `megatron.*`): the training engine of the actor, the critic or `sft`.
* `override_problems`: checks of `override_transformer_config` against Megatron-Core's source.
* `OptimConfig` (`optim.*`), `CheckpointConfig` (`checkpoint.*`), `ModelConfig` (`model.*`).
* `OwnDevices`: devices for a role that does not run on the policy's.
"""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.config.keys import MOST_MEGABYTES, MOST_RANKS, MOST_STEPS, above, differs, equals, key, nearest, section

DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
STRATEGIES = ("fsdp2", "fsdp", "megatron")
# Conditions on how a role's micro-batches are cut: by a budget of tokens, or by a number of samples.
BY_TOKENS, BY_SAMPLES = equals(".use_dynamic_bsz", True), equals(".use_dynamic_bsz", False)
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def short_dtype(name: str) -> str:
    """Return the short name of a dtype: bf16, fp16 or fp32. Other names are returned as they are."""
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
    """The settings of a training engine: strategy, sharding, sequence parallelism, gradient clipping and memory."""

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
        """True if training uses FP8 matmuls, so that its log-probs differ slightly from those of its own weights."""
        return self.strategy != "megatron" and self.fsdp_config.mixed_precision.product_dtype is not None

    def whole_dtype(self, ranks: int) -> str | None:
        """Return the dtype of the module's weights if a single rank trains it without FSDP, else None.

        None means that FSDP or Megatron holds the weights. A module that computes in bf16 and keeps fp32 weights is
        a bf16 module, whose optimizer holds fp32 master weights.
        """
        config, mixed = self.fsdp_config, self.fsdp_config.mixed_precision
        if self.strategy == "megatron" or ranks > 1 or config.offload_policy:
            return None
        param, reduced, kept = map(short_dtype, (mixed.param_dtype, mixed.reduce_dtype, config.model_dtype))
        if param == reduced == kept:
            return kept
        return "bf16" if (param, kept) == ("bf16", "fp32") else None


# Fields of Megatron-Core's TransformerConfig that may be overridden, read from its source because importing it is slow.

SOURCES = ("core/model_parallel_config.py", "core/transformer/transformer_config.py")
CLASSES = ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig")
# Fields that follow from other keys. A second way to set them would let the two values disagree.
FROM_OUR_KEYS = {
    "tensor_model_parallel_size": "megatron.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "megatron.pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "megatron.virtual_pipeline_model_parallel_size",
    "context_parallel_size": "megatron.context_parallel_size",
    "expert_model_parallel_size": "megatron.expert_model_parallel_size",
    "expert_tensor_parallel_size": "megatron.expert_tensor_parallel_size",
    "sequence_parallel": "megatron.sequence_parallel",
    "params_dtype": "megatron.dtype",
    "pipeline_dtype": "megatron.dtype",
    "bf16": "megatron.dtype",
    "fp16": "megatron.dtype",
    "num_layers": "model.override_config.num_hidden_layers",
    "hidden_size": "model.override_config.hidden_size",
    "num_attention_heads": "model.override_config.num_attention_heads",
    "num_query_groups": "model.override_config.num_key_value_heads",
    "kv_channels": "model.override_config.head_dim",
    "ffn_hidden_size": "model.override_config.intermediate_size",
    "num_moe_experts": "model.override_config.num_experts",
    "calculate_per_token_loss": "nothing: losses are shares of the global one, gradients are summed",
    "variable_seq_lengths": "nothing: micro-batches are packed rows of any length",
    "moe_grouped_gemm": "nothing: experts are modules of their own",
    "moe_enable_routing_replay": "actor.router_replay.mode",
    "mtp_num_layers": "nothing: there is no loss for multi-token prediction",
}


def has_megatron() -> bool:
    """Return whether Megatron-Core is installed, without importing it."""
    return _package() is not None


def override_problems(override: dict[str, Any], prefix: str) -> list[str]:
    """Return one message for each field of `override_transformer_config` that does not exist or that a key sets."""
    problems = []
    for name in override:
        key = f"{prefix}.override_transformer_config.{name}"
        if name in FROM_OUR_KEYS:
            problems.append(f"{key} cannot be set here; set {FROM_OUR_KEYS[name]}")
        elif name not in known_fields():
            suggestion = nearest(name, known_fields())
            hint = f"; did you mean {suggestion}?" if suggestion else ""
            problems.append(f"{key}: Megatron-Core's TransformerConfig has no field '{name}'{hint}")
    return problems


@cache
def known_fields() -> frozenset[str]:
    """Return the fields of Megatron-Core's config classes, parsed from their source. Empty if it is not installed."""
    package = _package()
    if package is None:
        return frozenset()
    found = set()
    for source in SOURCES:
        for node in ast.parse((package / source).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                found |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return frozenset(found)


def _package() -> Path | None:
    spec = importlib.util.find_spec("megatron")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((Path(folder) for folder in folders if (Path(folder) / SOURCES[0]).is_file()), None)


# `optim.*`: the optimizer and the learning-rate schedule of one model.


@dataclass
class OptimConfig:
    lr: float = key(1e-6, "Peak learning rate.", low=0, high=10)
    optimizer: str = key("AdamW", "Optimizer class.", choices=("AdamW",))
    weight_decay: float = key(0.01, "Decoupled weight decay.", low=0, high=10)
    betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates.", low=0, high=1)
    eps: float = key(1e-8, "AdamW's epsilon: gradients much smaller than this move nothing.", low=0, high=1)
    lr_warmup_steps: int = key(
        -1, "Optimizer steps of linear warm-up; -1: by lr_warmup_steps_ratio.", low=-1, high=MOST_STEPS
    )
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all optimizer steps.", low=0, high=1)
    lr_scheduler_type: str = key(
        "constant",
        "Schedule after the warm-up; wsd: constant, then a linear decay over lr_decay_steps_ratio.",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    lr_decay_steps_ratio: float = key(0.2, "wsd: the decay at the end, as a share of all steps.", low=0, high=1)
    min_lr_ratio: float = key(0.0, "Where linear, cosine and wsd end, as a share of lr.", low=0, high=1)


# `checkpoint.*` of a trained role: what is saved, what is loaded, and how.

CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class CheckpointConfig:
    save_contents: list[str] = key(
        ["model", "optimizer", "extra"],
        "What a checkpoint holds: weights, optimizer, schedule and random states, weights for Hugging Face.",
        choices=CONTENTS,
    )
    load_contents: list[str] | None = key(
        None,
        "What is loaded from it; null: all it holds.",
        choices=CONTENTS[:3],
        only_if=differs("trainer.resume_mode", "disable"),
    )
    async_save: bool = key(False, "Copy the state to host memory and write it while training goes on.")


# `model.*`: which model, and how it is prepared for training.


@dataclass
class ModelConfig:
    path: str | None = key(
        None, "Folder with the Hugging Face model (config.json, weights, tokenizer), or its name on the hub."
    )
    tokenizer_path: str | None = key(None, "Folder with the tokenizer; null: the model's folder.")
    custom_chat_template: str | None = key(
        None, "Chat template (Jinja) of the run instead of the tokenizer's; it is saved with the trained model."
    )
    trust_remote_code: bool = key(False, "Run model or tokenizer code found in the folder.")
    external_lib: str | None = key(
        None, "Python module (or file) imported first, here and in every worker: it may register losses and models."
    )
    random_init: bool = key(False, "Start from random weights of this shape; only config.json is read (benchmarks).")
    override_config: dict[str, Any] = key({}, "Fields of the model's config.json to change.")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in backward to save memory.")
    enable_activation_offload: bool = key(
        False, "Move activations to host memory until their backward.", only_if=differs("trainer.device", "cpu")
    )
    use_remove_padding: bool = key(True, "Pack sequences without padding; false: padded, by the model's own attention.")
    use_liger: bool = key(
        False, "Liger kernels.", pending="Liger kernels; use_torch_compile fuses a layer's operations instead"
    )
    lora_rank: int = key(
        0,
        "Rank of the LoRA adapter; 0: train all weights.",
        low=0,
        high=65536,
        only_if=equals(".lora_adapter_path", None),
        noted=True,
    )
    lora_alpha: float = key(
        16.0,
        "Scale of the LoRA adapter, over its rank.",
        low=0,
        high=1e6,
        only_if=equals(".lora_adapter_path", None),
        noted=True,
    )
    target_modules: list[str] = key(
        ["all-linear"], "Modules that get an adapter.", only_if=equals(".lora_adapter_path", None), noted=True
    )
    exclude_modules: list[str] = key(
        [],
        "Modules that get none: last parts of names, or patterns of whole names such as .*visual.*.",
        only_if=above(".lora_rank", 0),
        noted=True,
    )
    lora_adapter_path: str | None = key(None, "Folder of a peft adapter to start from.")

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters are trained instead of the model's own weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass
class OwnDevices:
    """The keys that give a role (reference, critic, reward model, judge) devices of its own.

    A role for which both keys are 0 shares the policy's devices.
    """

    nnodes: int = key(
        0, "Machines of its own, to work beside the policy; 0: it shares the policy's devices.", low=0, high=MOST_RANKS
    )
    n_gpus_per_node: int = key(0, "Processes on each of these machines.", low=0, high=MOST_RANKS)

    @property
    def has_own_devices(self) -> bool:
        """True if the role runs on devices of its own instead of the policy's."""
        return self.nnodes > 0 and self.n_gpus_per_node > 0

    @property
    def processes(self) -> list[int]:
        """The number of processes on each of the role's own machines."""
        return [self.n_gpus_per_node] * self.nnodes
