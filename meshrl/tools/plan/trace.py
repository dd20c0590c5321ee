"""Metering of a decoder layer: the bytes that its forward and backward keep, need temporarily, and move.

A layer runs its real forward and backward on the meta device, where tensors have sizes and no memory. The run uses the
recipe's tokens, types, attention, checkpointing and compiler.

- `trace_layer`: bytes of memory. A `Meter` sees every tensor come and go, so sharing, views and early frees by
  autograd are counted correctly. Two layers run in sequence; their difference is the cost of each further layer.
- `trace_model`: the distinct layers of a model as one rank runs them, each metered once.
- `trace_moves`: bytes that the layer's operations read and write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from meshrl.models.names import expert_count
from meshrl.parallel.context_parallel import kv_copies
from meshrl.tools.plan.models import PlannedModel


@dataclass(frozen=True)
class LayerTrace:
    """The memory of one layer on one rank, in bytes."""

    kept: int  # held from forward to backward
    forward: int  # peak of a forward without gradients, beyond the input
    backward: int  # peak of the backward, beyond the bytes that all layers keep

    def scaled(self, factor: float) -> LayerTrace:
        """Return the trace for a number of tokens that differs by `factor`."""
        return LayerTrace(*(int(value * factor) for value in (self.kept, self.forward, self.backward)))


class Meter(TorchDispatchMode):
    """A dispatch mode that counts the bytes of storages that are allocated inside it and not freed yet.

    `share` returns the fraction of a tensor's bytes to count.
    """

    def __init__(self, share: Callable[[Tensor], float] = lambda tensor: 1.0) -> None:
        super().__init__()
        self.share = share
        self.live = self.peak = 0
        self._held: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile still compiles inside this mode."""
        return True

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Exclude the storages of tensors that existed before."""
        for tensor in tensors:
            self._held[tensor.untyped_storage()._cdata] = 0

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        size = int(storage.nbytes() * self.share(tensor))
        self._held[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._held.pop(key, 0)


class _FusedAttention(torch.autograd.Function):
    """A stand-in for a fused attention kernel that allocates the same memory.

    It saves queries, keys, values, the output and one log-sum-exp per query and head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, heads, tokens, _ = query.shape
        out = value.new_empty((1, tokens, heads, value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, value.new_empty((heads, tokens), dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@dataclass(frozen=True)
class MeteredAttention:
    """An attention context that allocates the memory of the real one and computes nothing.

    With `sp` > 1 it includes the buffers of Ulysses, whose ranks exchange tokens for heads.
    """

    sp: int = 1

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Return a tensor with the shape of the attention's output; see `AttentionContext` for the arguments."""
        if self.sp == 1:
            return _FusedAttention.apply(query, key, value)
        copies = kv_copies(key.shape[1], self.sp)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        # All heads of this rank's tokens, or this rank's heads of all tokens: equal size, but separate tensors.
        return _FusedAttention.apply(query.clone(), key.clone(), value.clone()).clone()


class EvenExperts(nn.Module):
    """A stand-in for a layer's experts: the routed rows, spread evenly over ranks, go through one expert's matmuls."""

    def __init__(self, hidden: int, width: int, rows_per_token: float, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * width, hidden))
        self.down = nn.Parameter(torch.empty(hidden, width))
        self.rows_per_token, self.act = rows_per_token, act

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = max(1, int(len(hidden) * self.rows_per_token))
        index = torch.zeros(rows, dtype=torch.long, device=hidden.device)
        gate, up = nn.functional.linear(hidden[index], self.gate_up).chunk(2, dim=-1)
        mixed = nn.functional.linear(self.act(gate) * up, self.down)
        weight = top_k_weights.reshape(-1)[index % top_k_weights.numel()][:, None]
        return torch.zeros_like(hidden).index_add(0, index, (mixed * weight).to(hidden.dtype))


@dataclass(frozen=True)
class LayerSettings:
    """The settings of a metered layer run. With tensor parallelism the layer is already one rank's part."""

    tokens: int
    dtype: torch.dtype
    checkpointing: bool = False
    compiled: bool = False
    memory_budget: float = 1.0
    sp: int = 1
    # Number of tensor-parallel ranks that split the activations between the sharded matmuls (sequence parallelism).
    shared_by: int = 1


def trace_layer(model: Any, number: int, settings: LayerSettings) -> LayerTrace:
    """Meter the memory of layer `number` of a model on the meta device."""
    layer = model.base_model.layers[number]
    layer.to(settings.dtype).train()
    run = layer_call(model, layer, settings)
    hidden_size = model.config.hidden_size

    def share(tensor: Tensor) -> float:
        is_between = tensor.shape[-1:] == (hidden_size,) and tensor.numel() == settings.tokens * hidden_size
        return 1 / settings.shared_by if is_between else 1.0

    with compiled_layer(layer, settings):
        kept, backward = _train(run, layer, settings, share)
        forward = _infer(run, settings, share, hidden_size)
    return LayerTrace(kept, forward, backward)


def trace_norm(model: Any, settings: LayerSettings) -> LayerTrace:
    """Meter the last norm as if it were a layer."""
    norm = model.base_model.norm
    norm.to(settings.dtype)
    settings = replace(settings, checkpointing=False)
    kept, backward = _train(norm, norm, settings, lambda tensor: 1 / settings.shared_by)
    return LayerTrace(kept, kept, backward)


def layer_call(model: Any, layer: nn.Module, settings: LayerSettings) -> Callable[[Tensor], Tensor]:
    """Return the forward of a layer over hidden states `[1, T, hidden]`.

    Positions are zeros, and attention takes memory without computing.
    """
    meta = torch.device("meta")
    positions = torch.zeros(1, settings.tokens, dtype=torch.long, device=meta)
    hidden = torch.empty(1, settings.tokens, model.config.hidden_size, dtype=settings.dtype, device=meta)
    cos_sin = model.base_model.rotary_emb.to(meta)(hidden, positions)
    context = MeteredAttention(settings.sp)

    def run(hidden: Tensor) -> Tensor:
        out = layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=cos_sin,
            use_cache=False,
            attention_context=context,
        )
        return out[0] if isinstance(out, tuple) else out

    if not settings.checkpointing:
        return run
    return lambda hidden: checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)


