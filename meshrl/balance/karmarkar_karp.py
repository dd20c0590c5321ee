"""Karmarkar–Karp: repeatedly combine the two partial solutions that differ most within themselves."""

import heapq

import numpy as np


def karmarkar_karp(work: np.ndarray, k: int, equal_size: bool) -> list[np.ndarray]:
    """k parts by multi-way differencing.

    A partial solution is k loads in falling order. Two are combined by adding the heaviest of one to the lightest of
    the other. With equal sizes it starts from runs of k neighbours in sorted order, one for each part.

    Which items a part holds is kept as a tree (every combined part points at its two halves) and read out once at the
    end, so that no item is copied during the combining.
    """
    order = np.argsort(work, kind="stable")
    starts = order.reshape(-1, k)[:, ::-1] if equal_size else order[:, None]
    count, width = starts.shape
    # Node numbers: items are 0..n-1, empty is n, then k nodes for each combination.
    empty = len(work)
    solutions_loads = np.zeros((count, k))
    solutions_nodes = np.full((count, k), empty, dtype=np.int64)
    solutions_loads[:, :width] = work[starts]
    solutions_nodes[:, :width] = starts
    heap = [(-(row[0] - row[-1]), number) for number, row in enumerate(solutions_loads)]
    heapq.heapify(heap)
    halves = np.empty((count - 1, k, 2), dtype=np.int64)
    for step in range(count - 1):
        _, first = heapq.heappop(heap)
        _, second = heapq.heappop(heap)
        loads = solutions_loads[first] + solutions_loads[second][::-1]
        falling = np.argsort(-loads, kind="stable")
        halves[step, :, 0] = solutions_nodes[first][falling]
        halves[step, :, 1] = solutions_nodes[second][::-1][falling]
        solutions_loads[first] = loads[falling]
        solutions_nodes[first] = empty + 1 + step * k + np.arange(k)
        heapq.heappush(heap, (-(solutions_loads[first][0] - solutions_loads[first][-1]), first))
    part_of_node = np.full(empty + 1 + (count - 1) * k, -1, dtype=np.int64)
    part_of_node[solutions_nodes[heap[0][1]]] = np.arange(k)
    for step in range(count - 2, -1, -1):
        nodes = empty + 1 + step * k + np.arange(k)
        part_of_node[halves[step, :, 0]] = part_of_node[nodes]
        part_of_node[halves[step, :, 1]] = part_of_node[nodes]
    part_of_item = part_of_node[:empty]
    by_part = np.argsort(part_of_item, kind="stable")
    return np.split(by_part, np.searchsorted(part_of_item[by_part], np.arange(1, k)))


def karmarkar_karp_seconds(n: int, k: int, equal_size: bool) -> float:
    """Rough cost of a call, measured on one core: a combination is about 15 µs and 0.12 µs a part."""
    combinations = n // k if equal_size else n
    return combinations * (15e-6 + 0.12e-6 * k)
