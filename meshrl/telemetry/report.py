"""The picture of a run: curves.png and a report.html that needs nothing but itself."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.files import write_whole
from meshrl.telemetry.curves_png import write_curves
from meshrl.telemetry.curves_svg import draw_panel
from meshrl.telemetry.distributions import Spread, finish_shares, spread_of
from meshrl.telemetry.heat_svg import draw_spread
from meshrl.telemetry.page import render_page, render_sections
from meshrl.telemetry.panels import (
    COLORS,
    HEALTH,
    LEARNING,
    TIME,
    Panel,
    Record,
    Series,
    build_panels,
    finite,
    merge_steps,
    series_of,
)
from meshrl.telemetry.report_samples import page_samples
from meshrl.telemetry.report_tables import all_metrics, config_tables, ledger, summary, tiles
from meshrl.telemetry.report_text import visible
from meshrl.telemetry.run_folder import RunFiles
from meshrl.telemetry.time_panels import time_panels
from meshrl.telemetry.verdicts import verdicts

logger = logging.getLogger(__name__)

# Single values up to so many are stacked; more are a field of cells. Their colours from the lowest value on.
_FEW = 5
_VALUES = (12, 0, 6, 2, 8)
_ENDINGS = {"length": 1, "stop": 12}
HEADINGS = {LEARNING: "Is it learning?", HEALTH: "Is it healthy?", TIME: "Where does the time go?"}


@dataclass(frozen=True)
class RunData:
    """What is known of a run: its records by step, how its samples are spread, some samples, its config."""

    path: Path
    records: Sequence[Record]
    distributions: Sequence[Mapping[str, Any]] = ()
    generations: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The project's and the experiment's name, or else the folder's."""
        trainer = self.config.get("trainer")
        known = trainer if isinstance(trainer, Mapping) else {}
        names = [known.get(key) for key in ("project_name", "experiment_name")]
        return " / ".join(str(name) for name in names if name) or self.path.name


def read_run(run_dir: str | os.PathLike[str]) -> RunData:
    """What a run's folder holds; a folder that is none is refused."""
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
    """One record a step, in order; of a step that was taken twice the later one."""
    steps = {record["step"]: record for record in records if finite(record.get("step"))}
    return [steps[step] for step in sorted(steps)]


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes report.html and curves.png of a run from what its folder holds; returns the report's path.

    A run that has not logged a step gets a report that says so, and no curves.png.
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
    """The report of a run as one HTML file's text."""
    return render_page(visible(run.title, 120), run_sections(run), {"samples": page_samples(run.generations)})


def run_sections(run: RunData) -> dict[str, str]:
    """The parts of a run's page that change with every step, as HTML."""
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
    """A picture with what stands around it."""
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
    """How rewards and lengths are spread over the samples, and how these ended, as far as that was kept."""
    wanted = (
        ("score", "Reward, every sample", "score"),
        ("response_length", "Response length, every sample", "tokens"),
    )
    found: list[Panel | Spread] = []
    for name, title, unit in wanted:
        if (spread := spread_of(name, title, unit, run.distributions)) is not None:
            found.append(_shares(spread) if 1 < len(spread.labels) <= _FEW else spread)
    rows = finish_shares(run.distributions)
    # What ended by itself lies on top, so that the rest can be seen.
    reasons = sorted({name for row in rows for name in row} - {"step"}, key=lambda name: (name == "stop", name))
    if reasons:
        filled = [{**dict.fromkeys(reasons, 0.0), **row} for row in rows]
        series = [series_of(name, name, filled, color=_ENDINGS.get(name, 3 + i)) for i, name in enumerate(reasons)]
        note = "length: cut at the maximum"
        found.append(Panel("How answers end", "share of samples", series, stacked=True, note=note, section=HEALTH))
    return found


def _shares(spread: Spread) -> Panel:
    """A few single values, such as 0 and 1, stacked on each other."""
    columns = zip(*spread.shares, strict=True)
    series = [
        Series(f"{spread.unit} {label}", spread.steps, list(values), color=_VALUES[row])
        for row, (label, values) in enumerate(zip(spread.labels, columns, strict=True))
    ]
    return Panel(spread.title, "share of samples", series, stacked=True, note="by value", section=spread.section)
