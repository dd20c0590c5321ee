"""Shared prefixes computed once: a packed row as a tree of the distinct prefixes of its documents.

    documents   a b c d        nodes   a b c d        A token's hidden state depends on the tokens up to it alone, so
                a b c e                      └ e      equal prefixes (a prompt and its n samples, or samples that are
                a b f              └ f                word for word the same) need one node in the row, not one each.

The model runs on the nodes. Only attention sees whole documents. It lays queries, keys and values out as the distinct
documents and attends there as in any packed row. It then takes each node's result from the document that added it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from meshrl.parallel.attention import PackedSequences


@dataclass  # not frozen, see AttentionContext
class PrefixTree:
    """The distinct prefixes (nodes) of a packed row's documents; also the attention context for a row of nodes."""

    node_of: Tensor  # [tokens] the node of each token of the packed row; -1 for tokens that are not needed
    place_of: Tensor  # [nodes] an index into the packed row that holds the node's token
    packed: PackedSequences  # the distinct documents
    laid_out: Tensor  # [document tokens] the node of each token of the distinct documents
    brought_at: Tensor  # [nodes] the index of each node among the tokens of the distinct documents

    @staticmethod
    def of(input_ids: Tensor, lengths: list[int], needed: Tensor) -> PrefixTree:
        """Build the tree of a packed row on the CPU; only the outputs at the indices `needed` will be used.

        Tokens after a document's last needed index are left out, because they affect no result.
        """
        ends = np.cumsum(lengths)
        starts = ends - lengths
        tokens, kept = _rectangle(input_ids.numpy(), starts, _kept_lengths(starts, ends, needed.numpy()))
        # Sorting by bytes groups equal prefixes; padding (-1) sorts a document behind the documents that continue it.
        order = np.array(sorted(range(len(tokens)), key=[row.tobytes() for row in tokens].__getitem__))
        tokens, kept, starts = tokens[order], kept[order], starts[order]
        steps = np.arange(tokens.shape[1])
        shared = np.zeros_like(kept)
        differs = np.column_stack([tokens[1:] != tokens[:-1], np.ones(len(tokens) - 1, dtype=bool)])
        shared[1:] = np.minimum(differs.argmax(1), kept[1:])
        brought = (steps >= shared[:, None]) & (steps < kept[:, None])
        # Numbers grow from document to document, so the largest number so far belongs to the shared prefix.
        numbers = np.where(brought, np.cumsum(brought).reshape(brought.shape) - 1, -1)
        numbers = np.maximum.accumulate(numbers, axis=0)
        inside = steps < kept[:, None]
        places = starts[:, None] + steps
        node_of = np.full(int(ends[-1]), -1)
        node_of[places[inside]] = numbers[inside]
        leaves = np.flatnonzero(brought.any(1))
        leaves = leaves[np.argsort(-kept[leaves], kind="stable")]
        brought_at = np.empty(int(brought.sum()), dtype=np.int64)
        brought_at[numbers[leaves][brought[leaves]]] = np.flatnonzero(brought[leaves][inside[leaves]])
        return PrefixTree(
            torch.from_numpy(node_of),
            torch.from_numpy(places[brought]),
            PackedSequences.of(kept[leaves].tolist(), "cpu"),
            torch.from_numpy(numbers[leaves][inside[leaves]]),
            torch.from_numpy(brought_at),
        )

    @property
    def num_nodes(self) -> int:
        return len(self.place_of)

    @cached_property
    def position_ids(self) -> Tensor:
        """The positions of the nodes in their documents, int64 `[1, nodes]`."""
        return self.packed.position_ids[:, self.brought_at]

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Lay the nodes out as documents, attend, and return one result per node; see `AttentionContext`."""
        query, key, value = (self._lay_out(x) for x in (query, key, value))
        out = self.packed.attend(layer_idx, query, key, value, scaling, sliding_window)
        return out[0].flatten(1).index_select(0, self.brought_at).view(1, self.num_nodes, *out.shape[2:])

    def _lay_out(self, x: Tensor) -> Tensor:
        """Expand nodes `[1, heads, nodes, dim]` to documents `[1, heads, document tokens, dim]`."""
        rows = x[0].transpose(0, 1)
        return rows.flatten(1).index_select(0, self.laid_out).view(-1, *rows.shape[1:]).transpose(0, 1)[None]


def _kept_lengths(starts: np.ndarray, ends: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each document up to its last needed token."""
    kept = np.zeros(len(ends), dtype=np.int64)
    document = np.searchsorted(ends, needed, side="right")
    np.maximum.at(kept, document, needed - starts[document] + 1)
    return kept


def _rectangle(input_ids: np.ndarray, starts: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept tokens of each document, padded with -1 to `[documents, longest]`, and their numbers."""
    steps = np.arange(kept.max(initial=0))
    tokens = input_ids[np.minimum(starts[:, None] + steps, len(input_ids) - 1)]
    return np.where(steps < kept[:, None], tokens, -1), kept
