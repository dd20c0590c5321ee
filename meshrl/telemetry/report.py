"""The report of a run: curves.png and a self-contained report.html, and the comparison of several runs.

write_report:                    the report of one run, from the files in its folder
tiles, summary, ledger, config:  the numbers of the report as text
page_samples:                    the samples that a page contains
write_comparison:                several runs on one page
"""

import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.files import write_whole
from meshrl.telemetry.charts import draw_panel, draw_spread, sparkline, write_curves
from meshrl.telemetry.diagnosis import verdicts
from meshrl.telemetry.metrics import Spread, finish_shares, spread_of
from meshrl.telemetry.page import as_text, duration, number, render_page, render_sections, visible
from meshrl.telemetry.panels import (
    COLORS,
    HEALTH,
    LEARNING,
    STEP_CLOCK,
    TIME,
    WORKING,
    Entry,
    Panel,
    Record,
    Series,
    accounts,
    build_panels,
    finite,
    merge_steps,
    series_of,
    spans_decades,
    time_panels,
    validation_series,
)
from meshrl.telemetry.run_folder import RunFiles, flatten_config

logger = logging.getLogger(__name__)

# Up to `_FEW` different values are drawn as stacked shares, more as a heat map. `_VALUES` are the colours of the
# stacked values, from the lowest value up.
_FEW = 5
_VALUES = (12, 0, 6, 2, 8)
_ENDINGS = {"length": 1, "stop": 12}
HEADINGS = {LEARNING: "Is it learning?", HEALTH: "Is it healthy?", TIME: "Where does the time go?"}


@dataclass(frozen=True)
class RunData:
    """The data of a run: its metrics by step, distributions over samples, some samples, its config and its sources."""

    path: Path
    records: Sequence[Record]
    distributions: Sequence[Mapping[str, Any]] = ()
    generations: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The names of project and experiment, or else the name of the folder."""
        trainer = self.config.get("trainer")
        known = trainer if isinstance(trainer, Mapping) else {}
        names = [known.get(key) for key in ("project_name", "experiment_name")]
        return " / ".join(str(name) for name in names if name) or self.path.name


def read_run(run_dir: str | os.PathLike[str]) -> RunData:
    """Read the data of a run from its folder; raise a ValueError if it is no run folder."""
    run = RunFiles(run_dir)
    if not run.path.is_dir():
        raise ValueError(f"there is no run folder {run.path}")
    if not (run.metrics.exists() or run.config.exists()):
        raise ValueError(f"{run.path} is no run folder: it has neither metrics.jsonl nor config.yaml")
    return RunData(
        run.path,
        merge_steps(run.read_metrics()),
        latest_by_step(run.read_distributions()),
        run.read_generations(),
        run.read_config(),
        run.read_config_sources(),
    )


def latest_by_step(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one record per step, in order of steps; if a step occurs twice, the later record counts."""
    steps = {record["step"]: record for record in records if finite(record.get("step"))}
    return [steps[step] for step in sorted(steps)]


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write report.html and curves.png of a run from the files in its folder; return the report's path.

    If no step was logged yet, the report contains a note on this, and curves.png is not written.
    """
    run, files = read_run(run_dir), RunFiles(run_dir)
    panels = [*build_panels(run.records), *time_panels(run.records)]
    if panels:
        write_curves(panels, run.title, files.curves)
    else:
        logger.warning("%s has no step in metrics.jsonl yet: the report has no curves", run.path)
    write_whole(files.report, run_page(run))
    return files.report


def run_page(run: RunData) -> str:
    """Return the report of a run as the text of one HTML file."""
    return render_page(visible(run.title, 120), run_sections(run), {"samples": page_samples(run.generations)})


def run_sections(run: RunData) -> dict[str, str]:
    """Render the parts of a run's page that change with every step, as HTML by name."""
    pictures = [*time_panels(run.records), *build_panels(run.records), *spreads(run)]
    return render_sections(
        head={
            "title": visible(run.title, 120),
            "folder": visible(str(run.path)),
            "tiles": tiles(run.records),
            "empty": not run.records,
        },
        verdicts={"verdicts": verdicts(run.records, run.distributions)},
        **{
            name: {
                "heading": heading,
                "figures": [figure(picture) for picture in pictures if picture.section == name],
                "accounts": ledger(run.records) if name == TIME else [],
            }
            for name, heading in HEADINGS.items()
        },
        summary={"rows": summary(run.records), "metrics": all_metrics(run.records)},
        config=config_tables(run.config, run.sources),
    )


