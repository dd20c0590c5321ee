"""Stop strings: whether the text of an answer has come to hold one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

# A character may take up to four tokens of single bytes; some more for tokens without text.
TOKENS_PER_CHARACTER, MORE_TOKENS = 4, 8


def find_stop(tokenizer: Tokenizer, tokens: np.ndarray, stops: Sequence[str]) -> str | None:
    """The stop string in the text of an answer that its last token has completed, if any."""
    # What older tokens have completed was let pass, before min_tokens: the tail is enough, and a step stays short.
    tail = tokens[-(TOKENS_PER_CHARACTER * max(map(len, stops)) + MORE_TOKENS) :]
    text = str(tokenizer.decode(tail.tolist(), skip_special_tokens=False))
    ends = {stop: place + len(stop) for stop in stops if (place := text.rfind(stop)) >= 0}
    if not ends:
        return None
    # Not by length alone: the last token may have mended a character that was broken before.
    before = str(tokenizer.decode(tail[:-1].tolist(), skip_special_tokens=False))
    pairs = zip(before, text, strict=False)
    known = next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(before), len(text)))
    return next((stop for stop, end in ends.items() if end > known), None)
