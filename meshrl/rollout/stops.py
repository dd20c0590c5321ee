"""Stop strings: whether the text of an answer has come to hold one.

A stop string is looked for in what a reader sees, where special tokens have no text; one that names a special token
itself (`<|im_end|>`) in the text with all of them written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.models.loading import load_tokenizer

# A character may take up to four tokens of single bytes; some more for tokens without text.
TOKENS_PER_CHARACTER, MORE_TOKENS = 4, 8


class Specials(NamedTuple):
    """A tokenizer's special tokens."""

    ids: frozenset[int]
    texts: frozenset[str]


_known: WeakKeyDictionary[Tokenizer, Specials] = WeakKeyDictionary()


def special_tokens(tokenizer: Tokenizer) -> Specials:
    """All tokens that decoding leaves out, also those that have no role such as `eos`."""
    found = _known.get(tokenizer)
    if found is None:
        added = {token: text for token, text in tokenizer.added_tokens_decoder.items() if text.special}
        ids = frozenset(added).union(tokenizer.all_special_ids)
        texts = {text.content for text in added.values()}.union(tokenizer.all_special_tokens)
        found = _known[tokenizer] = Specials(ids, frozenset(texts))
    return found


@lru_cache(8)
def special_texts(path: str, trust_remote_code: bool = False) -> frozenset[str]:
    """The texts of the special tokens of the tokenizer in a folder, for engines that have one of their own."""
    return special_tokens(load_tokenizer(path, trust_remote_code)).texts


@lru_cache(1024)
def split_stops(stops: tuple[str, ...], specials: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stop strings that a reader could see, and those that name a special token."""
    written = tuple(stop for stop in stops if any(text in stop for text in specials))
    return tuple(stop for stop in stops if stop not in written), written


def find_stop(tokenizer: Tokenizer, tokens: np.ndarray, stops: Sequence[str]) -> str | None:
    """The stop string in the text of an answer that its last token has completed, if any."""
    ids, texts = special_tokens(tokenizer)
    seen, written = split_stops(tuple(stops), texts)
    found = None
    if seen and int(tokens[-1]) not in ids:
        found = _completed(tokenizer, _tail(tokens, seen, ids), seen, skip_special=True)
    if found is None and written:
        found = _completed(tokenizer, _tail(tokens, written), written, skip_special=False)
    return found


def _tail(tokens: np.ndarray, stops: Sequence[str], without_text: frozenset[int] = frozenset()) -> list[int]:
    """The last tokens: what older ones have completed was let pass, before min_tokens, and a step stays short."""
    needed = size = TOKENS_PER_CHARACTER * max(map(len, stops)) + MORE_TOKENS
    tail: list[int] = tokens[-size:].tolist()
    if not without_text.isdisjoint(tail):
        while size < len(tokens) and sum(token not in without_text for token in tail) < needed:
            size *= 2
            tail = tokens[-size:].tolist()
    return tail


def _completed(tokenizer: Tokenizer, tail: list[int], stops: Sequence[str], skip_special: bool) -> str | None:
    text = str(tokenizer.decode(tail, skip_special_tokens=skip_special))
    ends = {stop: place + len(stop) for stop in stops if (place := text.rfind(stop)) >= 0}
    if not ends:
        return None
    # Not by length alone: the last token may have mended a character that was broken before.
    before = str(tokenizer.decode(tail[:-1], skip_special_tokens=skip_special))
    pairs = zip(before, text, strict=False)
    known = next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(before), len(text)))
    return next((stop for stop, end in ends.items() if end > known), None)
