"""Requests and answers in vLLM's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshrl.models.sight import Sight
from meshrl.rollout.admission import refusal, room
from meshrl.rollout.embedded.sampler import derived_seed
from meshrl.rollout.requests import Request
from meshrl.rollout.stops import split_stops
from meshrl.rollout.vllm.log_probs import adjusts, extra_args


def vllm_refusal(request: Request, vocabulary: int, context: int, sight: Sight | None = None) -> str | None:
    """Why this engine cannot serve a request, or None."""
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
    """The fields of vLLM's sampling parameters for answer `index`, which is a request of its own to vLLM.

    `specials` gives the texts of special tokens, where there are stop strings.
    """
    params = request.params
    seed = derived_seed(request.seed, index)
    fields: dict[str, Any] = {
        "n": 1,
        "max_tokens": room(request, context),
        # The temperature itself is applied by `PolicyLogProbs`.
        "temperature": 1.0 if params.temperature > 0 else 0.0,
        "seed": seed,
        # The end token is one of the stop tokens if the caller wants it to be.
        "ignore_eos": True,
        "stop_token_ids": list(params.stop_token_ids),
        "logprobs": params.top_log_probs,
        "detokenize": bool(params.stop),
        "extra_args": extra_args(params, seed),
    }
    if params.stop:
        # As in `stops`, but vLLM has one rule for all of them.
        _, written = split_stops(params.stop, specials())
        fields |= {"stop": list(params.stop), "min_tokens": params.min_tokens, "skip_special_tokens": not written}
    if params.temperature > 0 and not adjusts(params):
        fields |= {"top_k": max(params.top_k, 0), "top_p": params.top_p, "min_p": params.min_p}
    return fields


def split_log_probs(flat: Any, tokens: int, top: int) -> tuple[list[float], list[dict[int, float]] | None]:
    """The sampled tokens' log-probs, and those of the `top` likeliest, from vLLM's flat list of the last `tokens`."""
    first = len(flat.start_indices) - tokens
    starts = flat.start_indices[first:]
    sampled = [flat.logprobs[start] for start in starts]
    if not top:
        return sampled, None
    tops = []
    for start, end in zip(starts, flat.end_indices[first:], strict=True):
        # The sampled token comes first, and again if it is one of the likeliest.
        found = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        tops.append(dict(sorted(found.items(), key=lambda pair: -pair[1])[:top]))
    return sampled, tops
