"""Answering prompts inside a worker: the rollout, the agents around it, and how both sample."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from meshrl.agents.batch import make_agent_rollout
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.data.proto import DataProto
from meshrl.models.loading import load_tokenizer, stop_token_ids
from meshrl.rollout.base import SamplingParams
from meshrl.rollout.build import build_rollout


class Generation:
    """One rank's rollout. `hf_model` says which model it is; with `can_share` the rollout generates with it."""

    def __init__(
        self,
        config: RolloutConfig,
        model: ModelConfig,
        hf_model: PreTrainedModel,
        *,
        device: torch.device,
        can_share: bool,
    ):
        self.config = config
        path = model.path or ""
        tokenizer = load_tokenizer(model.tokenizer_path or path, model.trust_remote_code)
        self.stop_token_ids = tuple(stop_token_ids(path, tokenizer))
        self.rollout = build_rollout(config, model, hf_model, tokenizer, device=device, can_share=can_share)
        self.agents = None
        if config.multi_turn.enable:
            self.agents = make_agent_rollout(self.rollout, tokenizer, config, self.stop_token_ids)

    def __call__(self, prompts: DataProto) -> DataProto:
        """Answers prompts; `meta_info["validate"]` chooses the sampling of validation."""
        config = self.config
        how = config.val_kwargs if prompts.meta_info.get("validate") else config
        params = SamplingParams(
            max_tokens=config.response_length or 1,
            temperature=how.temperature if how.do_sample else 0.0,
            top_k=how.top_k,
            top_p=how.top_p,
            stop_token_ids=self.stop_token_ids,
        )
        output = (self.agents or self.rollout).generate_sequences(prompts, params)
        if not config.calculate_log_probs:
            output.pop(batch_keys=["rollout_log_probs"])
        return output
