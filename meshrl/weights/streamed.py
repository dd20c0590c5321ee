"""A version for rollouts that take whole tensors, such as vLLM and SGLang: in parts, never the model beside itself.

    part 1: exchange -> compare sums -> all agree ─┐
    part 2: exchange -> compare sums -> all agree ─┼─> update_weights(whole tensors by name, version)
    ...                                           ─┘

A part is what fits into half a bucket, or one tensor that is larger. The first is there before the engine is stopped,
the others while it stands still, each before the engine takes the one before it: memory for two of them is enough, and
with messages of half the usual size a sync takes two buckets, as everywhere. What an engine has taken cannot be looked
at again, so sums are compared before a part is handed on. A sync that fails in its first part leaves the old version;
later, it leaves a rollout that refuses to generate until the next one succeeds.

An engine that is cut over ranks cuts the tensors itself: each rank gets whole ones in which nothing but its own part is
filled in (`rollout_placement.windows`), the rest being no numbers. So no rank receives more than it keeps, and one that
took another part would show it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from meshrl.rollout.base import Rollout
from meshrl.rollout.stepping import SteppingRollout
from meshrl.rollout.weight_stream import buckets
from meshrl.weights.exchange import Traffic
from meshrl.weights.placement import Placement
from meshrl.weights.plan import ReshardPlan
from meshrl.weights.shards import Shards
from meshrl.weights.sync import SyncReport, WeightSync, end_refusal, refuse
from meshrl.weights.transport import Carrier, SyncRefusedError

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
