"""One real `meshrl serve` process with small limits, shared by all tests of this folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from served import CONCURRENCY, MOST_BYTES, QUEUE, TOKEN, Server, make_folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("served")
    folder, other = make_folder(root / "tiny", 0), make_folder(root / "other", 1)
    words = ["serve", str(folder), "--port", "0", "--max-num-seqs", "6"]
    words += ["--max-concurrency", str(CONCURRENCY), "--max-queue", str(QUEUE)]
    words += ["--max-request-bytes", str(MOST_BYTES), "--max-answers", "16"]
    log = (root / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "meshrl.cli", *words],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | {"MESHRL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"serving tiny on (http://127\.0\.0\.1:\d+)", line)
        assert found, f"{line}\n{(root / 'log').read_text()}"
        made = Server(found[1], folder, other, process)
        yield made
        made.wait_until_idle()
        assert process.poll() is None, (root / "log").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
    assert "Traceback" not in (root / "log").read_text()
