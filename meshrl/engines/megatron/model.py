"""Megatron-Core's GPT model with meshrl's heads: the last stage returns log-probs or values, never logits.

- `LogProbHead`, `ValueHead`, `PackedGPTModel`, `build_chunks`: the model chunks of a rank.
- `LatentAttention`, `FixedRotary`: DeepSeek-V3's attention without TransformerEngine.
- `RouterPadding`, `auxiliary_tokens`, `take_balancing_metrics`: the balancing losses of mixtures of experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from meshrl.engines.megatron.megatron_config import rope_frequencies
from meshrl.engines.megatron.modules import PackedAttention, PackedDocuments, RMSNorm
from meshrl.engines.megatron.packed_rows import Question
from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.schedule import MicroBatch
from meshrl.engines.megatron.vocab_parallel import VocabularyPart, vocab_parallel_log_probs


class LogProbHead(ColumnParallelLinear):
    """The output projection, which returns the log-probs that a `Question` asks for, and entropies if wanted."""

    vocab_size: int  # without padding

    def forward(self, hidden: Tensor, question: Question, weight: Tensor | None = None) -> Tensor:
        """Map hidden states `[tokens, 1, dim]` to `[1 or 2, targets]`: log-probs, then entropies if wanted."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        weight = self.weight if weight is None else weight
        several = self.tp_group.size() > 1
        part = VocabularyPart.of(self.tp_group.rank(), len(weight), self.vocab_size, self.tp_group if several else None)
        log_probs, entropy = vocab_parallel_log_probs(
            hidden[:, 0][question.places],
            weight,
            question.targets,
            part,
            temperature=question.temperature,
            with_entropy=question.with_entropy,
        )
        return log_probs[None] if entropy is None else torch.stack([log_probs, entropy])


class ValueHead(nn.Module):
    """A head of one number per token, the same on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, tp_group: Any):
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    def forward(self, hidden: Tensor, question: Question, weight: Tensor | None = None) -> Tensor:
        """Map hidden states `[tokens, 1, dim]` to values `[1, targets]`."""
        if self.sequence_parallel:
            # Every rank computes the same values, so each rank takes only its own part of the gradient.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return F.linear(hidden[:, 0][question.places], self.weight, self.bias)[:, 0].float()[None]


class PackedGPTModel(GPTModel):
    """A chunk of the model. It takes a `Question` as its labels; the last chunk returns the head's outputs."""

    def __init__(self, config: TransformerConfig, *, real_vocab_size: int, head: str, **others: Any):
        # Read while the base class builds itself, before there is a module to set attributes on.
        object.__setattr__(self, "_head", (head, real_vocab_size))
        super().__init__(config=config, **others)

    def setup_embeddings_and_output_layer(self) -> None:
        if self.post_process:
            self.output_layer = self._new_head()
        super().setup_embeddings_and_output_layer()

    def _new_head(self) -> nn.Module:
        kind, real_vocab_size = self._head
        if kind == "value":
            return ValueHead(self.config, self.pg_collection.tp)
        head = LogProbHead(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            tp_group=self.pg_collection.tp,
        )
        head.vocab_size = real_vocab_size
        return head

    def _postprocess(self, *, hidden_states: Tensor, labels: Question, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, labels, weight=weight)


def build_chunks(
    config: TransformerConfig,
    hf: PretrainedConfig,
    ranks: ParallelRanks,
    *,
    padded_vocab_size: int,
    head: str,
    transformer_engine: bool,
) -> list[nn.Module]:
    """Build the model chunks of this rank's pipeline stage.

    In half precision, chunks are wrapped so that only the outputs of the last stage are float32.
    """
    chunks: list[nn.Module] = []
    for chunk in range(ranks.vpp):
        stage = chunk if ranks.vpp > 1 else None
        block = get_gpt_decoder_block_spec(config, transformer_engine, normalization="RMSNorm", vp_stage=stage)
        model = PackedGPTModel(
            config,
            transformer_layer_spec=block if transformer_engine else use_own_modules(block),
            vocab_size=padded_vocab_size,
            real_vocab_size=hf.vocab_size,
            head=head,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=ranks.has_embedding(chunk),
            post_process=ranks.has_output(chunk),
            share_embeddings_and_output_weights=hf.tie_word_embeddings and head == "lm",
            position_embedding_type="rope",
            vp_stage=stage,
        )
        use_rope_of(model, hf)
        model.to(torch.cuda.current_device())
        chunks.append(Float16Module(config, model) if config.bf16 else model)
    assert parallel_state.get_pipeline_model_parallel_rank() == ranks.pp_rank
    return chunks


