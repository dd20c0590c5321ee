"""From a prompt, text or chat messages, to token ids. Light: the processes that tokenize load this, and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


# How much of a prompt an error shows.
SHOWN = 200


class RowError(ValueError):
    """What is wrong with the row of a number; whoever knows its file tells it with `at`.

    Numbers count from 0, and the words from 1, as the lines of a file do.
    """

    def __init__(self, number: int, words: str):
        super().__init__(number, words)  # both, or it could not be pickled
        self.number, self.words = number, words

    def __str__(self) -> str:
        return f"row {self.number + 1}: {self.words}"

    def at(self, file: str, number: int) -> ValueError:
        """The same of a row of a file."""
        return ValueError(f"data file '{file}', row {number + 1}: {self.words}")


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Any,
    number: int,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Token ids of a prompt: a string as it is, or a list of chat messages through the tokenizer's chat template.

    `template_kwargs` are variables of the template, such as `enable_thinking`.
    """
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise RowError(
            number, f"the prompt must be a string or a list of messages with role and content, got {shown(prompt)}"
        )
    try:
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = render_chat(tokenizer, prompt, True, tools, template_kwargs)
    except (TypeError, TemplateError) as error:  # half of a surrogate pair, roles in an order that the template refuses
        raise RowError(number, f"the prompt cannot be tokenized ({error}): {shown(prompt)}") from error
    _check_tokens(ids, prompt, number)
    return np.asarray(ids, dtype=np.int64)


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[Any],
    first: int = 0,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[np.ndarray]:
    """`encode_prompt` of each; texts go to the tokenizer together. `first` is the number of the first of them."""
    if prompts and all(isinstance(prompt, str) for prompt in prompts):
        try:
            found = [np.asarray(ids, dtype=np.int64) for ids in tokenizer(list(prompts))["input_ids"]]
        except TypeError:
            pass  # one of them is no text: below it is told which
        else:
            for at, ids in enumerate(found):
                _check_tokens(ids, prompts[at], first + at)
            return found
    return [encode_prompt(tokenizer, prompt, first + at, tools, template_kwargs) for at, prompt in enumerate(prompts)]


def _check_tokens(ids: Sequence[int] | np.ndarray, prompt: Any, number: int) -> None:
    if len(ids) == 0:
        raise RowError(number, f"the prompt has no tokens: {shown(prompt)}")


def shown(value: Any) -> str:
    """A value for an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def is_chat(messages: Any) -> bool:
    """Whether this is a list of at least one chat message."""
    is_list = isinstance(messages, list) and len(messages) > 0
    return is_list and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "the data are chat messages, but the tokenizer has no chat template: put one into its folder as "
            "chat_template.jinja, set model.tokenizer_path to a folder that has one, or write plain text"
        )
    rendered = tokenizer.apply_chat_template(
        messages,
        tools=tools or None,  # type: ignore[arg-type]
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
        **(template_kwargs or {}),
    )
    return list(rendered)
