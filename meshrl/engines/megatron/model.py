"""Megatron-Core's GPT model with our heads: the last stage answers with log-probs or values, never with logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from meshrl.engines.megatron.latent import FixedRotary
from meshrl.engines.megatron.layer_spec import use_own_modules
from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.rows import Question
from meshrl.engines.megatron.transformer_config import rope_frequencies
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
