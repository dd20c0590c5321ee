"""Panels of the report: the curves of a run's charts, taken from the logged metrics.

build_panels:           learning, health and throughput curves, by the specs below
accounts, time_panels:  the time of the workers (ledger or step phases), utilisation, memory and balance
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshrl.telemetry.console import VALIDATION

MAX_POINTS = 300
# COLORS: colours on the page and in curves.png. WORKING: colours that may stand for anything but waiting.
COLORS, WORKING = 18, 13
LEARNING, HEALTH, TIME = "learning", "health", "time"

Record = Mapping[str, float]


@dataclass(frozen=True)
class Series:
    """A curve of finite values over steps.

    `sparse` curves (validations) are drawn with points. `metric` is the name of the logged metric, if the curve shows
    a single metric.
    """

    label: str
    steps: list[float]
    values: list[float]
    sparse: bool = False
    color: int = 0
    metric: str = ""


@dataclass(frozen=True)
class Panel:
    """One chart: curves over steps, or stacked phases; `section` is the section of the report that shows it."""

    title: str
    unit: str
    series: list[Series]
    stacked: bool = False
    log_scale: bool = False
    note: str = ""
    section: str = LEARNING


@dataclass(frozen=True)
class PanelSpec:
    """The definition of a panel: `curves` are (label, metric) pairs, drawn if the metric was logged.

    With `unless_zero`, the panel is left out if all its values are 0. `validations` adds the validation accuracies.
    """

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
    """Merge records into one per step, in order of steps.

    Records of the same step are combined. If a metric occurs twice, as after a resume, the later value counts.
    """
    steps: dict[float, dict[str, float]] = {}
    for record in records:
        if finite(record.get("step")):
            steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def series_of(name: str, label: str, records: Sequence[Record], sparse: bool = False, color: int = 0) -> Series:
    """Return the curve of a metric: its finite values over the steps that have them."""
    points = [(record["step"], record[name]) for record in records if finite(record.get(name))]
    return Series(label, [step for step, _ in points], [value for _, value in points], sparse, color, name)


def build_panels(records: Sequence[Record]) -> list[Panel]:
    """Build the panels of curves for which something was logged; `records` come from `merge_steps`."""
    return [panel for spec in _SPECS if (panel := _panel(spec, records)) is not None]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving average; at the ends of the curve the window is cut."""
    half = window // 2
    # Each window is summed separately. Differences of running sums would lose small values after a large one.
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in windows]


def smoothing_window(count: int) -> int:
    """Return the smoothing window in points for the bold line of a curve of `count` points; 1 means no smoothing."""
    return 1 if count < 30 else 2 * (count // 40) + 3


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether all values are positive and so different that they need a logarithmic scale."""
    return min(values) > 1e-100 and max(values) > 100 * min(values)


def starts_at_zero(values: Iterable[float]) -> bool:
    """Return whether the axis should begin at zero, because the values are not negative and come near zero."""
    found = list(values)
    return 0 <= min(found) < 0.5 * max(found)


def thin(steps: Sequence[float], values: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """Reduce a curve to at most `limit` points, each the mean of an equal run of consecutive points."""
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
    """Return one curve per validated data source, with the source's mean accuracy."""
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
    """Return whether `value` is a finite number that a chart can show."""
    # Beyond 1e100, sums and spans of an axis would overflow, and no chart could show the value anyway.
    return isinstance(value, int | float) and abs(value) < 1e100


# Time, memory and token balance of a run: from the ledger of its workers, or else from the phases of its steps.

MAX_PHASES = 8
_LEDGER = re.compile(r"^ledger_s/(?P<who>[^/]+)/(?P<what>.+)$")
_MEMORY = re.compile(r"^memory/(?P<phase>.+)/max_allocated_gib$")
_HOST_MEMORY = re.compile(r"^memory/(?P<phase>.+)/max_rss_gib$")
_SWITCH = re.compile(r"^memory/switch_\w+/(?=max_)")
_MFU = re.compile(r"^mfu/(?P<phase>.+)$")
_TFLOPS = re.compile(r"^perf/tflops/(?P<phase>.+)$")
STEP_CLOCK = "step"
# The usual order of phases in a step, so that phases keep their places from one report to the next.
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
    """One activity of a worker group: mean seconds per step, its share of the group's time, and its colour."""

    what: str
    seconds: float
    share: float
    color: int


@dataclass(frozen=True)
class Account:
    """The time of one worker group, by activity.

    `booked` is the share of the step's time that the group's ledger accounts for, or None if it is not known.
    """

    who: str
    seconds: float
    entries: list[Entry]
    booked: float | None = None


def is_waiting(what: str) -> bool:
    """Return whether a name of the ledger stands for waiting."""
    return what.startswith("wait")


def waiting(account: "Account") -> float:
    """Return the share of a worker group's time that it spent waiting."""
    return sum(entry.share for entry in account.entries if is_waiting(entry.what))


def accounts(records: Sequence[Record]) -> list[Account]:
    """Return the time account of every worker group; without a ledger, the step's phases measured by the controller."""
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
    """Build the panels of step time per worker group, utilisation, memory and balance, as far as these were logged."""
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
    """Return the colour number of a phase: a fixed one for known phases, or one derived from the name."""
    return _COLOR.get(what, _OTHER_WAIT if is_waiting(what) else sum(map(ord, what)) % WORKING)


def _seconds(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Return, for each worker group, its activities and the metric names of their seconds."""
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
    """Build a stacked panel of the largest phases over the steps; the remaining phases are summed as "other"."""
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
    """Merge the memory metrics of the phases `switch_*` into one phase `switch` with the largest of their peaks.

    A switch is the change between training and generating.
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        short = _SWITCH.sub("memory/switch/", name)
        if short == name:
            found[name] = value
        elif finite(value):
            found[short] = max(value, found.get(short, value))
    return found


def _balance(records: Sequence[Record]) -> Panel | None:
    """Build a panel of how many more tokens than the mean the fullest rank has, before and after balancing."""
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
