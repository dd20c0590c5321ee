"""Rollouts that record routes: every token of prompt and answer went where Hugging Face's own model sends it."""

import numpy as np
import pytest
import torch
from routed import OwnRoutes, check_routes

from meshrl.data.batch import DataProto
from meshrl.models.moe_routing import ROUTED_EXPERTS
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.hf import HFRollout
from meshrl.rollout.requests import Request, SamplingParams

KINDS = ("embedded", "preempting", "hf")


def make_rollout(make_lm, family, kind, **options):
    if kind == "hf":
        rollout = HFRollout(make_lm(family, "sdpa"), pad_token_id=0, stride=4, records_routes=True, **options)
    else:
        tight = {"max_num_batched_tokens": 16, "num_blocks": 15, "max_model_len": 56} if kind == "preempting" else {}
        rollout = EmbeddedRollout(
            make_lm(family), pad_token_id=0, block_size=4, max_num_seqs=8, records_routes=True, **tight, **options
        )
    rollout.version = 0
    return rollout


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_went_where_the_model_sends_it(make_lm, family, kind):
    rollout = make_rollout(make_lm, family, kind, shares_weights=True)
    check_routes(rollout, make_lm(family, "eager"))
    if kind == "preempting":
        assert rollout.stats()["preemptions"] > 0
    if kind != "hf":
        assert rollout.stats()["cached_prompt_tokens"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_a_column_of_them(make_lm, kind):
    expected = OwnRoutes(make_lm("qwen3_moe", "eager"))
    rollout = make_rollout(make_lm, "qwen3_moe", kind, shares_weights=True)
    ids = torch.tensor([[0, 0, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    prompts = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": (ids > 0).long(), "seeds": torch.tensor([1, 2, 3])}
    )
    made = rollout.generate_sequences(prompts, SamplingParams(max_tokens=6, stop_token_ids=(9, 11, 13, 15)))
    column = made.non_tensor_batch[ROUTED_EXPERTS]
    for row in range(3):
        tokens = made.batch["input_ids"][row][made.batch["attention_mask"][row].bool()].tolist()
        assert len(column[row]) == len(tokens)
        assert (np.sort(column[row], -1)[:-1] == expected(tokens)[:-1]).all()
        assert (column[row][-1] == 255).all()


@pytest.mark.parametrize("kind", ["embedded", "hf"])
def test_new_weights_in_the_middle_leave_earlier_tokens_their_routes(make_lm, kind):
    """An answer that is half done when weights change: its first tokens were sampled by way of the old routes."""
    old, new = make_lm("qwen3_moe", "eager"), make_lm("qwen3_moe", "eager")
    with torch.no_grad():
        for param in new.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    rollout = make_rollout(make_lm, "qwen3_moe", kind)
    rollout.update_weights(old.named_parameters(), 0)
    request = Request("a", (3, 4, 5), SamplingParams(max_tokens=12), 0)
    found = []
    rollout._enter([request], found.append)
    while sum(len(chunk.token_ids) for chunk in found) + rollout.num_generated() < 5:
        rollout._advance()
    rollout.update_weights(new.named_parameters(), 1)
    while not (found and found[-1].finish_reason):
        rollout._advance()
    tokens = [3, 4, 5, *(token for chunk in found for token in chunk.token_ids)]
    versions = [version for chunk in found for version in chunk.versions]
    # The token before the first new one was computed, for it, by the new weights.
    border = 3 + versions.index(1) - 1
    routes = np.sort(found[-1].routes, -1)
    by_old, by_new = OwnRoutes(old)(tokens), OwnRoutes(new)(tokens)
    assert (by_old != by_new).any()
    assert (routes[:border] == by_old[:border]).all()
    assert (routes[border:] == by_new[border:-1]).all()
