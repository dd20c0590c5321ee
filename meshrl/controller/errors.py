"""What can go wrong between the controller and its workers."""

from typing import Any


class ControllerError(RuntimeError):
    """The base of every error that a worker group raises about its workers."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


def _rebuild(kind: type[ControllerError], message: str, fields: dict[str, Any]) -> ControllerError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class WorkerError(ControllerError):
    """A worker's method raised; the message ends with the worker's own traceback."""

    def __init__(
        self, message: str, *, rank: int, role: str, method: str, error_type: str, traceback_text: str
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.role = role
        self.method = method
        self.error_type = error_type
        self.traceback_text = traceback_text


class WorkerDied(ControllerError):  # noqa: N818
    """A worker's process ended while it was needed."""

    def __init__(
        self, message: str, *, rank: int, role: str, method: str | None, pid: int | None, exitcode: int | None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.role = role
        self.method = method
        self.pid = pid
        self.exitcode = exitcode


class DeadlineError(ControllerError, TimeoutError):
    """A call took longer than its deadline; says which ranks have answered and which have not."""

    def __init__(
        self, message: str, *, role: str, method: str, answered: list[int], silent: list[int], waited: float
    ) -> None:
        super().__init__(message)
        self.role = role
        self.method = method
        self.answered = answered
        self.silent = silent
        self.waited = waited


class GroupBrokenError(ControllerError):
    """The group cannot be called any more; the message and `__cause__` say what happened first."""


class RayStartError(ControllerError):
    """Ray did not start, or its cluster cannot be reached."""
