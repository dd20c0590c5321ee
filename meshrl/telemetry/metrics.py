"""Metrics of a batch, a step and a validation, and distributions over samples, as pure functions.

Metrics:        reduction over ranks, data and throughput metrics, validation accuracy with pass@k
Distributions:  histograms of one step, and their combination over a whole run (`Spread`)
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


_WORDS = re.compile(r"[^a-z0-9]+")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduce each metric to one number from its values: a number, an array, or nested lists of ranks or micro-batches.

    The last part of the name decides the reduction. A word `max`, `min` or `sum` in it (`response_length/max`,
    `timing_s/gen_max`) selects that reduction; all other metrics are means. Metrics without values are left out.
    """
    reduced = {}
    for name, given in metrics.items():
        values = np.fromiter(_numbers(given), dtype=np.float64)
        if values.size:
            reduced[name] = float(_reduction(name)(values))
    return reduced


def count_steps(role: str, collected: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return how many optimizer steps an update had and how many of them were skipped.

    `collected` has one entry of `<role>/skipped_steps` for each optimizer step.
    """
    skipped = collected[f"{role}/skipped_steps"]
    return {f"{role}/optimizer_steps": float(len(skipped)), f"{role}/skipped_steps": sum(skipped)}


def compute_data_metrics(
    token_level_scores: torch.Tensor,
    token_level_rewards: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    prompt_lengths: torch.Tensor,
    response_lengths: torch.Tensor,
    max_response_length: int,
    max_prompt_length: int,
) -> dict[str, float]:
    """Return mean, max and min of scores, rewards, advantages, returns and lengths of a batch.

    The first five tensors are `[samples, response tokens]`, the lengths are `[samples]`. Scores and rewards are summed
    per sample, and they may have fewer rows than the other tensors if some samples have no score. Advantages and
    returns are taken per response token, and are left out if no token of the batch was sampled. `clip_ratio` is the
    share of samples that reach the maximum length.
    """
    if token_level_scores.shape[0] == 0:
        raise ValueError("there are no data metrics of a batch with 0 samples")
    sampled = response_mask.bool()
    groups = {
        "critic/score": token_level_scores.sum(-1),
        "critic/rewards": token_level_rewards.sum(-1),
        "critic/advantages": advantages[sampled],
        "critic/returns": returns[sampled],
        "response_length": response_lengths,
        "prompt_length": prompt_lengths,
    }
    metrics: dict[str, float] = {}
    for name, values in groups.items():
        if values.numel():
            metrics |= {f"{name}/{key}": value for key, value in _mean_max_min(values).items()}
    metrics["response_length/clip_ratio"] = _share_at_least(response_lengths, max_response_length)
    metrics["prompt_length/clip_ratio"] = _share_at_least(prompt_lengths, max_prompt_length)
    return metrics


def compute_throughput_metrics(num_tokens: int, seconds: float, n_gpus: int) -> dict[str, float]:
    """Return the tokens of a step (prompts and responses), its seconds, and its tokens per second per device."""
    if n_gpus < 1 or seconds <= 0:
        raise ValueError(f"throughput needs n_gpus >= 1 and seconds > 0, got {n_gpus} and {seconds}")
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": float(seconds),
        "perf/throughput": num_tokens / (seconds * n_gpus),
    }


def validation_metrics(
    data_sources: Sequence[str],
    group_ids: Sequence[Hashable],
    scores: Iterable[float],
    prefix: str = "val-core",
    threshold: float = 0.5,
) -> dict[str, float]:
    """Return, per data source, the mean score `acc/mean@n` and the accuracies `acc/pass@k`.

    k is 1, 2, 4, ... up to n.
    A group is the samples of one prompt, and n is the size of the source's largest group. Every prompt has the same
    weight. pass@k is the unbiased estimate of the probability that at least one of k samples is right. It uses the
    groups with k or more samples; a sample is right if its score is above `threshold`. If groups are smaller than n,
    `acc/short_groups` counts them.
    """
    values = np.fromiter(_numbers(scores), dtype=np.float64)
    if not len(data_sources) == len(group_ids) == len(values):
        sizes = f"{len(data_sources)}, {len(group_ids)} and {len(values)}"
        raise ValueError(f"data_sources, group_ids and scores must be of one length, got {sizes}")
    table: dict[tuple[str, Hashable], int] = {}
    keys = zip(data_sources, group_ids, strict=True)
    codes = np.fromiter((table.setdefault(key, len(table)) for key in keys), dtype=np.int64, count=len(values))
    n = np.bincount(codes, minlength=len(table))
    mean = np.bincount(codes, weights=values, minlength=len(table)) / np.maximum(n, 1)
    right = np.bincount(codes, weights=values > threshold, minlength=len(table))
    group_sources = np.array([str(source) for source, _ in table], dtype=object)
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(group_sources):
        mine = group_sources == source
        found = _accuracy(n[mine], right[mine], mean[mine])
        metrics |= {f"{prefix}/{source}/acc/{name}": value for name, value in found.items()}
    return metrics


def pass_at_k(n: np.ndarray, right: np.ndarray, k: int) -> np.ndarray:
    """Return pass@k, `1 - C(n - right, k) / C(n, k)`, for each group of n samples with n >= k, `[groups]`."""
    drawn = np.arange(k)
    # Probability that all k draws are wrong: (n - c)/n * (n - c - 1)/(n - 1) * ..., with c right samples. A factor is 0
    # if fewer than k samples are wrong.
    all_wrong = (n[:, None] - right[:, None] - drawn) / (n[:, None] - drawn)
    return 1.0 - np.prod(all_wrong, axis=1)


def _accuracy(n: np.ndarray, right: np.ndarray, mean: np.ndarray) -> dict[str, float]:
    largest = int(n.max())
    metrics = {f"mean@{largest}": float(mean.mean())}
    k = 1
    while k <= largest:
        enough = n >= k
        metrics[f"pass@{k}"] = float(pass_at_k(n[enough], right[enough], k).mean())
        k *= 2
    if short := int((n < largest).sum()):
        metrics["short_groups"] = float(short)
    return metrics


def _numbers(value: Any) -> Iterable[float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _numbers(item)
    else:
        yield float(value)


def _reduction(name: str) -> Any:
    # Only whole words of the last part count: "timing_s/gen" contains "min" in its first part and is not a minimum.
    words = _WORDS.split(name.rsplit("/", 1)[-1].lower())
    for word, reduction in (("max", np.max), ("min", np.min), ("sum", np.sum)):
        if word in words:
            return reduction
    return np.mean


def _mean_max_min(values: torch.Tensor) -> dict[str, float]:
    wide = values.double()
    return {"mean": wide.mean().item(), "max": wide.max().item(), "min": wide.min().item()}


def _share_at_least(lengths: torch.Tensor, maximum: int) -> float:
    return (lengths >= maximum).double().mean().item()


# Distributions over the samples of a step as small histograms, and their combination over the whole run.

BINS = 24
# Up to this many different values are counted one by one, because rewards of 0 and 1 need no bins.
MOST_VALUES = 12
Histogram = Mapping[str, Any]


def histogram(values: np.ndarray) -> dict[str, Any]:
    """Return a histogram: `values` and `counts`, or `low`, `high` and the `counts` of `BINS` equal bins.

    The first form is for up to `MOST_VALUES` different values. `nonfinite` counts values that are NaN or infinite, if
    there are any.
    """
    import numpy as np

    given = np.asarray(values, dtype=np.float64).ravel()
    finite = given[np.isfinite(given)]
    found: dict[str, Any] = {"nonfinite": len(given) - len(finite)} if len(finite) < len(given) else {}
    different, counts = np.unique(finite, return_counts=True)
    if len(different) <= MOST_VALUES:
        return {"values": [_short(v) for v in different], "counts": counts.tolist(), **found}
    low, high = float(different[0]), float(different[-1])
    # Not `numpy.histogram`, which refuses spans that are tiny relative to the values. Halves are used because the whole
    # span may overflow.
    span = max(high / 2 - low / 2, np.finfo(np.float64).tiny)
    places = np.minimum((BINS * ((finite / 2 - low / 2) / span)).astype(np.int64), BINS - 1)
    return {"low": low, "high": high, "counts": np.bincount(places, minlength=BINS).tolist(), **found}


@dataclass(frozen=True)
class Spread:
    """The distribution of a quantity over a run: one column per step (or span of steps), rows from low to high.

    `shares[column][row]` is the share of the samples in a row. If `labels` is filled, each row is a single value with
    that label. Otherwise the rows are equal bins from `low` to `high`.
    """

    title: str
    unit: str
    steps: list[float]
    shares: list[list[float]]
    low: float
    high: float
    labels: list[str]
    note: str = "darker: more of the step's samples"
    section: str = "learning"


def spread_of(
    name: str, title: str, unit: str, records: Sequence[Mapping[str, Any]], columns: int = 100, rows: int = BINS
) -> Spread | None:
    """Combine the histograms of a quantity over all steps; return None if no record has one.

    Neighbouring steps share a column if there are more steps than `columns`.
    """
    found = [(record["step"], record[name]) for record in records if _is_histogram(record.get(name))]
    if not found:
        return None
    every = -(-len(found) // columns)
    parts = [found[start : start + every] for start in range(0, len(found), every)]
    low = min(_bounds(histogram)[0] for _, histogram in found)
    high = max(_bounds(histogram)[1] for _, histogram in found)
    single = sorted({v for _, histogram in found for v in histogram.get("values", ())})
    exact = all("values" in histogram for _, histogram in found) and len(single) <= MOST_VALUES
    count = len(single) if exact else rows
    shares = []
    for part in parts:
        sums = [0.0] * count
        for _, h in part:
            for place, weight in _exact(h, single) if exact else _binned(h, low, high, rows):
                sums[place] += weight
        whole = sum(sums)
        shares.append([value / whole for value in sums])
    labels = [f"{value:g}" for value in single] if exact else []
    return Spread(title, unit, [_middle(part) for part in parts], shares, low, high, labels)


def finish_shares(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the share of samples per finish reason, for the steps that recorded finish reasons."""
    found = []
    for record in records:
        counts = record.get("finish")
        if isinstance(counts, Mapping) and _are_numbers(list(counts.values())) and (whole := sum(counts.values())) > 0:
            found.append({"step": record["step"], **{str(name): n / whole for name, n in counts.items()}})
    return found


def _is_histogram(value: Any) -> bool:
    if not isinstance(value, Mapping) or not _are_numbers(value.get("counts")) or not sum(value["counts"]) > 0:
        return False
    if "values" in value:
        values = value["values"]
        return _are_numbers(values) and len(values) == len(value["counts"]) and values == sorted(values)
    return _are_numbers([value.get("low"), value.get("high")]) and value["low"] < value["high"]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int | float) and abs(v) < 1e100 for v in values)


