"""The picture of a run: curves.png and a report.html that needs nothing but itself."""

import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.telemetry.curves_png import write_curves
from meshrl.telemetry.curves_svg import draw_panel, sparkline
from meshrl.telemetry.panels import Series, build_panels, merge_steps, phase_seconds, series_of, validation_series
from meshrl.telemetry.report_text import as_text, duration, number, visible
from meshrl.telemetry.run_folder import RunFiles, flatten_config

logger = logging.getLogger(__name__)

_TEMPLATE = Path(__file__).with_name("report_template.html")
_MAX_GENERATIONS = 24
_MAX_TEXT = 2000
_SHOWN_FIELDS = frozenset({"step", "prompt", "response", "score"})

# (label, metric, which way is better: +1 up, -1 down, 0 neither)
_SUMMARY = (
    ("Reward, training mean", "critic/score/mean", 1),
    ("Response length", "response_length/mean", 0),
    ("Responses cut at the maximum", "response_length/clip_ratio", -1),
    ("Entropy", "actor/entropy", 0),
    ("KL of the update", "actor/ppo_kl", 0),
    ("KL to the reference", "actor/kl_loss", 0),
    ("Clip fraction", "actor/pg_clipfrac", 0),
    ("Rollout vs. trainer log-probs", "training/rollout_log_prob_diff_mean", 0),
    ("Gradient norm", "actor/grad_norm", 0),
    ("Training loss", "train/loss", -1),
    ("Validation loss", "val/loss", -1),
    ("Gradient norm", "train/grad_norm", 0),
    ("Tokens/s per device", "perf/throughput", 1),
    ("Seconds per step", "timing_s/step", -1),
)
# (metric, what it says in words): counted problems that deserve a line at the top
_COUNTED = (
    ("training/nonfinite_metrics", "Metric values that were NaN or infinite"),
    ("reward/errors", "Samples whose reward function failed or gave no finite number"),
    ("actor/skipped_steps", "Optimizer steps skipped because the gradient was not finite"),
    ("train/skipped_steps", "Optimizer steps skipped because the gradient was not finite"),
    ("training/tracker_failures", "Failed calls to tracking services"),
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


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes report.html and curves.png of a run from what its folder holds; returns the report's path.

    A run that has not logged a step gets a report that says so, and no curves.png.
    """
    run = RunFiles(run_dir)
    if not run.path.is_dir():
        raise ValueError(f"there is no run folder {run.path}")
    if not (run.metrics.exists() or run.config.exists()):
        raise ValueError(f"{run.path} is no run folder: it has neither metrics.jsonl nor config.yaml")
    records = merge_steps(run.read_metrics())
    config = run.read_config()
    title = _title(config, run.path)
    panels = build_panels(records)
    if panels:
        write_curves(panels, title, run.curves)
    else:
        logger.warning("%s has no step in metrics.jsonl yet: the report has no curves", run.path)
    page = _render(
        title=visible(title, 120),
        folder=visible(str(run.path)),
        steps=len(records),
        tiles=_tiles(records),
        notes=_notes(records),
        panels=[{"panel": panel, "svg": draw_panel(panel)} for panel in panels],
        summary=_summary(records),
        metrics=_all_metrics(records),
        timing=_timing(records),
        generations=_generations(run.read_generations()),
        config=_config_tables(config, run.read_config_sources()),
    )
    aside = run.report.with_name(run.report.name + ".part")
    aside.write_text(page, encoding="utf-8")
    aside.replace(run.report)
    return run.report


def _render(**context: Any) -> str:
    import jinja2
    from markupsafe import Markup

    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    # Only what this package draws itself may pass unescaped.
    environment.filters["drawn"] = Markup
    environment.filters["visible"] = visible
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(**context)


def _title(config: Mapping[str, Any], path: Path) -> str:
    trainer = config.get("trainer")
    names = [trainer.get(key) for key in ("project_name", "experiment_name")] if isinstance(trainer, Mapping) else []
    return " / ".join(str(name) for name in names if name) or path.name


def _tiles(records: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """The few numbers to see first."""
    if not records:
        return []
    tiles = [{"label": "steps", "value": f"{max(record['step'] for record in records):,.0f}"}]
    reward = series_of("critic/score/mean", "reward, training", records)
    for curve in [reward, *validation_series(records)[:2], series_of("train/loss", "training loss", records)]:
        if curve.values:
            tiles.append({"label": visible(curve.label, 60), "value": _span(curve)})
    seconds = sum(series_of("timing_s/step", "", records).values)
    if seconds:
        tiles.append({"label": "time in steps", "value": duration(seconds)})
    speed = series_of("perf/throughput", "", records).values
    if speed:
        tiles.append({"label": "tokens/s per device, median", "value": f"{statistics.median(speed):,.0f}"})
    return tiles


def _span(curve: Series) -> str:
    first, last = number(curve.values[0]), number(curve.values[-1])
    return last if len(curve.values) == 1 else f"{first} → {last}"


def _notes(records: Sequence[Mapping[str, float]]) -> list[str]:
    notes = []
    for name, words in _COUNTED:
        count = sum(series_of(name, "", records).values)
        if count:
            notes.append(f"{words}: {count:,.0f} ({name})")
    cut = series_of("response_length/clip_ratio", "", records).values
    if cut and cut[-1] > 0.2:
        share = f"{cut[-1]:.0%} of the last step's responses"
        notes.append(f"{share} were cut at the maximum length (response_length/clip_ratio)")
    return notes


def _summary(records: Sequence[Mapping[str, float]]) -> list[SummaryRow]:
    rows = [(curve, 1) for curve in validation_series(records)]
    rows += [(series_of(name, label, records), better) for label, name, better in _SUMMARY]
    return [_summary_row(curve, better) for curve, better in rows if curve.values]


def _summary_row(curve: Series, better: int) -> SummaryRow:
    best = ""
    if better:
        place = max(range(len(curve.values)), key=lambda i: better * curve.values[i])
        best = f"{number(curve.values[place])} at step {curve.steps[place]:,.0f}"
    tail = curve.values[-10:]
    recent = number(math.fsum(tail) / len(tail))
    first, last = number(curve.values[0]), number(curve.values[-1])
    return SummaryRow(visible(curve.label, 80), first, last, recent, best, sparkline(curve.values))


def _all_metrics(records: Sequence[Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Every logged metric with its first, last, smallest and largest finite value."""
    names = sorted({name for record in records for name in record} - {"step", "time"})
    curves = [series_of(name, name, records) for name in names]
    return [
        (visible(c.label, 120), *(number(v) for v in (c.values[0], c.values[-1], min(c.values), max(c.values))))
        for c in curves
        if c.values
    ]


def _timing(records: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    seconds = phase_seconds(records)
    whole = sum(seconds.values())
    if not whole > 0:
        return []
    count = max(1, len(series_of("timing_s/step", "", records).values))
    return [
        {
            "phase": visible(phase, 40),
            "total": duration(value),
            "each": number(value / count),
            "share": f"{100 * value / whole:.1f}",
        }
        for phase, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]


def _generations(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Samples from the whole run, the latest first: one of every so many rows, with the last ones."""
    every = max(1, -(-len(rows) // _MAX_GENERATIONS))
    chosen = list(rows)[::-1][::every]
    return [
        {
            "step": number(row.get("step", "")),
            "prompt": visible(row.get("prompt", ""), _MAX_TEXT),
            "response": visible(row.get("response", ""), _MAX_TEXT),
            "score": number(row.get("score", "")),
            "more": [(visible(k, 40), visible(v, 300)) for k, v in row.items() if k not in _SHOWN_FIELDS],
        }
        for row in chosen
    ]


def _config_tables(config: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, list[tuple[str, str, str]]]:
    """The config's rows (key, value, where from): those that were chosen, then the defaults."""
    rows = [
        (visible(key), visible(as_text(value), 400), visible(sources.get(key, ""), 120))
        for key, value in flatten_config(config)
    ]
    if not sources:
        return {"chosen": [], "rest": rows}
    chosen = [row for row in rows if row[2] not in ("", "default")]
    return {"chosen": chosen, "rest": [row for row in rows if row[2] in ("", "default")]}
