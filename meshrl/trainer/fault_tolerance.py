"""Fault tolerance: an infrastructure failure restarts a run from its newest checkpoint, a limited number of times.

    restarts.jsonl     {"event": "failed", "kind": ..., "error": ...}
                       {"event": "resumed", "step": ..., "thrown_away": ..., "restart": ..., "seconds_lost": ...}

    Restarts, surviving   the restart budget of one command, and the loop that restarts
    kind_of, advice       the kind of a failure, and what to do about a full disk or memory
    StallWatch            a report of all processes if nothing has moved for a while
    supervise             `meshrl train --supervise`: a parent process that restarts a killed run

Lost time is the wall time of work that is done again, from the saved state to the failure, and of the restart, from the
failure to when work goes on. No second is counted twice. Restarts are counted per command. A supervising command
(`meshrl train --supervise`) and its run count together, by means of this file.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from meshrl.config.keys import ConfigError
from meshrl.config.trainer import RunConfig
from meshrl.controller import WorkerGroup
from meshrl.controller.calls import Collective, disagreements
from meshrl.environment import SUPERVISED_PIPE, SUPERVISED_SINCE
from meshrl.files import write_whole
from meshrl.telemetry.run_folder import RunFolder, append_line, parse_line

logger = logging.getLogger(__name__)

FILE = "restarts.jsonl"
LONGEST_WAIT = 300.0
T = TypeVar("T")


@dataclass
class Restarts:
    """The restart budget of one command: at most `limit` restarts, each after twice the wait of the previous one."""

    folder: Path
    limit: int
    first_wait: float
    since: float = field(default_factory=lambda: float(os.environ.get(SUPERVISED_SINCE, time.time())))
    say: Callable[[str], None] = logger.warning
    # Whether an attempt of this command has already opened the run's folder: the next attempt resumes what is there.
    opened: bool = False
    # Called with the new metrics after every restart.
    tell: Callable[[dict[str, float]], None] = lambda metrics: None

    @classmethod
    def of(cls, trainer: RunConfig) -> Restarts:
        """Return the restart budget that the config sets."""
        return cls(Path(trainer.run_dir), trainer.max_restarts, trainer.restart_wait)

    def records(self) -> list[dict[str, Any]]:
        """Return the records that this command has written, the oldest first."""
        file = self.folder / FILE
        lines = file.read_bytes().splitlines() if file.exists() else []
        records = [record for line in lines if (record := parse_line(line)) is not None]  # None: a cut-off line
        return [record for record in records if record.get("time", 0.0) >= self.since]

    @property
    def used(self) -> int:
        """The number of restarts so far, of whole runs and of rollouts."""
        return sum(record["event"] == "failed" for record in self.records())

    def is_since(self, file: Path) -> bool:
        """Return whether a file was written since this command began, for example by an attempt that was killed."""
        return file.is_file() and file.stat().st_mtime >= self.since

    def failed(self, what: str, kind: str) -> bool:
        """Record a failure and wait before the next start; return False if no restart is left."""
        used = self.used
        if used >= self.limit:
            return False
        wait = min(self.first_wait * 2**used, LONGEST_WAIT)
        self._write({"event": "failed", "kind": kind, "error": what[:2000]})
        first_line = what.partition("\n")[0]
        self.say(f"{kind} failure: {first_line}; restart {used + 1} of {self.limit} in {wait:g} s")
        time.sleep(wait)
        return True

    def resumed(self, step: int, kept_at: float) -> float:
        """Record that work resumes after a step whose state was saved at unix time `kept_at`; return seconds lost."""
        now, records = time.time(), self.records()
        spans = [(record["since"], record["time"]) for record in records if record["event"] == "resumed"]
        since, last = max(kept_at, self.since), max((end for _, end in spans), default=0.0)
        # A restart that fails during the start belongs to the same restart.
        failures = [record["time"] for record in records if record["event"] == "failed" and record["time"] >= last]
        failed_at = min(failures, default=now)
        thrown_away, restart = seconds_outside(since, failed_at, spans), seconds_outside(failed_at, now, spans)
        self._write(
            {
                "event": "resumed",
                "step": step,
                "since": min(since, failed_at),
                "thrown_away": round(thrown_away, 3),
                "restart": round(restart, 3),
                "seconds_lost": round(thrown_away + restart, 3),
            }
        )
        self.tell(self.metrics())
        return thrown_away + restart

    def metrics(self) -> dict[str, float]:
        """Return the restart metrics of the run; empty if restarts are off."""
        if not self.limit:
            return {}
        lost = sum(record.get("seconds_lost", 0.0) for record in self.records())
        return {"restarts/count": float(self.used), "restarts/seconds_lost": lost}

    def _write(self, record: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        append_line(self.folder / FILE, {"time": time.time(), **record})


def seconds_outside(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds from `begin` to `end` that lie in none of the spans."""
    seconds = 0.0
    for low, high in sorted(spans):
        seconds += max(0.0, min(low, end) - begin)
        begin = max(begin, high)
    return seconds + max(0.0, end - begin)


