"""What engines that are not ours to change need before a call reaches them: refusals in words."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.rollout.base import TAGS
from meshrl.rollout.requests import Request

NO_WEIGHTS = "the rollout has no weights yet: sync them before generating"


def refusal(request: Request, vocabulary: int, context: int, sees: bool = False) -> str | None:
    """Why a request cannot be served by a model of this vocabulary and context, or None."""
    prompt = request.prompt_token_ids
    if not prompt:
        return "the prompt is empty: it needs at least one token"
    if len(prompt) >= context:
        return f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in a context of {context}"
    if request.images and not sees:
        return "not supported yet: prompts with images in this engine; rollout.name=embedded and vllm take them"
    for what, ids in (
        ("prompt", prompt),
        ("stop_token_ids", request.params.stop_token_ids),
        ("logit_bias", request.params.logit_bias),
    ):
        wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            return f"token id {wrong} in {what} is outside the vocabulary (0 to {vocabulary - 1})"
    return None


def room(request: Request, context: int) -> int:
    """How many tokens an answer may have before the context is full."""
    return min(request.params.max_tokens, context - len(request.prompt_token_ids))


def known_tags(tags: Sequence[str]) -> set[str]:
    """The tags as a set; raises for one that no rollout knows."""
    unknown = set(tags) - set(TAGS)
    if unknown:
        raise ValueError(f"unknown tag '{sorted(unknown)[0]}': use one of {', '.join(TAGS)}")
    return set(tags)
