"""Several runs on one page: their curves over each other, their numbers side by side, what their configs differ in."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.files import write_whole
from meshrl.telemetry.page import render_page, render_sections
from meshrl.telemetry.panels import TIME, WORKING, Panel, Record, Series, build_panels, series_of, spans_decades
from meshrl.telemetry.report import HEADINGS, RunData, figure, read_run
from meshrl.telemetry.report_tables import best_of, recent_of, summary_series
from meshrl.telemetry.report_text import as_text, visible
from meshrl.telemetry.run_folder import flatten_config
from meshrl.telemetry.verdicts import verdicts

MOST_RUNS = WORKING - 1
# Where runs are kept and what they are called differs always and says nothing.
_NAMES = frozenset({"trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"})
_MISSING = "–"


def write_comparison(run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Writes one page on several runs, into the first one's folder unless `out` says where."""
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
    """For each run the shortest end of its path that no other has; what stands before and after is left out."""
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
    """The parts of the page, as HTML."""
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
    """One panel for each metric of the usual panels, with a curve of every run that has it."""
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
    """The summary's metrics, a cell for every run."""
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
    """The keys whose values are not the same everywhere, with their values; and how many are."""
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
