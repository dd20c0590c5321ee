"""A worker process of the reward pool: loads the reward functions, then scores one sample after the other."""

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
    """Run the worker. Its only command line argument is the file descriptor of its end of the connection."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection)
    except (EOFError, OSError):  # the pool has closed the connection
        return


def serve(connection: Connection) -> None:
    """Receive `sys.path` and the function specs, reply `ready`, then score (function index, sample) pairs in turn.

    If the functions cannot be loaded, reply `broken` with the error and return.
    """
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
    except (Exception, SystemExit) as error:  # from the user's function, or from pickling its result
        return pickle.dumps(("answer", replace(Failure.of(error), error=None)))  # the exception may not be picklable


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgid(0), signal.SIGKILL)
