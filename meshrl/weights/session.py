"""Bringing the policy's weights from the training engine into the rollout, under a version number.

A sync is all or nothing, over all ranks together:

    agree on plan and version -> exchange -> compare sums -> agree that all is well -> stamp the version

`staged` keeps the old weights until the last step, at the price of a second copy of the rollout's shard. Without it a
failed sync leaves a rollout that refuses to generate until the next one succeeds; it never generates with a mix.
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

# A rank's word to the others: numbers first, then a text.
WORD_BYTES = 1024
NUMBERS = 4


def sync_weights(
    engine: Engine,
    rollout: Rollout,
    version: int,
    watch: Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] = iter,
) -> None:
    """Streams every parameter to the rollout, one whole tensor at a time, and stamps it with `version`.

    `watch` may look at the stream as it passes.
    """
    if version <= rollout.version:
        raise ValueError(f"weight sync: version {version} is not newer than the rollout's {rollout.version}")
    rollout.update_weights(watch(engine.per_tensor_params()), version)


@dataclass(frozen=True)
class SyncReport:
    """What a sync did on this rank."""

    version: int
    seconds: float
    traffic: Traffic
    buffer_bytes: int
    stall_seconds: float = 0.0  # the largest gap between two tokens of the rollout that generated meanwhile

    def metrics(self) -> dict[str, float]:
        """For the metrics of a step."""
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
    """One rank's end of a plan, to be run once for each version; all ranks of the plan run it together.

    `source` and `destination` are this rank's parts of the two sides, None where it has no part in one. `dtypes` are
    those of the destination, by tensor. `verify` compares sums of both sides after every sync. `delta` sends only what
    changed since the last sync; senders then keep a copy of what they sent. `staged`: the rollout generates until the
    new version is complete beside the old one. `may_repeat`: the first sync may bring the version that is there.
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
        self._has_last = False  # whether the destination here has what was sent last
        self.part = plan.of_rank(rank)
        self.pairs = plan.pairs()
        self.version = -1
        self.is_mixed = False  # whether the destination may hold parts of two versions
        self.may_repeat = may_repeat
        self._is_open = False  # whether ranks may still wait for this one's messages
        # The next version while it arrives; with `delta` it stays, as what the next changes are laid upon.
        self._stage: dict[str, Tensor] | None = None
        self.tag = 1  # of the next message; all ranks count alike
        self._tables: Tables | None = None
        # Memory that is new in every sync is not worth a recording.
        self._records = destination is not None and not staged

    @torch.no_grad()
    def run(self, version: int, rollout: Rollout | None = None) -> SyncReport:
        """Brings `version` to the destination; `rollout` is the engine that generates with it on this rank.

        Raises on every rank if it failed on any. The rollout then still has its old version (`staged`), or refuses to
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
        """All ranks must have the same plan and bring the same version, newer than the one there is."""
        if self.carrier is not None:
            self.carrier.begin(Deadline(self.deadline))
        # A new connection's first sync may be for the sake of others, who joined late.
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
        """On a GPU: the tables of this rank's copies and sums."""
        where = self.destination
        if self._tables is None and where is not None and where.tensors and where.device.type == "cuda":
            from meshrl.weights.grouped import Tables

            self._tables = Tables(self._records)
        return self._tables

    def _target(self) -> Shards | None:
        """Where the new weights arrive: in their place, or beside it."""
        if not self.staged or self.destination is None:
            return self.destination
        if self._stage is None:
            self._stage = {name: torch.empty_like(t) for name, t in self.destination.tensors.items()}
        return self.destination.with_tensors(self._stage)

    def _settle(self, exchange: Exchange, version: int) -> None:
        """All ranks agree that what has arrived is right."""
        self._agree(self._compare(exchange) if self.verify else "", version)
        self._is_open = False

    def _hand_over(self, exchange: Exchange, version: int, held: int, rollout: Rollout | None) -> None:
        """The rollout takes the version over, between two of its steps."""
        arrivals = self._arrivals(exchange, version)
        if rollout is not None and self.staged and version == held:
            # It has this version: what came was for others, who joined late, and need not disturb it.
            self.version, self._has_last = version, True
            return
        if rollout is not None:
            rollout.update_weights(arrivals, version)
        # A rollout that shares the trainer's weights asks for none; the other ranks still need ours.
        for _ in arrivals:
            pass

    def _arrivals(self, exchange: Exchange, version: int) -> Iterator[tuple[str, Tensor]]:
        """The exchange, then every parameter of the destination by name; being in place, they cost nothing more.

        Unless they were staged they are compared last: until then a device still moves them and nobody may use them.
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
        """Says that the destination has lost its weights: the next sync sends everything even with `delta`."""
        self._has_last, self._stage = False, None

    def _announce(self, exchange: DeltaExchange) -> None:
        """Tells the receivers how long each message is."""
        for origin, to, count in self.plan.message_pairs():
            if origin == self.rank:
                self._tell(exchange.sizes_for(to).view(torch.uint8), to)
            elif to == self.rank:
                messages = np.unique(self.part.kept[origin]["message"])
                exchange.learn(messages, self._hear(origin, 8 * count).view(torch.int64))
            else:
                self.tag += self._parts(8 * count)

    def _compare(self, exchange: Exchange) -> str:
        """Sends the sums of what was sent after it, and compares those that come in; a problem in words."""
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
        """Every rank's word goes to the first rank, which tells all; raises everywhere if there is a problem.

        Says whether all ranks still have what was sent last.
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
    """Has a rollout with half of its weights new and half old refuse to generate until a sync succeeds."""
    rollout.version = -1
    try:
        rollout.release(("weights",))
    except Exception as error:  # its engine may be gone: what came first is to be told
        because.add_note(f"nor could the rollout give its weights up: {type(error).__name__}: {error}")