def figure(picture: Panel | Spread) -> dict[str, Any]:
    """Draw a panel or distribution as SVG; return it with its title, note and legend."""
    series = picture.series if isinstance(picture, Panel) else []
    drawn = draw_panel(picture) if isinstance(picture, Panel) else draw_spread(picture)
    legend = [(curve.label, curve.color % COLORS) for curve in series]
    shown = len(series) > 1 or (series and series[0].sparse)
    return {
        "title": visible(picture.title, 120),
        "note": visible(picture.note, 160),
        "legend": legend if shown else [],
        "svg": drawn,
    }


def spreads(run: RunData) -> list[Panel | Spread]:
    """Build the distributions of rewards, response lengths and finish reasons, as far as these were recorded."""
    wanted = (
        ("score", "Reward, every sample", "score"),
        ("response_length", "Response length, every sample", "tokens"),
    )
    found: list[Panel | Spread] = []
    for name, title, unit in wanted:
        if (spread := spread_of(name, title, unit, run.distributions)) is not None:
            found.append(_shares(spread) if 1 < len(spread.labels) <= _FEW else spread)
    rows = finish_shares(run.distributions)
    # "stop" is on top of the stack, so that the other reasons can be seen at the bottom.
    reasons = sorted({name for row in rows for name in row} - {"step"}, key=lambda name: (name == "stop", name))
    if reasons:
        filled = [{**dict.fromkeys(reasons, 0.0), **row} for row in rows]
        series = [series_of(name, name, filled, color=_ENDINGS.get(name, 3 + i)) for i, name in enumerate(reasons)]
        note = "length: cut at the maximum"
        found.append(Panel("How answers end", "share of samples", series, stacked=True, note=note, section=HEALTH))
    return found


def _shares(spread: Spread) -> Panel:
    """Convert a distribution over a few single values, such as 0 and 1, into a panel of stacked shares."""
    columns = zip(*spread.shares, strict=True)
    series = [
        Series(f"{spread.unit} {label}", spread.steps, list(values), color=_VALUES[row])
        for row, (label, values) in enumerate(zip(spread.labels, columns, strict=True))
    ]
    return Panel(spread.title, "share of samples", series, stacked=True, note="by value", section=spread.section)


# The numbers of the report as text: tiles, summary, all metrics, time accounts of the workers, config.

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
    """One metric of the summary table, with its values as text and a sparkline."""

    label: str
    first: str
    last: str
    recent: str
    best: str
    spark: str


def tiles(records: Sequence[Record]) -> list[dict[str, str]]:
    """Return the key numbers for the top of the page, each with a label."""
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
    """Return the summary table: the most important metrics, each with its course over the run."""
    return [_summary_row(curve, better) for curve, better in summary_series(records)]


def summary_series(records: Sequence[Record]) -> list[tuple[Series, int]]:
    """Return the logged curves of the summary, each with its better direction: +1 up, -1 down, 0 neither."""
    rows = [(curve, 1) for curve in validation_series(records)]
    rows += [(series_of(name, label, records), better) for label, name, better in SUMMARY]
    return [(curve, better) for curve, better in rows if curve.values]


def best_of(curve: Series, better: int) -> str:
    """Return the best value of a curve and its step as text, or "" if neither direction is better."""
    if not better:
        return ""
    place = max(range(len(curve.values)), key=lambda i: better * curve.values[i])
    return f"{number(curve.values[place])} at step {curve.steps[place]:,.0f}"


def recent_of(curve: Series) -> str:
    """Return the mean of the last ten values as text; of a validation curve, the last value."""
    tail = curve.values[-1:] if curve.sparse else curve.values[-10:]
    return number(math.fsum(tail) / len(tail))


