"""Threads that make calls: in order, errors are the caller's, and they end when they are told to."""

import threading
import time

import pytest

from meshrl.threads import Threads


def test_calls_are_made_in_threads_of_their_own_and_end_with_them():
    one, other = Threads(1, "one"), Threads(1, "other")
    idents = [threads.submit(threading.get_ident).result(5) for threads in (one, one, other)]
    assert idents[0] == idents[1]
    assert len({*idents, threading.get_ident()}) == 3
    with pytest.raises(ZeroDivisionError):
        one.submit(lambda: 1 // 0).result(5)
    assert one.submit(lambda: 7).result(5) == 7  # an error is the call's, not the thread's
    left = threading.Event()
    with pytest.raises(TimeoutError):
        one.submit(left.wait).result(0.01)
    one.close()
    other.close()
    left.set()
    for _ in range(500):  # both threads end, also the one that is in a call
        if not {thread.ident for thread in threading.enumerate()} & {*idents}:
            break
        time.sleep(0.01)
    assert not {thread.ident for thread in threading.enumerate()} & {*idents}
