"""Partitions of numbers into k parts of nearly equal sums, and the work of a sequence by its length.

Algorithms: exact dynamic programming, Karmarkar–Karp, greedy, longest first (LPT) with swaps; `auto` picks among them
Interface:  `get_seqlen_balanced_partitions` (lists) and `balanced_partition` (arrays)
Workloads:  turn lengths into tokens, squared lengths or FLOPs (`get_workload`)

`equal_size=True` also asks for equal item counts. Everything here is deterministic: the time budget of `auto` is
compared with estimated costs and not with a clock, so every rank that plans the same batch gets the same plan.
"""

import difflib
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Exact search for the partition with the smallest maximal load, for small inputs.

MAX_STATES = 50_000

Part = tuple[float, int]  # load, number of items
State = tuple[Part, ...]  # all parts, sorted, because the identity of a part does not matter
Layer = dict[State, tuple[State, Part]]  # state -> (previous state, the part that the item was added to)


def exact_is_cheap(n: int, k: int) -> bool:
    """Return whether the exact search over `n` items and `k` parts stays within a few thousand states.

    The estimate for the number of states is `k**n / k!`.
    """
    return n < 40 and k**n / math.factorial(k) < 5_000


def exact_partition(work: np.ndarray, k: int, equal_size: bool) -> list[np.ndarray]:
    """Find the optimal partition by dynamic programming over states, longest item first.

    A state is the sorted tuple of part loads and counts that the items so far can lead to. Equal states are merged.
    States heavier than a known complete partition are dropped. An input that needs more than `MAX_STATES` states in
    one layer raises a ValueError.
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
    """Walk back from the final state and assign each item to the part that it was added to."""
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
    """Return the maximal load of greedy longest-first assignment, an upper bound of the optimum."""
    heap, heaviest = [(0.0, 0)] * k, 0.0
    for amount in falling:
        load, count = heapq.heappop(heap)
        heaviest = max(heaviest, load + amount)
        if count + 1 < room:
            heapq.heappush(heap, (load + amount, count + 1))
    return heaviest


# Karmarkar–Karp: repeatedly combine the two partial solutions with the largest spread between their parts.


def karmarkar_karp(work: np.ndarray, k: int, equal_size: bool) -> list[np.ndarray]:
    """Split the items into k parts by multi-way Karmarkar–Karp differencing.

    A partial solution is k loads in descending order. Two partial solutions are combined by adding the loads of one to
    those of the other in reverse order, the heaviest to the lightest. With equal sizes, the initial solutions are runs
    of k neighbours in sorted order, one item for each part.

    The items of a part are kept as a tree: every combined part points to its two halves. The tree is read out once at
    the end, so no item is copied during the combining.
    """
    order = np.argsort(work, kind="stable")
    starts = order.reshape(-1, k)[:, ::-1] if equal_size else order[:, None]
    count, width = starts.shape
    # Node numbers: items are 0..n-1, the empty part is n, then come k nodes for each combination.
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
    """Estimate the seconds of a `karmarkar_karp` call, from measurements on one core.

    A combination takes about 15 µs, plus 0.12 µs per part.
    """
    combinations = n // k if equal_size else n
    return combinations * (15e-6 + 0.12e-6 * k)


# Improving parts of equal size by swapping items, in many pairs of parts at once.

TOLERANCE = 2e-4  # stop when the heaviest part is this close to the mean
MAX_SWEEPS = 120
PATIENCE = 8  # sweeps without a lighter heaviest part


def refine_by_swaps(work: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Swap items between heavy and light rows of `members` `[k, size]` until the heaviest part is near the mean.

    Each sweep pairs the heaviest part with the lightest, the second heaviest with the second lightest, and so on. In
    each pair it makes the one swap that brings the two loads closest together. A swap only narrows the gap of its
    pair, so the heaviest part never grows. `members` is changed in place and returned.
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
    """Pair the heaviest part with the lightest, and so on inwards.

    Later sweeps rotate the light half, so that the pairs differ between sweeps.
    """
    order = np.argsort(-loads, kind="stable")
    half = len(loads) // 2
    heavy, light = order[:half], order[len(order) - half :][::-1]
    return heavy, np.roll(light, -(sweep % min(half, PATIENCE)))


def _swap_best(work: np.ndarray, members: np.ndarray, heavy: np.ndarray, light: np.ndarray, loads: np.ndarray) -> bool:
    """Make the best swap in every pair of rows of `members`; return whether any swap was made."""
    size = members.shape[1]
    for rows in (heavy, light):
        members[rows] = np.take_along_axis(members[rows], np.argsort(work[members[rows]], axis=1), axis=1)
    from_heavy, from_light = work[members[heavy]], work[members[light]]
    wanted = (loads[heavy] - loads[light]) / 2
    # One search serves all pairs, because the numbers of each pair are shifted into a separate range.
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


Partition = list[np.ndarray]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | np.ndarray,
    k_partitions: int,
    equal_size: bool,
    algorithm: str = "auto",
    workload: Callable[[np.ndarray], np.ndarray] | None = None,
    time_budget_s: float = 0.1,
) -> list[list[int]]:
    """Split items into k lists of indices with nearly equal sums of work; the indices of a list ascend.

    The work is `workload(lengths)`, or the lengths without a workload. `algorithm` is kk, greedy, greedy_improved,
    lpt, dp or auto. `auto` takes dp if the exact search is cheap. Otherwise it takes the better of lpt and kk, and it
    tries kk only if its estimated cost is within `time_budget_s` seconds.
    """
    lengths = np.asarray(seqlen_list)
    work = np.asarray(lengths if workload is None else workload(lengths), dtype=np.float64)
    return [part.tolist() for part in balanced_partition(work, k_partitions, equal_size, algorithm, time_budget_s)]


def balanced_partition(
    work: np.ndarray, k: int, equal_size: bool, algorithm: str = "auto", time_budget_s: float = 0.1
) -> Partition:
    """Split `work` `[items]` into k arrays of ascending item indices, as `get_seqlen_balanced_partitions` does."""
    _check(work, k, equal_size)
    if algorithm == "auto":
        names = _affordable(len(work), k, equal_size, time_budget_s)
    elif algorithm in ALGORITHMS:
        names = [algorithm]
    else:
        near = difflib.get_close_matches(algorithm, [*ALGORITHMS, "auto"], n=1, cutoff=0.0)[0]
        known = ", ".join(["auto", *ALGORITHMS])
        raise ValueError(f"unknown balance algorithm {algorithm!r}; did you mean {near!r}? Known: {known}")
    candidates = [ALGORITHMS[name](work, k, equal_size) for name in names]
    best = min(candidates, key=lambda parts: max(work[part].sum() for part in parts))
    return [np.sort(part) for part in best]


def _check(work: np.ndarray, k: int, equal_size: bool) -> None:
    if k < 1:
        raise ValueError(f"k_partitions must be at least 1, got {k}")
    if work.ndim != 1 or len(work) < k:
        raise ValueError(f"{len(work)} items cannot fill k_partitions={k} parts: every part needs at least one")
    if equal_size and len(work) % k:
        raise ValueError(f"equal_size needs a multiple of k_partitions: {len(work)} items do not divide by {k}")
    bad = np.flatnonzero(~np.isfinite(work) | (work < 0))
    if len(bad):
        raise ValueError(f"seqlen_list must be finite and not negative: item {bad[0]} is {work[bad[0]]}")


def _affordable(n: int, k: int, equal_size: bool, time_budget_s: float) -> list[str]:
    if exact_is_cheap(n, k):
        return ["dp"]
    names = ["lpt"]
    if karmarkar_karp_seconds(n, k, equal_size) <= time_budget_s:
        names.append("kk")
    return names


def greedy(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Assign items in their given order, each to the least loaded part that has room."""
    return _assign_in_order(work, np.arange(len(work)), k, equal_size)


