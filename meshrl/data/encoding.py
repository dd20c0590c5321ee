"""From a prompt, text or chat messages, to token ids. Light: the processes that tokenize load this, and no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def encode_prompt(
    tokenizer: Tokenizer, prompt: Any, number: int, tools: list[dict[str, Any]] | None = None
) -> np.ndarray:
    """Token ids of a prompt: a string as it is, or a list of chat messages through the tokenizer's chat template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif is_chat(prompt):
        ids = render_chat(tokenizer, prompt, add_generation_prompt=True, tools=tools)
    else:
        raise ValueError(
            f"prompt {number} must be a string or a list of messages with role and content, got {prompt!r}"
        )
    if len(ids) == 0:
        raise ValueError(f"prompt {number} has no tokens: {prompt!r}")
    return np.asarray(ids, dtype=np.int64)


def is_chat(messages: Any) -> bool:
    """Whether this is a list of at least one chat message."""
    is_list = isinstance(messages, list) and len(messages) > 0
    return is_list and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template."""
    if tokenizer.chat_template is None:
        raise ValueError("the prompts are chat messages, but the tokenizer has no chat template: use plain strings")
    rendered = tokenizer.apply_chat_template(
        messages,
        tools=tools or None,  # type: ignore[arg-type]
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
    )
    return list(rendered)
