"""Which curves a run's pictures show: panels of series, taken from the logged metrics."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshrl.telemetry.console import VALIDATION

MAX_POINTS = 300
# How many colours the page and the picture have, and how many of them are for anything but waiting.
COLORS, WORKING = 18, 13
LEARNING, HEALTH, TIME = "learning", "health", "time"

Record = Mapping[str, float]


@dataclass(frozen=True)
class Series:
    """One curve: finite values over steps. `sparse` ones (validations) are drawn with their points.

    `metric` is the name it was logged under, where it is one metric.
    """

    label: str
    steps: list[float]
    values: list[float]
    sparse: bool = False
    color: int = 0
    metric: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture: curves over the step, or phases stacked on each other; `section` is the question it helps with."""

    title: str
    unit: str
    series: list[Series]
    stacked: bool = False
    log_scale: bool = False
    note: str = ""
    section: str = LEARNING


@dataclass(frozen=True)
class PanelSpec:
    """What a panel shows: (label, metric) pairs, those that were logged; `unless_zero`: only if one is not always 0."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    note: str = ""
    may_be_log: bool = False
    validations: bool = False
    section: str = LEARNING
    unless_zero: bool = False


_SPECS = (
    PanelSpec(
        "Reward", "score", (("training, mean", "critic/score/mean"),), "of the samples trained on", validations=True
    ),
    PanelSpec("Response length", "tokens", (("mean", "response_length/mean"),), "mean per response"),
    PanelSpec(
        "Samples that teach nothing",
        "share of samples",
        (("without advantage", "training/zero_advantage_share"),),
        "all answers of their group were worth the same",
    ),
    PanelSpec(
        "Loss",
        "mean",
        (("training", "train/loss"), ("validation", "val/loss")),
        "of a token of demonstrations (nats), or of a pair of answers",
    ),
    PanelSpec(
        "Chosen answers that lead",
        "share of pairs",
        (("training", "train/accuracy"), ("validation", "val/accuracy")),
        "pairs whose chosen answer the model likes better",
    ),
    PanelSpec(
        "Margin",
        "difference of rewards",
        (("training", "train/margin"), ("validation", "val/margin")),
        "by how much chosen answers lead, mean of the pairs",
    ),
    PanelSpec(
        "Critic",
        "share of variance",
        (("returns explained by the values", "critic/vf_explained_var"),),
        "1: the critic foresees every return; below 0 it harms",
    ),
    PanelSpec(
        "Entropy",
        "nats per token",
        (("policy", "actor/entropy"),),
        "falls to 0 when the policy stops exploring",
        section=HEALTH,
    ),
    PanelSpec(
        "KL",
        "nats per token",
        (
            ("update vs. old policy", "actor/ppo_kl"),
            ("loss term vs. reference", "actor/kl_loss"),
            ("reward term vs. reference", "actor/reward_kl_penalty"),
        ),
        "how far the policy moved",
        section=HEALTH,
    ),
    PanelSpec(
        "Clip fraction",
        "share of tokens",
        (
            ("upper and lower clip", "actor/pg_clipfrac"),
            ("dual clip", "actor/pg_clipfrac_lower"),
            ("values", "critic/vf_clipfrac"),
        ),
        "tokens whose ratio the loss clipped",
        section=HEALTH,
    ),
    PanelSpec(
        "Rollout vs. trainer log-probs",
        "difference, nats",
        (
            ("mean", "training/rollout_log_prob_diff_mean"),
            ("largest", "training/rollout_log_prob_diff_max"),
        ),
        "the same tokens scored by both engines",
        may_be_log=True,
        section=HEALTH,
    ),
    PanelSpec(
        "Staleness",
        "versions behind",
        (("mean of the tokens", "training/staleness_mean"), ("oldest token", "training/staleness_max")),
        "how many updates ago a token was sampled",
        section=HEALTH,
        unless_zero=True,
    ),
    PanelSpec(
        "Gradient norm",
        "norm before clipping",
        (("actor", "actor/grad_norm"), ("critic", "critic/grad_norm"), ("training", "train/grad_norm")),
        may_be_log=True,
        section=HEALTH,
    ),
    PanelSpec(
        "Throughput", "tokens/s per device", (("step", "perf/throughput"),), "prompts and responses", section=TIME
    ),
)


def merge_steps(records: Iterable[Record]) -> list[dict[str, float]]:
    """One record per step, in order: calls of one step together, and after a resume the later values."""
    steps: dict[float, dict[str, float]] = {}
    for record in records:
        if finite(record.get("step")):
            steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def series_of(name: str, label: str, records: Sequence[Record], sparse: bool = False, color: int = 0) -> Series:
    """The finite values of a metric over the steps that have it."""
    points = [(record["step"], record[name]) for record in records if finite(record.get(name))]
    return Series(label, [step for step, _ in points], [value for _, value in points], sparse, color, name)


def build_panels(records: Sequence[Record]) -> list[Panel]:
    """The panels of curves for which something was logged; records as `merge_steps` gives them."""
    return [panel for spec in _SPECS if (panel := _panel(spec, records)) is not None]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving average; at the ends over what is there of the window."""
    half = window // 2
    # Each window is added up anew: in differences of running sums, small values behind a large one would be lost.
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in windows]


def smoothing_window(count: int) -> int:
    """The points a curve of this many is averaged over for its bold line; 1 means it is drawn as it is."""
    return 1 if count < 30 else 2 * (count // 40) + 3


def spans_decades(values: Sequence[float]) -> bool:
    """Whether positive values are so different that only a scale by powers of ten shows them."""
    return min(values) > 1e-100 and max(values) > 100 * min(values)


def starts_at_zero(values: Iterable[float]) -> bool:
    """Whether the axis should begin at zero: curves that come near it are easier to judge so."""
    found = list(values)
    return 0 <= min(found) < 0.5 * max(found)


def thin(steps: Sequence[float], values: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most `limit` points: means over equal runs of points; the order is kept."""
    count = len(values)
    if count <= limit:
        return list(steps), list(values)
    edges = [round(i * count / limit) for i in range(limit + 1)]
    spans = list(itertools.pairwise(edges))
    return (
        [sum(steps[a:b]) / (b - a) for a, b in spans],
        [sum(values[a:b]) / (b - a) for a, b in spans],
    )


def _panel(spec: PanelSpec, records: Sequence[Record]) -> Panel | None:
    names = [(label, name) for label, name in spec.curves if any(finite(record.get(name)) for record in records)]
    series = [series_of(name, label, records, color=i) for i, (label, name) in enumerate(names)]
    if spec.validations:
        series += validation_series(records)
    if not series:
        return None
    values = [value for curve in series for value in curve.values]
    if spec.unless_zero and not any(values):
        return None
    log_scale = spec.may_be_log and spans_decades(values)
    return Panel(spec.title, spec.unit, series, log_scale=log_scale, note=spec.note, section=spec.section)


def validation_series(records: Sequence[Record]) -> list[Series]:
    """The mean accuracy of each validated data source."""
    names = dict.fromkeys(
        name for record in records for name in record if (m := VALIDATION.match(name)) and m["kind"] == "mean"
    )
    series = []
    for i, name in enumerate(names):
        match = VALIDATION.match(name)
        label = f"validation, {match['source']} mean@{match['n']}" if match else name
        series.append(series_of(name, label, records, sparse=True, color=i + 1))
    return [curve for curve in series if curve.values]


def finite(value: object) -> bool:
    """Whether it is a number that a picture can show."""
    # Beyond this, sums and spans of an axis would overflow; no picture could show it anyway.
    return isinstance(value, int | float) and abs(value) < 1e100
