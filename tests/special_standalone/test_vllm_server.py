"""vLLM's real server keeps the contract, over HTTP."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CONTEXT, RolloutContract

from meshrl.rollout.remote import RemoteRollout
from meshrl.rollout.vllm.server import VllmServer

ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": CONTEXT,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 32,
}


class TestVllmServer(RolloutContract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _cpu(cls):
        with pytest.MonkeyPatch.context() as patch:
            # Its workers compile a function of the log-probs with a C++ compiler otherwise, for seconds.
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            yield

    def make(self, folder, hf_model):
        client = VllmServer(folder, arguments=ARGUMENTS, start_seconds=280)
        return RemoteRollout(client, pad_token_id=0, bucket_bytes=100_000, deadline=60)

    def test_it_serves_its_own_run_alone(self, engine):
        for route in ("/collective_rpc", "/v1/completions", "/pause", "/health"):
            answer = httpx.post(engine.client._url + route, json={}, timeout=60)
            assert answer.status_code == 401

    def test_streams_are_labelled_as_the_engine_says_in_the_end(self, engine):
        """Runs last: over all tests no token of a stream was handed out under a version that it did not have."""
        assert engine.stats()["relabelled_tokens"] == 0
