"""Reshard plans: which rank sends which rectangle of which tensor to which rank.

    source placement ─┐
                      ├─ intersect ─ choose senders ─ bucket ─ order ──> ReshardPlan ──> `of_rank(r)`
    destination ──────┘

After a plan every rank has its own shard, and has received no more than that. Planning is pure NumPy on sizes, so every
rank computes the same plan without communication. Weights that a rank already holds are copied locally. Ranks that hold
the same rectangle share the sending. If senders would otherwise have to send everything several times, copies of a
rollout form chains, in which each copy passes on what it received.

- `plan_reshard` makes a `ReshardPlan`, of which `RankPlan` is one rank's part.
- `Holders` and `choose_senders` choose the sender of each rectangle.
- `plan_lines` describes a plan as text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshrl.config.keys import count
from meshrl.weights.placement import Placement
from meshrl.weights.rectangles import (
    BOX,
    BOX_FIELDS,
    areas,
    as_boxes,
    cut_to,
    intersections,
    numbered,
    offsets_of,
    overlapping,
    ranges,
    sorted_by,
)

FEEDS = ("auto", "direct", "chain")
# Chains replace direct sends once the busiest sender has this many times the bytes of the busiest receiver.
CHAIN_ABOVE = 1.25
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class RankPlan:
    """The part of one rank in a plan.

    Boxes are records of `BOX`. `copy_source` and `copy_destination` index slices of the two placements. `hops` are
    [message, from, to] in the order in which this rank starts them. `packs` has the pieces of each message that starts
    here. `drops` has the pieces that this rank keeps of each message that comes here. `sent` has the drops that this
    rank first sent, grouped by the rank that keeps them. `kept` has the drops that this rank keeps, grouped by the rank
    that first sent them.
    """

    rank: int
    hops: np.ndarray
    copies: np.ndarray
    copy_source: np.ndarray
    copy_destination: np.ndarray
    packs: dict[int, np.ndarray]
    drops: dict[int, np.ndarray]
    sent: dict[int, np.ndarray]
    kept: dict[int, np.ndarray]


# A piece of a message: its rectangle, its slice, its message, its first byte in the message (`place`), and its number.
PIECE = np.dtype([*((name, np.int64) for name in ("tensor", *BOX_FIELDS, "slice", "message", "place", "number"))])


@dataclass(frozen=True)
class ReshardPlan:
    """A plan for all ranks. Ranks are global: `source_ranks[i]` is the global rank of the source's rank i."""

    source: Placement
    destination: Placement
    source_ranks: np.ndarray
    destination_ranks: np.ndarray
    names: tuple[str, ...]
    itemsize: np.ndarray
    bucket_bytes: int
    feed: str
    copies: np.ndarray
    copy_source: np.ndarray
    copy_destination: np.ndarray
    packs: np.ndarray  # PIECE records, by message
    drops: np.ndarray  # PIECE records, by message
    senders: np.ndarray  # [message]: the rank that first sends it
    message_bytes: np.ndarray
    hops: np.ndarray  # [number, 3]: message, from, to, in global order

    @property
    def slot_bytes(self) -> int:
        """The maximum bytes of one message. Two outgoing and two incoming slots are two buckets."""
        return self.bucket_bytes // 2

    @cached_property
    def ranks(self) -> list[int]:
        """All global ranks of source and destination, sorted."""
        return sorted({*self.source_ranks.tolist(), *self.destination_ranks.tolist()})

    @cached_property
    def digest(self) -> int:
        """A hash of the plan, equal on two ranks only if they made the same plan."""
        found = hashlib.blake2b(digest_size=7)
        for part in (self.hops, self.packs, self.drops, self.itemsize):
            found.update(np.ascontiguousarray(part).tobytes())
        return int.from_bytes(found.digest(), "little")

    def of_rank(self, rank: int) -> RankPlan:
        """Return the hops, copies and pieces that concern one rank."""
        mine = self.hops[(self.hops[:, 1] == rank) | (self.hops[:, 2] == rank)]
        here = self.destination_ranks[self.destination.slices["rank"][self.copy_destination]] == rank
        packs = self.packs[self.senders[self.packs["message"]] == rank]
        sender, keeper = self.ends_of_drops
        comes, goes = np.flatnonzero(keeper == rank), np.flatnonzero(sender == rank)
        return RankPlan(
            rank, mine, self.copies[here], self.copy_source[here], self.copy_destination[here],
            _by(packs["message"], packs), _by(self.drops["message"][comes], self.drops[comes]),
            _by(keeper[goes], self.drops[goes]), _by(sender[comes], self.drops[comes]),
        )  # fmt: skip

    @cached_property
    def ends_of_drops(self) -> tuple[np.ndarray, np.ndarray]:
        """The rank that first sent each drop, and the rank that keeps it."""
        held = self.destination.slices["rank"][self.drops["slice"]]
        return self.senders[self.drops["message"]], self.destination_ranks[held]

    def pairs(self) -> list[tuple[int, int, int]]:
        """Return (sender, keeper, number of pieces) for all pairs of ranks, in an order that is equal on all ranks."""
        sender, keeper = self.ends_of_drops
        world = self.world_size
        keys, counts = np.unique(sender * world + keeper, return_counts=True)
        found = [(key // world, key % world, count) for key, count in zip(keys.tolist(), counts.tolist(), strict=True)]
        return sorted(found, key=lambda pair: ((pair[1] - pair[0]) % world, pair[0]))

    def message_pairs(self) -> list[tuple[int, int, int]]:
        """Return (sender, keeper, number of messages) in the order of `pairs`."""
        sender, keeper = self.ends_of_drops
        world = self.world_size
        messages = np.unique(np.stack([sender * world + keeper, self.drops["message"]], 1), axis=0)
        keys, counts = np.unique(messages[:, 0], return_counts=True)
        count_of = dict(zip(keys.tolist(), counts.tolist(), strict=True))
        return [(origin, to, count_of[origin * world + to]) for origin, to, _ in self.pairs()]

    @property
    def world_size(self) -> int:
        return max(self.ranks) + 1

    def sent(self) -> np.ndarray:
        """Return the bytes that each rank sends, including messages that it passes on."""
        return self._sum(self.hops[:, 1], self.message_bytes[self.hops[:, 0]])

    def received(self) -> np.ndarray:
        return self._sum(self.hops[:, 2], self.message_bytes[self.hops[:, 0]])

    def copied(self) -> np.ndarray:
        """Return the bytes that each rank copies locally."""
        ranks = self.destination_ranks[self.destination.slices["rank"][self.copy_destination]]
        return self._sum(ranks, areas(self.copies) * self.itemsize[self.copies["tensor"]])

    def missing(self) -> np.ndarray:
        """Return the bytes of each rank's destination shard that it does not hold as a source.

        A rank must receive at least these bytes.
        """
        slices = self.destination.slices
        tensors = _tensor_map(self.source, self.destination)[slices["tensor"]]
        whole = self._sum(self.destination_ranks[slices["rank"]], areas(slices) * self.itemsize[tensors])
        return whole - self.copied()

    def gathered(self) -> np.ndarray:
        """Return the bytes that each destination rank would receive if every tensor were gathered whole on it."""
        rows = np.array([np.prod(self.source.tensors[name], dtype=np.int64) for name in self.names])
        total = int((rows * self.itemsize).sum())
        slices = self.source.slices
        _, first = numbered(slices, ("rank", "tensor", *BOX_FIELDS))
        kept = slices[first]
        held = self._sum(self.source_ranks[kept["rank"]], areas(kept) * self.itemsize[kept["tensor"]])
        found = np.zeros(self.world_size, np.int64)
        found[self.destination_ranks] = np.maximum(0, total - held[self.destination_ranks])
        return found

    def _sum(self, ranks: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.bincount(ranks, weights=values, minlength=self.world_size).astype(np.int64)


def plan_reshard(
    source: Placement,
    destination: Placement,
    *,
    itemsize: int | Mapping[str, int] = 2,
    bucket_bytes: int = 512 * MEGABYTE,
    source_ranks: Sequence[int] | None = None,
    destination_ranks: Sequence[int] | None = None,
    hosts: Sequence[int] | None = None,
    feed: str = "auto",
) -> ReshardPlan:
    """Plan how to bring every tensor of the destination from the source.

    `itemsize` is the size in bytes of the elements in messages (the destination's), for all tensors or by name. Without
    explicit global ranks the ranks of both sides are the same processes. `hosts` has the host of each global rank;
    senders on the receiver's own host are preferred. `feed` is `direct`, `chain` or `auto`.
    """
    if feed not in FEEDS:
        raise ValueError(f"unknown feed '{feed}': use one of {', '.join(FEEDS)}")
    tensor_of = _tensor_map(source, destination)
    names = tuple(source.tensors)
    sizes = np.array([itemsize if isinstance(itemsize, int) else itemsize.get(name, 2) for name in names], np.int64)
    if bucket_bytes < 2 * int(sizes.max(initial=1)):
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds not even two elements: enlarge it")
    holders = _holders(source, np.asarray(source_ranks if source_ranks is not None else range(source.world_size)))
    to_ranks = np.asarray(destination_ranks if destination_ranks is not None else range(destination.world_size))
    wanted = destination.slices.copy()
    wanted["tensor"] = tensor_of[wanted["tensor"]]
    _check_memory(destination)
    draft = _Draft(source, destination, holders, to_ranks, wanted, sizes, bucket_bytes // 2, hosts)
    draft.match()
    draft.split()
    draft.assign(feed)
    draft.pack()
    return ReshardPlan(
        source, destination, holders.global_ranks, to_ranks, names, sizes, bucket_bytes, draft.feed,
        draft.copies, draft.copy_source, draft.copy_destination,
        draft.packs, draft.drops, draft.senders, draft.message_bytes, draft.hops(),
    )  # fmt: skip


class _Draft:
    """A plan under construction; every step adds its arrays."""

    def __init__(
        self, source: Placement, destination: Placement, holders: Holders, to_ranks: np.ndarray, wanted: np.ndarray,
        itemsize: np.ndarray, slot_bytes: int, hosts: Sequence[int] | None,
    ):  # fmt: skip
        self.source, self.destination, self.holders, self.to_ranks = source, destination, holders, to_ranks
        self.wanted, self.itemsize, self.slot_bytes = wanted, itemsize, slot_bytes
        world = int(max(holders.global_ranks.max(initial=0), to_ranks.max(initial=0))) + 1
        self.hosts = np.zeros(world, np.int64) if hosts is None else np.asarray(hosts, np.int64)
        if len(self.hosts) < world:
            raise ValueError(f"hosts names {len(self.hosts)} ranks, but the plan has {world}")
        self.world = world

    def match(self) -> None:
        """Pair every destination slice with the source boxes that cover it.

        Boxes that the rank already holds become local copies.
        """
        numbers, first = numbered(self.wanted, ("tensor", *BOX_FIELDS))
        boxes = as_boxes(self.wanted[first])
        order = np.argsort(boxes["tensor"], kind="stable")
        box, target, shared = intersections(self.holders.boxes, boxes[order])
        target = order[target]
        covered = np.bincount(target, weights=areas(shared), minlength=len(boxes)).astype(np.int64)
        self._check_cover(covered, boxes, first)
        # Expand the pairs of distinct boxes to all slices with that box.
        members = np.argsort(numbers, kind="stable")
        count = np.bincount(numbers, minlength=len(boxes))
        start = offsets_of(count)[:-1]
        take = ranges(start[target], count[target])
        pair = np.repeat(np.arange(len(target)), count[target])
        self.piece, self.box, self.slice = shared[pair], box[pair], members[take]
        self.rank = self.to_ranks[self.wanted["rank"][self.slice]]
        local = self.holders.slice_on(self.box, self.rank)
        here = local >= 0
        self.copies, self.copy_source, self.copy_destination = self.piece[here], local[here], self.slice[here]
        self.piece, self.box, self.slice, self.rank = (
            values[~here] for values in (self.piece, self.box, self.slice, self.rank)
        )

    def _check_cover(self, covered: np.ndarray, boxes: np.ndarray, first: np.ndarray) -> None:
        short = np.flatnonzero(covered != areas(boxes))
        if not len(short):
            return
        box, wanted = boxes[short[0]], self.wanted[first[short[0]]]
        name = list(self.source.tensors)[box["tensor"]]
        held = self.source.slices[self.source.slices["tensor"] == box["tensor"]]
        ranks = np.unique(held["rank"]).tolist()
        raise ValueError(
            f"'{name}' {list(self.source.tensors[name])}: rank {int(wanted['rank'])} of '{self.destination.title}' "
            f"needs rows {_span(box, 'row')} x columns {_span(box, 'col')}, of which ranks {_few(ranks)} of "
            f"'{self.source.title}' hold {covered[short[0]]} of {areas(boxes)[short[0]]} elements"
        )

    def split(self) -> None:
        """Cut pieces that are larger than a slot."""
        self.piece, origin = cut_to(self.piece, self.slot_bytes // self.itemsize[self.piece["tensor"]])
        self.box, self.slice, self.rank = self.box[origin], self.slice[origin], self.rank[origin]
        self.bytes = areas(self.piece) * self.itemsize[self.piece["tensor"]]

    def assign(self, feed: str) -> None:
        """Choose the sender of each piece, and whether copies of the rollout pass pieces on in chains."""
        self.sender = choose_senders(self.holders, self.box, self.rank, self.bytes, self.hosts)
        out = np.bincount(self.sender, weights=self.bytes, minlength=self.world)
        into = np.bincount(self.rank, weights=self.bytes, minlength=self.world)
        if feed == "auto":
            feed = "chain" if out.max(initial=0) > CHAIN_ABOVE * into.max(initial=0) else "direct"
        self.feed = feed
        # A parcel is a piece as it is sent. In a chain one parcel serves all ranks that lack the piece.
        if feed == "direct":
            self.parcel = np.arange(len(self.piece))
            self.parcel_first = self.parcel
            return
        keys = np.empty(len(self.piece), np.dtype([(name, np.int64) for name in ("box", *BOX_FIELDS)]))
        keys["box"] = self.box
        for name in BOX_FIELDS:
            keys[name] = self.piece[name]
        self.parcel, self.parcel_first = numbered(keys, ("box", *BOX_FIELDS))
        one = self.parcel_first
        chosen = choose_senders(self.holders, self.box[one], self.rank[one], self.bytes[one], self.hosts)
        self.sender = chosen[self.parcel]

    def pack(self) -> None:
        """Pack the parcels with the same path into messages of at most a slot."""
        way, paths = self._ways()
        first = self.parcel_first
        piece, size = self.piece[first], self.bytes[first]
        item = self.itemsize[piece["tensor"]]
        # Larger elements come first, so that every piece starts at a multiple of its element size without padding.
        order = sorted_by(way, item.max(initial=0) - item, piece["tensor"], piece["row"], piece["col"])
        message, place, message_way = _fill(way[order], size[order], self.slot_bytes)
        self.paths = [paths[number] for number in message_way]
        self.message_way = np.array(message_way, np.int64)
        parcels = len(first)
        message_of, place_of = np.empty(parcels, np.int64), np.empty(parcels, np.int64)
        message_of[order], place_of[order] = message, place
        self.message_bytes = np.bincount(message, weights=size[order], minlength=len(message_way)).astype(np.int64)
        self.senders = np.array([path[0] for path in self.paths], np.int64)
        source = self.holders.slice_on(self.box[first], self.sender[first])
        self.packs = self._pieces(order, piece, source, message_of, place_of, np.arange(parcels))
        onto, spot = message_of[self.parcel], place_of[self.parcel]
        order = order if self.feed == "direct" else sorted_by(onto, spot)
        self.drops = self._pieces(order, self.piece, self.slice, onto, spot, self.parcel)

    @staticmethod
    def _pieces(order: np.ndarray, boxes: np.ndarray, *others: np.ndarray) -> np.ndarray:
        made = np.empty(len(boxes), PIECE)
        for name in BOX.names or ():
            made[name] = boxes[name][order]
        for name, values in zip(("slice", "message", "place", "number"), others, strict=True):
            made[name] = values[order]
        return made

    def _ways(self) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """Return each parcel's path number, and each path as the ranks that it passes, the sender first."""
        order = np.argsort(self.parcel, kind="stable")
        count = np.bincount(self.parcel, minlength=len(self.parcel_first))
        start = offsets_of(count)[:-1]
        mark = np.random.default_rng(0).integers(1, 1 << 62, self.world)
        total = np.add.reduceat(mark[self.rank[order]], start) if len(order) else np.empty(0, np.int64)
        keys = np.empty(len(count), np.dtype([("sender", np.int64), ("set", np.int64)]))
        keys["sender"], keys["set"] = self.sender[self.parcel_first], total
        way, first = numbered(keys, ("sender", "set"))
        paths = []
        for parcel in first.tolist():
            ranks = np.unique(self.rank[order[start[parcel] : start[parcel] + count[parcel]]]).tolist()
            sender = int(keys["sender"][parcel])
            # Senders begin at different copies, so that all links are used from the start.
            turn = sender % len(ranks)
            paths.append((sender, *ranks[turn:], *ranks[:turn]))
        return way, paths

    def hops(self) -> np.ndarray:
        """Return every hop of a message from rank to rank along its path, `[hops, 3]`, in an order equal on all ranks.

        Each rank starts its hops in this order and waits only for earlier ones, so no deadlock is possible. A rank
        passes a message on before it receives the next one. The n-th messages of all paths come before the (n+1)-th.
        Among the n-th messages, senders turn to different receivers.
        """
        if not self.paths:
            return np.empty((0, 3), np.int64)
        count = np.bincount(self.message_way)
        turn = ranges(np.zeros(len(count), np.int64), count)  # messages are numbered path by path
        length = np.array([len(path) - 1 for path in self.paths], np.int64)
        message = np.repeat(np.arange(len(self.paths)), length)
        step = ranges(np.zeros(len(length), np.int64), length)
        ranks = np.array([rank for path in self.paths for rank in path[:-1]], np.int64)
        onto = np.array([rank for path in self.paths for rank in path[1:]], np.int64)
        phase = np.array([(path[1] - path[0]) % self.world for path in self.paths], np.int64)
        order = sorted_by(turn[message], phase[message], message, step)
        return np.stack([message, ranks, onto], 1)[order]


def _fill(way: np.ndarray, size: np.ndarray, slot_bytes: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Fill messages greedily with parcels sorted by path.

    Return the message and first byte of each parcel, and the path of each message.
    """
    message, place = np.empty(len(way), np.int64), np.empty(len(way), np.int64)
    ends = np.cumsum(size)
    ways: list[int] = []
    borders = np.append(np.flatnonzero(np.diff(way, prepend=-1)), len(way))
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        while start < stop:
            before = ends[start - 1] if start else 0
            until = min(stop, int(np.searchsorted(ends, before + slot_bytes, "right")))
            message[start:until] = len(ways)
            place[start:until] = ends[start:until] - size[start:until] - before
            ways.append(int(way[start]))
            start = until
    return message, place, ways


def _by(keys: np.ndarray, pieces: np.ndarray) -> dict[int, np.ndarray]:
    """Group pieces by a key, keeping their order."""
    if not len(pieces):
        return {}
    order = np.argsort(keys, kind="stable")
    borders = np.flatnonzero(np.diff(keys[order])) + 1
    starts = np.concatenate([[0], borders])
    groups = np.split(pieces[order], borders)
    return {int(keys[order[start]]): group for start, group in zip(starts, groups, strict=True)}


def _tensor_map(source: Placement, destination: Placement) -> np.ndarray:
    """Return the source's number of each destination tensor; raise a ValueError for missing tensors or other shapes."""
    number = {name: i for i, name in enumerate(source.tensors)}
    for name, shape in destination.tensors.items():
        if name not in number:
            missing = [n for n in destination.tensors if n not in number]
            raise ValueError(
                f"'{destination.title}' needs {len(missing)} tensors that '{source.title}' does not have, first of all "
                f"'{name}' {list(shape)}"
            )
        if source.tensors[name] != shape:
            raise ValueError(
                f"'{name}' has shape {list(source.tensors[name])} in '{source.title}' and {list(shape)} in "
                f"'{destination.title}'"
            )
    return np.array([number[name] for name in destination.tensors], np.int64)


def _holders(source: Placement, global_ranks: np.ndarray) -> Holders:
    """Return the source's boxes, pairwise disjoint, with the slices that hold each box."""
    slices = source.slices
    boxes, of_slice = as_boxes(slices), np.arange(len(slices))
    _, first = numbered(boxes, ("tensor", *BOX_FIELDS))
    crossing = overlapping(boxes["tensor"][first], boxes[first])
    if len(crossing):
        # Boxes that overlap but are not equal are cut along each other's borders.
        keep = ~np.isin(boxes["tensor"], crossing)
        parts, origin = [boxes[keep]], [of_slice[keep]]
        for tensor in crossing.tolist():
            mine = np.flatnonzero(boxes["tensor"] == tensor)
            for index in mine.tolist():
                made = _grid(boxes[index : index + 1], boxes[mine])
                parts.append(made)
                origin.append(np.full(len(made), index))
        boxes, of_slice = np.concatenate(parts), np.concatenate(origin)
    return Holders(boxes, of_slice, slices["rank"], global_ranks)


def _grid(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Cut a box along the borders of other boxes."""
    lines = []
    for first, length in (("row", "rows"), ("col", "cols")):
        low, high = box[first][0], box[first][0] + box[length][0]
        at = np.unique(np.concatenate([others[first], others[first] + others[length]]))
        lines.append(np.concatenate([[low], at[(at > low) & (at < high)], [high]]))
    rows, cols = lines
    made = np.empty((len(rows) - 1, len(cols) - 1), BOX)
    made["tensor"] = box["tensor"][0]
    made["row"], made["rows"] = rows[:-1, None], np.diff(rows)[:, None]
    made["col"], made["cols"] = cols[:-1], np.diff(cols)
    return made.reshape(-1)


def _check_memory(placement: Placement) -> None:
    """Raise a ValueError if two slices of a rank overlap in memory: each destination element must be written once."""
    slices = placement.slices
    turned = slices["row_stride"] < slices["col_stride"]
    stride = np.maximum(np.where(turned, slices["col_stride"], slices["row_stride"]), 1)
    boxes = np.empty(len(slices), BOX)
    boxes["row"], boxes["col"] = slices["offset"] // stride, slices["offset"] % stride
    boxes["rows"] = np.where(turned, slices["cols"], slices["rows"])
    boxes["cols"] = np.where(turned, slices["rows"], slices["cols"])
    keys = np.empty(len(slices), np.dtype([(name, np.int64) for name in ("rank", "parameter", "stride")]))
    keys["rank"], keys["parameter"], keys["stride"] = slices["rank"], slices["parameter"], stride
    group, first = numbered(keys, ("rank", "parameter", "stride"))
    found = overlapping(group, boxes)
    if len(found):
        where = slices[first[found[0]]]
        parameter = placement.parameters[where["parameter"]]
        names = list(placement.tensors)
        inside = sorted({names[t] for t in slices["tensor"][group == found[0]]})
        raise ValueError(
            f"'{placement.title}': two slices of rank {int(where['rank'])} lie on the same elements of parameter "
            f"'{parameter}', among {_few(inside)}"
        )


def _span(box: np.ndarray, dim: str) -> str:
    return f"[{int(box[dim])}, {int(box[dim] + box[dim + 's'])})"


def _few(values: Sequence[object], most: int = 6) -> str:
    shown = ", ".join(map(str, values[:most]))
    return f"{shown}, ... ({len(values)})" if len(values) > most else shown


# The holders of each rectangle, and the choice of a sender among several holders: equal shares by bytes.


class Holders:
    """The disjoint boxes of a source, sorted by tensor, and the slices that hold each box."""

    def __init__(self, boxes: np.ndarray, slices: np.ndarray, rank_of_slice: np.ndarray, global_ranks: np.ndarray):
        """Group the boxes: slice `slices[i]` holds `boxes[i]`, and equal boxes become one box with several holders."""
        self.global_ranks = global_ranks
        number, first = numbered(boxes, ("tensor", *BOX_FIELDS))
        self.boxes = boxes[first]
        rank = global_ranks[rank_of_slice[slices]]
        self.world = int(global_ranks.max(initial=0)) + 1
        order = np.lexsort([rank, number])
        # A rank may hold a box in two parameters, such as a tied output projection. One parameter is enough.
        key = number[order] * self.world + rank[order]
        kept = order[np.concatenate([[True], key[1:] != key[:-1]])] if len(order) else order
        self.number, self.rank, self.slice = number[kept], rank[kept], slices[kept]
        self._key = self.number * self.world + self.rank
        self.start = offsets_of(np.bincount(self.number, minlength=len(self.boxes)))

    def slice_on(self, box: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return the slice with which a global rank holds a box, or -1."""
        wanted = box * self.world + rank
        at = np.minimum(np.searchsorted(self._key, wanted), len(self._key) - 1)
        return np.where((self._key[at] == wanted) & (rank < self.world), self.slice[at], -1)


def choose_senders(
    holders: Holders, box: np.ndarray, receiver: np.ndarray, size: np.ndarray, hosts: np.ndarray
) -> np.ndarray:
    """Return the global rank that sends each piece, given its box, its receiver and its bytes (all `[pieces]`).

    Pieces with the same candidate senders are dealt out so that the bytes of all senders level out. Pieces with few
    candidates come first, and pieces with more candidates fill up what is left.
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
    """Group pieces by their candidate senders, fewest candidates first, as (pieces, senders)."""
    if not len(box):
        return []
    # A set of ranks is identified by one number: the sum of the random marks of its ranks.
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
    """Distribute `amount` bytes over senders so that the least loaded reach an equal level.

    Return the share of each sender, `[senders]`.
    """
    ordered = np.sort(load)
    room = np.cumsum(np.arange(1, len(load)) * np.diff(ordered))  # the amount from which one more sender takes part
    count = int(np.searchsorted(room, amount, "right")) + 1
    level = (amount + ordered[:count].sum()) / count
    return np.maximum(level - load, 0)


# The description of a plan as text.

ROWS = 16
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_bytes(number: float) -> str:
    """Format a number of bytes with a unit, such as "1.50 MiB"."""
    for unit in UNITS:
        if number < 1024 or unit == UNITS[-1]:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def plan_lines(plan: ReshardPlan, most_ranks: int = ROWS) -> list[str]:
    """Return text lines with the bytes that each rank sends, receives and copies.

    The last column has the bytes that gathering every tensor whole would cost.
    """
    sent, received, copied, gathered = plan.sent(), plan.received(), plan.copied(), plan.gathered()
    total = int((plan.itemsize * _elements(plan)).sum())
    lines = [
        f"{plan.source.title} ({count(plan.source.world_size, 'rank')}) -> {plan.destination.title} "
        f"({count(plan.destination.world_size, 'rank')})",
        f"{count(len(plan.destination.tensors), 'tensor')}, {as_bytes(total)}; "
        f"{count(len(plan.message_bytes), 'message')} of up to {as_bytes(plan.message_bytes.max(initial=0))} in "
        f"{count(len(plan.hops), 'hop')}, fed {plan.feed}; buffers "
        f"{as_bytes(4 * min(plan.slot_bytes, int(plan.message_bytes.max(initial=0))))} a rank",
        "",
        f"{'rank':>6} {'sends':>12} {'receives':>12} {'copies':>12} {'gathering':>12}",
    ]
    trains, serves = set(plan.source_ranks.tolist()), set(plan.destination_ranks.tolist())
    for rank in plan.ranks[:most_ranks]:
        role = "+".join(word for word, ranks in (("train", trains), ("rollout", serves)) if rank in ranks)
        numbers = (as_bytes(column[rank]) for column in (sent, received, copied, gathered))
        lines.append(f"{rank:>6} " + " ".join(f"{number:>12}" for number in numbers) + f"  {role}")
    if len(plan.ranks) > most_ranks:
        lines.append(f"{'...':>6} {len(plan.ranks) - most_ranks} more ranks")
    numbers = (as_bytes(int(column.sum())) for column in (sent, received, copied, gathered))
    lines.append(f"{'all':>6} " + " ".join(f"{number:>12}" for number in numbers))
    part = received.sum() / max(1, gathered.sum())
    lines += ["", f"received: {part:.1%} of what gathering everything on every rollout rank receives"]
    return lines


def _elements(plan: ReshardPlan) -> np.ndarray:
    sizes = [int(np.prod(plan.source.tensors[name], dtype=np.int64)) for name in plan.names]
    return np.array(sizes, np.int64)
