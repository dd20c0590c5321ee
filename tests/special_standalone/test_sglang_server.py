"""SGLang's real server keeps the contract, over HTTP, on a CPU with two shims for what has no CPU build."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-sglang")

from contract import CONTEXT, RolloutContract

from meshrl.rollout.remote import RemoteRollout
from meshrl.rollout.sglang.sglang_engine import SglangServer

ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "context_length": CONTEXT,
    "max_total_tokens": 20_000,
    "mem_fraction_static": 0.3,
    "skip_server_warmup": True,
}


class TestSglangServer(RolloutContract):
    # Its seeds are for its deterministic mode alone, which has no CPU backend.
    seeded = False
    adjusts = False
    top_p_within_top_k = False
    spare_tokens = 2

    def make(self, folder, hf_model):
        client = SglangServer(folder, arguments=ARGUMENTS, start_seconds=280)
        made = RemoteRollout(client, pad_token_id=0, bucket_bytes=100_000, deadline=60)
        # The saver itself needs a GPU to start. Without it SGLang still goes through releasing and resuming, and ends
        # with an error where something is resumed that was not released, or where it is not idle.
        client._arguments["enable_memory_saver"] = True
        return made

    def test_it_serves_its_own_run_alone(self, engine):
        for route in ("/update_weights_from_tensor", "/generate", "/pause_generation"):
            answer = httpx.post(engine.client._url + route, json={}, timeout=60)
            assert answer.status_code == 401

    def test_streams_are_labelled_as_the_engine_says_in_the_end(self, engine):
        """Runs last: over all tests no token of a stream was handed out under a version that it did not have."""
        assert engine.stats()["relabelled_tokens"] == 0
