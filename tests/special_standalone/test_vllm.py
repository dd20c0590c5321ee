"""The real vLLM keeps the contract, inside this process."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CONTEXT, RolloutContract

from meshrl.rollout.vllm.vllm_rollout import VllmRollout

SMALL = {
    "dtype": "float32",
    "max_model_len": CONTEXT,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 32,
}


class TestVllm(RolloutContract):
    def make(self, folder, hf_model):
        return VllmRollout(folder, pad_token_id=0, bucket_bytes=100_000, **SMALL)
