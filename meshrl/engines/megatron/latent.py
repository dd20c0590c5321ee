"""DeepSeek-V3's latent attention from Megatron-Core's modules, where there is no TransformerEngine.

Its local spec names such a layer, but 0.16.1 cannot build it. Nor would its gradients be right: it cuts the down
projections over tensor-parallel ranks and takes back only a rank's own part of their gradient, while the rotated part
of the key is one for all heads, of which each rank has some: their sum over the ranks is missing. Here, as with
TransformerEngine, the down projections are whole on every rank, which applies them to its own tokens; gathering the
tokens sums the gradients. They are small, and no size has to divide by the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from meshrl.engines.megatron.modules import PackedDocuments, RMSNorm


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
