"""Which curves a run's pictures show: panels of series, taken from the logged metrics."""

import itertools
import re
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


# Where the time, the memory and the tokens of a run go: the ledger of its workers, or else the phases of its steps.

MAX_PHASES = 8
_LEDGER = re.compile(r"^ledger_s/(?P<who>[^/]+)/(?P<what>.+)$")
_MEMORY = re.compile(r"^memory/(?P<phase>.+)/max_allocated_gib$")
_HOST_MEMORY = re.compile(r"^memory/(?P<phase>.+)/max_rss_gib$")
_SWITCH = re.compile(r"^memory/switch_\w+/(?=max_)")
_MFU = re.compile(r"^mfu/(?P<phase>.+)$")
_TFLOPS = re.compile(r"^perf/tflops/(?P<phase>.+)$")
STEP_CLOCK = "step"
# The usual order of a step, so that phases keep their places and colours from one report to the next.
_ORDER = (
    *("gen", "generate", "prefill", "gen_max", "reward", "old_log_prob", "log_prob", "ref", "values", "value", "adv"),
    *("update_critic", "update_actor", "update_forward", "update_backward", "update_optimizer", "train"),
    *("sync", "save_checkpoint", "checkpoint", "testing"),
)
_OTHER, _OTHER_WAIT = 12, 17
_COLOR = {
    **dict.fromkeys(("gen", "generate"), 0),
    **dict.fromkeys(("update_actor", "update_backward", "train"), 1),
    **dict.fromkeys(("old_log_prob", "log_prob"), 2),
    "sync": 3,
    "reward": 4,
    **dict.fromkeys(("update_critic", "update_forward"), 5),
    **dict.fromkeys(("prefill", "adv"), 6),
    **dict.fromkeys(("ref", "gen_max"), 8),
    **dict.fromkeys(("values", "value"), 9),
    **dict.fromkeys(("update_optimizer", "testing"), 10),
    **dict.fromkeys(("checkpoint", "save_checkpoint"), 11),
    "other": _OTHER,
    "wait_controller": 7,
    "wait_peers": 13,
    "wait_reward": 14,
    "wait_rollout": 15,
    "wait_actor_rollout_ref": 16,
}


@dataclass(frozen=True)
class Entry:
    """What a worker did: seconds per step (mean over the steps), its share of the worker's time, a colour."""

    what: str
    seconds: float
    share: float
    color: int


@dataclass(frozen=True)
class Account:
    """The time of one kind of worker; `booked` is the share of the step that its ledger holds, where that is known."""

    who: str
    seconds: float
    entries: list[Entry]
    booked: float | None = None


def is_waiting(what: str) -> bool:
    """Whether an entry of the ledger is time in which nothing was done."""
    return what.startswith("wait")


def waiting(account: "Account") -> float:
    """The share of a worker's time in which it did nothing."""
    return sum(entry.share for entry in account.entries if is_waiting(entry.what))


def accounts(records: Sequence[Record]) -> list[Account]:
    """The ledger of every kind of worker; without one, the phases of the step as the controller saw them."""
    found = []
    for who, rows in _seconds(records).items():
        steps = [record for record in records if any(finite(record.get(name)) for name in rows.values())]
        sums = {what: sum(_value(record, name) for record in steps) for what, name in rows.items()}
        whole = sum(sums.values())
        if whole > 0:
            ordered = sorted((what for what in sums if sums[what] > 0), key=_place)
            entries = [Entry(w, sums[w] / len(steps), sums[w] / whole, color_of(w)) for w in ordered]
            booked = series_of(f"ledger/{who}/booked", "", records).values
            share = sum(booked) / len(booked) if booked else None
            found.append(Account(who, whole / len(steps), entries, share))
    return found


def time_panels(records: Sequence[Record]) -> list[Panel]:
    """The time of a step for every kind of worker, then utilisation, memory and balance, as far as they were logged."""
    ledgers = _seconds(records)
    panels = [_stack(who, rows, records) for who, rows in ledgers.items()]
    mfu = _named(records, _MFU, "Model-FLOPs utilisation", "share of the device's peak", "by phase")
    panels.append(mfu or _named(records, _TFLOPS, "Model FLOPs", "TFLOP/s per device", "by phase"))
    memory = [_with_one_switch(record) for record in records]
    panels.append(_named(memory, _MEMORY, "Peak memory", "GiB allocated", "of each phase, on the device"))
    panels.append(_named(memory, _HOST_MEMORY, "Peak memory of the host", "GiB resident", "of each phase, one process"))
    panels.append(_balance(records))
    return [panel for panel in panels if panel is not None]


