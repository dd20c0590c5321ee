"""Log-probs as the trainer defines them, from vLLM's own sampler, by a logits processor inside vLLM's workers.

vLLM reports log-probs either before the temperature (`raw_*`) or after top-k and top-p have filtered and renormalised
them (`processed_*`). The policy's log-probs are between the two. So this processor applies the temperature, and vLLM
gets temperature 1. The processor passes normalised logits on. Normalisation changes neither filters nor samples, and
vLLM's "processed logit" of a token is then its log-prob before any filter. If penalties or biases change the choice of
tokens, but not the log-probs, the processor samples the token and masks all other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from meshrl.models.vision import Sight
from meshrl.rollout.base import refusal, room
from meshrl.rollout.embedded.sampler import Settings, derived_seed, sample
from meshrl.rollout.requests import Request, SamplingParams
from meshrl.rollout.text import split_stops

EXTRA = "meshrl"


def extra_args(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Return the parameters that `PolicyLogProbs` needs for a request, in types that JSON can represent."""
    extra: dict[str, Any] = {"temperature": params.temperature or 1.0}
    if adjusts(params):
        extra["seed"] = seed
        extra["wishes"] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
            "min_tokens": params.min_tokens,
            "stop_token_ids": list(params.stop_token_ids),
        }
    return {EXTRA: extra}


def adjusts(params: SamplingParams) -> bool:
    """Return whether penalties, biases or `min_tokens` change the choice of tokens without changing the log-probs."""
    return params.repetition_penalty != 1 or bool(params.logit_bias) or params.min_tokens > 0


class Row:
    """One request in vLLM's batch. `output` is vLLM's own list of output tokens, which grows during generation."""

    def __init__(self, extra: dict[str, Any], prompt: list[int] | None, output: list[int]):
        self.temperature: float = extra["temperature"]
        self.params: SamplingParams | None = None
        wishes = extra.get("wishes")
        if wishes is not None:
            bias = {int(token): value for token, value in wishes["logit_bias"].items()}
            stops = tuple(wishes["stop_token_ids"])
            self.params = SamplingParams(**(wishes | {"logit_bias": bias, "stop_token_ids": stops}))
            self.settings = Settings.of([self.params])
            self.seed = torch.tensor([extra["seed"]])
            self.prompt, self.output = prompt or [], output

    def force(self, logits: Tensor) -> Tensor:
        """Sample a token from logits `[vocabulary]`; return `[vocabulary]` with its log-prob, and -inf elsewhere."""
        params = self.params
        assert params is not None
        adjusted = logits.clone()
        if params.repetition_penalty != 1:
            seen = torch.tensor([*self.prompt, *self.output], device=logits.device).unique()
            values = adjusted[seen]
            penalty = params.repetition_penalty
            adjusted[seen] = torch.where(values > 0, values / penalty, values * penalty)
        for token, bias in params.logit_bias.items():
            adjusted[token] += bias
        if len(self.output) < params.min_tokens:
            adjusted[list(params.stop_token_ids)] = -torch.inf
        # Sampled on the CPU from the seed and the position, so that the token is the same after a preemption and on
        # every rank.
        drawn = sample(logits[None].cpu(), self.settings, self.seed, len(self.output), adjusted[None].cpu())
        forced = torch.full_like(logits, -torch.inf)
        forced[drawn.tokens[0]] = drawn.log_probs[0].to(logits.device)
        return forced