def surviving(attempt: Callable[[], T], restarts: Restarts) -> T:
    """Call `attempt()` until it returns, fails for a reason other than infrastructure, or uses up the restarts."""
    while True:
        try:
            return attempt()
        except Exception as error:
            kind = kind_of(error)
            if not kind.may_be_tried_again or not restarts.failed(f"{type(error).__name__}: {error}", kind):
                if kind.may_be_tried_again and restarts.limit:
                    restarts.say(f"trainer.max_restarts={restarts.limit} is used up")
                raise


# The kind of failure that ended a run, which decides whether to try again.
#
# Errors are classified by the names of their types: a worker's errors arrive as names, and the libraries that raise
# some of them may not be installed.

# Exit code of a run that an infrastructure failure has ended (EX_TEMPFAIL): the same command may work another time.
INFRASTRUCTURE_EXIT = 75


class Failure(StrEnum):
    """The kind of a failure, which decides whether to try again.

    Only infrastructure failures are tried again, because failures of the other kinds would occur again.
    """

    INFRASTRUCTURE = "infrastructure"  # a process, a connection or a machine was lost, or a deadline passed
    DATA = "data"  # a file that cannot be read or written, a row that does not fit
    NUMERIC = "numeric"  # numbers that are not finite, a gate that stopped the run
    USER_CODE = "user code"  # anything else, such as a reward function that raises

    @property
    def may_be_tried_again(self) -> bool:
        return self is Failure.INFRASTRUCTURE


_INFRASTRUCTURE_NAMES = {
    "WorkerDied",
    "DeadlineError",
    "GroupBrokenError",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
    "TimeoutError",
    "SyncError",
    "SyncTimeoutError",
    "NurseryError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    # of Ray
    "RayStartError",
    "RayActorError",
    "ActorDiedError",
    "ActorUnavailableError",
    "ActorPlacementGroupRemoved",
    "NodeDiedError",
    "WorkerCrashedError",
    "LocalRayletDiedError",
    "ObjectLostError",
    "OwnerDiedError",
    "GetTimeoutError",
    "RaySystemError",
}
_NUMERIC_NAMES = {"FloatingPointError", "NonFiniteError", "GateError"}
_DATA_NAMES = {
    "FileNotFoundError",
    "UnicodeDecodeError",
    "JSONDecodeError",
    "ArrowInvalid",
    "SafetensorError",
    "CheckpointError",
    "DamagedFileError",
    "OSError",
}
# Not infrastructure: any error in a reward function, such as a service that does not answer, and ranks that differ.
_OF_USERS = {"RewardError", "SyncRefusedError"}
# Messages of the plain RuntimeErrors that collectives raise if a rank is lost.
_LOST_RANK = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|Timed out waiting|gloo.*(timeout|closed)|NCCL (error|timeout)"
    r"|Broken pipe|Socket Timeout",
    re.IGNORECASE,
)

# Collectives that do not match each other fail again in the same way.
_RANKS_DIFFER = re.compile(r"doesn't match expected size|Detected mismatch between collectives")


