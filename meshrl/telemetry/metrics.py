"""What is measured about a batch, a step and a validation: pure functions from data to named numbers."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_WORDS = re.compile(r"[^a-z0-9]+")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number per metric from its values (a number, an array, or lists of them from micro-batches and ranks).

    The last part of the name decides: the word `max`, `min` or `sum` in it (`response_length/max`, `timing_s/gen_max`)
    is the reduction, all others are means over the values. A metric without any value is left out.
    """
    reduced = {}
    for name, given in metrics.items():
        values = np.fromiter(_numbers(given), dtype=np.float64)
        if values.size:
            reduced[name] = float(_reduction(name)(values))
    return reduced


def count_steps(role: str, collected: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How many optimizer steps an update had, and how many of them were skipped; `collected` has an entry for each."""
    skipped = collected[f"{role}/skipped_steps"]
    return {f"{role}/optimizer_steps": float(len(skipped)), f"{role}/skipped_steps": sum(skipped)}


def compute_data_metrics(
    token_level_scores: "torch.Tensor",
    token_level_rewards: "torch.Tensor",
    advantages: "torch.Tensor",
    returns: "torch.Tensor",
    response_mask: "torch.Tensor",
    prompt_lengths: "torch.Tensor",
    response_lengths: "torch.Tensor",
    max_response_length: int,
    max_prompt_length: int,
) -> dict[str, float]:
    """Scores and rewards per sample, advantages and returns per response token, lengths: mean, max and min of each.

    The first five are (samples, response tokens), the lengths (samples,); scores and rewards may be those of fewer
    samples than the rest, where some have none. `clip_ratio` is the share of samples that fill the given maximum.
    Advantages and returns are left out if no token of the batch was sampled.
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
    """The tokens of a step (prompts and responses), its seconds, and tokens per second and device."""
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
    """Per data source: `acc/mean@n`, the mean score, and `acc/pass@k` for k = 1, 2, 4, ... up to n.

    A group is the samples of one prompt, n the largest group of the source; every prompt weighs the same. pass@k is
    the unbiased estimate of "one of k samples is right" (score above `threshold`) from the groups with k or more
    samples; groups smaller than n are counted in `acc/short_groups` where there are any.
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
    """1 - C(n - right, k) / C(n, k) for each group of n samples (n >= k)."""
    drawn = np.arange(k)
    # All k draws wrong: (n - c)/n * (n - c - 1)/(n - 1) * ...; a factor is 0 where fewer than k are wrong.
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
    # Whole words of the last part only: "timing_s/gen" has a "min" in it, and must not become a minimum.
    words = _WORDS.split(name.rsplit("/", 1)[-1].lower())
    for word, reduction in (("max", np.max), ("min", np.min), ("sum", np.sum)):
        if word in words:
            return reduction
    return np.mean


def _mean_max_min(values: "torch.Tensor") -> dict[str, float]:
    wide = values.double()
    return {"mean": wide.mean().item(), "max": wide.max().item(), "min": wide.min().item()}


def _share_at_least(lengths: "torch.Tensor", maximum: int) -> float:
    return (lengths >= maximum).double().mean().item()
