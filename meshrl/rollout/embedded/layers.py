"""The forward pass of plain decoder layers (Llama, Mistral, Qwen2, Qwen3) with a Hugging Face model's own weights.

The arithmetic is the same with fewer operations: queries, keys and values are one matmul, gate and up another one. MoE
layers (Qwen3-MoE, Mixtral) run as modules. In a VLM (Qwen's VL models), the language model's layers run this way. Any
other model runs through its own forward. Weights are not copied: fused matrices are views of neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.models.fp8 import Fp8Projection, Linear8
from meshrl.models.vision import language_model, sees
from meshrl.parallel.attention import ATTENTION_NAME, AttentionContext

if TYPE_CHECKING:
    from meshrl.models.vision import Deep
    from meshrl.rollout.embedded.parallel import TensorParallel

# Types of rotary embeddings whose angles do not depend on the sequence length.
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SEEING_FAMILIES = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
WITH_EXPERTS = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")


def is_plain(hf_model: PreTrainedModel, families: tuple[str, ...] = FAMILIES) -> bool:
    """Return whether the model is of one of these families, uses SiLU, and has no adapters or other additions."""
    if type(hf_model).__name__ not in families or hf_model.config.get_text_config().hidden_act != "silu":
        return False
    # A trainer's linears may compute with FP8. Their weights are ordinary weights.
    return all(
        type(m) in (torch.nn.Linear, Linear8) for m in language_model(hf_model).modules() if hasattr(m, "in_features")
    )


def takes_contexts(hf_model: PreTrainedModel) -> bool:
    """Return whether the engine can generate with this module.

    A module that trains on padded batches has another attention implementation, which only a plain model can bypass.
    """
    ours = hf_model.config.get_text_config()._attn_implementation == ATTENTION_NAME
    return ours or is_plain(hf_model, FAMILIES + SEEING_FAMILIES + WITH_EXPERTS)


def rounds_in_forward(hf_model: PreTrainedModel) -> bool:
    """Return whether the engine would generate through the trainer's FP8 linears, because the model is not plain.

    Those linears quantise all weights in every step, which takes too long for one token per sequence.
    """
    if is_plain(hf_model, FAMILIES + SEEING_FAMILIES + WITH_EXPERTS):
        return False
    return any(isinstance(module, Linear8) for module in hf_model.modules())


def joined(parts: list[Tensor]) -> Tensor | None:
    """Return one matrix with the rows of all parts as a view, or None if the parts are not contiguous in memory."""
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.numel() * part.element_size()
    if parts[0].untyped_storage().data_ptr() != parts[-1].untyped_storage().data_ptr():
        return None
    rows = sum(len(part) for part in parts)
    return parts[0].detach().as_strided((rows, *parts[0].shape[1:]), parts[0].stride())


def join_in_memory(linears: list[torch.nn.Linear]) -> None:
    """Move the weights of linears next to each other in memory. Each linear keeps its weight as a view."""
    for name in ("weight", "bias"):
        parts = [getattr(linear, name) for linear in linears]
        if parts[0] is None or joined([p.data for p in parts]) is not None:
            continue
        whole = torch.cat([part.data for part in parts])
        for part, view in zip(parts, whole.split([len(p) for p in parts]), strict=True):
            part.data = view


class Projection:
    """Several linears of one input as one matmul, or as several matmuls if their weights are not contiguous."""

    def __init__(self, linears: list[torch.nn.Linear], *, has_bias: bool = True):
        weights = [linear.weight.data for linear in linears]
        biases = [linear.bias.data for linear in linears if has_bias and linear.bias is not None]
        one = joined(weights)
        self.weights = weights if one is None else [one]
        self.biases: list[Tensor | None] = [None] * len(self.weights)
        if biases:
            self.biases = list(biases) if one is None else [joined(biases) if len(biases) > 1 else biases[0]]
            if self.biases[0] is None:
                self.biases = [torch.cat(biases)]

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.biases[0])
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)], -1)

    def halves(self, x: Tensor) -> Iterable[Tensor]:
        """Return the outputs of the two linears, such as gate and up, without concatenating them."""
        if len(self.weights) == 1:
            return self(x).chunk(2, -1)
        return (F.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True))


AnyProjection = Projection | Fp8Projection


@dataclass(frozen=True)
class Layer:
    """The weights and fused projections of one decoder layer."""

    norm_1: Tensor
    qkv: AnyProjection
    norms: tuple[Tensor, Tensor] | None  # Qwen3 normalises each query and key
    out: AnyProjection
    norm_2: Tensor
    gate_up: AnyProjection | None
    down: AnyProjection | None
    experts: Any  # the MLP module with its router, instead of `gate_up` and `down`
    window: int | None


class PlainLayers:
    """All layers of a plain decoder. Call `refresh` after the weights changed. With `in_8_bits`, matmuls use FP8."""

    def __init__(
        self,
        hf_model: PreTrainedModel,
        owns_weights: bool,
        parallel: TensorParallel | None = None,
        in_8_bits: bool = False,
    ):
        self.decoder: Any = language_model(hf_model)
        config: Any = hf_model.config.get_text_config()
        self.config, self.sees = config, sees(hf_model.config)
        self.eps: float = config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scaling = self.dim**-0.5
        self.parallel, self.in_8_bits = parallel, in_8_bits
        if parallel is not None:
            self.heads, self.kv_heads = self.heads // parallel.size, parallel.local_kv_heads
        if owns_weights:
            for layer in self.decoder.layers:
                join_in_memory([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
                if not hasattr(layer.mlp, "experts"):
                    join_in_memory([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.layers: list[Layer] = []
        self._params = [*self.decoder.parameters(), hf_model.get_output_embeddings().weight]
        self._pointers: tuple[int, ...] = ()
        self._rotations: tuple[Tensor, Tensor] | None = None
        self._head_norms: list[Tensor | None] | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> bool:
        """Look up the weights again; return whether any weight has moved in memory."""
        pointers = tuple(map(Tensor.data_ptr, self._params))
        moved = pointers != self._pointers
        if moved:
            self._pointers = pointers
            self.layers = [self._layer(layer) for layer in self.decoder.layers]
        else:
            for layer in self.layers:
                for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
                    if isinstance(projection, Fp8Projection):
                        projection.refresh()
        self._head_norms = None
        return moved

    def forget(self) -> None:
        """Release the references to all weights. There are no layers until the next `refresh`."""
        self.layers, self._head_norms, self._pointers = [], None, ()

    def head_norms(self) -> list[Tensor | None]:
        """Return the weights of each layer's query and key norms, expanded to `[heads + kv_heads, dim]`."""
        if self._head_norms is None:
            counts = (self.heads, self.kv_heads)
            self._head_norms = [
                None
                if layer.norms is None
                else torch.cat([w.expand(count, -1) for w, count in zip(layer.norms, counts, strict=True)])
                for layer in self.layers
            ]
        return self._head_norms

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[tokens, hidden]` of token ids."""
        embedding = self.decoder.embed_tokens
        return embedding(ids) if self.parallel is None else self.parallel.embedding(ids, embedding.weight)

    def whole(self, x: Tensor) -> Tensor:
        """Sum a matmul's partial results over the ranks, if the model is sharded."""
        return x if self.parallel is None else self.parallel.add(x)

    def rotations(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines and sines `[angles, dim]` in the dtype of x, and each token's row in them.

        `positions` is `[tokens]`, or `[3, tokens]` if the tokens include images.
        """
        if positions.dim() == 2 or getattr(self.decoder.rotary_emb, "rope_type", "") not in FIXED_ROTATIONS:
            return *self._angles(x, positions), torch.arange(positions.shape[-1], device=x.device)
        if self._rotations is None:
            self._rotations = self._angles(x, torch.arange(self.config.max_position_embeddings, device=x.device))
        return *self._rotations, positions

    def _angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cosines and sines `[tokens, dim]` of rotary positions."""
        if not self.sees:
            cos, sin = self.decoder.rotary_emb(x, positions[None])
            return cos[0].contiguous(), sin[0].contiguous()
        cos, sin = self.decoder.rotary_emb(x, positions.expand(3, -1)[:, None])
        if cos.dim() == 4:  # some versions of Transformers return all axes, from which the layers choose
            sizes = 2 * list(self.config.rope_parameters["mrope_section"])
            cos, sin = (
                torch.cat([part[at % 3] for at, part in enumerate(axes.split(sizes, -1))], -1) for axes in (cos, sin)
            )
        return cos[0].contiguous(), sin[0].contiguous()

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        has_experts = hasattr(mlp, "experts")
        # Results are summed over ranks, so only one rank adds the bias.
        has_bias = self.parallel is None or self.parallel.rank == 0
        return Layer(
            layer.input_layernorm.weight.detach(),
            self._projection([attention.q_proj, attention.k_proj, attention.v_proj]),
            (attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
            if hasattr(attention, "q_norm")
            else None,
            self._projection([attention.o_proj], has_bias),
            layer.post_attention_layernorm.weight.detach(),
            None if has_experts else self._projection([mlp.gate_proj, mlp.up_proj]),
            None if has_experts else self._projection([mlp.down_proj], has_bias),
            mlp if has_experts else None,
            self._window(attention),
        )

    def _projection(self, linears: list[torch.nn.Linear], has_bias: bool = True) -> AnyProjection:
        if not self.in_8_bits:
            return Projection(linears, has_bias=has_bias)
        biases = [linear.bias.data for linear in linears if has_bias and linear.bias is not None]
        return Fp8Projection([linear.weight.data for linear in linears], biases)

    @property
    def has_experts(self) -> bool:
        """True if some layers have MoE modules, which run through their own forward."""
        return any(layer.experts is not None for layer in self.layers)

    def _window(self, attention: Any) -> int | None:
        window = getattr(attention, "sliding_window", None)
        if window is None and not getattr(self.config, "layer_types", None):
            window = getattr(self.config, "sliding_window", None)
        return window

    def __call__(
        self, x: Tensor, positions: Tensor, context: AttentionContext, one_each: bool, deep: Deep | None = None
    ) -> Tensor:
        """Run all layers on embeddings; return hidden states `[tokens, hidden]`.

        With `one_each`, every token is a row of its own. Otherwise the tokens are one packed row.
        """
        cos, sin = (values[:, None] for values in self._angles(x, positions))
        # Rotation subtracts the first half of the rotated vector. The sign is put into the sines once.
        sin = torch.cat([-sin[..., : self.dim // 2], sin[..., self.dim // 2 :]], -1)
        rotated = self.heads + self.kv_heads
        hidden = x.shape[-1:]
        for index, (layer, head_norm) in enumerate(zip(self.layers, self.head_norms(), strict=True)):
            h = F.rms_norm(x, hidden, layer.norm_1, self.eps)
            qkv = layer.qkv(h).view(len(x), -1, self.dim)
            qk = qkv[:, :rotated]
            if head_norm is not None:
                qk = F.rms_norm(qk, (self.dim,), None, self.eps) * head_norm
            qk = qk * cos + qk.roll(self.dim // 2, -1) * sin
            parts = qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:]
            q, k, v = (p.unsqueeze(2) if one_each else p.transpose(0, 1)[None] for p in parts)
            mixed = context.attend(index, q, k, v, self.scaling, layer.window)
            x = x + self.whole(layer.out(mixed.reshape(len(x), -1)))
            h = F.rms_norm(x, hidden, layer.norm_2, self.eps)
            if layer.gate_up is None or layer.down is None:
                x = x + layer.experts(h[None])[0]
            else:
                gate, up = layer.gate_up.halves(h)
                x = x + self.whole(layer.down(F.silu(gate) * up))
            if deep is not None:
                deep.add_to(x, index)
        return self.decoder.norm(x)
