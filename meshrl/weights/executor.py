"""The execution of one rank's part of a reshard plan: pack, send, pass on, unpack, copy, and checksums.

- `Exchange` runs a plan.
- `checksum` sums rectangles to verify the outcome.
- `DeltaExchange` sends only what changed since the last version.

Hops are started in the plan's order. While a message is in transit the next one is packed and the last one is unpacked.
Local copies are done in between. Besides the two models an exchange needs two outgoing and two incoming slots of half a
bucket.
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
# The number of local copies in one call of torch.
COPIES_AT_ONCE = 64


@dataclass
class Traffic:
    """The bytes that one rank moved in a sync."""

    sent: int = 0
    received: int = 0
    copied: int = 0
    shared: int = 0  # the part of `copied` that already lay in the destination's storage

    def add(self, other: Traffic) -> None:
        """Add the bytes that another exchange moved."""
        for name, amount in vars(other).items():
            setattr(self, name, getattr(self, name) + amount)


@dataclass
class Exchange:
    """One rank's part of one sync. Messages get tags from `first_tag` on."""

    plan: ReshardPlan
    part: RankPlan
    source: Shards | None
    destination: Shards | None
    carrier: Carrier | None
    dtypes: Mapping[str, torch.dtype]
    verify: bool = True
    first_tag: int = 1
    tables: Tables | None = None  # set if local copies and checksums run in one kernel
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.rank = self.part.rank
        self._asked: deque[tuple[int, int, Incoming]] = deque()  # tag, message
        self._sent: deque[int] = deque([0] * IN_FLIGHT, IN_FLIGHT)  # tags
        # Checksums: of sent pieces by piece number, of local copies by destination slice.
        self.sent_sums: dict[int, Tensor] = {}
        self.copied_sums: list[tuple[np.ndarray | list[int], Tensor]] = []

    @cached_property
    def dtype_of(self) -> list[torch.dtype]:
        """The destination dtype of each tensor, by its number in the plan."""
        return [self.dtypes.get(name, torch.float32) for name in self.plan.names]

    @torch.no_grad()
    def run(self) -> None:
        """Move everything. Return when this rank's shard is complete and its messages have been taken."""
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
        """Return memory to send a message from."""
        # This may wait until an earlier send is read, by a rank that may itself wait for this rank. So the messages
        # that come before that send in the plan's order are unpacked first. (No rank ever waits for a message while an
        # earlier message in the plan's order lies unread there.)
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
                # The sum of the parameter, not of the message, because the message may be wrong.
                self.sent_sums[int(piece["number"])] = checksum(region, piece["row"], piece["col"], dtype)

    def _receive(self, message: int, origin: int) -> None:
        if len(self._asked) == IN_FLIGHT:
            self._take_in()
        size = self._size(message)
        tag = self.tag_of[message, origin, self.rank]
        self._asked.append((tag, message, self._carrier().receive(origin, size, tag)))
        self.traffic.received += size

    def _take_in(self) -> None:
        """Wait for the oldest message asked for, and unpack its pieces."""
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
        """Receive a message from another rank, unpack it, and send it on."""
        buffer = self._outgoing(message)
        while self._asked[0][1] != message:
            self._take_in()
        _, _, incoming = self._asked.popleft()
        buffer.copy_(incoming.wait())
        # Unpacked and released before it is sent on, so that its sender can continue.
        self._unpack(buffer, self.part.drops[message])
        incoming.release()
        self._post(message, to)

    def _copies(self) -> Iterator[None]:
        """Copy within this rank, up to `COPIES_AT_ONCE` rectangles at each `next`.

        Rectangles that already share the destination's memory are skipped.
        """
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
        """Run all copies in one kernel and return True, or return False if no kernel can run them."""
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
        """Return the checksums of the pieces that this rank sent to another rank, `[pieces]` in the plan's order."""
        sums = [self.sent_sums[number][None] for number in self.part.sent[rank]["number"].tolist()]
        return torch.from_numpy(_on_host(sums))

    def check(self, told: Mapping[int, Tensor]) -> str | None:
        """Compare this rank's shard with the senders' checksums `told`.

        Return a description of the first slice that differs, or None.
        """
        if self.destination is None:
            return None
        slices = self.plan.destination.slices
        mine = np.flatnonzero(self.plan.destination_ranks[slices["rank"]] == self.rank)
        # Launched first, so that the device sums the actual values while the host sums the expected checksums.
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
        """Return the checksums of slices as they now are in the destination, `[slices]`."""
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
    """Concatenate checksums in host memory, fetched together.

    If the tensors of one rank lie on several devices, each checksum is fetched alone.
    """
    devices = {tensor.device for tensor in sums}
    if len(devices) > 1:
        sums = [tensor.cpu() for tensor in sums]
    return torch.cat(list(sums)).cpu().numpy() if sums else np.zeros(0, dtype=np.int64)


