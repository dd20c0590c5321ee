"""What one decoder layer keeps for its backward pass and needs for a moment: its real forward and backward, metered.

The layer runs on the meta device, where tensors have sizes and no memory, with the recipe's tokens, types, attention,
checkpointing and compiler. A `Meter` sees every tensor come and go, so sharing, views and what autograd frees early are
counted as they are. Two layers run one after the other; the difference between them is what each further one keeps.
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
    """Bytes of one layer on one rank."""

    kept: int  # from forward to backward
    forward: int  # at most during a forward without gradients, beyond the input
    backward: int  # at most during the backward, beyond what all layers keep

    def scaled(self, factor: float) -> LayerTrace:
        """The same for another number of tokens."""
        return LayerTrace(*(int(value * factor) for value in (self.kept, self.forward, self.backward)))


class Meter(TorchDispatchMode):
    """Counts the bytes of all memory that is taken inside and not given back yet; `share` may count a tensor less."""

    def __init__(self, share: Callable[[Tensor], float] = lambda tensor: 1.0) -> None:
        super().__init__()
        self.share = share
        self.live = self.peak = 0
        self._held: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled inside."""
        return True

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Memory that was there before."""
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
    """The memory of a fused attention kernel: it keeps queries, keys, values, its output and a log-sum a query."""

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
    """An attention context that takes the memory of the real one; with `sp` ranks that trade tokens for heads."""

    sp: int = 1

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See `AttentionContext`."""
        if self.sp == 1:
            return _FusedAttention.apply(query, key, value)
        copies = kv_copies(key.shape[1], self.sp)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        # All heads of own tokens, or own heads of all tokens: as many bytes, in memory of their own.
        return _FusedAttention.apply(query.clone(), key.clone(), value.clone()).clone()


class EvenExperts(nn.Module):
    """Stands in for a layer's experts: as many rows as routing makes, evenly spread, through an expert's products."""

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
    """How a layer is run. Under tensor parallelism the layer given is a rank's part of one."""

    tokens: int
    dtype: torch.dtype
    checkpointing: bool = False
    compiled: bool = False
    memory_budget: float = 1.0
    sp: int = 1
    # Tensor-parallel ranks that share what lies between the cut products (sequence parallelism).
    shared_by: int = 1


def trace_layer(model: Any, number: int, settings: LayerSettings) -> LayerTrace:
    """Meters layer `number` of a model on the meta device."""
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
    """The last norm, as if it were a layer."""
    norm = model.base_model.norm
    norm.to(settings.dtype)
    settings = replace(settings, checkpointing=False)
    kept, backward = _train(norm, norm, settings, lambda tensor: 1 / settings.shared_by)
    return LayerTrace(kept, kept, backward)


def layer_call(model: Any, layer: nn.Module, settings: LayerSettings) -> Callable[[Tensor], Tensor]:
    """A layer's forward of hidden states, with positions and attention that take memory and compute nothing."""
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
    """Bytes that a further layer keeps, and the most that a backward needs beyond."""
    width = getattr(module, "hidden_size", None) or _width(module)
    first = torch.empty(1, settings.tokens, width, dtype=settings.dtype, device="meta", requires_grad=True)
    # Gradients of weights are taken as soon as they are there: what they add to belongs to the states.
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in module.parameters() if p.requires_grad]
    try:
        run(first)  # compiles
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
    """Inside, the layer runs as torch.compile cuts it, up to the code generator: what it keeps is what it will keep."""
    if not settings.compiled:
        yield
        return
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def as_it_is(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=min_cut_rematerialization_partition)
    # Other layers of the same class were compiled before, and there is a limit to how often.
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


# The distinct layers of a model as one rank runs them, each metered once: dense or with experts, cut or whole.

# Bytes grow in proportion to the tokens: a trace of so many serves all numbers of tokens.
TRACED_TOKENS = 4096


