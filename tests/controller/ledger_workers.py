"""Workers whose time is known, for tests of the ledger: worker processes import them from here."""

import time

from meshrl.controller import Dispatch, Worker, register
from meshrl.telemetry.time_ledger import Ledger, booked


class Sleeper(Worker):
    """Works by sleeping. Its clock may be far off, as another machine's is."""

    def __init__(self, ahead=0.0):
        self.ledger = Ledger(clock=lambda: time.perf_counter() + ahead * (1 + self.rank))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self, name, seconds):
        """Sleeps `seconds`, one number for each rank."""
        with booked(name):
            time.sleep(seconds[self.rank])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self):
        raise RuntimeError("on purpose")
