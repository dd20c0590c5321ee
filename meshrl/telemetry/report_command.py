"""The commands `meshrl report`, `meshrl watch` and `meshrl timeline`: command-line options and execution."""

import argparse
from collections.abc import Callable
from pathlib import Path

PORT = 8420


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `meshrl report` to its parser."""
    parser.add_argument("run_dirs", nargs="+", metavar="RUN", help="folder of a run; several are compared on one page")
    parser.add_argument(
        "--out", metavar="FILE", help="with several runs: the page to write (default: comparison.html in the first)"
    )


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `meshrl watch` to its parser."""
    parser.add_argument("run_dir", metavar="RUN", help="folder of the run; it may not have begun")
    parser.add_argument("--port", type=int, default=PORT, help=f"on 127.0.0.1; 0: any free one (default: {PORT})")


def write_pages(arguments: argparse.Namespace) -> str:
    """Write the report of one run or the comparison of several; return a line with the file's path."""
    if len(arguments.run_dirs) == 1:
        if arguments.out is not None:
            raise ValueError("--out is for comparisons of several runs: the report of one run lies in its folder")
        from meshrl.telemetry.report import write_report

        return f"wrote {write_report(arguments.run_dirs[0])}"
    from meshrl.telemetry.report import write_comparison

    return f"wrote {write_comparison(arguments.run_dirs, arguments.out)}"


def watch_run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Serve the live report for `meshrl watch` until Ctrl-C; `say` is called with lines for the user."""
    from meshrl.telemetry.live_report import watch

    watch(arguments.run_dir, arguments.port, say)


def add_timeline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `meshrl timeline` to its parser."""
    parser.add_argument("run_dir", help="folder of a run with trainer.timeline=true, or a timeline.json.gz")
    parser.add_argument("--step", type=int, help="the step (default: the last)")
    parser.add_argument("--out", type=Path, help="picture to write, .png or .svg (default: in the run's folder)")


def drawn_timeline(arguments: argparse.Namespace) -> Path:
    """Draw the step chosen by `meshrl timeline` and return the path of the picture."""
    from meshrl.telemetry.timeline import draw_step

    return draw_step(Path(arguments.run_dir), arguments.step, arguments.out)
