"""What a worker group asks of the backend that runs its workers."""

from collections.abc import Sequence
from typing import Any, Protocol

from meshrl.controller.dispatch import RankCall
from meshrl.controller.errors import ControllerError
from meshrl.controller.flight_recorder import Collective
from meshrl.controller.futures import Future


class Backend(Protocol):
    """Runs the workers of one group, wherever they are."""

    world_size: int

    def submit(
        self, method: str, calls: Sequence[RankCall], future: Future[Any], *, blocking: bool, direct: bool
    ) -> None:
        """Send each rank its part; settle the future with the answers in the order of `calls`.

        Calls of a rank run in the order they were submitted; `direct` ones at once, beside them. `blocking` says that
        the caller will wait, so a backend may run the call right here.
        """

    def check(self) -> None:
        """Raise if the group cannot be called any more."""

    def alive(self) -> list[bool]:
        """Which ranks' workers live."""

    def pids(self) -> list[int]:
        """The ranks' process ids, each on its own machine."""

    def stop(self, error: ControllerError, graceful: bool) -> None:
        """End the workers, letting them finish what is queued if `graceful`; later calls get `error`."""

    def waits(self) -> list[str]:
        """A line for every call that is under way: which ranks have answered and which have not."""

    def stacks(self) -> str:
        """Where the ranks' processes are."""

    def last_words(self) -> str:
        """The ends of what the ranks have written to their standard error, where that is known."""

    def collectives(self) -> dict[int, list[Collective]]:
        """The newest collectives of the ranks that say so within a short time and whose torch records them."""
