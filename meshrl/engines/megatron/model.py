"""Megatron-Core's GPT model with our heads: the last stage answers with log-probs or values, never with logits."""

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
    """The output projection, which answers a question about its tokens: log-probs, and entropies under them."""

    vocab_size: int  # without padding

    def forward(self, hidden: Tensor, question: Question, weight: Tensor | None = None) -> Tensor:
        """Hidden states [tokens, 1, dim] in, [1 or 2, targets] out."""
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
    """One number a token, the same on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, tp_group: Any):
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    def forward(self, hidden: Tensor, question: Question, weight: Tensor | None = None) -> Tensor:
        """Hidden states [tokens, 1, dim] in, [1, targets] out."""
        if self.sequence_parallel:
            # Every rank computes the same values, so each keeps its own part of the gradient.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return F.linear(hidden[:, 0][question.places], self.weight, self.bias)[:, 0].float()[None]


class PackedGPTModel(GPTModel):
    """A chunk of the model. Called with a `Question` as its labels, the last one returns the answers."""

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
    """This rank's model chunks, in half precision wrapped so that only the last stage's answers are float32."""
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
    """Hugging Face's own frequencies, so that every kind of rotary scaling is the model's."""
    frequencies, scale = rope_frequencies(hf)
    frequencies = frequencies.to(torch.cuda.current_device())
    if not model.config.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = frequencies
        return
    rotary = FixedRotary(frequencies, scale)
    for layer in model.decoder.layers:
        layer.self_attention.rotary_pos_emb = rotary


# DeepSeek-V3's latent attention from Megatron-Core's modules, where there is no TransformerEngine.
#
# Its local spec names such a layer, but 0.16.1 cannot build it. Nor would its gradients be right: it cuts the down
# projections over tensor-parallel ranks and takes back only a rank's own part of their gradient, while the rotated part
# of the key is one for all heads, of which each rank has some: their sum over the ranks is missing. Here, as with
# TransformerEngine, the down projections are whole on every rank, which applies them to its own tokens; gathering the
# tokens sums the gradients. They are small, and no size has to divide by the ranks.


class LatentNorm(RMSNorm):
    """The norm of a latent vector, with the epsilon that Hugging Face's has whatever `rms_norm_eps` says."""

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
        """[tokens, 1, inputs] in, [tokens, 1, outputs] and no bias out."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron-Core's latent attention, built here: its own constructor asks for TransformerEngine's types."""

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
        """A projection whose heads are cut over the tensor-parallel ranks."""
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
    """Rotary angles of given frequencies, and the factor on what is rotated, as latent attention asks for them."""

    def __init__(self, frequencies: Tensor, scale: float):
        super().__init__()
        self.frequencies, self.scale = frequencies, scale
        self._last: Tensor | None = None

    def get_rotary_seq_len(
        self, inference: Any, transformer: Any, hidden: Tensor, config: Any, packed: PackedDocuments
    ) -> int:
        """The length of the longest document."""
        assert packed.max_seqlen_q is not None
        return int(packed.max_seqlen_q)

    def forward(self, length: int, packed_seq: bool = True) -> tuple[Tensor, float]:
        """The angles [length, 1, 1, dim] of a document's places, kept for the layers to come, and the factor."""
        if self._last is None or len(self._last) != length:
            places = torch.arange(length, device=self.frequencies.device, dtype=self.frequencies.dtype)
            angles = torch.outer(places, self.frequencies)
            self._last = torch.cat([angles, angles], -1)[:, None, None]
        return self._last, self.scale


# Megatron-Core's layer specification with our modules in the places where its own lack something.


def use_own_modules(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Puts our norms and attention into a block's specification, wherever Megatron's own stand."""
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


# The routers' balancing losses: how much each micro-batch weighs, and what they were.
#
# Megatron-Core adds them to the gradient inside the routers, each micro-batch weighted by its tokens (without padding,
# if
# it is told which they are). Divided by all tokens, that is the weighted mean over the mini-batch, whatever the layout.

TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}

# Megatron-Core 0.16 asks whether this is None, but binds the name only where TransformerEngine is installed.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def balancing_losses(config: TransformerConfig) -> list[str]:
    """The names under which Megatron-Core tracks the losses that this config asks for."""
    if config.num_moe_experts is None:
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = list(weights) if isinstance(weights, list | tuple) else [weights] * len(kinds)
    names = [TRACKED[kind] for kind, weight in zip(kinds, weights, strict=True) if weight and kind in TRACKED]
    return names + (["z_loss"] if config.moe_z_loss_coeff else [])


class RouterPadding:
    """Tells the routers which tokens are padding; of a stand-in all but one, for a mean over nothing is no number."""

    def __init__(self, config: TransformerConfig, ranks: ParallelRanks):
        self.parts = ranks.tp if config.sequence_parallel else 1
        self.part, self.embeds = ranks.tp_rank, ranks.pp_rank == 0

    def __call__(self, part: MicroBatch) -> Tensor:
        padding = part.row.padding
        if part.rows is None:
            padding = torch.ones_like(padding).index_fill(1, torch.zeros(1, dtype=torch.long, device=padding.device), 0)
        # The first stage cuts the mask as it cuts its tokens, later ones take it as it is.
        if self.parts == 1 or self.embeds:
            return padding
        return padding.chunk(self.parts, 1)[self.part]


def auxiliary_tokens(parts: list[MicroBatch]) -> float:
    """By what the routers' sums are divided: all tokens of the mini-batch."""
    tokens = sum(1 if part.rows is None else len(part.row.row.input_ids) for part in parts)
    total = torch.tensor(float(tokens), device=parts[0].row.device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total)


def take_balancing_metrics(config: TransformerConfig, micro_batches: int, dp: int) -> dict[str, float]:
    """The mean of each balancing loss over layers with experts and micro-batches, the same on every rank."""
    tracker = get_moe_layer_wise_logging_tracker()
    frequency = config.moe_layer_freq
    layers = sum(frequency) if isinstance(frequency, list) else -(-config.num_layers // frequency)
    metrics = {}
    for name in balancing_losses(config):
        held = tracker[name]["values"] if name in tracker else None
        total = torch.zeros(1, device=torch.cuda.current_device()) if held is None else held.sum()[None].clone()
        # Ranks that share a row hold shares of its loss, stages their own layers, data-parallel ranks their own rows.
        dist.all_reduce(total, group=parallel_state.get_tensor_and_context_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        metrics[f"moe/{name}"] = float(total) / (layers * micro_batches * dp)
    clear_aux_losses_tracker()
    return metrics