def end_refusal(rollout: Rollout) -> None:
    """Has a rollout take memory for weights again that it gave up after a sync that failed, by whatever way."""
    if rollout.version < 0:
        rollout.resume(("weights",))


def check_dtypes(plan: ReshardPlan, destination: Shards | None, dtypes: Mapping[str, torch.dtype]) -> None:
    """The plan's element sizes, the types given and the destination's parameters must fit each other."""
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
    """A rank's word as bytes."""
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
    """What is wrong with the words of all ranks, or nothing."""
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


# A version for rollouts that take whole tensors, such as vLLM and SGLang: in parts, never the model beside itself.
#
#     part 1: exchange -> compare sums -> all agree ─┐
#     part 2: exchange -> compare sums -> all agree ─┼─> update_weights(whole tensors by name, version)
#     ...                                           ─┘
#
# A part is what fits into half a bucket, or one tensor that is larger. The first is there before the engine is stopped,
# the others while it stands still, each before the engine takes the one before it: memory for two of them is enough,
# and
# with messages of half the usual size a sync takes two buckets, as everywhere. What an engine has taken cannot be
# looked
# at again, so sums are compared before a part is handed on. A sync that fails in its first part leaves the old version;
# later, it leaves a rollout that refuses to generate until the next one succeeds.
#
# An engine that is cut over ranks cuts the tensors itself: each rank gets whole ones in which nothing but its own part
# is
# filled in (`rollout_placement.windows`), the rest being no numbers. So no rank receives more than it keeps, and one
# that
# took another part would show it.

Blank = tuple[Sequence[int], torch.dtype]