def kind_of(error: BaseException) -> Failure:
    """Return the kind of a failure from the error and its causes.

    It is infrastructure if the error or one of its causes is. Otherwise it is the error's own kind.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and type(at).__name__ not in _OF_USERS:
        seen.add(id(at))
        if _own_kind(at) is Failure.INFRASTRUCTURE:
            return Failure.INFRASTRUCTURE
        at = at.__cause__
    return _own_kind(error)


def _own_kind(error: BaseException) -> Failure:
    names = {kind.__name__ for kind in type(error).__mro__}
    message = str(error)
    if "WorkerError" in names:  # what a worker's method raised
        names = {str(getattr(error, "error_type", "")).rpartition(".")[2]}
        message = message.partition("\nThe worker's traceback:")[0]
    if names & _OF_USERS or _RANKS_DIFFER.search(message):
        return Failure.USER_CODE
    if names & _INFRASTRUCTURE_NAMES or ("RuntimeError" in names and _LOST_RANK.search(message)):
        return Failure.INFRASTRUCTURE
    if names & _NUMERIC_NAMES:
        return Failure.NUMERIC
    if names & _DATA_NAMES:
        return Failure.DATA
    return Failure.USER_CODE


_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|File too large")
_NO_MEMORY = re.compile(
    r"(can't|cannot|could not|unable to) allocate memory|not enough memory|out of memory|bad_alloc|MemoryError",
    re.IGNORECASE,
)
_GOES_ON = "the same command goes on from the newest checkpoint"
_DISK = (
    f"no room to write: free some, keep fewer checkpoints (trainer.max_ckpt_to_keep) or choose another disk "
    f"(trainer.default_local_dir); {_GOES_ON}"
)
_MEMORY = (
    "memory ran out in {where}: smaller micro-batches (ppo_max_token_len_per_gpu of its role), "
    "fewer answers at once (actor_rollout_ref.rollout.max_num_seqs), fewer processes on the machine "
    "(reward_manager.num_processes); see Out of memory in docs/troubleshooting.md; {goes_on}"
)
_KILLED = (
    "whoever is killed (SIGKILL) was mostly chosen by the kernel because the machine had no memory left (dmesg, and "
    "Out of memory in docs/troubleshooting.md). "
    f"{_GOES_ON[0].upper()}{_GOES_ON[1:]}; with --supervise and trainer.max_restarts it does so by itself"
)


def advice(error: BaseException) -> str | None:
    """Return what to do about a machine that ran out of room or memory; None for all other errors."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        text = str(at)
        if getattr(at, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or _NO_ROOM.search(text):
            return None if "--shm-size" in text else _DISK  # the message itself has the advice
        if isinstance(at, MemoryError) or getattr(at, "errno", None) == errno.ENOMEM or _NO_MEMORY.search(text):
            is_workers = any(kind.__name__ == "ControllerError" for kind in type(error).__mro__)
            where = "the worker that is named above" if is_workers else "the controller, the process of this command"
            return _MEMORY.format(where=where, goes_on=_GOES_ON)
        if getattr(at, "exitcode", None) == -signal.SIGKILL:
            return _KILLED
        at = at.__cause__ or at.__context__
    return None


# A report for when nothing has moved for a while: where every process is and who waits for whom.

LOG_LINES = 20
FRAMES = 12


class StallWatch:
    """A watch that writes `stall-N.txt` if no phase has begun or ended for `seconds`, once for each stall."""

    def __init__(
        self, seconds: float | None, run: RunFolder, groups: Mapping[str, WorkerGroup], say: Callable[[str], None]
    ):
        self.seconds, self.run, self.groups, self.say = seconds, run, groups, say
        self.step: Callable[[], int] = lambda: 0
        # Besides the worker groups: functions that return what another part of the run waits for, such as rewards.
        self.waits: list[Callable[[], list[str]]] = []
        self._phase, self._moved_at, self._reported = "the start", time.monotonic(), False
        self._ended = threading.Event()
        self._reports = 0

    def moved(self, phase: str) -> None:
        """Record that a phase has begun; "" stands for the time between phases."""
        self._phase, self._moved_at, self._reported = phase or "between phases", time.monotonic(), False

    def __enter__(self) -> StallWatch:
        if self.seconds is not None:
            threading.Thread(target=self._watch, daemon=True, name="stall-watch").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def _watch(self) -> None:
        assert self.seconds is not None
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            waited = time.monotonic() - self._moved_at
            if waited > self.seconds and not self._reported:
                self._reported = True
                self._write(waited)

    def _write(self, waited: float) -> None:
        self._reports += 1
        file = self.run.path / f"stall-{self._reports}.txt"
        page = self.page(waited)
        write_whole(file, page)
        self.say(f"nothing has moved for {waited:.0f} s: {page.splitlines()[0]}; see {file}")

    def page(self, waited: float) -> str:
        """Return the whole report; its first line is a summary."""
        groups = self._whole_groups()
        waits = [line for ask in (*(group.waits for group in groups), *self.waits) for line in ask()]
        collectives = {group.role: group.collectives() for group in groups}
        apart = [f"'{role}': {line}" for role, by_rank in collectives.items() for line in disagreements(by_rank)]
        who = waits[0] if waits else f"the controller waits in {_own_place()}"
        log = self.run.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.run.log.exists() else []
        parts = [
            f"step {self.step()}, {self._phase}, for {waited:.1f} s: {'; '.join([who, *apart[:1]])}",
            "Who waits for whom\n" + "\n".join(f"  {line}" for line in waits or [who]),
            "Collectives, by torch's flight recorder\n" + _collective_lines(groups, collectives, apart),
            "The controller\n" + _own_stacks(),
            *(f"Workers of '{group.role}'\n{group.stacks()}" for group in groups),
            *(f"Last words of '{group.role}'\n{words}" for group in groups if (words := group.last_words())),
            "Last lines of the log\n" + "\n".join(log),
        ]
        return "\n\n".join(parts) + "\n"

    def _whole_groups(self) -> list[WorkerGroup]:
        """Return one worker group for each set of processes; colocated roles are views over the same processes."""
        return list({id(group._backend): group for group in self.groups.values()}.values())


def _collective_lines(
    groups: Sequence[WorkerGroup], collectives: Mapping[str, Mapping[int, Sequence[Collective]]], apart: Sequence[str]
) -> str:
    lines = [f"  {line}" for line in apart]
    for group in groups:
        told = collectives[group.role]
        for rank, entries in told.items():
            lines.append(f"  rank {rank} of '{group.role}': the last is {entries[-1].number}, {entries[-1].words}")
        if group.world_size > 1 and (silent := [rank for rank in range(group.world_size) if rank not in told]):
            lines.append(f"  ranks {silent} of '{group.role}' have told nothing: stopped, or none recorded")
    return "\n".join(lines or ["  none"])


def _own_place() -> str:
    """Return the innermost line of the main thread, and the innermost line of meshrl that led there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    ours = [place for place in stack if "meshrl" in place.filename]
    last, own = stack[-1], (ours or stack)[-1]
    return f"{last.name} ({last.filename}:{last.lineno}), called by {own.name} ({own.filename}:{own.lineno})"


def _own_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            found.append(f"thread {names.get(ident)}:\n" + "".join(traceback.format_stack(frame)[-FRAMES:]))
    return "\n".join(found)


# `meshrl train --supervise`: a small parent process that restarts the run after its process was killed or ended by an
# infrastructure failure. The run resumes from its newest checkpoint, as if a person had given the command again.
#
# The run also ends if its parent ends in any way: the run holds one end of a pipe, which closes with the parent. Then
# the run sends itself SIGTERM, which saves the current step.

# Signals to the parent, from a user or a scheduler, are meant for the run.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals that ask a process to end, so that the run is not restarted.
WANTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# After its parent has ended, the run is killed unless it ends within `trainer.deadlines.stop` and these seconds.
GRACE_SECONDS = 60.0


def supervise(words: Sequence[str], trainer: RunConfig, say: Callable[[str], None]) -> int:
    """Run `meshrl WORDS` as a child and return its exit code.

    The child is restarted within `trainer.max_restarts` if it was killed or an infrastructure failure ended it.
    """
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
    """Return whether an exit code means an infrastructure failure.

    Such a process was killed by a signal that is not a request to end, or it returned `INFRASTRUCTURE_EXIT`.
    """
    return code == INFRASTRUCTURE_EXIT or (code < 0 and -code not in WANTED)


def run_child(words: Sequence[str], environment: dict[str, str], grace: float) -> tuple[int, bool]:
    """Run the command to its end and pass signals on to it.

    Return its exit code as `subprocess` gives it, and whether a signal requested the end. After the end of this process
    the child has `grace` seconds to end.
    """
    theirs, ours = os.pipe()  # `ours` closes with this process, because no other process has it
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
    """End this run with the command that supervises it; do nothing if no such command started the run."""
    if (said := os.environ.pop(SUPERVISED_PIPE, None)) is None:
        return
    pipe, _, grace = said.partition(",")
    os.set_inheritable(int(pipe), False)
    threading.Thread(target=_wait_for_end, args=(int(pipe), float(grace)), daemon=True, name="supervised").start()


def _wait_for_end(pipe: int, grace: float) -> None:
    os.read(pipe, 1)  # nothing is ever written: the read returns when the parent has ended
    try:
        sys.stderr.write("meshrl: the command that supervised this run has ended: the run ends with it\n")
    except OSError:  # stderr is a pipe that closed with the parent
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os.kill(os.getpid(), signal.SIGKILL)