def use_rope_of(model: GPTModel, hf: PretrainedConfig) -> None:
    """Set the rotary frequencies to Hugging Face's own, so that every kind of rotary scaling matches the model."""
    frequencies, scale = rope_frequencies(hf)
    frequencies = frequencies.to(torch.cuda.current_device())
    if not model.config.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = frequencies
        return
    rotary = FixedRotary(frequencies, scale)
    for layer in model.decoder.layers:
        layer.self_attention.rotary_pos_emb = rotary


# DeepSeek-V3's latent attention from Megatron-Core's modules, without TransformerEngine.
#
# Megatron-Core's local spec names such a layer, but version 0.16.1 cannot build it. Its gradients would also be wrong.
# It shards the down projections over tensor-parallel ranks and keeps only a rank's own part of their gradient. But the
# rotated part of the key is shared by all heads, and each rank has some of the heads, so the sum over the ranks is
# missing. Here, as with TransformerEngine, every rank holds the down projections whole and applies them to its own
# tokens. Gathering the tokens sums the gradients. The projections are small, and no size has to be divisible by the
# number of ranks.


class LatentNorm(RMSNorm):
    """The norm of a latent vector, with Hugging Face's fixed epsilon of 1e-6 instead of `rms_norm_eps`."""

    def __init__(self, config: MLATransformerConfig, hidden_size: int, **_: Any):
        super().__init__(config, hidden_size, eps=1e-6)


