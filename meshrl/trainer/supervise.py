"""`meshrl train --supervise`: a small parent that starts the run again when its process was killed or infrastructure
ended it. The run itself goes on from its newest checkpoint, as it would for a person who gives the command again.

The run ends with its parent, however that ends: it holds the other end of a pipe, which closes with the parent. It then
does what SIGTERM asks for, and saves the step under way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from meshrl.config.errors import ConfigError
from meshrl.config.trainer import RunConfig
from meshrl.environment import SUPERVISED_PIPE, SUPERVISED_SINCE
from meshrl.trainer.failures import INFRASTRUCTURE_EXIT
from meshrl.trainer.restarts import Restarts

# What the user or a scheduler says to the parent is meant for the run.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals that end a process because somebody wants it ended.
WANTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Seconds that a run has beyond `trainer.deadlines.stop` to end after its parent has, before it is killed.
GRACE_SECONDS = 60.0


def supervise(words: Sequence[str], trainer: RunConfig, say: Callable[[str], None]) -> int:
    """Runs `meshrl WORDS` as a child, again after kill -9, within `trainer.max_restarts`; returns its exit code."""
    if trainer.resume_mode != "auto":
        raise ConfigError([f"--supervise goes on from checkpoints: trainer.resume_mode={trainer.resume_mode} cannot"])
    if trainer.max_restarts < 1:
        raise ConfigError(["--supervise needs a budget of restarts: set trainer.max_restarts, such as 10"])
    restarts = Restarts.of(trainer)
    restarts.say = say
    while True:
        code, asked = run_child(
            words, {**os.environ, SUPERVISED_SINCE: repr(restarts.since)}, trainer.deadlines.stop + GRACE_SECONDS
        )
        if asked or not is_lost(code):
            return code if code >= 0 else 128 - code
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        if not restarts.failed(f"the run's process ended with {how}", "infrastructure"):
            say(f"trainer.max_restarts={restarts.limit} is used up")
            return code if code >= 0 else 128 - code


def is_lost(code: int) -> bool:
    """Whether a process that ended so was ended by infrastructure: by a signal nobody meant for it, or by its word."""
    return code == INFRASTRUCTURE_EXIT or (code < 0 and -code not in WANTED)


def run_child(words: Sequence[str], environment: dict[str, str], grace: float) -> tuple[int, bool]:
    """Runs the command to its end and passes signals on; its exit code as `subprocess` says it, and whether its end
    was asked for. The run has `grace` seconds to end after this process has."""
    theirs, ours = os.pipe()  # ours closes with this process, and no other has it
    child = subprocess.Popen(
        [sys.executable, "-m", "meshrl.cli", *words],
        env=environment | {SUPERVISED_PIPE: f"{theirs},{grace}"},
        start_new_session=True,
        pass_fds=(theirs,),
    )
    os.close(theirs)
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number in WANTED:
            asked.append(number)
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        while (code := child.poll()) is None:
            time.sleep(0.05)
        return code, bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.kill()
            child.wait(10)
        os.close(ours)


def end_with_parent() -> None:
    """In the run's process: have the end of the supervising command end it; nothing if no such command started it."""
    if (said := os.environ.pop(SUPERVISED_PIPE, None)) is None:
        return
    pipe, _, grace = said.partition(",")
    os.set_inheritable(int(pipe), False)
    threading.Thread(target=_wait_for_end, args=(int(pipe), float(grace)), daemon=True, name="supervised").start()


def _wait_for_end(pipe: int, grace: float) -> None:
    os.read(pipe, 1)  # nobody writes: it returns when the parent is gone
    try:
        sys.stderr.write("meshrl: the command that supervised this run has ended: the run ends with it\n")
    except OSError:  # a pipe that went with the parent
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os.kill(os.getpid(), signal.SIGKILL)
