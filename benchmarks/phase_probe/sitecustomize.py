"""Lets others see from outside in which phase a run's controller is: Python imports this module before all else.

Put this folder on `PYTHONPATH` and a file's name into `MESHRL_PHASE_FILE`: that file holds `pid number phase`, where
the number grows with every change of the phase; "start" until the loop begins, "between" outside of all phases. With
`MESHRL_AIMS` its processes die at moments that were chosen before (`aims`).
"""

import os
import sys


def _report(file: str) -> None:
    from meshrl.telemetry.time_ledger import PhaseTimer

    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    announce, number = PhaseTimer._announce, 0

    def tell(phase: str) -> None:
        nonlocal number
        number += 1
        os.pwrite(descriptor, f"{os.getpid()} {number} {phase}".ljust(63).encode() + b"\n", 0)

    def announce_to_all(timer: PhaseTimer) -> None:
        tell(timer._open[-1] if timer._open else "between")
        announce(timer)

    PhaseTimer._announce = announce_to_all
    tell("start")


_FILE = os.environ.get("MESHRL_PHASE_FILE")
if _FILE and "meshrl.cli" in sys.orig_argv and "--supervise" not in sys.orig_argv:
    _report(_FILE)

if os.environ.get("MESHRL_AIMS"):
    import aims

    aims.arm()