def _train(
    run: Callable[[Tensor], Tensor], module: nn.Module, settings: LayerSettings, share: Callable[[Tensor], float]
) -> tuple[int, int]:
    """Return the bytes that one more layer keeps, and the peak bytes of the backward.

    The peak does not include the bytes that all layers keep.
    """
    width = getattr(module, "hidden_size", None) or _width(module)
    first = torch.empty(1, settings.tokens, width, dtype=settings.dtype, device="meta", requires_grad=True)
    # Weight gradients are dropped as soon as they exist, because the states count the gradients' memory.
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in module.parameters() if p.requires_grad]
    try:
        run(first)  # compile before metering
        meter = Meter(share)
        with meter:
            meter.ignore(iter((first, *module.parameters(), *module.buffers())))
            one = run(first)
            after_one = meter.live
            two = run(one)
            kept = meter.live - after_one
            del one
            grad = torch.empty_like(two)
            meter.reset_peak()
            before = meter.live
            two.backward(grad)
            backward = meter.peak - before
    finally:
        for hook in hooks:
            hook.remove()
    return kept, backward


def _infer(
    run: Callable[[Tensor], Tensor], settings: LayerSettings, share: Callable[[Tensor], float], hidden_size: int
) -> int:
    first = torch.empty(1, settings.tokens, hidden_size, dtype=settings.dtype, device="meta")
    with torch.no_grad(), Meter(share) as meter:
        run(first)
    return meter.peak


def _drop(param: Tensor) -> None:
    param.grad = None


def _width(module: nn.Module) -> int:
    norm: Any = getattr(module, "input_layernorm", module)
    return int(norm.weight.shape[0])


