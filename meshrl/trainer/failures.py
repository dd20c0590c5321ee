"""What kind of failure ended a run, which decides whether it may be tried again.

Errors are known by their names: those of workers arrive as such, and libraries that raise them may not be there.
"""

from __future__ import annotations

import errno
import re
import signal
from enum import StrEnum

# Exit code of a run that infrastructure has ended (EX_TEMPFAIL): the same command may work another time.
INFRASTRUCTURE_EXIT = 75


class Failure(StrEnum):
    """Only infrastructure is tried again: the others would fail in the same way."""

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
# Whatever a reward function met, such as a service that does not answer, is its own; ranks that differ stay different.
_OF_USERS = {"RewardError", "SyncRefusedError"}
# What collectives say, as a plain RuntimeError, of ranks that are gone.
_LOST_RANK = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|Timed out waiting|gloo.*(timeout|closed)|NCCL (error|timeout)"
    r"|Broken pipe|Socket Timeout",
    re.IGNORECASE,
)

# Collectives that do not fit together do so each time.
_RANKS_DIFFER = re.compile(r"doesn't match expected size|Detected mismatch between collectives")


def kind_of(error: BaseException) -> Failure:
    """The kind of a failure: that of what caused it, where that is infrastructure."""
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
            return None if "--shm-size" in text else _DISK  # which says itself what to do
        if isinstance(at, MemoryError) or getattr(at, "errno", None) == errno.ENOMEM or _NO_MEMORY.search(text):
            is_workers = any(kind.__name__ == "ControllerError" for kind in type(error).__mro__)
            where = "the worker that is named above" if is_workers else "the controller, the process of this command"
            return _MEMORY.format(where=where, goes_on=_GOES_ON)
        if getattr(at, "exitcode", None) == -signal.SIGKILL:
            return _KILLED
        at = at.__cause__ or at.__context__
    return None
