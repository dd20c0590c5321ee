"""Results that are not there yet, and the thread that waits for them in order."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from meshrl.telemetry.ledger import booked

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a non-blocking call.

    It may be passed as an argument to another group's method before it is ready. The collect step (concatenating the
    ranks' answers) runs in the first thread that asks for the value, so that an unused result costs nothing.
    """

    def __init__(self, whom: str = "workers") -> None:
        self.whom = whom  # whose answer it is
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._raw: Any = None
        self._error: BaseException | None = None
        self._transform: Callable[[Any], T] | None = None
        self.describe: Callable[[], str] = lambda: "the call has not been sent yet: it waits for its arguments"

    def done(self) -> bool:
        """Whether `get` would return or raise without waiting for a worker."""
        return self._settled.is_set()

    def get(self, timeout: float | None = None) -> T:
        """The result, or the error of the call. `TimeoutError` after `timeout` seconds leaves the call running."""
        if not self._settled.is_set():
            with booked(f"wait_{self.whom}"):
                if not self._settled.wait(timeout):
                    raise TimeoutError(f"no result after {timeout:.1f} s: {self.describe()}")
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._transform is not None:
                transform, self._transform = self._transform, None
                try:
                    self._raw = transform(self._raw)
                except BaseException as error:
                    self._raw, self._error = None, error
                    raise
            return self._raw

    def set_transform(self, transform: Callable[[Any], T]) -> None:
        """Say how the raw answers become the result (by whoever makes the future)."""
        self._transform = transform

    def set_result(self, raw: Any) -> None:
        """Settle with the workers' raw answers (by whoever makes the future)."""
        self._settle(raw, None)

    def set_error(self, error: BaseException) -> None:
        """Settle with an error (by whoever makes the future)."""
        self._settle(None, error)

    def _settle(self, raw: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._settled.is_set():
                return
            self._raw, self._error = raw, error
            self.describe = _answered  # the call's own leads back here: such a circle would keep the answers in memory
            self._settled.set()


def _answered() -> str:
    return "the workers have answered"


def has_pending(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of the arguments is a future that is not ready."""
    return any(isinstance(value, Future) and not value.done() for value in (*args, *kwargs.values()))


def materialize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace futures among the arguments by their results, waiting for them."""

    def value_of(value: Any) -> Any:
        return value.get() if isinstance(value, Future) else value

    return tuple(value_of(value) for value in args), {key: value_of(value) for key, value in kwargs.items()}


class SerialThread:
    """Runs jobs one after another in one daemon thread, started with the first job.

    Not a ThreadPoolExecutor: its threads are joined when the interpreter exits, which would keep Ctrl-C waiting.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a job waits or runs."""
        return self._unfinished > 0

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; it should handle its own exceptions: nobody hears of others but the log."""
        with self._lock:
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException:
                logger.exception("a job of thread %s failed", self._name)
            finally:
                del job  # with what it was called with, which may be large, while this waits for the next
                with self._lock:
                    self._unfinished -= 1