def color_of(what: str) -> int:
    """The colour of a phase."""
    return _COLOR.get(what, _OTHER_WAIT if is_waiting(what) else sum(map(ord, what)) % WORKING)


def _seconds(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """For each kind of worker what it did and the metric of its seconds."""
    names = list(dict.fromkeys(name for record in records for name in record))
    ledgers: dict[str, dict[str, str]] = {}
    for name in names:
        if match := _LEDGER.match(name):
            ledgers.setdefault(match["who"], {})[match["what"]] = name
    if ledgers:
        return ledgers
    phases = {name.removeprefix("timing_s/"): name for name in names if name.startswith("timing_s/")}
    phases.pop("step", None)
    return {STEP_CLOCK: phases} if phases else {}


def _stack(who: str, rows: dict[str, str], records: Sequence[Record]) -> Panel | None:
    """The seconds of the largest phases over the steps, the rest in one."""
    timed = [record for record in records if any(finite(record.get(name)) for name in rows.values())]
    totals = {what: sum(_value(record, name) for record in timed) for what, name in rows.items()}
    totals = {what: total for what, total in totals.items() if total > 0}
    if not totals:
        return None
    large = sorted((w for w in totals if w != "other"), key=lambda w: -totals[w])[: MAX_PHASES - 1]
    steps = [record["step"] for record in timed]
    series = [
        Series(what, steps, [_value(record, rows[what]) for record in timed], color=color_of(what))
        for what in sorted(large, key=_place)
    ]
    rest = [what for what in totals if what not in large]
    if rest:
        summed = [sum(_value(record, rows[what]) for what in rest) for record in timed]
        series.append(Series("other", steps, summed, color=_OTHER))
    title = "Time of a step" if who == STEP_CLOCK else f"Time of a step: {who}"
    note = "by phase" if who == STEP_CLOCK else "mean over its ranks"
    return Panel(title, "seconds", series, stacked=True, note=note, section=TIME)


def _named(records: Sequence[Record], pattern: re.Pattern[str], title: str, unit: str, note: str) -> Panel | None:
    names = dict.fromkeys(name for record in records for name in record if pattern.match(name))
    found = [(match["phase"], name) for name in names if (match := pattern.match(name))]
    series = [series_of(name, phase, records, color=i) for i, (phase, name) in enumerate(found)]
    series = [curve for curve in series if curve.values]
    if len(series) == 1:
        note = f"{note}: {series[0].label}"
    return Panel(title, unit, series, note=note, section=TIME) if series else None


def _with_one_switch(record: Record) -> Record:
    """The steps of the switch between training and generating as one phase, with the largest of their peaks."""
    found: dict[str, float] = {}
    for name, value in record.items():
        short = _SWITCH.sub("memory/switch/", name)
        if short == name:
            found[name] = value
        elif finite(value):
            found[short] = max(value, found.get(short, value))
    return found


def _balance(records: Sequence[Record]) -> Panel | None:
    """How much more than the mean the fullest rank has: as the samples came, and as they were dealt out."""
    curves = []
    for color, (label, name) in enumerate((("as they came", "max"), ("after balancing", "balanced_max"))):
        points = [
            (record["step"], 100 * (record[f"global_seqlen/{name}"] / record["global_seqlen/mean"] - 1))
            for record in records
            if finite(record.get(f"global_seqlen/{name}")) and _value(record, "global_seqlen/mean") > 0
        ]
        curves.append(Series(label, [step for step, _ in points], [value for _, value in points], color=1 - color))
    if not any(value > 1e-9 for curve in curves for value in curve.values):
        return None
    note = "tokens of the fullest rank; the others wait for it"
    return Panel("Balance", "% above the mean", [c for c in curves if c.values], note=note, section=TIME)


def _value(record: Record, name: str) -> float:
    value = record.get(name, 0.0)
    return value if finite(value) else 0.0


def _place(what: str) -> tuple[int, str]:
    if what == "other":
        return len(_ORDER) + 2, what
    if is_waiting(what):
        return len(_ORDER) + 1, what
    return (_ORDER.index(what) if what in _ORDER else len(_ORDER)), what
