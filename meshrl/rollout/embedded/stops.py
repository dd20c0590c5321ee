"""Stop strings: whether the text of an answer has come to hold one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

# A character may take up to four tokens of single bytes; some more for tokens without text.
TOKENS_PER_CHARACTER, MORE_TOKENS = 4, 8


def find_stop(tokenizer: Tokenizer, tokens: np.ndarray, stops: Sequence[str]) -> str | None:
    """The stop string in the text of an answer that its last token has completed, if any."""
    # Earlier ones would have ended the answer before: the tail is enough, and a step stays short.
    tail = tokens[-(TOKENS_PER_CHARACTER * max(map(len, stops)) + MORE_TOKENS) :]
    text = tokenizer.decode(tail.tolist(), skip_special_tokens=False)
    return next((stop for stop in stops if stop in text), None)
