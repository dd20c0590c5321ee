"""The gated delta rule over packed documents: the linear attention of Qwen3-Next, Qwen3.5 and OLMo-Hybrid.

- `DeltaRule`, `States`: the rule of one layer, and its recurrent state.
- `convolved`, `chunked`: the rule in plain torch.
- `RecurrentContext`, `enter_recurrences`: how a model's layers run the rule through their context.

Each head of a layer keeps a matrix S that maps keys to values. A token lets S decay, corrects the value that S holds
for the token's key, and reads S with its query:

    S ← exp(decay) S        S ← S + key ⊗ rate (value − Sᵀ key)        out = Sᵀ query / √dim

Queries, keys and values have passed a short convolution over the last tokens before. So the state of a sequence
(`States`) has two parts: the inputs of the convolution at those last tokens, and S.

Many tokens are computed in chunks. Work inside a chunk is matrix products, and only S goes from chunk to chunk. Every
document begins a new chunk, and documents advance side by side, so only document ends are padded. On GPUs the kernels
of flash-linear-attention compute the rule, if they are installed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshrl.parallel.attention import PackedSequences, note_attended

CHUNK = 64
EPSILON = 1e-6  # in the length of queries and keys
logger = logging.getLogger(__name__)


class States(NamedTuple):
    """The recurrent states of several sequences, one row each.

    `recent`: channels before the convolution `[sequences, width - 1, channels]`. `memory`: the matrices S `[sequences,
    value_heads, key_dim, value_dim]` in float32.
    """

    recent: Tensor
    memory: Tensor


@dataclass  # not frozen, see AttentionContext
class DeltaRule:
    """One layer's rule: its convolution `[channels, width]`, and the channel layout of queries, keys and values."""

    conv: Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def sizes(self) -> list[int]:
        """The numbers of channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return [keys, keys, self.value_heads * self.value_dim]

    @property
    def width(self) -> int:
        return self.conv.shape[1]

    def no_states(self, count: int, like: Tensor) -> States:
        """Return zero states for `count` sequences that have not begun."""
        recent = like.new_zeros(count, self.width - 1, self.conv.shape[0])
        shape = (count, self.value_heads, self.key_dim, self.value_dim)
        return States(recent, like.new_zeros(shape, dtype=torch.float32))

    def heads_of(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split channels `[tokens, channels]` into heads of queries, keys and values.

        Returns queries and keys `[tokens, key_heads, key_dim]` and values `[tokens, value_heads, value_dim]`.
        """
        query, key, value = channels.split(self.sizes, dim=1)
        heads, dims = (self.key_heads, self.key_heads, self.value_heads), (self.key_dim, self.key_dim, self.value_dim)
        parts = zip((query, key, value), heads, dims, strict=True)
        query, key, value = (x.unflatten(1, (count, dim)) for x, count, dim in parts)
        return query, key, value

    def over(
        self,
        channels: Tensor,
        decay: Tensor,
        rate: Tensor,
        packed: PackedSequences,
        before: States | None = None,
        wants_after: bool = False,
    ) -> tuple[Tensor, States | None]:
        """Run the rule over a row of documents: channels `[tokens, channels]`, decay and rate `[tokens, value_heads]`.

        Returns values `[tokens, value_heads, dim]` and, if `wants_after`, the documents' states at their ends. The
        documents start from the states `before`, or from zero states.
        """
        # Training and its log-probs use the same code. Prompts of a rollout use the fastest code.
        is_prompt = wants_after and not torch.is_grad_enabled()
        if channels.is_cuda and _fla() is not None and (is_prompt or _fla_trains()):
            return self._over_by_fla(channels, decay, rate, packed, before, wants_after)
        mixed, recent = convolved(channels, self.conv, packed, before.recent if before else None, wants_after)
        query, key, value = self.heads_of(mixed)
        memory = before.memory if before else None
        row = *self._prepared(query, key), value.float(), decay.float(), rate.float(), packed, memory
        # On GPUs the backward recomputes the rule, because its intermediates take 20 times the memory of its inputs.
        saves = channels.is_cuda and torch.is_grad_enabled()
        out, after = checkpoint(chunked, *row, use_reentrant=False) if saves else chunked(*row)
        return out.to(channels.dtype), States(recent, after) if recent is not None else None

    def step(self, channels: Tensor, decay: Tensor, rate: Tensor, states: States) -> tuple[Tensor, States]:
        """Run the rule over one token of each sequence, like `over`; both states are `[sequences, ...]`."""
        window = torch.cat([states.recent, channels[:, None].to(states.recent.dtype)], 1)
        mixed = F.silu((window.float() * self.conv.t().float()).sum(1)).to(channels.dtype)
        query, key, value = self.heads_of(mixed)
        query, key = self._prepared(query, key)
        memory = states.memory * decay.float().exp()[..., None, None]
        known = torch.einsum("shk,shkv->shv", key, memory)
        change = (value.float() - known) * rate.float()[..., None]
        memory = memory + key[..., None] * change[..., None, :]
        out = torch.einsum("shk,shkv->shv", query, memory)
        return out.to(channels.dtype), States(window[:, 1:], memory)

    def _prepared(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys in float32 and of length 1, repeated for every value head.

        Queries are scaled by 1/√dim.
        """
        copies = self.value_heads // self.key_heads
        query, key = (_of_length_1(x.float()).repeat_interleave(copies, dim=1) for x in (query, key))
        return query * self.key_dim**-0.5, key

    def _over_by_fla(
        self,
        channels: Tensor,
        decay: Tensor,
        rate: Tensor,
        packed: PackedSequences,
        before: States | None,
        wants_after: bool,
    ) -> tuple[Tensor, States | None]:
        convolve, rule = _fla()
        borders = _borders(packed.lengths, packed.device)  # one tensor for all layers: fla's caches are keyed by it
        recent = None
        if before is not None:
            # fla's convolution state holds one more token, which is never read.
            recent = F.pad(before.recent, (0, 0, 1, 0)).transpose(1, 2).to(channels.dtype).contiguous()
        mixed, _ = convolve(channels[None], self.conv, initial_state=recent, activation="silu", cu_seqlens=borders)
        query, key, value = (x[None] for x in self.heads_of(mixed[0]))
        out, memory = rule(
            query,
            key,
            value,
            g=decay.float()[None],
            beta=rate[None],
            initial_state=before.memory if before else None,
            output_final_state=wants_after,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=borders,
        )
        if not wants_after:
            return out[0], None
        return out[0], States(last_tokens(channels, self.width - 1, packed, before.recent if before else None), memory)


@cache
def _fla() -> Any:
    """Return the convolution and the rule of flash-linear-attention, or None if the package is not installed."""
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        logger.warning("linear attention runs without kernels, many times slower: pip install 'meshrl[linear]'")
        return None
    return causal_conv1d, chunk_gated_delta_rule


@cache
def _fla_trains() -> bool:
    """Return whether the kernels of flash-linear-attention have gradients on this GPU.

    On Hopper GPUs Triton 3.4 to 3.7.0 computes wrong gradients, and the kernels refuse to run.
    """
    import triton

    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
    if not is_hopper or not (3, 4) <= Version(triton.__version__).release < (3, 7, 1):
        return True
    logger.warning(
        "linear attention trains without kernels, slower: those for Hopper GPUs need Triton 3.7.1 (torch 2.13), and "
        "this is %s",
        triton.__version__,
    )
    return False


@lru_cache(maxsize=8)
def _borders(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(device)


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def last_tokens(channels: Tensor, count: int, packed: PackedSequences, before: Tensor | None) -> Tensor:
    """Return the last `count` tokens `[documents, count, channels]` of each document.

    A document with fewer tokens is filled up from `before`, or with zeros.
    """
    return _extended(channels, count, packed, before)[0][_extension(packed.lengths, count, packed.device)[2]]


def convolved(
    channels: Tensor, weight: Tensor, packed: PackedSequences, before: Tensor | None, wants_after: bool
) -> tuple[Tensor, Tensor | None]:
    """Apply each channel's convolution over the tokens of its document, then SiLU.

    The second result is the documents' last tokens if `wants_after`, otherwise None.
    """
    count = weight.shape[1] - 1
    row, places = _extended(channels, count, packed, before)
    # In float32, as in `step`: with fewer bits, the trained policy would differ from the policy that sampled.
    mixed = sum(row[places - (count - at)].float() * weight[:, at].float() for at in range(count + 1))
    assert isinstance(mixed, Tensor)
    ends = _extension(packed.lengths, count, packed.device)[2]
    return F.silu(mixed).to(channels.dtype), row[ends] if wants_after else None


def _extended(channels: Tensor, count: int, packed: PackedSequences, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the row with `count` more tokens before each document, and the indices of the original tokens in it."""
    heads, places, _ = _extension(packed.lengths, count, packed.device)
    row = channels.new_zeros(len(places) + heads.numel(), channels.shape[1])
    if before is not None:
        row = row.index_put((heads,), before.to(row.dtype))
    return row.index_put((places,), channels), places


@lru_cache(maxsize=8)
def _extension(lengths: tuple[int, ...], count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices into a row that is extended by `count` tokens before each document.

    They are the indices of the added tokens `[documents, count]`, of the original tokens `[tokens]`, and of each
    document's last `count` tokens `[documents, count]`.
    """
    sizes, documents = torch.tensor(lengths), torch.arange(len(lengths))
    document = documents.repeat_interleave(sizes)
    places = torch.arange(len(document)) + (document + 1) * count
    heads = (sizes.cumsum(0) - sizes + documents * count)[:, None] + torch.arange(count)
    ends = heads + sizes[:, None]
    return heads.to(device), places.to(device), ends.to(device)


class Chunks(NamedTuple):
    """The chunks of a row: all first chunks, then all second chunks, and so on.

    In each step the chunk of the longest document is first.
    """

    tokens: Tensor  # [chunks, CHUNK] indices into the row; after a document's end the index past the row's last token
    sizes: list[int]  # how many documents have a chunk at each step
    place: Tensor  # [tokens] the index of each token of the row in the flattened chunks
    document: Tensor  # [documents] document numbers, the longest document first


@lru_cache(maxsize=8)
def chunks_of(sizes_of_documents: tuple[int, ...], device: torch.device) -> Chunks:
    """Return how a row of documents is cut into chunks."""
    lengths = torch.tensor(sizes_of_documents)
    order = lengths.argsort(descending=True, stable=True)
    counts = -(-lengths // CHUNK)
    steps = torch.arange(int(counts.max()))
    sizes = (counts[None] > steps[:, None]).sum(1)
    # In a step, the documents that have another chunk are the first ones of the order.
    step = steps.repeat_interleave(sizes)
    document = order[torch.arange(len(step)) - (sizes.cumsum(0) - sizes)[step]]
    starts = lengths.cumsum(0) - lengths
    inside = step[:, None] * CHUNK + torch.arange(CHUNK)
    is_there = inside < lengths[document][:, None]
    tokens = torch.where(is_there, starts[document][:, None] + inside, sum(sizes_of_documents))
    place = torch.empty(sum(sizes_of_documents), dtype=torch.long)
    place[tokens[is_there]] = is_there.flatten().nonzero()[:, 0]
    return Chunks(tokens.to(device), sizes.tolist(), place.to(device), order.to(device))


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    packed: PackedSequences,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the rule over a row `[tokens, heads, dim]` in float32.

    Returns the outputs of the tokens and the matrices S at the documents' ends.
    """
    chunks = chunks_of(packed.lengths, packed.device)
    # A padding token leaves the matrix as it is, because its rate and its decay are zero.
    query, key, value, decay, rate = (
        F.pad(x, (0, 0) * (x.ndim - 1) + (0, 1))[chunks.tokens].transpose(1, 2)
        for x in (query, key, value, decay, rate)
    )
    faded = decay.cumsum(-1)  # [chunks, heads, CHUNK]: since the chunk's beginning
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (faded[..., :, None] - faded[..., None, :]).masked_fill(later, -torch.inf).exp()
    ours = key * rate[..., None]
    # What a token writes depends on what earlier tokens of the chunk have written: a triangular system.
    system = (ours @ key.transpose(-1, -2)) * between
    wanted = torch.cat([value * rate[..., None], ours * faded.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, read_before = solved.split([value.shape[-1], key.shape[-1]], -1)
    seen = (query @ key.transpose(-1, -2)) * between
    query = query * faded.exp()[..., None]
    key = key * (faded[..., -1:] - faded).exp()[..., None]
    kept = faded[..., -1].exp()[..., None, None]

    shape = (len(packed.lengths), *key.shape[1:2], key.shape[-1], value.shape[-1])
    memory = key.new_zeros(shape) if before is None else before.float()[chunks.document]
    outputs, ended, first = [], [], 0
    for size in chunks.sizes:
        ended.append(memory[size:])
        memory, now = memory[:size], slice(first, first + size)
        new = written[now] - read_before[now] @ memory
        outputs.append(query[now] @ memory + seen[now] @ new)
        memory = memory * kept[now] + key[now].transpose(-1, -2) @ new
        first += size
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.place]
    after = torch.cat([memory, *reversed(ended)])
    return out, torch.empty_like(after).index_copy(0, chunks.document, after)


# Recurrent layers, which carry a state from token to token, in models whose other layers attend.
#
# Like attention layers, they use the context that is passed through the model's forward. Only the context has the ends
# of the documents and their earlier states. Transformers has no interface for such layers, so `enter_recurrences`
# replaces a layer's class by a subclass that uses the context. Weights, names and a forward without a context stay.


class RecurrentContext(Protocol):
    """The interface through which a recurrent layer computes its output, in addition to `AttentionContext`."""

    def recur(self, layer_idx: int, rule: DeltaRule, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Map channels `[tokens, channels]`, decay and rate `[tokens, value_heads]` to `[tokens, value_heads, dim]`."""
        ...


class _GatedDeltaNet(nn.Module):
    """The forward of gated delta nets: projections → the context's recurrence → gated norm → projection."""

    # Names of the norm after the rule and of the last projection.
    outward = ("norm", "out_proj")

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project `[tokens, hidden]` to channels, gate `[tokens, value channels]`, and inputs of rate and decay."""
        own: Any = self
        return own.in_proj_qkv(x), own.in_proj_z(x), own.in_proj_b(x), own.in_proj_a(x)

    def forward(self, hidden_states: Tensor, *args: Any, attention_context: Any = None, **kwargs: Any) -> Tensor:
        if attention_context is None:
            return super().forward(hidden_states, *args, **kwargs)
        own: Any = self
        channels, gate, rate, fading = self.projected(hidden_states.flatten(0, 1))
        rate = rate.sigmoid() * (2 if getattr(self, "allow_neg_eigval", False) else 1)
        decay = -own.A_log.float().exp() * F.softplus(fading.float() + own.dt_bias)
        out = _recur(own, attention_context, channels, decay, rate)
        norm, projection = (getattr(own, name) for name in self.outward)
        out = norm(out.flatten(0, 1), gate.reshape(-1, out.shape[-1]))
        return projection(out.reshape(len(channels), -1)).unflatten(0, hidden_states.shape[:2])


class _Qwen3Next(_GatedDeltaNet):
    """The gated delta net of Qwen3-Next: queries, keys, values and gates of a key head are adjacent."""

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own: Any = self
        copies = own.num_v_heads // own.num_k_heads
        wide = copies * own.head_v_dim
        parts = own.in_proj_qkvz(x).unflatten(1, (own.num_k_heads, -1))
        query, key, value, gate = parts.split([own.head_k_dim, own.head_k_dim, wide, wide], 2)
        rate, fading = own.in_proj_ba(x).unflatten(1, (own.num_k_heads, -1)).split([copies, copies], 2)
        channels = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], 1)
        return channels, gate.flatten(1), rate.flatten(1), fading.flatten(1)


class _OlmoHybrid(_GatedDeltaNet):
    outward = ("o_norm", "o_proj")

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own: Any = self
        channels = torch.cat([own.q_proj(x), own.k_proj(x), own.v_proj(x)], 1)
        return channels, own.g_proj(x), own.b_proj(x), own.a_proj(x)


KNOWN: dict[str, Any] = {
    "Qwen3NextGatedDeltaNet": _Qwen3Next,
    "Qwen3_5GatedDeltaNet": _GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": _GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": _OlmoHybrid,
}


@torch.compiler.disable
def _recur(own: Any, context: Any, channels: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    if not hasattr(context, "recur"):
        raise ValueError(f"{type(own).__name__} carries a state, which {type(context).__name__} has no place for")
    note_attended(own)
    rule = DeltaRule(own.conv1d.weight.squeeze(1), own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim)
    return context.recur(own.layer_idx, rule, channels, decay, rate)


@cache
def _asking(known: Any, own: Any) -> type[nn.Module]:
    return type(own.__name__, (known, own), {})


def recurrences(hf_model: nn.Module) -> list[Any]:
    """Return the recurrent layers of a model that are of a known class."""
    return [m for m in hf_model.modules() if isinstance(m, _GatedDeltaNet) or type(m).__name__ in KNOWN]


def enter_recurrences(hf_model: nn.Module) -> bool:
    """Make a model's recurrent layers use the context; return whether the model has such layers."""
    found = recurrences(hf_model)
    for module in found:
        own: Any = type(module)
        if issubclass(own, _GatedDeltaNet):
            continue
        if module.activation not in ("silu", "swish"):
            raise ValueError(f"{own.__name__} has the activation {module.activation}: only silu is supported")
        if module.conv1d.bias is not None:
            raise ValueError(f"{own.__name__} has a convolution with a bias, which is not supported")
        module.__class__ = _asking(KNOWN[own.__name__], own)
    return bool(found)
