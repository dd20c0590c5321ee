"""The distinct layers of a model as one rank runs them, each metered once: dense or with experts, cut or whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from meshrl.models.sizes import expert_count
from meshrl.plan.activations import EvenExperts, LayerSettings, LayerTrace, trace_layer, trace_norm
from meshrl.plan.model import PlannedModel
from meshrl.plan.moving import LayerMoves, Moved, trace_moves

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
