"""Who holds which rectangle, and who of several holders sends it: a share each, by bytes."""

from __future__ import annotations

import numpy as np

from meshrl.weights.boxes import BOX_FIELDS, numbered, offsets_of


class Holders:
    """Disjoint boxes of a source, sorted by tensor, and the slices that hold each."""

    def __init__(self, boxes: np.ndarray, slices: np.ndarray, rank_of_slice: np.ndarray, global_ranks: np.ndarray):
        """`boxes[i]` is held by slice `slices[i]`; equal boxes become one with several holders."""
        self.global_ranks = global_ranks
        number, first = numbered(boxes, ("tensor", *BOX_FIELDS))
        self.boxes = boxes[first]
        rank = global_ranks[rank_of_slice[slices]]
        self.world = int(global_ranks.max(initial=0)) + 1
        order = np.lexsort([rank, number])
        # A rank may hold a box in two parameters, such as a tied output projection: one of them is enough.
        key = number[order] * self.world + rank[order]
        kept = order[np.concatenate([[True], key[1:] != key[:-1]])] if len(order) else order
        self.number, self.rank, self.slice = number[kept], rank[kept], slices[kept]
        self._key = self.number * self.world + self.rank
        self.start = offsets_of(np.bincount(self.number, minlength=len(self.boxes)))

    def slice_on(self, box: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """The slice with which a global rank holds a box, or -1."""
        wanted = box * self.world + rank
        at = np.minimum(np.searchsorted(self._key, wanted), len(self._key) - 1)
        return np.where((self._key[at] == wanted) & (rank < self.world), self.slice[at], -1)


def choose_senders(
    holders: Holders, box: np.ndarray, receiver: np.ndarray, size: np.ndarray, hosts: np.ndarray
) -> np.ndarray:
    """The global rank that sends each piece (of a box, to a receiver, of a size in bytes).

    Pieces with the same possible senders are dealt out so that all senders' bytes level out: those with few possible
    senders first, the others fill up what is left.
    """
    sender = np.empty(len(box), np.int64)
    load = np.zeros(max(holders.world, len(hosts)), np.float64)
    for rows, candidates in _alike(holders, box, receiver, hosts):
        if len(candidates) > 1:
            ends = np.cumsum(size[rows], dtype=np.float64)
            share = _fill_up(load[candidates], ends[-1])
            middle = ends - size[rows] / 2
            at = np.minimum(np.searchsorted(np.cumsum(share), middle, "right"), len(candidates) - 1)
            sender[rows] = candidates[at]
        else:
            sender[rows] = candidates[0]
        load += np.bincount(sender[rows], weights=size[rows], minlength=len(load))
    return sender


def _alike(
    holders: Holders, box: np.ndarray, receiver: np.ndarray, hosts: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pieces grouped by their possible senders, fewest first: (pieces, senders)."""
    if not len(box):
        return []
    # A set of ranks as one number: the sum of a random mark for each.
    marks = np.random.default_rng(1).integers(1, 1 << 40, holders.world)
    one_host = hosts.max(initial=0) == 0
    host_of = np.zeros_like(hosts) if one_host else hosts
    table = np.zeros((len(holders.boxes), int(host_of.max(initial=0)) + 1), np.int64)
    np.add.at(table, (holders.number, host_of[holders.rank]), marks[holders.rank])
    near = table[box, host_of[receiver]]
    is_near = near > 0
    keys = np.empty(len(box), np.dtype([("set", np.int64), ("near", np.int64)]))
    keys["set"] = np.where(is_near, near, table[box].sum(1))
    keys["near"] = np.where(is_near & (not one_host), hosts[receiver], -1)
    number, first = numbered(keys, ("near", "set"))
    order = np.argsort(number, kind="stable")
    start = offsets_of(np.bincount(number))
    found = []
    for group, example in enumerate(first.tolist()):
        ranks = holders.rank[holders.start[box[example]] : holders.start[box[example] + 1]]
        if keys["near"][example] >= 0:
            ranks = ranks[hosts[ranks] == keys["near"][example]]
        found.append((order[start[group] : start[group + 1]], ranks))
    found.sort(key=lambda pair: len(pair[1]))
    return found


def _fill_up(load: np.ndarray, amount: float) -> np.ndarray:
    """How much each sender takes of an amount so that the least loaded come level, as water would."""
    ordered = np.sort(load)
    room = np.cumsum(np.arange(1, len(load)) * np.diff(ordered))  # until one more sender takes part
    count = int(np.searchsorted(room, amount, "right")) + 1
    level = (amount + ordered[:count].sum()) / count
    return np.maximum(level - load, 0)
