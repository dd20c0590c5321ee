"""The report's numbers as text: tiles, summary, all metrics, the workers' accounts of their time, config."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.telemetry.curves_svg import sparkline
from meshrl.telemetry.panels import Record, Series, series_of, validation_series
from meshrl.telemetry.report_text import as_text, duration, number, visible
from meshrl.telemetry.run_folder import flatten_config
from meshrl.telemetry.time_panels import STEP_CLOCK, Entry, accounts

# (label, metric, which way is better: +1 up, -1 down, 0 neither)
SUMMARY = (
    ("Reward, training mean", "critic/score/mean", 1),
    ("Response length", "response_length/mean", 0),
    ("Responses of the maximum length", "response_length/clip_ratio", 0),
    ("Samples that teach nothing", "training/zero_advantage_share", 0),
    ("Entropy", "actor/entropy", 0),
    ("KL of the update", "actor/ppo_kl", 0),
    ("KL to the reference", "actor/kl_loss", 0),
    ("Clip fraction", "actor/pg_clipfrac", 0),
    ("Rollout vs. trainer log-probs", "training/rollout_log_prob_diff_mean", 0),
    ("Gradient norm", "actor/grad_norm", 0),
    ("Variance explained by the critic", "critic/vf_explained_var", 1),
    ("Training loss", "train/loss", -1),
    ("Validation loss", "val/loss", -1),
    ("Chosen answers that lead", "train/accuracy", 1),
    ("The same, held-out pairs", "val/accuracy", 1),
    ("Margin of chosen answers", "train/margin", 1),
    ("Gradient norm", "train/grad_norm", 0),
    ("Tokens/s per device", "perf/throughput", 1),
    ("Seconds per step", "timing_s/step", -1),
)


@dataclass(frozen=True)
class SummaryRow:
    """One metric over the run, as text."""

    label: str
    first: str
    last: str
    recent: str
    best: str
    spark: str


def tiles(records: Sequence[Record]) -> list[dict[str, str]]:
    """The few numbers to see first."""
    if not records:
        return []
    found = [{"label": "steps", "value": f"{max(record['step'] for record in records):,.0f}"}]
    reward = series_of("critic/score/mean", "reward, training", records)
    for curve in [reward, *validation_series(records)[:2], series_of("train/loss", "training loss", records)]:
        if curve.values:
            found.append({"label": visible(curve.label, 60), "value": _span(curve)})
    seconds = sum(series_of("timing_s/step", "", records).values)
    if seconds:
        found.append({"label": "time in steps", "value": duration(seconds)})
    speed = series_of("perf/throughput", "", records).values
    if speed:
        found.append({"label": "tokens/s per device, median", "value": f"{statistics.median(speed):,.0f}"})
    return found


def summary(records: Sequence[Record]) -> list[SummaryRow]:
    """The metrics that matter most, each with its course."""
    return [_summary_row(curve, better) for curve, better in summary_series(records)]


def summary_series(records: Sequence[Record]) -> list[tuple[Series, int]]:
    """The series of the summary that were logged, and which way each is better."""
    rows = [(curve, 1) for curve in validation_series(records)]
    rows += [(series_of(name, label, records), better) for label, name, better in SUMMARY]
    return [(curve, better) for curve, better in rows if curve.values]


def best_of(curve: Series, better: int) -> str:
    """The best value and its step; nothing where no way is better."""
    if not better:
        return ""
    place = max(range(len(curve.values)), key=lambda i: better * curve.values[i])
    return f"{number(curve.values[place])} at step {curve.steps[place]:,.0f}"


def recent_of(curve: Series) -> str:
    """The mean of the last ten, or the last validation."""
    tail = curve.values[-1:] if curve.sparse else curve.values[-10:]
    return number(math.fsum(tail) / len(tail))


def all_metrics(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Every logged metric with its first, last, smallest and largest finite value."""
    names = sorted({name for record in records for name in record} - {"step", "time"})
    curves = [series_of(name, name, records) for name in names]
    return [
        (visible(c.label, 120), *(number(v) for v in (c.values[0], c.values[-1], min(c.values), max(c.values))))
        for c in curves
        if c.values
    ]


def ledger(records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each kind of worker where its time went, largest first for the table, in order for the bar."""
    found = []
    for account in accounts(records):
        rows = {entry.what: _ledger_row(entry) for entry in account.entries}
        largest = sorted(account.entries, key=lambda entry: -entry.share)
        who = "phases of a step" if account.who == STEP_CLOCK else visible(account.who, 40)
        booked = "" if account.booked is None else f"{account.booked:.1%} of the step booked"
        found.append(
            {
                "who": who,
                "seconds": number(account.seconds),
                "booked": booked,
                "bar": list(rows.values()),
                "rows": [rows[entry.what] for entry in largest],
            }
        )
    return found


def _ledger_row(entry: Entry) -> dict[str, Any]:
    share = f"{100 * entry.share:.1f}"
    return {"what": visible(entry.what, 40), "seconds": number(entry.seconds), "share": share, "color": entry.color}


def config_tables(config: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, list[tuple[str, str, str]]]:
    """The config's rows (key, value, where from): those that were chosen, then the defaults."""
    rows = [
        (visible(key), visible(as_text(value), 400), visible(sources.get(key, ""), 120))
        for key, value in flatten_config(config)
    ]
    if not sources:
        return {"chosen": [], "rest": rows}
    chosen = [row for row in rows if row[2] not in ("", "default")]
    return {"chosen": chosen, "rest": [row for row in rows if row[2] in ("", "default")]}


def _span(curve: Series) -> str:
    first, last = number(curve.values[0]), number(curve.values[-1])
    return last if len(curve.values) == 1 else f"{first} → {last}"


def _summary_row(curve: Series, better: int) -> SummaryRow:
    first, last = number(curve.values[0]), number(curve.values[-1])
    best, spark = best_of(curve, better), sparkline(curve.values)
    return SummaryRow(visible(curve.label, 80), first, last, recent_of(curve), best, spark)