class PolicyLogProbs(LogitsProcessor):
    """A logits processor that turns logits into log-probs at each request's temperature.

    vLLM must run with `logprobs_mode=processed_logits`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.device = device
        self.rows: dict[int, Row] = {}
        self._temperatures: Tensor | None = None

    @classmethod
    def validate_params(cls, sampling_params: VllmParams) -> None:
        """Refuse requests that this rollout did not send, because their log-probs would have another meaning."""
        if EXTRA not in (sampling_params.extra_args or {}):
            raise ValueError(f"this engine serves a meshrl rollout: a request needs extra_args['{EXTRA}']")

    def is_argmax_invariant(self) -> bool:
        """Return False, so that vLLM runs this processor for greedy requests as well."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update `rows` for requests that vLLM added, removed or moved in its batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.rows[index] = Row((params.extra_args or {}).get(EXTRA, {"temperature": 1.0}), prompt, output)
        for source, target, how in batch_update.moved:
            moving, replaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moving is not None:
                self.rows[target] = moving
            if replaced is not None and how == MoveDirectionality.SWAP:
                self.rows[source] = replaced
        self._temperatures = None

    def apply(self, logits: Tensor) -> Tensor:
        """Replace logits `[requests, vocabulary]` with log-probs of the same shape."""
        if self._temperatures is None or len(self._temperatures) != len(logits):
            column = torch.ones(len(logits), 1)
            for index, row in self.rows.items():
                if index < len(logits):
                    column[index] = row.temperature
            self._temperatures = column.to(self.device)
        forced = {i: row.force(logits[i].float()) for i, row in self.rows.items() if row.params and i < len(logits)}
        log_probs = (logits.float() / self._temperatures).log_softmax(-1)
        for index, values in forced.items():
            log_probs[index] = values
        return log_probs


# Conversion between this package's requests and completions and vLLM's.


def vllm_refusal(request: Request, vocabulary: int, context: int, sight: Sight | None = None) -> str | None:
    """Return why this engine cannot serve a request, or None."""
    params = request.params
    if adjusts(params) and params.top_log_probs:
        return (
            "vLLM cannot give top_log_probs together with repetition_penalty, logit_bias or min_tokens: "
            "leave one of them out"
        )
    problem = refusal(request, vocabulary, context, sees=sight is not None)
    if problem is None and sight is not None and request.images:
        problem = sight.problem(request.prompt_token_ids, request.images)
    return problem


def sampling_fields(
    request: Request, index: int, context: int, specials: Callable[[], frozenset[str]]
) -> dict[str, Any]:
    """Return the fields of vLLM's sampling parameters for completion `index`, which is a separate vLLM request.

    `specials` returns the texts of special tokens. It is called only if there are stop strings.
    """
    params = request.params
    seed = derived_seed(request.seed, index)
    fields: dict[str, Any] = {
        "n": 1,
        "max_tokens": room(request, context),
        # The temperature itself is applied by `PolicyLogProbs`.
        "temperature": 1.0 if params.temperature > 0 else 0.0,
        "seed": seed,
        # The end token ends a completion only if it is one of the caller's stop tokens.
        "ignore_eos": True,
        "stop_token_ids": list(params.stop_token_ids),
        "logprobs": params.top_log_probs,
        "detokenize": bool(params.stop),
        "extra_args": extra_args(params, seed),
    }
    if params.stop:
        # As in `meshrl.rollout.text`, except that vLLM has one rule for all stop strings of a request.
        _, written = split_stops(params.stop, specials())
        fields |= {"stop": list(params.stop), "min_tokens": params.min_tokens, "skip_special_tokens": not written}
    if params.temperature > 0 and not adjusts(params):
        fields |= {"top_k": max(params.top_k, 0), "top_p": params.top_p, "min_p": params.min_p}
    return fields


def split_log_probs(flat: Any, tokens: int, top: int) -> tuple[list[float], list[dict[int, float]] | None]:
    """Return the log-probs of the last `tokens` sampled tokens, and of the `top` likeliest tokens at each position.

    `flat` is vLLM's flat list of log-probs.
    """
    first = len(flat.start_indices) - tokens
    starts = flat.start_indices[first:]
    sampled = [flat.logprobs[start] for start in starts]
    if not top:
        return sampled, None
    tops = []
    for start, end in zip(starts, flat.end_indices[first:], strict=True):
        # The sampled token comes first, and a second time if it is one of the likeliest tokens.
        found = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        tops.append(dict(sorted(found.items(), key=lambda pair: -pair[1])[:top]))
    return sampled, tops
