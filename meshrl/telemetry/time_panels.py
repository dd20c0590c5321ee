"""Where the time, the memory and the tokens of a run go: the ledger of its workers, or else the phases of its steps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.telemetry.panels import TIME, WORKING, Panel, Record, Series, finite, series_of

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
