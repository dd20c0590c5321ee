"""SGLang, as a server and within this process, says which experts its tokens went to."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-sglang")

from contract import CHARACTERS, SHAPE, make_from, request
from routed import check_routes
from test_sglang_server import ARGUMENTS
from transformers import Qwen3MoeConfig

from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.remote import RemoteRollout
from meshrl.rollout.requests import SamplingParams
from meshrl.rollout.sglang.sglang_engine import SglangEngine, SglangServer


def make_model(seed):
    config = Qwen3MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
    return make_from(config, seed, "eager")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [SglangServer, SglangEngine])
def test_every_token_went_where_the_model_sends_it(tmp_path, kind):
    model, folder = make_model(0), tmp_path / "model"
    save_hf_folder(folder, model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(folder)
    routed = ARGUMENTS | {"enable_return_routed_experts": True}
    client = kind(folder, arguments=routed, start_seconds=280)
    rollout = RemoteRollout(client, pad_token_id=0, bucket_bytes=100_000, deadline=60)
    try:
        for version, seed in enumerate((3, 4)):
            rollout.update_weights(make_model(seed).named_parameters(), version)
            check_routes(rollout, make_model(seed))
        (refused,) = rollout.complete([request((5, 6), SamplingParams(max_tokens=4, stop_token_ids=(7,)))])
        assert refused.finish_reason == "error"
        assert "without the model's own ([1]) among them" in refused.error
    finally:
        rollout.close()
