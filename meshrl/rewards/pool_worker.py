"""One process of the pool: loads the reward functions, then answers one sample after the other."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from meshrl.rewards.reward_calls import Failure, call_one, extras_of


def main() -> None:
    """Started with the number of its end of the connection as the only argument."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection)
    except (EOFError, OSError):  # the other end is gone
        return


def serve(connection: Connection) -> None:
    """First the path and the functions, answered by `ready`; then (function, sample) pairs, each answered in turn."""
    try:
        sys.path[:], specs = connection.recv()
        functions = [spec.load() for spec in specs]
    except Exception as error:
        connection.send(("broken", f"{type(error).__name__}: {error}"))
        return
    extras = [extras_of(function) for function in functions]
    connection.send(("ready", None))
    while True:
        index, sample = connection.recv()
        connection.send_bytes(_answer(functools.partial(call_one, functions[index], sample, extras[index])))


def _answer(call: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(("answer", call()))
    except (Exception, SystemExit) as error:  # whatever a user's function does, or an answer that cannot be sent
        return pickle.dumps(("answer", replace(Failure.of(error), error=None)))  # which may not be able to travel


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgid(0), signal.SIGKILL)