@contextmanager
def compiled_layer(layer: nn.Module, settings: LayerSettings) -> Iterator[None]:
    """Inside, run the layer as torch.compile partitions it, so that it saves the same tensors.

    The code generator is not run.
    """
    if not settings.compiled:
        yield
        return
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def as_it_is(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=min_cut_rematerialization_partition)
    # Earlier layers of the same class count against dynamo's recompile limit.
    torch._dynamo.reset()
    original = layer.forward
    budget = torch._functorch.config.activation_memory_budget
    torch._functorch.config.activation_memory_budget = settings.memory_budget
    layer.forward = torch.compile(original, backend=backend, dynamic=False)
    try:
        yield
    finally:
        layer.forward = original
        torch._functorch.config.activation_memory_budget = budget


# ---- distinct layers of a model

# Bytes are proportional to tokens, so one trace at this many tokens is scaled to any number of tokens.
TRACED_TOKENS = 4096


@dataclass(frozen=True)
class ModelTrace:
    """The metered dense layer, sparse layer and last norm of one rank, scaled to any number of tokens."""

    dense: LayerTrace | None
    sparse: LayerTrace | None
    norm: LayerTrace
    is_sparse: tuple[bool, ...]
    moved: dict[bool, LayerMoves]  # key: False for a dense layer, True for a sparse layer

    def of_layer(self, layer: int, tokens: int) -> LayerTrace:
        """Return one layer's trace, scaled to `tokens`."""
        trace = self.sparse if self.is_sparse[layer] else self.dense
        assert trace is not None
        return trace.scaled(tokens / TRACED_TOKENS)

    def kept(self, layers: Sequence[int], tokens: int) -> int:
        """Return the bytes that these layers keep for their backward passes."""
        return sum(self.of_layer(layer, tokens).kept for layer in layers)

    def moves(self, layers: Sequence[int], tokens: float, trains: bool, again: bool) -> Moved:
        """Return the bytes that these layers move for `tokens` tokens; see `LayerMoves.of_pass` for the flags."""
        found = [self.moved[self.is_sparse[layer]].of_pass(trains, again) for layer in layers]
        return sum(found, Moved()).times(tokens / TRACED_TOKENS)

    def widest(self, layers: Sequence[int], tokens: int) -> LayerTrace:
        """Return the maximum over these layers for each field of the trace."""
        traces = [self.of_layer(layer, tokens) for layer in layers] or [LayerTrace(0, 0, 0)]
        return LayerTrace(max(t.kept for t in traces), max(t.forward for t in traces), max(t.backward for t in traces))


@dataclass(frozen=True)
class Cut:
    """The tensor-parallel sharding of a layer's matmuls and activations.

    `tp` ranks share the dense matmuls and `etp` ranks the expert matmuls. `shares_sequence` is sequence parallelism.
    """

    tp: int = 1
    etp: int = 1
    shares_sequence: bool = False


def trace_model(model: PlannedModel, settings: LayerSettings, cut: Cut | None = None) -> ModelTrace:
    """Meter one layer of each kind, cached on the model. `settings.tokens` is replaced by `TRACED_TOKENS`."""
    key = (settings, cut or Cut())
    if key not in model.notes:
        model.notes[key] = _trace(model, *key)
    return model.notes[key]


def _trace(model: PlannedModel, settings: LayerSettings, cut: Cut) -> ModelTrace:
    kinds = model.layer_kinds
    first = {kind: kinds.index(kind) for kind in set(kinds)}
    modules = small_model(model, max(first.values()) + 1, cut)
    shared_by = cut.tp if cut.shares_sequence else 1
    how = replace(settings, tokens=TRACED_TOKENS, shared_by=shared_by)
    traces = {kind: trace_layer(modules, layer, how) for kind, layer in first.items()}
    moved = {kind: trace_moves(modules, layer, how) for kind, layer in first.items()}
    return ModelTrace(traces.get(False), traces.get(True), trace_norm(modules, how), kinds, moved)


