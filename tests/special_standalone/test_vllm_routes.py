"""vLLM inside this process says which experts its tokens went to, whatever it computed and whatever it had cached."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CHARACTERS
from routed import OwnRoutes, check_routes
from test_vllm_engine import SMALL, of_family

from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.requests import Request, SamplingParams
from meshrl.rollout.vllm.vllm_rollout import VllmRollout

# The first layer has no experts.
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"hidden_size": 128, "num_hidden_layers": 3, "mlp_only_layers": [0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    model = of_family(EXPERTS, 0)
    save_hf_folder(path, model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(path)
    return path


def test_every_token_went_where_the_model_sends_it(folder):
    # The longest prompt fills a block, which the next find in the cache; blocks are few, so that answers are set aside.
    few = SMALL | {"num_gpu_blocks_override": 8, "max_num_seqs": 8, "max_model_len": 96}
    rollout = VllmRollout(folder, pad_token_id=0, records_routes=True, **few)
    try:
        for version, seed in enumerate((3, 4)):
            model = of_family(EXPERTS, seed)
            rollout.update_weights(model.named_parameters(), version)
            check_routes(rollout, model)
    finally:
        rollout.close()


def test_new_weights_in_the_middle_leave_earlier_tokens_their_routes(folder):
    rollout = VllmRollout(folder, pad_token_id=0, records_routes=True, **SMALL)
    old, new = of_family(EXPERTS, 3), of_family(EXPERTS, 4)
    try:
        rollout.update_weights(old.named_parameters(), 0)
        found = []
        rollout._enter([Request("a", (3, 4, 5), SamplingParams(max_tokens=12), 0)], found.append)
        while sum(len(chunk.token_ids) for chunk in found) < 5:
            rollout._advance()
        rollout.update_weights(new.named_parameters(), 1)
        while not found[-1].finish_reason:
            rollout._advance()
    finally:
        rollout.close()
    tokens = [3, 4, 5, *(token for chunk in found for token in chunk.token_ids)]
    # The last token before the change was computed by the new weights.
    border = 3 + 5 - 1
    routes = torch.from_numpy(found[-1].routes).sort(-1).values.numpy()
    by_old, by_new = OwnRoutes(old)(tokens), OwnRoutes(new)(tokens)
    assert (by_old != by_new).any()
    assert (routes[:border] == by_old[:border]).all()
    assert (routes[border:] == by_new[border:-1]).all()