def _middle(part: Sequence[tuple[float, Histogram]]) -> float:
    return (part[0][0] + part[-1][0]) / 2


def _bounds(h: Histogram) -> tuple[float, float]:
    return (h["values"][0], h["values"][-1]) if "values" in h else (h["low"], h["high"])


def _exact(h: Histogram, single: Sequence[float]) -> list[tuple[int, float]]:
    return [(single.index(value), count) for value, count in zip(h["values"], h["counts"], strict=True)]


def _binned(h: Histogram, low: float, high: float, rows: int) -> list[tuple[int, float]]:
    """Distribute the counts of a histogram over equal rows from `low` to `high`, as (row, count) pairs.

    A bin that overlaps several rows gives each row its proportional part.
    """
    size = (high - low) / rows
    if not size > 0:
        return [(0, float(sum(h["counts"])))]
    if "values" in h:
        return [(_row(v, low, size, rows), n) for v, n in zip(h["values"], h["counts"], strict=True)]
    parts = []
    width = (h["high"] - h["low"]) / len(h["counts"])
    for number, count in enumerate(h["counts"]):
        if count:
            start = h["low"] + number * width
            first, last = _row(start, low, size, rows), _row(start + width, low, size, rows)
            for row in range(first, last + 1):
                inside = min(start + width, low + (row + 1) * size) - max(start, low + row * size)
                parts.append((row, count * max(inside, 0.0) / width))
    return parts


def _row(value: float, low: float, size: float, rows: int) -> int:
    return min(max(int((value - low) / size), 0), rows - 1)


def _short(value: float) -> float:
    """Round to six significant digits, which suffice for a label and are short in the file."""
    return float(f"{value:.6g}")
