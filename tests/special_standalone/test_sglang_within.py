"""SGLang's real engine keeps the contract, inside this process."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-sglang")

from contract import RolloutContract
from test_sglang_server import ARGUMENTS

from meshrl.rollout.remote import RemoteRollout
from meshrl.rollout.sglang.sglang_engine import SglangEngine


class TestSglangEngine(RolloutContract):
    seeded = False
    adjusts = False
    top_p_within_top_k = False
    spare_tokens = 2

    def make(self, folder, hf_model):
        before = multiprocessing.get_start_method(allow_none=True), signal.getsignal(signal.SIGQUIT)
        made = RemoteRollout(
            SglangEngine(folder, arguments=ARGUMENTS, start_seconds=560),
            pad_token_id=0,
            bucket_bytes=100_000,
            deadline=60,
        )
        assert (multiprocessing.get_start_method(allow_none=True), signal.getsignal(signal.SIGQUIT)) == before
        return made

    def test_streams_are_labelled_as_the_engine_says_in_the_end(self, engine):
        """Runs last: over all tests no token of a stream was handed out under a version that it did not have."""
        assert engine.stats()["relabelled_tokens"] == 0

    def test_its_end_is_that_of_its_own_processes_alone(self, engine):
        """Runs last, too. SGLang's own shutdown would end every child, such as those that grade answers."""
        beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        own = engine.client._processes
        assert len(own) >= 2  # that schedule, and that make text of tokens
        assert all(process.is_alive() for process in own)
        engine.close()
        assert not any(process.is_alive() for process in own)
        assert beside.poll() is None
        assert torch.ones(3).share_memory_().is_shared()  # by a process that torch has started
        beside.kill()
        beside.wait()