class StreamedSync:
    """One rank's end of a plan for each part, over one carrier; all ranks run it together, once for each version.

    `blanks` are shape and type of the rollout's parameters by name, on the rank `place` of the rollouts; None on a
    trainer. The deadline of a part is that of a whole sync elsewhere. Without a carrier there is one rank alone.
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
        self._is_open = False  # whether ranks may still wait for this one's messages

    @property
    def source(self) -> Shards | None:
        """A trainer's weights."""
        return self.parts[0].source

    @source.setter
    def source(self, shards: Shards) -> None:
        for part in self.parts:
            part.source = shards

    def run(self, version: int, rollout: Rollout | None = None) -> SyncReport:
        """Brings `version` to the rollouts; trainers give none.

        Raises on every rank if it failed on any before the last part was there; later, on that rank alone.
        """
        started, traffic = time.perf_counter(), Traffic()
        held = self.version if rollout is None else rollout.version
        if isinstance(rollout, SteppingRollout):
            rollout.gaps.restart()
        stood = 0.0
        self._is_open = True
        try:
            parts = self._arrivals(version, held, traffic)
            arrivals = chain([next(parts)], parts)  # the first while the rollout still generates
            if rollout is not None and version != held:
                stood = self._hand_over(rollout, _one_by_one(arrivals), version)
            # A trainer's are empty; a rollout that has the version already only passes them on.
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
        """Nothing is remembered: every version is sent whole."""

    def _hand_over(self, rollout: Rollout, weights: Iterator[tuple[str, Tensor]], version: int) -> float:
        """The engine takes the version; for how long answers stood still meanwhile."""
        started, runs = time.perf_counter(), rollout.stats()["running"] > 0
        end_refusal(rollout)
        self.is_mixed = True
        rollout.update_weights(weights, version)
        self.is_mixed = False
        return time.perf_counter() - started if runs else 0.0

    def _arrivals(self, version: int, held: int, traffic: Traffic) -> Iterator[dict[str, Tensor]]:
        """The rollout's parameters of each part, once all ranks agree that they are right."""
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
        """New memory for a part on a rollout: an engine may keep what it got last until a layer is complete."""
        wanted, placement = self._blanks_of(part), part.plan.destination
        made = {name: torch.empty(*shape, dtype=dtype, device=self.device) for name, (shape, dtype) in wanted.items()}
        if made:
            if placement.elements_of_ranks()[self.place] < placement.elements():
                fill_with_nothing(made.values())
            part.destination = Shards(placement, self.place, dict(made))
        return made

    def _blanks_of(self, part: WeightSync) -> dict[str, Blank]:
        """All parameters of a part; of some a rank may have no element."""
        if self.blanks is None:
            return {}
        placement = part.plan.destination
        numbers = np.unique(placement.slices["parameter"]).tolist()
        return {name: self.blanks[name] for name in (placement.parameters[number] for number in numbers)}

    def _buffer_bytes(self) -> int:
        """Memory for messages, and on a rollout for the two largest parts."""
        messages = self.carrier.memory_bytes() if self.carrier is not None else 0
        return messages + sum(self._part_bytes[-2:])


def _one_by_one(parts: Iterable[dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All tensors; each is let go as it is handed on, since only the engine knows how long it needs it."""
    for tensors in parts:
        for name in list(tensors):
            yield name, tensors.pop(name)


def fill_with_nothing(tensors: Iterable[Tensor]) -> None:
    """Fills tensors with what is no number, where their type has that."""
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
    """A plan for every part of the rollouts' parameters, in their order, and this rank's end of them.

    `plan` makes one of a part's two sides and a bucket's bytes; `carrier` the connections for them all.
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
    """The tensors of each part: those of neighbouring parameters up to a bucket, or of one that is larger."""
    tensors, inside = list(target.tensors), defaultdict[str, list[str]](list)
    held = np.unique(np.stack([target.slices["parameter"], target.slices["tensor"]], 1), axis=0)
    for parameter, tensor in held.tolist():
        inside[target.parameters[parameter]].append(tensors[tensor])
    sizes = ((name, torch.empty(*shape, dtype=dtype, device="meta")) for name, (shape, dtype) in blanks.items())
    return [[tensor for name, _ in bucket for tensor in inside[name]] for bucket in buckets(sizes, bucket_bytes)]


def _nbytes(blank: Blank) -> int:
    shape, dtype = blank
    return math.prod(shape) * dtype.itemsize
