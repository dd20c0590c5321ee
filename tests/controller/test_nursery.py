"""The controller's side of the nursery, against one that the test plays itself."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from meshrl.controller import forkserver
from meshrl.controller.forkserver import Nursery, NurseryError


@pytest.fixture
def played(monkeypatch):
    """A nursery's two sides: the controller's, and the socket of a process that is not there."""
    sides = []

    def start(command, pass_fds, **options):
        sides.append(socket.socket(fileno=os.dup(pass_fds[0])))
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(forkserver.subprocess, "Popen", start)
    asker = Nursery()
    yield asker, sides[0]
    sides[0].close()


def test_a_worker_that_comes_too_late_is_not_taken_for_the_next_one(played):
    asker, control = played
    ends, (ours, theirs) = [], socket.socketpair()

    def fork_both():
        for pid in (11, 12):
            options, fd = forkserver._next_request(control)
            os.close(fd)
            control.sendall(f"forked {pid} {options['number']}\n".encode())
        control.sendall(b"ended 11 1\nended 12 3\n")

    with ours, theirs:
        with pytest.raises(NurseryError, match=r"did not fork a worker within 0\.05 s"):
            asker.fork(theirs, [], 0.05, ends.append)
        forking = threading.Thread(target=fork_both)
        forking.start()
        assert asker.fork(theirs, [], 5, ends.append) == 12
    forking.join(5)
    control.close()
    asker._listener.join(5)
    assert ends == [3]
    assert not asker._ended


def test_a_nursery_that_is_killed_with_a_request_unread_is_known_to_be_gone(played):
    asker, control = played
    ours, theirs = socket.socketpair()
    threading.Timer(0.05, control.close).start()
    with ours, theirs, pytest.raises(NurseryError, match="ended before it could fork a worker"):
        asker.fork(theirs, [], 5, print)
    assert not asker.alive
