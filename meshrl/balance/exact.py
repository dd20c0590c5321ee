"""The partition with the smallest maximal load, exactly, for small inputs."""

import heapq
import math

import numpy as np

MAX_STATES = 50_000

Part = tuple[float, int]  # load, number of items
State = tuple[Part, ...]  # all parts, sorted: which part is which does not matter
Layer = dict[State, tuple[State, Part]]  # state -> the state before, and the part the item went to


def exact_is_cheap(n: int, k: int) -> bool:
    """Whether the exact search surely stays within a few thousand states."""
    return n < 40 and k**n / math.factorial(k) < 5_000


def exact_partition(work: np.ndarray, k: int, equal_size: bool) -> list[np.ndarray]:
    """Dynamic programming over the states that the items so far can lead to, longest item first.

    Two ways to the same state are one, and a state above a known complete partition is dropped. An input that needs
    too many states is refused.
    """
    order = np.argsort(-work, kind="stable").tolist()
    room = len(work) // k if equal_size else len(work)
    bound = _greedy_max(work[order].tolist(), k, room) * (1 + 1e-12)
    layers: list[Layer] = []
    states: list[State] = [((0.0, 0),) * k]
    for position, item in enumerate(order):
        layer = _next_layer(states, float(work[item]), room, bound, items_left=len(order) - position - 1)
        if len(layer) > MAX_STATES:
            raise ValueError(
                f"algorithm 'dp' is exact and for small inputs: {len(work)} items in {k} parts need more than "
                f"{MAX_STATES} states; use 'auto', 'lpt' or 'kk'"
            )
        layers.append(layer)
        states = list(layer)
    return _read_out(min(states, key=lambda state: state[-1][0]), layers, order, work)


def _next_layer(states: list[State], amount: float, room: int, bound: float, items_left: int) -> Layer:
    layer: Layer = {}
    for state in states:
        for slot, part in enumerate(state):
            twin = slot > 0 and part == state[slot - 1]
            if twin or part[1] >= room or part[0] + amount > bound:
                continue
            new = tuple(sorted((*state[:slot], (part[0] + amount, part[1] + 1), *state[slot + 1 :])))
            if sum(count == 0 for _, count in new) <= items_left:
                layer.setdefault(new, (state, part))
    return layer


def _read_out(final: State, layers: list[Layer], order: list[int], work: np.ndarray) -> list[np.ndarray]:
    """Walk back from the final state and hand each item to the part it went to."""
    parts: list[tuple[Part, list[int]]] = [(part, []) for part in final]
    state = final
    for layer, item in zip(reversed(layers), reversed(order), strict=True):
        state, before = layer[state]
        after = (before[0] + float(work[item]), before[1] + 1)
        slot = next(number for number, (part, _) in enumerate(parts) if part == after)
        parts[slot][1].append(item)
        parts[slot] = (before, parts[slot][1])
    return [np.asarray(items, dtype=np.int64) for _, items in parts]


def _greedy_max(falling: list[float], k: int, room: int) -> float:
    """The maximal load of longest-first, which the optimum cannot exceed."""
    heap, heaviest = [(0.0, 0)] * k, 0.0
    for amount in falling:
        load, count = heapq.heappop(heap)
        heaviest = max(heaviest, load + amount)
        if count + 1 < room:
            heapq.heappush(heap, (load + amount, count + 1))
    return heaviest