def write_piece(buffer: Tensor, piece: np.ndarray, region: Tensor, dtype: torch.dtype) -> None:
    """Write a piece to its place in a message."""
    read_piece(buffer, piece, dtype).copy_(region)


def read_piece(buffer: Tensor, piece: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a piece of a message as a view `[rows, cols]`."""
    rows, cols, place = int(piece["rows"]), int(piece["cols"]), int(piece["place"])
    return buffer[place : place + rows * cols * dtype.itemsize].view(dtype).view(rows, cols)


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.data_ptr() == right.data_ptr() and left.stride() == right.stride()


# Additive checksums of rectangles: the checksums of disjoint parts of a rectangle add up to that of the whole, on any
# layout.
#
# The bits of every element, as an integer, are multiplied by a weight of its row plus a weight of its column, modulo
# 2^64. So an element that is missing, changed, or at another place changes the sum, unless the sums of all rows and of
# all columns stay the same. Equal elements that trade places crosswise are not detected. Integer sums are the same on
# every device in any order. No temporary of the data's size is made, because some rows are summed at a time.

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The number of elements that are converted at once, by device type.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 23}
# The seeds of the weights of rows and of columns.
ROW_SEED, COL_SEED = 0x1234567, 0x7654321


def checksum(values: Tensor, row: int, col: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the checksum (one int64) of a matrix that starts at (row, col) of its tensor, as elements of `dtype`."""
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
    """Return at least `count` pseudo-random odd int64 weights, one for each row or column index."""
    return _weight_table(1 << max(10, (count - 1).bit_length()), seed, str(device))


@lru_cache(maxsize=32)
def _weight_table(count: int, seed: int, device: str) -> Tensor:
    x = torch.arange(count, dtype=torch.int64, device=device) + seed
    for shift, factor in ((30, -0x4B47D0C5B6F0D1A3), (27, -0x61C8864680B583EB), (31, 0x2545F4914F6CDD1D)):
        x = (x ^ (x >> shift)) * factor
    return x | 1


# Sending only what changed since the last version, bit for bit.
#
# A step of reinforcement learning in bfloat16 leaves most elements unchanged. A message then consists of a bit for each
# 16-bit unit (changed or not) and of the units that changed. If that is not shorter, the message itself is sent.
# Senders keep what they last sent, and receivers have it in place. Checksums cover the outcome as in every sync.

UNITS = {1: torch.uint8, 2: torch.int16}


class DeltaExchange(Exchange):
    """An exchange whose messages may be shorter than planned. `sizes` has the bytes of each message as it is sent."""

    def prepare(self, memory: dict[int, Tensor], *, is_known: bool) -> None:
        """Pack all messages that start here and compare them with what was last sent.

        `memory` has the messages that were last sent, and is updated. `is_known`: whether the receivers still have
        them.
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
        """Record the sizes in bytes of another rank's messages."""
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
    """Return the sorted numbers of the messages that contain the pieces."""
    return np.unique(pieces["message"]).tolist()


def pack_bits(mask: Tensor) -> Tensor:
    """Pack booleans `[n]` into bytes, eight in each."""
    padded = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    return (padded * _powers(mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Unpack `count` booleans from the bytes of `pack_bits`."""
    return (packed[:, None] & _powers(packed.device)).ne(0).view(-1)[:count]


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _units(data: Tensor, unit: int) -> Tensor:
    return data.view(UNITS[unit])