class WholeLinear(nn.Module):
    """A projection that every tensor-parallel rank holds whole and applies to its own tokens."""

    def __init__(self, config: MLATransformerConfig, inputs: int, outputs: int):
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Map `[tokens, 1, inputs]` to `[tokens, 1, outputs]`; the second result, the bias, is None."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron-Core's latent attention with its own constructor: the original one needs TransformerEngine's types."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ):
        # Builds the core attention and the output projection, for heads of `kv_channels` and scores of `softmax_scale`.
        Attention.__init__(self, config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection)
        hidden, heads, rotated = config.hidden_size, config.num_attention_heads, config.qk_pos_emb_head_dim
        self.q_head_dim = config.qk_head_dim + rotated
        self.recompute_up_proj = config.recompute_granularity == "selective" and "mla_up_proj" in (
            config.recompute_modules or ()
        )
        self.qkv_up_checkpoint, self.cache_mla_latents = None, False
        self.rotary_pos_emb: FixedRotary | None = None  # the model's, set when it is built
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(submodules.linear_q_proj, hidden, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, config.q_lora_rank)
            self.linear_q_up_proj = self._up(submodules.linear_q_up_proj, config.q_lora_rank, heads * self.q_head_dim)
            self.q_layernorm = LatentNorm(config, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(config, hidden, config.kv_lora_rank + rotated)
        outputs = heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj = self._up(submodules.linear_kv_up_proj, config.kv_lora_rank, outputs)
        self.kv_layernorm = LatentNorm(config, config.kv_lora_rank)

    def _up(self, kind: Any, inputs: int, outputs: int) -> nn.Module:
        """Build a projection whose heads are sharded over the tensor-parallel ranks."""
        module: nn.Module = kind(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )
        return module


class FixedRotary(nn.Module):
    """Rotary angles of given frequencies, and the factor on rotated vectors, with the interface of latent attention."""

    def __init__(self, frequencies: Tensor, scale: float):
        super().__init__()
        self.frequencies, self.scale = frequencies, scale
        self._last: Tensor | None = None

    def get_rotary_seq_len(
        self, inference: Any, transformer: Any, hidden: Tensor, config: Any, packed: PackedDocuments
    ) -> int:
        """Return the length in tokens of the longest document."""
        assert packed.max_seqlen_q is not None
        return int(packed.max_seqlen_q)

    def forward(self, length: int, packed_seq: bool = True) -> tuple[Tensor, float]:
        """Return the angles `[length, 1, 1, dim]` of a document's positions, and the factor.

        The angles are kept for the following layers.
        """
        if self._last is None or len(self._last) != length:
            places = torch.arange(length, device=self.frequencies.device, dtype=self.frequencies.dtype)
            angles = torch.outer(places, self.frequencies)
            self._last = torch.cat([angles, angles], -1)[:, None, None]
        return self._last, self.scale


# Megatron-Core's layer specification, with meshrl's modules in place of incomplete ones.


def use_own_modules(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Replace Megatron's norms and attention in a block's specification by meshrl's modules."""
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if isinstance(attention, MLASelfAttentionSubmodules):
            parts.self_attention.module = LatentAttention
            continue
        for name in ("q_layernorm", "k_layernorm"):
            if "Identity" not in getattr(getattr(attention, name, None), "__name__", "Identity"):
                setattr(attention, name, RMSNorm)
    block.layer_norm = RMSNorm
    return block


# The routers' balancing losses: the weight of each micro-batch, and metrics.
#
# Megatron-Core adds these losses to the gradient inside the routers. It weights each micro-batch by its tokens (without
# padding, if it gets a padding mask). Divided by all tokens, this is the weighted mean over the mini-batch, for every
# layout.

TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}

# Megatron-Core 0.16 tests whether this is None, but binds the name only if TransformerEngine is installed.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def balancing_losses(config: TransformerConfig) -> list[str]:
    """Return the names under which Megatron-Core tracks the balancing losses of this config."""
    if config.num_moe_experts is None:
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = list(weights) if isinstance(weights, list | tuple) else [weights] * len(kinds)
    names = [TRACKED[kind] for kind, weight in zip(kinds, weights, strict=True) if weight and kind in TRACKED]
    return names + (["z_loss"] if config.moe_z_loss_coeff else [])


class RouterPadding:
    """A function from a micro-batch to the padding mask that its routers get.

    In a stand-in, all tokens but one count as padding, because a mean over no token would be NaN.
    """

    def __init__(self, config: TransformerConfig, ranks: ParallelRanks):
        self.parts = ranks.tp if config.sequence_parallel else 1
        self.part, self.embeds = ranks.tp_rank, ranks.pp_rank == 0

    def __call__(self, part: MicroBatch) -> Tensor:
        padding = part.row.padding
        if part.rows is None:
            padding = torch.ones_like(padding).index_fill(1, torch.zeros(1, dtype=torch.long, device=padding.device), 0)
        # The first stage splits the mask as it splits its tokens. Later stages use the mask as it is.
        if self.parts == 1 or self.embeds:
            return padding
        return padding.chunk(self.parts, 1)[self.part]


def auxiliary_tokens(parts: list[MicroBatch]) -> float:
    """Return the divisor of the routers' loss sums: the mini-batch's tokens on all data-parallel ranks."""
    tokens = sum(1 if part.rows is None else len(part.row.row.input_ids) for part in parts)
    total = torch.tensor(float(tokens), device=parts[0].row.device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total)


def take_balancing_metrics(config: TransformerConfig, micro_batches: int, dp: int) -> dict[str, float]:
    """Return the mean of each balancing loss over layers with experts and micro-batches, the same on every rank.

    The tracker is cleared.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    frequency = config.moe_layer_freq
    layers = sum(frequency) if isinstance(frequency, list) else -(-config.num_layers // frequency)
    metrics = {}
    for name in balancing_losses(config):
        held = tracker[name]["values"] if name in tracker else None
        total = torch.zeros(1, device=torch.cuda.current_device()) if held is None else held.sum()[None].clone()
        # Ranks that share a row hold shares of its loss; stages hold their layers; data-parallel ranks hold their rows.
        dist.all_reduce(total, group=parallel_state.get_tensor_and_context_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        metrics[f"moe/{name}"] = float(total) / (layers * micro_batches * dp)
    clear_aux_losses_tracker()
    return metrics
