"""What torch's flight recorder knows of the collectives of each rank, and where the ranks do not fit together.

torch keeps the newest collectives of a process in a ring buffer (`TORCH_FR_BUFFER_SIZE`), with NCCL and with gloo.
Ranks that wait for each other are in the same collective of the same group; where one is in another, has another shape
or has not come, that is the reason.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The newest ones of each group are enough: ranks that wait for each other are never far apart.
NEWEST = 32
# In these, the ranks' own shapes may differ.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv")
EVEN = ("all_gather", "_all_gather", "reduce_scatter", "_reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One collective of a process group as a rank has called it."""

    group: str
    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    done: bool

    @property
    def words(self) -> str:
        """What was called, with shapes where all ranks must have the same."""
        is_even = self.name.startswith(EVEN) or not self.name.startswith(UNEVEN)
        sizes = " of " + ", ".join(str(list(size)) for size in self.sizes) if self.sizes and is_even else ""
        return self.name + sizes


def recorded() -> list[Collective] | None:
    """The newest collectives of this process; None where this torch does not record them."""
    import torch._C._distributed_c10d as c10d

    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dumps = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    if not dumps:
        return None
    entries = [entry for dump in dumps for entry in json.loads(dump() or b"{}").get("entries", [])]
    by_group: dict[str, list[Collective]] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        number, description = entry["process_group"]
        group = description if description and description != "undefined" else f"group {number}"
        name = str(entry["profiling_name"]).rpartition(":")[2]
        done = bool(entry.get("retired")) or entry.get("state") == "completed"
        sizes = tuple(tuple(size) for size in entry.get("input_sizes", []))
        by_group.setdefault(group, []).append(Collective(group, entry["collective_seq_id"], name, sizes, done))
    return [entry for found in by_group.values() for entry in found[-NEWEST:]]


def disagreements(by_rank: Mapping[int, Iterable[Collective]]) -> list[str]:
    """A line for each group in which a rank waits: who is in another collective, or has not come to it."""
    lines = []
    for group in sorted({entry.group for entries in by_rank.values() for entry in entries}):
        members = {
            rank: found
            for rank, entries in by_rank.items()
            if (found := {entry.number: entry for entry in entries if entry.group == group})
        }
        waiting = [entry.number for found in members.values() for entry in found.values() if not entry.done]
        if waiting:
            lines.append(_about(group, min(waiting), members))
    return lines


def _about(group: str, number: int, members: Mapping[int, Mapping[int, Collective]]) -> str:
    there = {rank: found[number] for rank, found in members.items() if number in found}
    absent = {rank: found[max(found)] for rank, found in members.items() if max(found) < number}
    place = f"collective {number} of {group}"
    if len({entry.words for entry in there.values()}) > 1:
        told = [f"rank {rank} {entry.words}{' (done)' if entry.done else ''}" for rank, entry in sorted(there.items())]
        return f"{place}: the ranks do not fit together: {', '.join(told)}"
    words = next(iter(there.values())).words
    inside = [rank for rank, entry in there.items() if not entry.done]
    if absent:
        last = ", ".join(f"rank {rank} ({entry.words})" for rank, entry in sorted(absent.items()))
        return f"{place}: ranks {sorted(inside)} wait in {words}; not there, after their last one: {last}"
    return f"{place}: ranks {sorted(inside)} are in {words}"
