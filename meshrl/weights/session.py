"""Sync of the policy's weights from the training engine into the rollout, under a version number.

- `WeightSync` runs one reshard plan.
- `StreamedSync` runs a plan for each part of the model, for rollouts that take whole tensors.

A sync is all or nothing, over all ranks together:

    agree on plan and version -> exchange -> compare checksums -> agree that all is well -> stamp the version

`staged` keeps the old weights until the last step, which needs memory for a second copy of the rollout's shard. Without
it, a rollout refuses to generate after a failed sync until a sync succeeds. A rollout never generates with a mix of two
versions.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from meshrl.engines.training_engine import Engine
from meshrl.rollout.base import Rollout
from meshrl.rollout.in_process_rollout import SteppingRollout
from meshrl.rollout.weight_files import buckets
from meshrl.weights.executor import DeltaExchange, Exchange, Traffic
from meshrl.weights.placement import Placement, Shards
from meshrl.weights.planner import ReshardPlan
from meshrl.weights.transports import Carrier, Deadline, SyncRefusedError

if TYPE_CHECKING:
    from meshrl.weights.grouped import Tables


logger = logging.getLogger(__name__)

# The size of a rank's status message: NUMBERS int64 values, then a text.
WORD_BYTES = 1024
NUMBERS = 4


def sync_weights(
    engine: Engine,
    rollout: Rollout,
    version: int,
    watch: Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] = iter,
) -> None:
    """Stream every parameter to the rollout, one whole tensor at a time, and stamp it with `version`.

    `watch` may wrap the stream to look at the tensors.
    """
    if version <= rollout.version:
        raise ValueError(f"weight sync: version {version} is not newer than the rollout's {rollout.version}")
    rollout.update_weights(watch(engine.per_tensor_params()), version)


@dataclass(frozen=True)
class SyncReport:
    """The version, duration and traffic of one sync on this rank."""

    version: int
    seconds: float
    traffic: Traffic
    buffer_bytes: int
    stall_seconds: float = 0.0  # the largest gap between two tokens of a rollout that generated during the sync

    def metrics(self) -> dict[str, float]:
        """Return the report as `weight_sync/...` metrics of a training step."""
        return {
            "weight_sync/seconds": self.seconds,
            "weight_sync/version": float(self.version),
            "weight_sync/sent_bytes": float(self.traffic.sent),
            "weight_sync/received_bytes": float(self.traffic.received),
            "weight_sync/copied_bytes": float(self.traffic.copied - self.traffic.shared),
            "weight_sync/shared_bytes": float(self.traffic.shared),
            "weight_sync/buffer_bytes": float(self.buffer_bytes),
            "weight_sync/stall_seconds": self.stall_seconds,
        }


class WeightSync:
    """One rank's end of a plan, to be run once for each version. All ranks of the plan run it together.

    `source` and `destination` are this rank's shards on the two sides, or None if the rank has none there. `dtypes` are
    the destination's dtypes by tensor. `verify` compares checksums of both sides after every sync. `delta` sends only
    what changed since the last sync, for which senders keep a copy of what they sent. With `staged` the rollout
    generates until the new version is complete in separate memory. With `may_repeat` the first sync may bring the
    version that is already there.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        *,
        source: Shards | None,
        destination: Shards | None,
        dtypes: Mapping[str, torch.dtype],
        carrier: Carrier | None = None,
        verify: bool = True,
        staged: bool = False,
        delta: bool = False,
        deadline: float = 600.0,
        may_repeat: bool = False,
    ):
        check_dtypes(plan, destination, dtypes)
        largest = max(int(plan.message_bytes.max(initial=0)), WORD_BYTES)
        if carrier is not None and carrier.slot_bytes < largest:
            raise ValueError(f"the carrier's slots of {carrier.slot_bytes} bytes are too small for {largest}")
        self.plan, self.rank, self.carrier, self.dtypes = plan, rank, carrier, dtypes
        self.source, self.destination = source, destination
        self.verify, self.staged, self.delta, self.deadline = verify, staged, delta, deadline
        self._sent: dict[int, Tensor] = {}
        self._has_last = False  # whether this rank's destination still has what was last sent
        self.part = plan.of_rank(rank)
        self.pairs = plan.pairs()
        self.version = -1
        self.is_mixed = False  # whether the destination may hold parts of two versions
        self.may_repeat = may_repeat
        self._is_open = False  # whether other ranks may still wait for this rank's messages
        # The next version while it arrives. With `delta` it stays, because the next changes are applied to it.
        self._stage: dict[str, Tensor] | None = None
        self.tag = 1  # the tag of the next message; all ranks count alike
        self._tables: Tables | None = None
        # Staged memory is new in every sync, so recording a CUDA graph for it does not pay.
        self._records = destination is not None and not staged

    @torch.no_grad()
    def run(self, version: int, rollout: Rollout | None = None) -> SyncReport:
        """Sync `version` to the destination. `rollout` is the engine that generates with it on this rank.

        A failure on any rank raises on every rank. The rollout then keeps its old version (`staged`), or refuses to
        generate.
        """
        started = time.perf_counter()
        held = self.version if rollout is None else rollout.version
        if isinstance(rollout, SteppingRollout):
            rollout.gaps.restart()
        self._is_open = True
        try:
            if rollout is not None:
                end_refusal(rollout)
            exchange = self._begin(version, held)
            if self.staged:
                exchange.run()  # the rollout goes on generating
                self._settle(exchange, version)
            self._hand_over(exchange, version, held, rollout)
        except BaseException as error:
            if self._is_open and self.carrier is not None and not isinstance(error, SyncRefusedError):
                self.carrier.abort(f"{type(error).__name__}: {error}")
            if rollout is not None and self.is_mixed:
                refuse(rollout, error)
            raise
        finally:
            if not self.delta:
                self._stage = None
        seconds = time.perf_counter() - started
        buffers = self.carrier.memory_bytes() if self.carrier is not None else 0
        stall = rollout.longest_gap() if isinstance(rollout, SteppingRollout) else 0.0
        return SyncReport(version, seconds, exchange.traffic, buffers, stall)

    def _begin(self, version: int, held: int) -> Exchange:
        """Return the exchange of this sync, after all ranks have agreed on the plan and the version.

        The version must be newer than the one that a rollout has, except in a first sync with `may_repeat`.
        """
        if self.carrier is not None:
            self.carrier.begin(Deadline(self.deadline))
        # A new connection's first sync may bring the current version to rollouts that joined late.
        newer = self.destination is None or version > held or (version == held and self.may_repeat)
        knows = self._agree("" if newer else f"version {version} is not newer than the {held} there", version)
        self.may_repeat = False
        made = DeltaExchange if self.delta else Exchange
        target = self._target()
        exchange = made(self.plan, self.part, self.source, target, self.carrier, self.dtypes, self.verify, 0)
        if isinstance(exchange, DeltaExchange):
            self._has_last = False
            exchange.prepare(self._sent, is_known=knows)
            self._announce(exchange)
        exchange.first_tag, exchange.tables = self.tag, self._grouping()
        self.tag += len(self.plan.hops)
        return exchange

    def _grouping(self) -> Tables | None:
        """Return the kernel tables of this rank's copies and checksums if the destination is on a GPU, else None."""
        where = self.destination
        if self._tables is None and where is not None and where.tensors and where.device.type == "cuda":
            from meshrl.weights.grouped import Tables

            self._tables = Tables(self._records)
        return self._tables

    def _target(self) -> Shards | None:
        """Return the shards that receive the new weights: the destination itself, or separate memory if `staged`."""
        if not self.staged or self.destination is None:
            return self.destination
        if self._stage is None:
            self._stage = {name: torch.empty_like(t) for name, t in self.destination.tensors.items()}
        return self.destination.with_tensors(self._stage)

    def _settle(self, exchange: Exchange, version: int) -> None:
        """Compare the checksums if `verify` is set, and agree with all ranks that the weights are correct."""
        self._agree(self._compare(exchange) if self.verify else "", version)
        self._is_open = False

    def _hand_over(self, exchange: Exchange, version: int, held: int, rollout: Rollout | None) -> None:
        """Let the rollout take the version over, between two of its generation steps."""
        arrivals = self._arrivals(exchange, version)
        if rollout is not None and self.staged and version == held:
            # The rollout has this version already. The sync was for rollouts that joined late.
            self.version, self._has_last = version, True
            return
        if rollout is not None:
            rollout.update_weights(arrivals, version)
        # A rollout that shares the trainer's weights takes no tensors, but other ranks need this rank's messages.
        for _ in arrivals:
            pass

    def _arrivals(self, exchange: Exchange, version: int) -> Iterator[tuple[str, Tensor]]:
        """Run the exchange, then yield every parameter of the destination by name. The parameters are already in place.

        Unless the weights are staged, the checksums are compared after the last yield: until then a device still moves
        the weights, and nothing may use them.
        """
        if not self.staged:
            self.is_mixed = True
            exchange.run()
        if self.destination is not None and exchange.destination is not None:
            self.is_mixed = True
            if exchange.destination is not self.destination:
                new, old = exchange.destination.tensors, self.destination.tensors
                torch._foreach_copy_([tensor.data for tensor in old.values()], [new[name] for name in old])
            yield from self.destination.tensors.items()
        if not self.staged:
            self._settle(exchange, version)
        self.is_mixed, self.version, self._has_last = False, version, True

    def forget(self) -> None:
        """Record that the destination has lost its weights.

        The next sync then sends everything, even with `delta`.
        """
        self._has_last, self._stage = False, None

    def _announce(self, exchange: DeltaExchange) -> None:
        """Send the receivers the length of each message, which varies with `delta`."""
        for origin, to, count in self.plan.message_pairs():
            if origin == self.rank:
                self._tell(exchange.sizes_for(to).view(torch.uint8), to)
            elif to == self.rank:
                messages = np.unique(self.part.kept[origin]["message"])
                exchange.learn(messages, self._hear(origin, 8 * count).view(torch.int64))
            else:
                self.tag += self._parts(8 * count)

    def _compare(self, exchange: Exchange) -> str:
        """Exchange the checksums of the sent weights and compare the received ones; return a problem as text, or ""."""
        told: dict[int, Tensor] = {}
        for origin, to, count in self.pairs:
            if origin == self.rank:
                self._tell(exchange.sums_for(to).view(torch.uint8), to)
            elif to == self.rank:
                told[origin] = self._hear(origin, 8 * count).view(torch.int64)
            else:
                self.tag += self._parts(8 * count)
        return exchange.check(told) or ""

    def _parts(self, nbytes: int) -> int:
        return -(-nbytes // self.carrier.slot_bytes) if self.carrier is not None else 0

    def _tell(self, data: Tensor, to: int) -> None:
        assert self.carrier is not None
        for part in data.split(self.carrier.slot_bytes):
            self.carrier.outgoing(len(part)).copy_(part)
            self.carrier.send(len(part), to, self.tag)
            self.tag += 1

    def _hear(self, origin: int, nbytes: int) -> Tensor:
        assert self.carrier is not None
        found: list[Tensor] = []
        while (left := nbytes - sum(map(len, found))) > 0:
            incoming = self.carrier.receive(origin, min(left, self.carrier.slot_bytes), self.tag)
            found.append(incoming.wait().cpu().clone())
            incoming.release()
            self.tag += 1
        return torch.cat(found)

    def _agree(self, problem: str, version: int) -> bool:
        """Gather every rank's status on the first rank, which sends a verdict to all. A problem raises on every rank.

        Return whether all ranks still have what was last sent.
        """
        root, *others = self.plan.ranks
        if self.carrier is None:
            if problem:
                raise SyncRefusedError(f"weight sync: rank {self.rank}: {problem}")
            return self._has_last
        words = {self.rank: (self.plan.digest, version, problem, self._has_last)}
        verdict, known = "", False
        for rank in others:
            if self.rank == rank:
                self._tell(_word(*words[rank]), root)
            elif self.rank == root:
                words[rank] = _read(self._hear(rank, WORD_BYTES))
            else:
                self.tag += self._parts(WORD_BYTES)
        if self.rank == root:
            verdict, known = _verdict(words), all(word[3] for word in words.values())
        for rank in others:
            if self.rank == root:
                self._tell(_word(0, version, verdict, known), rank)
            elif self.rank == rank:
                _, _, verdict, known = _read(self._hear(root, WORD_BYTES))
            else:
                self.tag += self._parts(WORD_BYTES)
        self.carrier.flush()
        if verdict:
            raise SyncRefusedError(f"weight sync: {verdict}")
        return known


def refuse(rollout: Rollout, because: BaseException) -> None:
    """Make a rollout with a mix of old and new weights refuse to generate until a sync succeeds."""
    rollout.version = -1
    try:
        rollout.release(("weights",))
    except Exception as error:  # the engine may be gone; the first error is the one to report
        because.add_note(f"nor could the rollout give its weights up: {type(error).__name__}: {error}")


def end_refusal(rollout: Rollout) -> None:
    """Let a rollout allocate memory for the weights that it released after a failed sync of any kind."""
    if rollout.version < 0:
        rollout.resume(("weights",))


def check_dtypes(plan: ReshardPlan, destination: Shards | None, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise a ValueError unless the plan's element sizes, `dtypes` and the destination's parameters fit together."""
    for name, size in zip(plan.names, plan.itemsize.tolist(), strict=True):
        if name in plan.destination.tensors and dtypes[name].itemsize != size:
            raise ValueError(f"'{name}' is planned with {size} bytes an element, but {dtypes[name]} has another size")
    if destination is None:
        return
    names = list(plan.destination.tensors)
    held = plan.destination.of_rank(destination.rank)
    for tensor, parameter in np.unique(np.stack([held["tensor"], held["parameter"]], 1), axis=0).tolist():
        home = destination.placement.parameters[parameter]
        if destination.tensors[home].dtype != dtypes[names[tensor]]:
            raise ValueError(
                f"'{names[tensor]}' is to arrive as {dtypes[names[tensor]]}, but parameter '{home}' of rank "
                f"{destination.rank} is {destination.tensors[home].dtype}"
            )


def _word(digest: int, version: int, text: str, known: bool) -> Tensor:
    """Encode a rank's status as `[WORD_BYTES]` bytes: plan digest, version, text length, `known`, text."""
    data = text.encode()[: WORD_BYTES - 8 * NUMBERS]
    word = torch.zeros(WORD_BYTES, dtype=torch.uint8)
    word[: 8 * NUMBERS] = torch.tensor([digest, version, len(data), known]).view(torch.uint8)
    if data:
        word[8 * NUMBERS : 8 * NUMBERS + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return word


def _read(word: Tensor) -> tuple[int, int, str, bool]:
    digest, version, length, known = word[: 8 * NUMBERS].view(torch.int64).tolist()
    text = bytes(word[8 * NUMBERS : 8 * NUMBERS + length].tolist()).decode(errors="replace")
    return digest, version, text, bool(known)


def _verdict(words: Mapping[int, tuple[int, int, str, bool]]) -> str:
    """Return the problem in the statuses of all ranks as text, or "" if there is none."""
    problems = [f"rank {rank}: {text}" for rank, (_, _, text, _) in words.items() if text]
    if problems:
        return "; ".join(problems)
    for index, what in ((1, "version"), (0, "plan")):
        found: dict[object, list[int]] = {}
        for rank, word in words.items():
            found.setdefault(word[index], []).append(rank)
        if len(found) > 1:
            parts = [f"ranks {ranks} have {what} {value}" for value, ranks in found.items()]
            return f"the ranks differ: {'; '.join(parts)}"
    return ""


# The sync of rollouts that take whole tensors, such as vLLM and SGLang. The model is sent in parts, so that no rank
# needs memory for a second whole copy.
#
#     part 1: exchange -> compare sums -> all agree ─┐
#     part 2: exchange -> compare sums -> all agree ─┼─> update_weights(whole tensors by name, version)
#     ...                                           ─┘
#
# A part is what fits into half a bucket, or one tensor that is larger. The first part arrives before the engine stops.
# The other parts arrive while the engine stands still, each before the engine takes the previous part. So memory for
# two parts is enough. With messages of half the usual size a sync takes two buckets, like every other sync. The weights
# that an engine has taken cannot be read back, so checksums are compared before a part is handed over. A sync that
# fails in its first part leaves the old version. A sync that fails later leaves a rollout that refuses to generate
# until a sync succeeds.
#
# An engine that is sharded over ranks cuts the tensors itself. Each rank gets whole tensors in which only its own shard
# is filled in (`placement.windows`) and the rest is NaN. So no rank receives more than it keeps, and a rank that took
# another shard would have NaN in its parameters.

Blank = tuple[Sequence[int], torch.dtype]


class StreamedSync:
    """One rank's end of a plan for each part, over one transport. All ranks run it together, once for each version.

    `blanks` has the shape and dtype of the rollout's parameters by name, on the rank `place` of the rollouts; it is
    None on a trainer. Each part has the deadline that other syncs have for the whole model. Without a transport there
    is a single rank.
    """

    def __init__(
        self,
        parts: Sequence[WeightSync],
        carrier: Carrier | None,
        *,
        place: int = -1,
        blanks: Mapping[str, Blank] | None = None,
        device: torch.device | str = "cpu",
    ):
        self.parts, self.carrier = parts, carrier
        self.place, self.blanks, self.device = place, blanks, device
        self._part_bytes = sorted(sum(map(_nbytes, self._blanks_of(part).values())) for part in parts)
        self.version = -1
        self.is_mixed = False  # whether the engine may hold parts of two versions
        self.may_repeat = True
        self._tag = 1
        self._is_open = False  # whether other ranks may still wait for this rank's messages

    @property
    def source(self) -> Shards | None:
        """This trainer rank's shards of the weights."""
        return self.parts[0].source

    @source.setter
    def source(self, shards: Shards) -> None:
        for part in self.parts:
            part.source = shards

    def run(self, version: int, rollout: Rollout | None = None) -> SyncReport:
        """Sync `version` to the rollouts. Trainers pass no `rollout`.

        A failure on any rank before the last part has arrived raises on every rank. A later failure raises on that rank
        alone.
        """
        started, traffic = time.perf_counter(), Traffic()
        held = self.version if rollout is None else rollout.version
        if isinstance(rollout, SteppingRollout):
            rollout.gaps.restart()
        stood = 0.0
        self._is_open = True
        try:
            parts = self._arrivals(version, held, traffic)
            arrivals = chain([next(parts)], parts)  # the first part arrives while the rollout still generates
            if rollout is not None and version != held:
                stood = self._hand_over(rollout, _one_by_one(arrivals), version)
            # Trainers have no tensors. A rollout that already has the version only passes messages on.
            for tensors in arrivals:
                tensors.clear()
        except BaseException as error:
            if self._is_open and self.carrier is not None and not isinstance(error, SyncRefusedError):
                self.carrier.abort(f"{type(error).__name__}: {error}")
            if rollout is not None and self.is_mixed:
                refuse(rollout, error)
            raise
        self.version, self.may_repeat = version, False
        seconds = time.perf_counter() - started
        stall = rollout.longest_gap() if isinstance(rollout, SteppingRollout) else stood
        return SyncReport(version, seconds, traffic, self._buffer_bytes(), stall)

    def forget(self) -> None:
        """Do nothing: the sync keeps no state, because every version is sent whole."""

    def _hand_over(self, rollout: Rollout, weights: Iterator[tuple[str, Tensor]], version: int) -> float:
        """Let the engine take the version, and return for how many seconds generation stood still."""
        started, runs = time.perf_counter(), rollout.stats()["running"] > 0
        end_refusal(rollout)
        self.is_mixed = True
        rollout.update_weights(weights, version)
        self.is_mixed = False
        return time.perf_counter() - started if runs else 0.0

    def _arrivals(self, version: int, held: int, traffic: Traffic) -> Iterator[dict[str, Tensor]]:
        """Yield the rollout's parameters of each part, after all ranks have agreed that the part is correct."""
        for part in self.parts:
            part.version, part.may_repeat, part.tag = held, self.may_repeat, self._tag
            tensors = self._blank_tensors(part)
            try:
                moved = part.run(version).traffic
            finally:
                self._tag, part.destination = part.tag, None
            traffic.add(moved)
            self._is_open = part is not self.parts[-1]
            yield tensors

    def _blank_tensors(self, part: WeightSync) -> dict[str, Tensor]:
        """Allocate the tensors of a part on a rollout, and make them the part's destination.

        The memory is new for each part, because an engine may keep tensors until a layer is complete.
        """
        wanted, placement = self._blanks_of(part), part.plan.destination
        made = {name: torch.empty(*shape, dtype=dtype, device=self.device) for name, (shape, dtype) in wanted.items()}
        if made:
            if placement.elements_of_ranks()[self.place] < placement.elements():
                fill_with_nothing(made.values())
            part.destination = Shards(placement, self.place, dict(made))
        return made

    def _blanks_of(self, part: WeightSync) -> dict[str, Blank]:
        """Return all parameters of a part, including those of which this rank holds no element."""
        if self.blanks is None:
            return {}
        placement = part.plan.destination
        numbers = np.unique(placement.slices["parameter"]).tolist()
        return {name: self.blanks[name] for name in (placement.parameters[number] for number in numbers)}

    def _buffer_bytes(self) -> int:
        """Return the bytes of memory for messages and, on a rollout, for the two largest parts."""
        messages = self.carrier.memory_bytes() if self.carrier is not None else 0
        return messages + sum(self._part_bytes[-2:])


def _one_by_one(parts: Iterable[dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, dropping the reference to each one.

    Only the engine can tell how long it needs a tensor.
    """
    for tensors in parts:
        for name in list(tensors):
            yield name, tensors.pop(name)


def fill_with_nothing(tensors: Iterable[Tensor]) -> None:
    """Fill floating-point tensors with NaN; other tensors stay as they are."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(math.nan)


def streamed_sync(
    placement: Placement,
    target: Placement,
    blanks: Mapping[str, Blank],
    *,
    rank: int,
    place: int,
    source: Shards | None,
    dtypes: Mapping[str, torch.dtype],
    plan: Callable[[Placement, Placement, int], ReshardPlan],
    carrier: Callable[[Sequence[ReshardPlan]], Carrier | None],
    bucket_bytes: int,
    verify: bool,
    deadline: float,
    device: torch.device,
) -> StreamedSync:
    """Plan the sync of every part of the rollouts' parameters, in their order, and return this rank's end.

    `plan` makes a plan from the two placements of a part and the bytes of a bucket. `carrier` makes the transport for
    all plans.
    """
    half = max(1, bucket_bytes // 2)
    plans = [plan(placement.only(p), target.only(p), half) for p in names_of_parts(target, blanks, half)]
    connections = carrier(plans)
    parts = [
        WeightSync(
            one,
            rank,
            source=source,
            destination=None,
            dtypes=dtypes,
            carrier=connections,
            verify=verify,
            deadline=deadline,
        )
        for one in plans
    ]
    return StreamedSync(parts, connections, place=place, blanks=blanks if place >= 0 else None, device=device)


def names_of_parts(target: Placement, blanks: Mapping[str, Blank], bucket_bytes: int) -> list[list[str]]:
    """Return the names of the tensors of each part.

    A part has the tensors of neighbouring parameters up to a bucket, or of one larger parameter.
    """
    tensors, inside = list(target.tensors), defaultdict[str, list[str]](list)
    held = np.unique(np.stack([target.slices["parameter"], target.slices["tensor"]], 1), axis=0)
    for parameter, tensor in held.tolist():
        inside[target.parameters[parameter]].append(tensors[tensor])
    sizes = ((name, torch.empty(*shape, dtype=dtype, device="meta")) for name, (shape, dtype) in blanks.items())
    return [[tensor for name, _ in bucket for tensor in inside[name]] for bucket in buckets(sizes, bucket_bytes)]


def _nbytes(blank: Blank) -> int:
    shape, dtype = blank
    return math.prod(shape) * dtype.itemsize
