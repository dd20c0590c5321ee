"""Compiled layers: a handful of graphs, whatever the rows hold."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from meshrl.engines.fsdp.fsdp_engine import compile_layers
from meshrl.parallel.attention import PackedSequences
from meshrl.parallel.context_parallel import RingContext, UlyssesContext
from meshrl.parallel.prefix_tree import PrefixTree


@pytest.fixture
def compiled(make_lm, monkeypatch):
    """Two models of one class, compiled as far as graphs go."""
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_function(function, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    models = [make_lm("qwen3", num_hidden_layers=3) for _ in range(2)]
    for model in models:
        compile_layers(model, 1.0)
    yield models
    torch._dynamo.reset()


def test_neither_lengths_nor_numbers_of_documents_compile_anew(compiled):
    policy, reference = compiled
    graphs = []
    rng = torch.Generator().manual_seed(0)
    for documents in range(2, 16):
        lengths = torch.randint(3, 20, (documents,), generator=rng).tolist()
        packed = PackedSequences.of(lengths, "cpu")
        ids = torch.randint(2, 40, (1, packed.num_tokens), generator=rng)
        for model, with_gradients in ((reference, False), (policy, True), (policy, False)):
            with torch.set_grad_enabled(with_gradients):
                model.model(input_ids=ids, position_ids=packed.position_ids, use_cache=False, attention_context=packed)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1:] == graphs[1:2] * len(graphs[1:])  # the second length made the code general
    assert counters["frames"]["total"] == counters["frames"]["ok"]


@pytest.mark.parametrize("context", [PackedSequences, PrefixTree, UlyssesContext, RingContext])
def test_contexts_are_opaque_to_every_compiler(context):
    """torch 2.11 looks into frozen dataclasses, and compiles for every number of documents what they hold."""
    assert dataclasses.is_dataclass(context)
    assert not context.__dataclass_params__.frozen
