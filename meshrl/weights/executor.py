"""Carries out one rank's part of a plan: pack, send, pass on, unpack, copy; and the sums that prove it.

Hops are started in the plan's order. While a message is on its way the next one is packed and the last one unpacked;
local copies are done in between. Memory beyond the two models: two outgoing and two incoming slots of half a bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from meshrl.weights.placement import Shards
from meshrl.weights.planner import RankPlan, ReshardPlan
from meshrl.weights.transports import Carrier, Incoming, SyncError

if TYPE_CHECKING:
    from meshrl.weights.grouped import Tables


IN_FLIGHT = 2
# Local copies that are handed to torch at once.
COPIES_AT_ONCE = 64


@dataclass
class Traffic:
    """What a rank moved, in bytes."""

    sent: int = 0
    received: int = 0
    copied: int = 0
    shared: int = 0  # of the copied ones: those that already lay in the destination's own storage

    def add(self, other: Traffic) -> None:
        """Counts what another exchange moved as well."""
        for name, amount in vars(other).items():
            setattr(self, name, getattr(self, name) + amount)


@dataclass
class Exchange:
    """One rank's part of one sync. `first_tag`: messages get tags from there on."""

    plan: ReshardPlan
    part: RankPlan
    source: Shards | None
    destination: Shards | None
    carrier: Carrier | None
    dtypes: Mapping[str, torch.dtype]
    verify: bool = True
    first_tag: int = 1
    tables: Tables | None = None  # where local copies and sums go through one kernel
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.rank = self.part.rank
        self._asked: deque[tuple[int, int, Incoming]] = deque()  # tag, message
        self._sent: deque[int] = deque([0] * IN_FLIGHT, IN_FLIGHT)  # tags
        # Sums of pieces: by piece where sent from here, by destination slice where expected here.
        self.sent_sums: dict[int, Tensor] = {}
        self.copied_sums: list[tuple[np.ndarray | list[int], Tensor]] = []

    @cached_property
    def dtype_of(self) -> list[torch.dtype]:
        """By number of tensor."""
        return [self.dtypes.get(name, torch.float32) for name in self.plan.names]

    @torch.no_grad()
    def run(self) -> None:
        """Moves everything; returns when this rank's shard is complete and its messages are taken."""
        hops = self.part.hops.tolist()
        mine = (self.plan.hops[:, 1:] == self.rank).any(1)
        tags = self.first_tag + np.flatnonzero(mine)
        self.tag_of = dict(zip(map(tuple, hops), tags.tolist(), strict=True))
        copies = self._copies()
        share = -(-len(self.part.copies) // (COPIES_AT_ONCE * max(1, len(hops))))
        for message, origin, to in hops:
            if to == self.rank:
                self._receive(message, origin)
            elif message in self.part.packs:
                self._send(message, to)
            else:
                self._pass_on(message, to)
            for _ in range(share):
                next(copies, None)
        for _ in copies:
            pass
        while self._asked:
            self._take_in()
        if self.carrier is not None:
            self.carrier.flush()

    def _carrier(self) -> Carrier:
        if self.carrier is None:
            raise SyncError(f"weight sync: rank {self.rank} has messages to exchange, but no carrier")
        return self.carrier

    def _size(self, message: int) -> int:
        return int(self.plan.message_bytes[message])

    def _send(self, message: int, to: int) -> None:
        self._pack(self._outgoing(message), self.part.packs[message])
        self._post(message, to)

    def _outgoing(self, message: int) -> Tensor:
        """Memory to send from."""
        # This may wait until an earlier send is read, by a rank that may wait for us: take in what came before it.
        # (Nobody ever waits for a message while one that comes before it in the plan's order lies unread here.)
        while self._asked and self._asked[0][0] < self._sent[0]:
            self._take_in()
        return self._carrier().outgoing(self._size(message))

    def _post(self, message: int, to: int) -> None:
        tag, size = self.tag_of[message, self.rank, to], self._size(message)
        self._carrier().send(size, to, tag)
        self._sent.append(tag)
        self.traffic.sent += size

    def _pack(self, buffer: Tensor, pieces: np.ndarray) -> None:
        assert self.source is not None
        for piece in pieces:
            region = self.source.region(self.plan.source.slices[piece["slice"]], piece)
            dtype = self.dtype_of[piece["tensor"]]
            write_piece(buffer, piece, region, dtype)
            if self.verify:
                # From the parameter and not from the message: what is sent may be wrong.
                self.sent_sums[int(piece["number"])] = checksum(region, piece["row"], piece["col"], dtype)

    def _receive(self, message: int, origin: int) -> None:
        if len(self._asked) == IN_FLIGHT:
            self._take_in()
        size = self._size(message)
        tag = self.tag_of[message, origin, self.rank]
        self._asked.append((tag, message, self._carrier().receive(origin, size, tag)))
        self.traffic.received += size

    def _take_in(self) -> None:
        """Waits for the oldest message asked for, and brings its pieces to their places."""
        _, message, incoming = self._asked.popleft()
        buffer = incoming.wait()
        self._unpack(buffer, self.part.drops[message])
        incoming.release()

    def _unpack(self, buffer: Tensor, pieces: np.ndarray) -> None:
        assert self.destination is not None
        for piece in pieces:
            region = self.destination.region(self.plan.destination.slices[piece["slice"]], piece)
            region.copy_(read_piece(buffer, piece, self.dtype_of[piece["tensor"]]))

    def _pass_on(self, message: int, to: int) -> None:
        """Sends a message that came last from another rank."""
        buffer = self._outgoing(message)
        while self._asked[0][1] != message:
            self._take_in()
        _, _, incoming = self._asked.popleft()
        buffer.copy_(incoming.wait())
        # Kept and given back first: whoever sent it can go on while it travels further.
        self._unpack(buffer, self.part.drops[message])
        incoming.release()
        self._post(message, to)

    def _copies(self) -> Iterator[None]:
        """Copies within this rank, some at a time; what already shares its memory is left alone."""
        part = self.part
        if self._copied_at_once():
            yield
            return
        targets: list[Tensor] = []
        origins: list[Tensor] = []
        for box, ours, theirs in zip(part.copies, part.copy_source, part.copy_destination, strict=True):
            assert self.source is not None
            assert self.destination is not None
            region = self.source.region(self.plan.source.slices[ours], box)
            target = self.destination.region(self.plan.destination.slices[theirs], box)
            size = region.numel() * target.element_size()
            self.traffic.copied += size
            if _same_memory(region, target):
                self.traffic.shared += size
            else:
                targets.append(target)
                origins.append(region)
            if self.verify:
                dtype = self.dtype_of[box["tensor"]]
                self.copied_sums.append(([int(theirs)], checksum(region, box["row"], box["col"], dtype)[None]))
            if len(targets) == COPIES_AT_ONCE:
                torch._foreach_copy_(targets, origins)
                targets, origins = [], []
                yield
        if targets:
            torch._foreach_copy_(targets, origins)
        yield

    def _copied_at_once(self) -> bool:
        """All copies by one kernel, where there is one for them."""
        if self.tables is None or self.source is None or self.destination is None or not len(self.part.copies):
            return False
        made = self.tables.copies(self.plan, self.part, self.source, self.destination)
        if made is None:
            return False
        sums = made.moves.run(self.verify)
        self.traffic.copied += made.copied
        self.traffic.shared += made.shared
        if self.verify:
            self.copied_sums.append((self.part.copy_destination, sums))
        return True

    def sums_for(self, rank: int) -> Tensor:
        """The sums of the pieces that this rank sent to another, in the plan's order."""
        sums = [self.sent_sums[number][None] for number in self.part.sent[rank]["number"].tolist()]
        return torch.from_numpy(_on_host(sums))

    def check(self, told: Mapping[int, Tensor]) -> str | None:
        """Compares this rank's shard with what its senders say; names the first slice that differs, if any."""
        if self.destination is None:
            return None
        slices = self.plan.destination.slices
        mine = np.flatnonzero(self.plan.destination_ranks[slices["rank"]] == self.rank)
        # Asked for first: a device adds up what is there while the host adds up what should be.
        sums = [self._sums_of(slices[mine])]
        expected = np.zeros(len(slices), dtype=np.int64)
        for origin, theirs in told.items():
            np.add.at(expected, self.part.kept[origin]["slice"], theirs.numpy())
        numbers = np.concatenate([np.zeros(0, dtype=np.int64), *(part for part, _ in self.copied_sums)])
        found, copied = np.split(_on_host(sums + [own for _, own in self.copied_sums]), [len(mine)])
        np.add.at(expected, numbers, copied)
        wrong = np.flatnonzero(found != expected[mine])
        return self._complaint(int(mine[wrong[0]]), list(told)) if len(wrong) else None

    def _sums_of(self, slices: np.ndarray) -> Tensor:
        """The sums of slices as they now lie in the destination."""
        assert self.destination is not None
        made = self.tables.sums(self.destination, slices) if self.tables is not None else None
        if made is not None:
            return made.run()
        found = [checksum(self.destination.region(s), s["row"], s["col"]) for s in slices]
        return torch.stack(found) if found else torch.empty(0, dtype=torch.int64)

    def _complaint(self, number: int, senders: list[int]) -> str:
        held = self.plan.destination.slices[number]
        drops = self.plan.drops[self.plan.drops["slice"] == number]
        origins = sorted({int(self.plan.senders[message]) for message in drops["message"]}) or senders or [self.rank]
        name = list(self.plan.destination.tensors)[held["tensor"]]
        return (
            f"'{name}' on rank {self.rank}, rows [{held['row']}, {held['row'] + held['rows']}) x columns "
            f"[{held['col']}, {held['col'] + held['cols']}), differs from what ranks {origins} hold "
            f"({self.plan.source.title} -> {self.plan.destination.title})"
        )


def _on_host(sums: Sequence[Tensor]) -> np.ndarray:
    """Sums one after the other, fetched together; weights of one rank may lie on several devices."""
    devices = {tensor.device for tensor in sums}
    if len(devices) > 1:
        sums = [tensor.cpu() for tensor in sums]
    return torch.cat(list(sums)).cpu().numpy() if sums else np.zeros(0, dtype=np.int64)


def write_piece(buffer: Tensor, piece: np.ndarray, region: Tensor, dtype: torch.dtype) -> None:
    """Lays a piece down at its place in a message."""
    read_piece(buffer, piece, dtype).copy_(region)


def read_piece(buffer: Tensor, piece: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A piece in a message, as a view."""
    rows, cols, place = int(piece["rows"]), int(piece["cols"]), int(piece["place"])
    return buffer[place : place + rows * cols * dtype.itemsize].view(dtype).view(rows, cols)


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.data_ptr() == right.data_ptr() and left.stride() == right.stride()


# Checksums of rectangles that add up: those of disjoint parts of a rectangle make that of the whole, on any layout.
#
# Every element counts by its bits, times a number that depends on its row plus one that depends on its column, modulo
# 2^64. So what is missing, changed, or at another place changes the sum, unless the sums of all rows and of all columns
# stay as they were: of equal elements that trade places crosswise it sees nothing. Integer sums are the same on every
# device whatever the order. No temporary of the data's size is made: some rows are summed at a time.

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are converted at once.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 23}
# Weights of rows and of columns.
ROW_SEED, COL_SEED = 0x1234567, 0x7654321


def checksum(values: Tensor, row: int, col: int, dtype: torch.dtype | None = None) -> Tensor:
    """The sum (one int64) of a matrix that starts at (row, col) of its tensor, as elements of `dtype`."""
    dtype = dtype or values.dtype
    rows, cols = values.shape
    by_row = _weights(rows, row, ROW_SEED, values.device)
    by_col = _weights(cols, col, COL_SEED, values.device)
    step = max(1, CHUNK_ELEMENTS.get(values.device.type, 1 << 17) // max(1, cols))
    sums = [
        _sum(part.to(dtype).view(INTEGERS[dtype.itemsize]), weights, by_col)
        for part, weights in zip(values.split(step), by_row.split(step), strict=True)
    ]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _sum(bits: Tensor, by_row: Tensor, by_col: Tensor) -> Tensor:
    wide = bits.long()
    return (wide.sum(1) * by_row).sum() + (wide.sum(0) * by_col).sum()


def _weights(count: int, first: int, seed: int, device: torch.device) -> Tensor:
    first = int(first)
    return weight_table(first + count, seed, device)[first : first + count]


def weight_table(count: int, seed: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers that look random, one for each index; at least `count` of them."""
    return _weight_table(1 << max(10, (count - 1).bit_length()), seed, str(device))


@lru_cache(maxsize=32)
def _weight_table(count: int, seed: int, device: str) -> Tensor:
    x = torch.arange(count, dtype=torch.int64, device=device) + seed
    for shift, factor in ((30, -0x4B47D0C5B6F0D1A3), (27, -0x61C8864680B583EB), (31, 0x2545F4914F6CDD1D)):
        x = (x ^ (x >> shift)) * factor
    return x | 1


# Sending only what changed since the last version, bit for bit.
#
# A step of reinforcement learning in bfloat16 leaves most elements as they were. A message is then a bit for each
# 16-bit
# unit (changed or not) and the units that changed; where that is no shorter, the message itself. Senders keep what they
# last sent, receivers have it in place. The sums of a sync cover the outcome as they always do.

UNITS = {1: torch.uint8, 2: torch.int16}


class DeltaExchange(Exchange):
    """An exchange whose messages may be shorter than planned. `sizes` says how long each is on its way."""

    def prepare(self, memory: dict[int, Tensor], *, is_known: bool) -> None:
        """Packs and compares all messages that start here; `memory` has what was last sent, and is brought up to date.

        `is_known`: whether the receivers still have that.
        """
        self.sizes: dict[int, int] = {}
        self.memory = memory
        self._changed: dict[int, Tensor] = {}
        for message, pieces in self.part.packs.items():
            new = torch.empty(super()._size(message), dtype=torch.uint8, device=self._device())
            super()._pack(new, pieces)
            old = memory.get(message)
            memory[message] = new
            self.sizes[message] = len(new)
            if is_known and old is not None:
                changed = _units(old, self._unit(pieces)) != _units(new, self._unit(pieces))
                size = -(-len(changed) // 8) + int(changed.sum()) * self._unit(pieces)
                if size < len(new):
                    self.sizes[message], self._changed[message] = size, pack_bits(changed)

    def learn(self, messages: np.ndarray, sizes: Tensor) -> None:
        """Takes in how long another rank's messages are."""
        self.sizes |= dict(zip(messages.tolist(), sizes.tolist(), strict=True))

    def sizes_for(self, rank: int) -> Tensor:
        return torch.tensor([self.sizes[number] for number in messages_of(self.part.sent[rank])], dtype=torch.int64)

    def _device(self) -> torch.device:
        assert self.source is not None
        return self.source.device

    def _size(self, message: int) -> int:
        return self.sizes[message]

    def _unit(self, pieces: np.ndarray) -> int:
        return min(2, int(self.plan.itemsize[pieces["tensor"]].min()))

    def _pack(self, buffer: Tensor, pieces: np.ndarray) -> None:
        message = int(pieces["message"][0])
        bits = self._changed.get(message)
        if bits is None:
            buffer.copy_(self.memory[message])
            return
        unit = self._unit(pieces)
        new = _units(self.memory[message], unit)
        buffer[: len(bits)].copy_(bits)
        buffer[len(bits) :].copy_(new[unpack_bits(bits, len(new))].view(torch.uint8))

    def _unpack(self, buffer: Tensor, pieces: np.ndarray) -> None:
        message = int(pieces["message"][0])
        whole = super()._size(message)
        if len(buffer) == whole:
            super()._unpack(buffer, pieces)
            return
        assert self.destination is not None
        unit = self._unit(pieces)
        held = torch.empty(whole, dtype=torch.uint8, device=buffer.device)
        for piece in pieces:
            region = self.destination.region(self.plan.destination.slices[piece["slice"]], piece)
            write_piece(held, piece, region, self.dtype_of[piece["tensor"]])
        count = whole // unit
        border = -(-count // 8)
        changed = unpack_bits(buffer[:border], count)
        _units(held, unit)[changed] = _units(buffer[border:].clone(), unit)
        super()._unpack(held, pieces)


def messages_of(pieces: np.ndarray) -> list[int]:
    """The messages that pieces come in, in order."""
    return np.unique(pieces["message"]).tolist()


def pack_bits(mask: Tensor) -> Tensor:
    """Eight booleans a byte."""
    padded = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    return (padded * _powers(mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits`."""
    return (packed[:, None] & _powers(packed.device)).ne(0).view(-1)[:count]


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _units(data: Tensor, unit: int) -> Tensor:
    return data.view(UNITS[unit])
