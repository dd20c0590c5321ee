"""The tree of prefixes against a dictionary of them, and models run on it against each document alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshrl.parallel.attention import PackedSequences
from meshrl.parallel.prefix_tree import PrefixTree

FAMILIES = ["llama", "qwen3", "mistral", "qwen3_mixed", "qwen3_moe"]
# Shared beginnings of many lengths, word for word repeats, a document that is another's beginning, equal ends and
# middles after unequal beginnings (which must not be shared), and one that shares nothing.
DOCUMENTS = [
    [5, 3, 8, 1, 1, 7, 2, 9, 4, 4, 6],
    [5, 3, 8, 1, 1, 7, 2, 9, 4, 5],
    [5, 3, 8, 1, 1, 7, 2, 9, 4, 5],
    [5, 3, 8, 1],
    [5, 3, 8, 2, 1, 7, 2, 9, 4],
    [6, 3, 8, 1, 1, 7, 2],
    [2],
]


def tree_of(documents: list[list[int]], needed: list[int] | None = None) -> tuple[PrefixTree, Tensor, list[int]]:
    ids, lengths = torch.tensor([token for d in documents for token in d]), [len(d) for d in documents]
    places = torch.arange(len(ids)) if needed is None else torch.tensor(needed, dtype=torch.long)
    return PrefixTree.of(ids, lengths, places), ids, lengths


def prefixes(documents: list[list[int]]) -> list[tuple[int, ...]]:
    return [tuple(d[: t + 1]) for d in documents for t in range(len(d))]


words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(documents=words)
def test_nodes_are_the_distinct_prefixes(documents):
    tree, ids, _ = tree_of(documents)
    of_place = prefixes(documents)
    node_of = tree.node_of.tolist()
    assert tree.num_nodes == len(set(of_place)) == len(set(node_of))
    assert len({(node, prefix) for node, prefix in zip(node_of, of_place, strict=True)}) == tree.num_nodes
    assert [of_place[place] for place in tree.place_of] == [of_place[node_of.index(n)] for n in range(tree.num_nodes)]
    assert tree.position_ids[0].tolist() == [len(of_place[place]) - 1 for place in tree.place_of]
    # The documents laid out are the distinct ones that no other goes on from.
    laid_out = ids[tree.place_of][tree.laid_out].split(list(tree.packed.lengths))
    whole = {tuple(d) for d in documents}
    leaves = {d for d in whole if not any(o[: len(d)] == d and o != d for o in whole)}
    assert sorted(tuple(d.tolist()) for d in laid_out) == sorted(leaves)
    assert tree.laid_out[tree.brought_at].tolist() == list(range(tree.num_nodes))


@settings(max_examples=100, deadline=None)
@given(documents=words, data=st.data())
def test_what_reaches_no_needed_place_is_left_out(documents, data):
    of_place = prefixes(documents)
    needed = data.draw(st.lists(st.integers(0, len(of_place) - 1), min_size=1, unique=True).map(sorted))
    tree, _, _ = tree_of(documents, needed)
    wanted = {of_place[place][:cut] for place in needed for cut in range(1, len(of_place[place]) + 1)}
    assert {of_place[place] for place in tree.place_of} == wanted
    assert tree.num_nodes == len(wanted)
    for place in needed:
        assert of_place[tree.place_of[tree.node_of[place]]] == of_place[place]


def on_tree(model, documents: list[list[int]], tree: PrefixTree | None = None) -> Tensor:
    made, ids, _ = tree_of(documents)
    tree = tree or made
    row = ids[tree.place_of][None]
    out = model(row, position_ids=tree.position_ids, use_cache=False, attention_context=tree).logits[0]
    return out[tree.node_of]


def by_document(model, documents: list[list[int]]) -> Tensor:
    return torch.cat([model(torch.tensor([d]), use_cache=False).logits[0] for d in documents])


def worst(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_each_document_alone(make_lm, family):
    ours, reference = make_lm(family), make_lm(family, "eager")
    logits, wanted = on_tree(ours, DOCUMENTS), by_document(reference, DOCUMENTS)
    assert worst(logits.detach(), wanted.detach()) < 1e-5
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    for out in (logits, wanted):
        (out * weights).sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, p in ours.named_parameters():
        if name in gradients:
            assert float((p.grad - gradients[name]).abs().max()) < 1e-5 * scale, name


def test_a_node_that_stands_for_another_prefix_is_seen(make_lm):
    """Control: the same comparison fails when one place is pointed at a neighbour's node."""
    ours, reference = make_lm("qwen3"), make_lm("qwen3", "eager")
    tree, _, _ = tree_of(DOCUMENTS)
    node_of = tree.node_of.clone()
    node_of[10] = node_of[20]
    wrong = PrefixTree(node_of, tree.place_of, tree.packed, tree.laid_out, tree.brought_at)
    with torch.no_grad():
        assert worst(on_tree(ours, DOCUMENTS, wrong), by_document(reference, DOCUMENTS)) > 1e-3


def test_a_row_that_shares_nothing_is_itself():
    documents = [[token, 1, 2] for token in range(5)]
    tree, ids, lengths = tree_of(documents)
    assert tree.num_nodes == len(ids)
    assert tree.packed.lengths == tuple(lengths)
    assert np.array_equal(np.sort(tree.node_of.numpy()), np.arange(len(ids)))
    assert PackedSequences.of(lengths, "cpu").runs == tree.packed.runs
