"""`meshrl timeline`: its options and what it does."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_timeline_options(parser: argparse.ArgumentParser) -> None:
    """The options of `meshrl timeline`."""
    parser.add_argument("run_dir", help="folder of a run with trainer.timeline=true, or a timeline.json.gz")
    parser.add_argument("--step", type=int, help="the step (default: the last)")
    parser.add_argument("--out", type=Path, help="picture to write, .png or .svg (default: in the run's folder)")


def drawn_timeline(arguments: argparse.Namespace) -> Path:
    """Draws the step; where the picture is."""
    from meshrl.telemetry.gantt import draw_step

    return draw_step(Path(arguments.run_dir), arguments.step, arguments.out)