@dataclass(frozen=True)
class ModelTrace:
    """What the layers and the last norm of a rank take, for each number of tokens asked for."""

    dense: LayerTrace | None
    sparse: LayerTrace | None
    norm: LayerTrace
    is_sparse: tuple[bool, ...]
    moved: dict[bool, LayerMoves]  # of a dense and of a sparse layer

    def of_layer(self, layer: int, tokens: int) -> LayerTrace:
        """One layer at so many tokens."""
        trace = self.sparse if self.is_sparse[layer] else self.dense
        assert trace is not None
        return trace.scaled(tokens / TRACED_TOKENS)

    def kept(self, layers: Sequence[int], tokens: int) -> int:
        """Bytes that these layers keep for their backward passes."""
        return sum(self.of_layer(layer, tokens).kept for layer in layers)

    def moves(self, layers: Sequence[int], tokens: float, trains: bool, again: bool) -> Moved:
        """What these layers move for so many tokens; see `LayerMoves.of_pass`."""
        found = [self.moved[self.is_sparse[layer]].of_pass(trains, again) for layer in layers]
        return sum(found, Moved()).times(tokens / TRACED_TOKENS)

    def widest(self, layers: Sequence[int], tokens: int) -> LayerTrace:
        """The most that any of these layers takes, for each kind of bytes."""
        traces = [self.of_layer(layer, tokens) for layer in layers] or [LayerTrace(0, 0, 0)]
        return LayerTrace(max(t.kept for t in traces), max(t.forward for t in traces), max(t.backward for t in traces))


@dataclass(frozen=True)
class Cut:
    """Over how many ranks a layer's products are cut, and how much of what lies between them is shared."""

    tp: int = 1
    etp: int = 1
    shares_sequence: bool = False


def trace_model(model: PlannedModel, settings: LayerSettings, cut: Cut | None = None) -> ModelTrace:
    """Meters one layer of each kind, once a model; `settings.tokens` is replaced, see `ModelTrace`."""
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
    """The first layers of a model, a tensor-parallel rank's part of each, with stand-ins for its experts."""
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
    """Every routed row goes to some rank; evenly, each gets as many as its own tokens make (times etp)."""
    rows = config.num_experts_per_tok * cut.etp / (cut.tp if cut.shares_sequence else 1)
    for layer in modules.base_model.layers:
        for owner in list(layer.modules()):
            experts: Any = getattr(owner, "experts", None)
            if isinstance(experts, nn.Module) and hasattr(experts, "gate_up_proj"):
                inner = int(experts.gate_up_proj.shape[1]) // 2  # type: ignore[index]
                with torch.device("meta"):
                    owner.experts = EvenExperts(config.hidden_size, inner, rows, nn.functional.silu)


# The bytes that a layer's operations read and write, counted by running it on the meta device, one by one.
#
# Matrix products are left to their operations, but for those so thin that memory limits them, such as adapters'. A
# compiler fuses neighbours of the rest: `timing.Efficiency.fused` says what is left of them.

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
# Only memory is taken, nothing is moved.
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "detach")
# A product with fewer rows, columns or terms than this is limited by memory.
THIN = 256


@dataclass(frozen=True)
class Moved:
    """Of one layer: bytes of what lies between the products and of thin products, and how many operations there are."""

    between: float = 0.0
    thin: float = 0.0
    operations: float = 0.0

    def times(self, factor: float) -> Moved:
        """All of it so many times; the operations are those of one micro-batch, however long."""
        return Moved(self.between * factor, self.thin * factor, self.operations)

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.between + other.between, self.thin + other.thin, self.operations + other.operations)


@dataclass(frozen=True)
class LayerMoves:
    """What one layer moves in its forward and in its backward."""

    forward: Moved
    backward: Moved

    def of_pass(self, trains: bool, again: bool) -> Moved:
        """Of a forward, or of a training step, which may compute its forwards twice."""
        if not trains:
            return self.forward
        return self.forward + self.forward + self.backward if again else self.forward + self.backward


class Mover(TorchDispatchMode):
    """Adds up what every operation inside reads and writes."""

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
    """Of layer `number` of a model on the meta device; compiler and checkpointing are left aside."""
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
