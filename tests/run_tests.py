"""Run pytest; run once more, alone, what failed; say at the end which tests needed that.

`python tests/run_tests.py RESULTS [pytest arguments]`, with RESULTS a folder for pytest's cache and `flaky.txt`. A test
that fails beside others and passes alone does not fail the run, but it is counted and named at the end. So is one that
brings down its worker: pytest-xdist begins its file anew, and if it passes then, pytest's cache has forgotten it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS_FAILED = 1  # pytest's exit status where tests ran and some failed; others are faults of the run itself
RUN = "--run"  # the first word where this file is pytest's own process


def main(results: Path, arguments: list[str]) -> int:
    """Run the tests, repeat the failures without neighbours, and report those that passed then."""
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    options = ["-o", "addopts=-q --strict-markers", "-o", f"cache_dir={results}"]
    pytest = [sys.executable, __file__, RUN, str(results / "failed.txt"), *options]
    status = subprocess.run([*pytest, *arguments]).returncode
    first = failed_tests(results)
    if status != TESTS_FAILED or not first:
        report(results, [])
        return exit_code(status)
    print(f"Once more, alone, what failed ({len(first)}):", flush=True)
    alone = without_workers(arguments)
    status = subprocess.run([*pytest, *alone, "--last-failed", "--last-failed-no-failures", "none"]).returncode
    if status not in (0, TESTS_FAILED):
        print(f"The second run was cut short: which of the {len(first)} pass alone is not known:", *first, sep="\n  ")
        report(results, [])
        return exit_code(status)
    again = failed_tests(results)
    report(results, [test for test in first if test not in again])
    return status


def exit_code(status: int) -> int:
    """Say which signal ended pytest, if one did, and return what a shell would as its status."""
    if status >= 0:
        return status
    print(f"CRASHED: pytest was ended by {signal.Signals(-status).name}", flush=True)
    return 128 - status


class Failures:
    """What pytest tells as it goes: the names of the tests that failed, also of those that passed when repeated."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a failed test's name down."""
        self.keep(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write the name of a file down that cannot be imported."""
        self.keep(report)

    def keep(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Write a name down if the report is of a failure."""
        if report.failed:
            with self.file.open("a") as names:
                names.write(f"{report.nodeid}\n")


def run_pytest(file: Path, arguments: list[str]) -> int:
    """Run pytest in this process, as `python -m pytest` does, and write the names of failed tests into the file."""
    sys.path[0] = os.getcwd()
    return int(pytest.main(arguments, plugins=[Failures(file)]))


def failed_tests(results: Path) -> list[str]:
    """List the tests that failed last, and have pytest's cache name them as well: the next run repeats those."""
    names = results / "failed.txt"
    failed = sorted(set(names.read_text().splitlines())) if names.exists() else []
    names.unlink(missing_ok=True)
    cache = results / "v" / "cache" / "lastfailed"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(dict.fromkeys(failed, True)))
    return failed


def without_workers(arguments: list[str]) -> list[str]:
    """Drop the options of pytest-xdist and of timing, so that tests run one after the other."""
    alone: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("-n", "--dist"):
            skip = True
        elif argument != "--no-loadscope-reorder" and not argument.startswith("--durations"):
            alone.append(argument)
    return alone


def report(results: Path, flaky: list[str]) -> None:
    """Print the tests that failed at first and passed alone, and keep their names in `flaky.txt`."""
    (results / "flaky.txt").write_text("".join(f"{test}\n" for test in flaky))
    if flaky:
        print(f"FLAKY: {len(flaky)} failed beside others and passed alone:", *flaky, sep="\n  ", flush=True)
    else:
        print("FLAKY: 0", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == RUN:
        sys.exit(run_pytest(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