def greedy_improved(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Assign items by descending work, each to the least loaded part that has room."""
    return _assign_in_order(work, np.argsort(-work, kind="stable"), k, equal_size)


def _assign_in_order(work: np.ndarray, order: np.ndarray, k: int, equal_size: bool) -> Partition:
    room = len(work) // k if equal_size else len(work)
    heap = [(0.0, 0, part) for part in range(k)]
    parts: list[list[int]] = [[] for _ in range(k)]
    for item, amount in zip(order.tolist(), work[order].tolist(), strict=True):
        load, count, part = heapq.heappop(heap)
        parts[part].append(item)
        if count + 1 < room:
            heapq.heappush(heap, (load + amount, count + 1, part))
    return _without_empty([np.asarray(part, dtype=np.int64) for part in parts], work)


def _without_empty(parts: Partition, work: np.ndarray) -> Partition:
    """Move one item into every empty part, from the part with the most items.

    Parts can only be empty if some items have no work. The item with the least work moves.
    """
    for number, part in enumerate(parts):
        if len(part) == 0:
            donor = max(range(len(parts)), key=lambda i: len(parts[i]))
            smallest = parts[donor][np.argmin(work[parts[donor]])]
            parts[donor] = parts[donor][parts[donor] != smallest]
            parts[number] = np.asarray([smallest], dtype=np.int64)
    return parts


def lpt(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Assign the longest items first (LPT, longest processing time).

    With equal sizes, items are assigned in rounds of k, the longest of a round to the least loaded part. Swaps
    between the parts then refine the result.
    """
    if not equal_size:
        return greedy_improved(work, k, equal_size)
    rounds = np.argsort(-work, kind="stable").reshape(-1, k)
    loads = np.zeros(k)
    members = np.empty((k, len(rounds)), dtype=np.int64)
    for number, items in enumerate(rounds):
        lightest_first = np.argsort(loads, kind="stable")
        members[lightest_first, number] = items
        loads[lightest_first] += work[items]
    return list(refine_by_swaps(work, members))


def dp(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Return the optimal partition; inputs that need too many states raise a ValueError."""
    return exact_partition(work, k, equal_size)


def kk(work: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Split by Karmarkar–Karp differencing, and fill parts that it left empty."""
    return _without_empty(karmarkar_karp(work, k, equal_size), work)


ALGORITHMS: dict[str, Callable[[np.ndarray, int, bool], Partition]] = {
    "kk": kk,
    "greedy": greedy,
    "greedy_improved": greedy_improved,
    "lpt": lpt,
    "dp": dp,
}


# Workloads: the cost of a sequence of a given length, as tokens, squared length or the FLOPs of a model.

# Model families whose MLPs have no gate projection.
UNGATED = {"apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi", "starcoder2"}
# Config fields that give the sizes of a mixture of experts, by family.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
VISITED = ("num_experts_per_tok", "moe_k", "moe_topk")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
WITH_SHARED = {"hunyuan_v1_moe"}  # have one shared expert, but no config field for it
DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")

Workload = Callable[[np.ndarray], np.ndarray]


def tokens_workload(lengths: np.ndarray) -> np.ndarray:
    """Return the lengths as work, which fits models whose linear layers dominate."""
    return np.asarray(lengths, dtype=np.float64)


def squared_workload(lengths: np.ndarray) -> np.ndarray:
    """Return the squared lengths as work, the cost of attention alone."""
    return np.square(np.asarray(lengths, dtype=np.float64))


def flops_workload(model_config: Any) -> Workload:
    """Return a workload of forward FLOPs for a decoder with this config (Hugging Face attribute names).

    Linear layers, the output layer and causal attention are counted. For mixture-of-experts models, the router and
    the experts that one token visits are counted.
    """
    config = getattr(model_config, "text_config", None) or model_config
    hidden = _required(config, "hidden_size")
    layers = _required(config, "num_hidden_layers")
    heads = _required(config, "num_attention_heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    vocabulary = _required(config, "vocab_size")
    projections, width = hidden * head_dim * (2 * heads + 2 * kv_heads), head_dim
    if latent := _first(config, ("kv_lora_rank",)):
        turned, plain, values = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
        queries, width = heads * (turned + plain), (turned + plain + values) / 2
        low = config.q_lora_rank
        projections = low * (hidden + queries) if low else hidden * queries
        projections += hidden * (latent + turned) + latent * heads * (plain + values) + heads * values * hidden
    # Linear-attention layers keep a state: they cost the same for every token and have different projections.
    stateful = (getattr(config, "layer_types", None) or []).count("linear_attention")
    mixing = (layers - stateful) * projections + stateful * _state_projections(config, hidden, stateful)
    per_token = 2.0 * (mixing + _mlp_weights(config, hidden, layers) + hidden * vocabulary)
    # Attention scores and weighted values: 2 matmuls x 2 FLOPs x heads x head_dim for each of length / 2 visible
    # positions.
    per_square = 2.0 * (layers - stateful) * heads * width

    def workload(lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths, dtype=np.float64)
        return per_token * lengths + per_square * np.square(lengths)

    return workload


def get_workload(name: str, model_config: Any = None) -> Workload:
    """Return a workload by name: tokens, squared, or flops (which needs the model's config)."""
    if name == "tokens":
        return tokens_workload
    if name == "squared":
        return squared_workload
    if name == "flops":
        if model_config is None:
            raise ValueError("workload 'flops' needs the model's config")
        return flops_workload(model_config)
    near = difflib.get_close_matches(name, ["tokens", "squared", "flops"], n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown workload {name!r}; did you mean {near!r}? Known: tokens, squared, flops")


def _state_projections(config: Any, hidden: int, stateful: int) -> float:
    """Count the projection weights of one linear-attention layer.

    The projections map between hidden states and queries, keys, values, gates and outputs. Configs without
    `linear_num_value_heads` get the estimate `4 * hidden**2`.
    """
    if not stateful or getattr(config, "linear_num_value_heads", None) is None:
        return 4.0 * hidden * hidden
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return float(hidden * (2 * keys + 3 * config.linear_num_value_heads * config.linear_value_head_dim))


def _mlp_weights(config: Any, hidden: int, layers: int) -> float:
    """Count the weights of all MLPs that one token passes through: gate, up and down, or up and down without a gate."""
    matrices = 2.0 if getattr(config, "model_type", None) in UNGATED else 3.0
    experts = _first(config, EXPERTS)
    if not experts:
        return layers * matrices * hidden * _required(config, "intermediate_size")
    visited = _first(config, VISITED) or _required(config, VISITED[0])
    expert_size = getattr(config, "moe_intermediate_size", None) or _required(config, "intermediate_size")
    always = int(getattr(config, "model_type", None) in WITH_SHARED)
    shared_size = getattr(config, "shared_expert_intermediate_size", None)
    shared_size = shared_size or (_first(config, SHARED) or always) * expert_size
    sparse = matrices * hidden * (visited * expert_size + shared_size) + hidden * experts
    dense_layers = _dense_layers(config)
    dense = matrices * hidden * _required(config, "intermediate_size") if dense_layers else 0.0
    return (layers - dense_layers) * sparse + dense_layers * dense


def _dense_layers(config: Any) -> int:
    """Count the dense layers of a mixture-of-experts model, the layers without experts."""
    if kinds := getattr(config, "mlp_layer_types", None):
        return list(kinds).count("dense")
    return len(getattr(config, "mlp_only_layers", None) or []) or _first(config, DENSE)


def _first(config: Any, names: tuple[str, ...]) -> int:
    """Return the first of these config fields that is set, or 0.

    Some fields hold a list with a number for each layer. Then the first layer's number is returned.
    """
    found = next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
    return int(found[0] if isinstance(found, list) else found)


def _required(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"the model config {type(config).__name__} has no {name}, which workload 'flops' needs")
    return int(value)
