"""A plan in words and numbers."""

from __future__ import annotations

import numpy as np

from meshrl.config.names import count
from meshrl.weights.plan import ReshardPlan

ROWS = 16
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_bytes(number: float) -> str:
    """A number of bytes as people read it."""
    for unit in UNITS:
        if number < 1024 or unit == UNITS[-1]:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def plan_lines(plan: ReshardPlan, most_ranks: int = ROWS) -> list[str]:
    """Who sends, receives and copies how much, beside what gathering every tensor whole would cost."""
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