def small_model(model: PlannedModel, layers: int, cut: Cut) -> Any:
    """Return a model of the first layers, each one a tensor-parallel rank's part, with stand-ins for its experts."""
    fields = model.config.to_dict()
    fields["num_hidden_layers"] = layers
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][:layers]
    if not model.is_latent:
        fields["head_dim"] = model.heads()[2]
        fields["num_key_value_heads"] = max(1, model.heads()[1] // cut.tp)
    elif cut.tp > 1:
        fields["num_key_value_heads"] = fields["num_attention_heads"] // cut.tp
    fields["num_attention_heads"] //= cut.tp
    for name in ("intermediate_size", "shared_expert_intermediate_size"):
        if fields.get(name):
            fields[name] //= cut.tp
    if fields.get("moe_intermediate_size"):
        fields["moe_intermediate_size"] //= cut.etp
    config = AutoConfig.for_model(**fields)
    made = PlannedModel(config, model.source, model.lora).build("lm")
    if expert_count(config):
        _spread_experts(made, config, cut)
    return made


def _spread_experts(modules: Any, config: Any, cut: Cut) -> None:
    """Replace experts by stand-ins for an even load.

    Every routed row goes to some rank. If the load is even, a rank receives as many rows as its own tokens make, times
    `etp`.
    """
    rows = config.num_experts_per_tok * cut.etp / (cut.tp if cut.shares_sequence else 1)
    for layer in modules.base_model.layers:
        for owner in list(layer.modules()):
            experts: Any = getattr(owner, "experts", None)
            if isinstance(experts, nn.Module) and hasattr(experts, "gate_up_proj"):
                inner = int(experts.gate_up_proj.shape[1]) // 2  # type: ignore[index]
                with torch.device("meta"):
                    owner.experts = EvenExperts(config.hidden_size, inner, rows, nn.functional.silu)


# ---- bytes that a layer's operations read and write
#
# Matmuls are timed by their floating-point operations, except thin ones, such as adapters', which memory limits. A
# compiler fuses neighbours of the other operations: `timing.Efficiency.fused` is the share of their bytes that remains.

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
# Operations that only allocate memory or make a view.
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "detach")
# A matmul with fewer rows, columns or inner elements than this is limited by memory.
THIN = 256


@dataclass(frozen=True)
class Moved:
    """Bytes that a layer moves between its matmuls, bytes of thin matmuls, and the number of operations."""

    between: float = 0.0
    thin: float = 0.0
    operations: float = 0.0

    def times(self, factor: float) -> Moved:
        """Multiply the bytes by `factor`; operations stay, because one micro-batch runs equally many at any length."""
        return Moved(self.between * factor, self.thin * factor, self.operations)

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.between + other.between, self.thin + other.thin, self.operations + other.operations)


@dataclass(frozen=True)
class LayerMoves:
    """The bytes that one layer moves in its forward and in its backward."""

    forward: Moved
    backward: Moved

    def of_pass(self, trains: bool, again: bool) -> Moved:
        """Return the sum of a forward, or of a training step; `again` adds a second forward for checkpointing."""
        if not trains:
            return self.forward
        return self.forward + self.forward + self.backward if again else self.forward + self.backward


class Mover(TorchDispatchMode):
    """A dispatch mode that adds up the bytes that every operation inside reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.between = self.thin = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in given}
        is_view = not func._schema.is_mutable and all(x.untyped_storage()._cdata in known for x in made)
        if name in FREE or is_view:
            return result
        self.operations += 1
        size = sum(x.numel() * x.element_size() for x in (*given, *made))
        if name not in PRODUCTS:
            self.between += size
        elif min(*given[-2].shape[-2:], *given[-1].shape[-2:]) < THIN:
            self.thin += size
        return result


def trace_moves(model: Any, number: int, settings: LayerSettings) -> LayerMoves:
    """Count the bytes moved by layer `number` of a model on the meta device, without compiler and checkpointing."""
    layer = model.base_model.layers[number]
    layer.to(settings.dtype).train()
    run = layer_call(model, layer, replace(settings, checkpointing=False, compiled=False))
    hidden = model.config.hidden_size
    first = torch.empty(1, settings.tokens, hidden, dtype=settings.dtype, device="meta", requires_grad=True)
    with Mover() as forward:
        out = run(first)
    with Mover() as backward:
        out.backward(torch.empty_like(out))
    for param in layer.parameters():
        param.grad = None
    return LayerMoves(*(Moved(part.between, part.thin, part.operations) for part in (forward, backward)))
