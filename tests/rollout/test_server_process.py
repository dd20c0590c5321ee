"""A server that was started for a rollout never outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from meshrl.rollout.engine_server import ServerProcess, free_port

# A server with a child of its own, as engines have them; prints both process ids.
SERVER = "import os, subprocess, time; c = subprocess.Popen(['sleep', '100']); print(os.getpid(), c.pid, flush=True)\n"


def ids(log) -> list[int]:
    until = time.monotonic() + 30
    while not (found := log.read_text().split() if log.exists() else []):
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int(word) for word in found]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_stop_ends_the_server_and_its_children(tmp_path):
    log = tmp_path / "log"
    server = ServerProcess([sys.executable, "-c", SERVER + "time.sleep(100)"], {}, log)
    pids = ids(log)
    assert all(map(alive, pids))
    server.stop()
    assert gone(pids)


def test_the_server_ends_when_its_parent_is_killed(tmp_path):
    log = tmp_path / "log"
    code = (
        "import sys, time; from pathlib import Path; from meshrl.rollout.engine_server import ServerProcess\n"
        f"s = ServerProcess([sys.executable, '-c', {SERVER + 'time.sleep(100)'!r}], {{}}, Path({str(log)!r}))\n"
        "time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    pids = ids(log)
    assert all(map(alive, pids))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(pids)


def test_a_server_that_dies_is_named_with_its_last_words(tmp_path):
    server = ServerProcess([sys.executable, "-c", "raise SystemExit('no such model')"], {}, tmp_path / "log")

    async def never() -> bool:
        return False

    with pytest.raises(RuntimeError, match=r"code 1[\s\S]*no such model"):
        asyncio.run(server.until(never, 60))
    server.stop()


def test_a_server_that_does_not_come_up(tmp_path):
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(100)"], {}, tmp_path / "log")

    async def never() -> bool:
        return False

    with pytest.raises(TimeoutError, match="within 0 s"):
        asyncio.run(server.until(never, 0.3))
    server.stop()


def test_a_free_port_can_be_bound():
    with socket.socket() as made:
        port = free_port()
        made.bind(("127.0.0.1", port))
        assert made.getsockname()[1] == port > 0