def all_metrics(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return every logged metric with its first, last, smallest and largest finite value, as text."""
    names = sorted({name for record in records for name in record} - {"step", "time"})
    curves = [series_of(name, name, records) for name in names]
    return [
        (visible(c.label, 120), *(number(v) for v in (c.values[0], c.values[-1], min(c.values), max(c.values))))
        for c in curves
        if c.values
    ]


def ledger(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the time account of each worker group: rows by falling share, and the bar in the order of a step."""
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
    """Return the rows (key, value, source) of the config, divided into chosen values and defaults."""
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


# The samples in a page: some from every part of the run, as plain data that the page's script draws and filters.

MAX_SAMPLES = 240
MAX_TEXT = 4000
# Tokens with details over all samples of a page: about two megabytes with all columns.
MAX_TOKENS = 60_000
_OWN = frozenset({"step", "split", "prompt", "response", "score", "finish", "tokens"})
_COLUMNS = ("log_prob", "advantage", "version", "mismatch", "told")


def page_samples(rows: Sequence[Mapping[str, Any]], limit: int = MAX_SAMPLES) -> list[dict[str, Any]]:
    """Return at most `limit` samples, spread evenly over the run, the latest first.

    The token details of the newest samples are kept up to `MAX_TOKENS` tokens. Older samples are text only.
    """
    every = max(1, -(-len(rows) // limit))
    left, found = MAX_TOKENS, []
    for row in list(rows)[::-1][::every]:
        sample = _sample(row)
        if "tokens" in sample:
            left -= len(sample["tokens"]["text"])
            if left < 0:
                del sample["tokens"]
        found.append(sample)
    return found


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "step": _number(row.get("step")),
        "split": visible(row.get("split", ""), 40),
        "prompt": visible(_prompt(row.get("prompt", "")), MAX_TEXT),
        "response": visible(row.get("response", ""), MAX_TEXT),
        "score": _number(row.get("score")),
        "finish": visible(row.get("finish", ""), 40),
        "more": [[visible(k, 40), visible(v, 300)] for k, v in row.items() if k not in _OWN and v is not None],
    }
    tokens = row.get("tokens")
    if isinstance(tokens, Mapping) and isinstance(tokens.get("text"), list):
        sample["tokens"] = _tokens(tokens)
    return sample


def _prompt(prompt: Any) -> Any:
    """Return chat messages as one text with a line per message; return any other prompt unchanged."""
    messages: list[Any] = prompt if isinstance(prompt, list) and prompt else [None]
    if not all(isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in messages):
        return prompt
    return "\n".join(f"{m.get('role', '')}: {m['content']}" for m in messages)


def _tokens(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token texts and their valid columns.

    A column is valid if it is one number for all tokens or a list with a value for each token.
    """
    text = [visible(piece) for piece in tokens["text"]]
    found: dict[str, Any] = {"text": text}
    for name in _COLUMNS:
        values = tokens.get(name)
        if isinstance(values, list) and len(values) == len(text):
            found[name] = [_number(value) for value in values]
        elif _number(values) is not None:
            found[name] = _number(values)
    if isinstance(tokens.get("of"), int):
        found["of"] = tokens["of"]
    return found


def _number(value: Any) -> float | None:
    """Return a finite number, or None, because JSON has no NaN or infinity; a bool becomes 0 or 1 for the script."""
    if isinstance(value, bool):
        return int(value)
    return value if finite(value) else None


# The comparison of several runs on one page: overlaid curves, numbers side by side, differences of the configs.

MOST_RUNS = WORKING - 1
# Folders and names of runs always differ, so the comparison leaves these keys out.
_NAMES = frozenset({"trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"})
_MISSING = "–"


def write_comparison(run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write a page that compares several runs to `out`, by default comparison.html in the first run's folder."""
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        raise ValueError(f"a comparison needs 2 to {MOST_RUNS} runs, got {len(run_dirs)}")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    names = run_names([run.path for run in runs])
    file = Path(out) if out is not None else runs[0].path / "comparison.html"
    title = f"{len(runs)} runs: {', '.join(names)}"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, render_page(visible(title, 120), comparison_sections(runs, names), {}))
    return file


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return a short unique name for each run: the shortest end of its path that distinguishes all runs.

    Trailing path parts that are equal in all runs are removed.
    """
    for size in range(1, max(len(path.parts) for path in paths) + 1):
        ends = [path.parts[-size:] for path in paths]
        if len(set(ends)) == len(paths):
            break
    else:
        return [f"{'/'.join(path.parts[-2:])} ({number})" for number, path in enumerate(paths, start=1)]
    while all(len(end) > 1 for end in ends) and len({end[-1] for end in ends}) == 1:
        ends = [end[:-1] for end in ends]
    return ["/".join(end) for end in ends]


def comparison_sections(runs: Sequence[RunData], names: Sequence[str]) -> dict[str, str]:
    """Render the parts of the comparison page as HTML, by name."""
    shown = [visible(name, 60) for name in names]
    panels = overlaid([run.records for run in runs], names)
    rows, alike = config_differences([run.config for run in runs])
    return render_sections(
        head={"title": f"Comparison of {len(runs)} runs", "folder": ", ".join(shown), "tiles": [], "empty": False},
        runs={"runs": [_run_row(run, name, color) for color, (run, name) in enumerate(zip(runs, shown, strict=True))]},
        **{
            name: {
                "heading": heading,
                "figures": [figure(panel) for panel in panels if panel.section == name],
                "accounts": [],
            }
            for name, heading in HEADINGS.items()
        },
        side_by_side={"names": shown, "rows": side_by_side([run.records for run in runs])},
        differences={"names": shown, "rows": rows, "alike": alike},
    )


def overlaid(runs: Sequence[Sequence[Record]], names: Sequence[str]) -> list[Panel]:
    """Build one panel for each metric of the report's panels, with a curve for every run that logged the metric."""
    found: dict[str, tuple[str, Panel]] = {}
    for records in runs:
        for panel in build_panels(records):
            for curve in panel.series:
                title = panel.title if curve is panel.series[0] else f"{panel.title}: {curve.label}"
                found.setdefault(curve.metric, (title, panel))
    found.setdefault("timing_s/step", ("Seconds per step", Panel("", "seconds", [], section=TIME)))
    panels = []
    for metric, (title, panel) in found.items():
        found_in = enumerate(zip(names, runs, strict=True))
        curves = [series_of(metric, name, records, color=i) for i, (name, records) in found_in]
        curves = [_sparse(curve, panel, metric) for curve in curves if curve.values]
        values = [value for curve in curves for value in curve.values]
        if values:
            log = panel.log_scale and spans_decades(values)
            panels.append(Panel(title, panel.unit, curves, log_scale=log, note=metric, section=panel.section))
    return panels


def side_by_side(runs: Sequence[Sequence[Record]]) -> list[dict[str, Any]]:
    """Return the rows of the summary's metrics, with a cell for every run."""
    tables = [{curve.metric: (curve, better) for curve, better in summary_series(records)} for records in runs]
    labels: dict[str, str] = {}
    for table in tables:
        for metric, (curve, _) in table.items():
            labels.setdefault(metric, curve.label)
    return [
        {
            "label": visible(label, 80),
            "cells": [
                {"recent": recent_of(table[metric][0]), "best": best_of(*table[metric])}
                if metric in table
                else {"recent": _MISSING, "best": ""}
                for table in tables
            ],
        }
        for metric, label in labels.items()
    ]


def config_differences(configs: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, list[str]]], int]:
    """Return the keys whose values differ between configs, with their values, and the number of equal keys."""
    flat = [dict(flatten_config(config)) for config in configs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    rows = []
    for key in keys:
        values = [as_text(config[key]) if key in config else _MISSING for config in flat]
        if len(set(values)) > 1 and key not in _NAMES:
            rows.append((visible(key, 120), [visible(value, 200) for value in values]))
    return rows, len(keys) - len(rows) - len(_NAMES & set(keys))


def _sparse(curve: Series, panel: Panel, metric: str) -> Series:
    sparse = any(other.sparse for other in panel.series if other.metric == metric)
    return Series(curve.label, curve.steps, curve.values, sparse, curve.color, metric)


def _run_row(run: RunData, name: str, color: int) -> dict[str, Any]:
    steps = f"{run.records[-1]['step']:,.0f}" if run.records else "0"
    found = verdicts(run.records, run.distributions)
    return {"name": name, "folder": visible(str(run.path)), "color": color, "steps": steps, "verdicts": found}
