"""`meshrl doctor`: the options of the command, and one function that runs all its checks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshrl.tools.doctor.machine import Finding


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `meshrl doctor` to an argument parser."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--measure", metavar="FILE", help="also time this machine's device and write it as hardware for `meshrl plan`"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the link run (default: 2)")
    parser.add_argument(
        "--address", default=os.environ.get("RAY_ADDRESS"), metavar="RAY", help="a Ray cluster: host:port, or auto"
    )
    parser.add_argument("--disk", default=".", metavar="DIR", help="where runs will write (default: here)")


def examine(arguments: argparse.Namespace) -> list[Finding]:
    """Run every check and return the findings.

    The link run's processes start first, so that they work in the background while the machine checks run.
    """
    from meshrl.tools.doctor import machine, network
    from meshrl.tools.doctor.network import check_cluster

    if arguments.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {arguments.ranks}")
    found = [machine.check_python(), *machine.check_versions()]
    if arguments.ranks == 1:
        return [*found, *_of_machine(arguments), *check_cluster(arguments.address)]
    try:
        with network.LinkRun(arguments.ranks) as run:
            found += _of_machine(arguments)
            found += network.judge_links(run.result(network.SECONDS))
    except ImportError as error:
        found.append(machine.Finding("device", "fail", f"torch cannot be imported: {error}", "pip install torch"))
    return [*found, *check_cluster(arguments.address)]


def _of_machine(arguments: argparse.Namespace) -> list[Finding]:
    from meshrl.tools.doctor import machine

    has_gpu = machine.NVIDIA_DRIVER.exists()
    return [
        *machine.check_devices(),
        machine.check_memory(),
        machine.check_shared_memory(ranks=arguments.ranks, is_needed=has_gpu or bool(arguments.address)),
        machine.check_file_handles(arguments.ranks),
        machine.check_disk(arguments.disk),
        machine.check_host_name(),
        machine.check_sandbox(),
    ]


def doctor(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run `meshrl doctor`: print the findings and return the exit code, which is 1 if any check failed."""
    from meshrl.tools.doctor.machine import as_json, as_lines, worst

    if arguments.measure and not Path(arguments.measure).resolve().parent.is_dir():
        raise ValueError(f"--measure: there is no folder to write {arguments.measure} into")
    findings = examine(arguments)
    answer = as_json(findings)
    if arguments.measure:
        from meshrl.tools.doctor.measure import measure, write_entry

        entry = measure(findings)
        write_entry(entry, arguments.measure)
        answer["hardware"] = {entry.name: dict(entry.numbers)}
    if arguments.json:
        say(json.dumps(answer, indent=2))
    else:
        say("\n".join(as_lines(findings)))
        if arguments.measure:
            say(f"wrote {entry.name} to {arguments.measure}")
    return 1 if worst(findings) == "fail" else 0
