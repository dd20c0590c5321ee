"""Run pytest; run once more, alone, what failed; say at the end which tests needed that.

`python tests/run_tests.py RESULTS [pytest arguments]`, with RESULTS a folder for pytest's cache and `flaky.txt`. A test
that fails beside others and passes alone does not fail the run, but it is counted and named at the end.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

TESTS_FAILED = 1  # pytest's exit status where tests ran and some failed; others are faults of the run itself


def main(results: Path, arguments: list[str]) -> int:
    """Run the tests, repeat the failures without neighbours, and report those that passed then."""
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    options = ["-o", "addopts=-q --strict-markers", "-o", f"cache_dir={results}"]
    pytest = [sys.executable, "-m", "pytest", *options]
    status = subprocess.run([*pytest, *arguments]).returncode
    first = failed_tests(results)
    if status != TESTS_FAILED or not first:
        report(results, [])
        return status
    print(f"Once more, alone, what failed ({len(first)}):", flush=True)
    alone = without_workers(arguments)
    status = subprocess.run([*pytest, *alone, "--last-failed", "--last-failed-no-failures", "none"]).returncode
    again = failed_tests(results)
    report(results, [test for test in first if test not in again] if status in (0, TESTS_FAILED) else [])
    return status


def failed_tests(results: Path) -> list[str]:
    """List the tests that failed last, as pytest's cache names them."""
    file = results / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
