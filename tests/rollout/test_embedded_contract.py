"""The embedded rollout keeps the contract that all engines keep."""

from __future__ import annotations

import pytest
from contract import CHARACTERS, RolloutContract
from transformers import AutoModelForCausalLM

from meshrl.models.tiny import char_tokenizer
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout


def build(hf_model, **settings):
    own = AutoModelForCausalLM.from_config(hf_model.config, attn_implementation=ATTENTION_NAME).eval()
    return EmbeddedRollout(own, pad_token_id=0, tokenizer=char_tokenizer(CHARACTERS), **settings)


class TestEmbedded(RolloutContract):
    long = 200

    def make(self, folder, hf_model):
        return build(hf_model, max_num_seqs=32)


@pytest.mark.slow
class TestEmbeddedWithLittleMemory(RolloutContract):
    """Few rows, few blocks and a small token budget: requests wait, are preempted and recomputed."""

    long = 200  # four of them still want more than the 640 tokens there is room for

    def make(self, folder, hf_model):
        return build(hf_model, max_num_seqs=5, max_num_batched_tokens=64, num_blocks=40, block_size=16)
