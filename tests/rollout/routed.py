"""Whether a rollout says of every token which experts it went to, by Hugging Face's own model."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from meshrl.models.moe_routing import Routers
from meshrl.rollout.base import Rollout
from meshrl.rollout.requests import Request, SamplingParams

LENGTHS = (5, 9, 3, 37)


class OwnRoutes:
    """Where Hugging Face's own model sends the tokens of a text, experts in the order of their numbers."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.routers = model, Routers(model)

    def __call__(self, tokens: list[int]) -> np.ndarray:
        with torch.no_grad(), self.routers.routing(records=True):
            self.model(torch.tensor([tokens], device=self.model.device))
            return np.sort(self.routers.recorded().cpu().numpy(), -1)


def check_routes(rollout: Rollout, model: PreTrainedModel) -> None:
    """Several answers to each of several prompts, then a prompt that goes on where an answer ended."""
    own, generator = OwnRoutes(model), torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    prompts = [tuple(torch.randint(2, vocabulary, (n,), generator=generator).tolist()) for n in LENGTHS]
    asked = [Request(f"r{i}", p, SamplingParams(max_tokens=5 + i, n=3), i) for i, p in enumerate(prompts)]
    answers = rollout.complete(asked)
    last = (*prompts[-1], *answers[-1].token_ids, 4, 5)
    asked.append(Request("again", last, SamplingParams(max_tokens=4, n=2), 9))
    answers += rollout.complete(asked[-1:])
    prompt_of = {request.request_id: request.prompt_token_ids for request in asked}
    for answer in answers:
        tokens = [*prompt_of[answer.request_id], *answer.token_ids]
        assert answer.routes is not None
        assert answer.routes.dtype == np.uint8
        # The last token of an answer is never computed.
        assert (np.sort(answer.routes, -1) == own(tokens)[:-1]).all(), answer.request_id
