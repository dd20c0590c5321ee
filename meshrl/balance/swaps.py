"""Improving parts of equal size by exchanging items, many pairs of parts at once."""

import numpy as np

TOLERANCE = 2e-4  # stop when the heaviest part is this close to the mean
MAX_SWEEPS = 120
PATIENCE = 8  # sweeps without a lighter heaviest part


def refine_by_swaps(work: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Exchange items between heavy and light rows of `members` [k, size] until the heaviest is near the mean.

    Each sweep pairs the heaviest part with the lightest, the second with the second lightest and so on, and makes in
    each pair the one exchange that brings the two closest together. Exchanges only narrow a pair, so the heaviest
    part never grows.
    """
    k, _ = members.shape
    mean = work[members].sum() / k
    best_max, waited = np.inf, 0
    for sweep in range(MAX_SWEEPS if k > 1 else 0):
        loads = work[members].sum(axis=1)
        if loads.max() <= mean * (1 + TOLERANCE):
            break
        waited = waited + 1 if loads.max() >= best_max else 0
        best_max = min(best_max, loads.max())
        if waited > PATIENCE:
            break
        heavy, light = _pairs(loads, sweep)
        if not _swap_best(work, members, heavy, light, loads) and sweep >= PATIENCE:
            break
    return members


def _pairs(loads: np.ndarray, sweep: int) -> tuple[np.ndarray, np.ndarray]:
    """Heaviest with lightest, and so on inwards; later sweeps turn the light half, so that pairs differ."""
    order = np.argsort(-loads, kind="stable")
    half = len(loads) // 2
    heavy, light = order[:half], order[len(order) - half :][::-1]
    return heavy, np.roll(light, -(sweep % min(half, PATIENCE)))


def _swap_best(work: np.ndarray, members: np.ndarray, heavy: np.ndarray, light: np.ndarray, loads: np.ndarray) -> bool:
    """Make the best exchange in every pair of rows; True if any was made."""
    size = members.shape[1]
    for rows in (heavy, light):
        members[rows] = np.take_along_axis(members[rows], np.argsort(work[members[rows]], axis=1), axis=1)
    from_heavy, from_light = work[members[heavy]], work[members[light]]
    wanted = (loads[heavy] - loads[light]) / 2
    # One search for all pairs: each pair's numbers are moved to a range of its own.
    shift = np.arange(len(heavy))[:, None] * (2.0 * max(from_heavy.max(), from_light.max()) + 1.0)
    targets = np.maximum(from_heavy - wanted[:, None], 0.0)
    found = np.searchsorted((from_light + shift).ravel(), (targets + shift).ravel()).reshape(targets.shape)
    found -= np.arange(len(heavy))[:, None] * size
    best_error = np.full(len(heavy), np.inf)
    give = np.zeros(len(heavy), dtype=np.int64)
    take = np.zeros(len(heavy), dtype=np.int64)
    for neighbour in (found - 1, found):
        neighbour = np.clip(neighbour, 0, size - 1)
        error = np.abs(from_heavy - np.take_along_axis(from_light, neighbour, axis=1) - wanted[:, None])
        column = error.argmin(axis=1)
        pair_error = error[np.arange(len(heavy)), column]
        better = pair_error < best_error
        best_error = np.where(better, pair_error, best_error)
        give = np.where(better, column, give)
        take = np.where(better, neighbour[np.arange(len(heavy)), column], take)
    helps = best_error < wanted * (1 - 1e-12)
    rows_heavy, rows_light = heavy[helps], light[helps]
    given, taken = members[rows_heavy, give[helps]].copy(), members[rows_light, take[helps]].copy()
    members[rows_heavy, give[helps]], members[rows_light, take[helps]] = taken, given
    return bool(helps.any())
