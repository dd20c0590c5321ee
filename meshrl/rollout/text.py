"""Incremental conversion of tokens to text, without incomplete characters and without stop strings.

Parts: `TextStream` for text that is streamed, `answer_text` for a whole completion, and `find_stop`, which engines call
after each token to detect stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.models.loading import load_tokenizer
from meshrl.rollout.requests import SamplingParams

# The replacement character that a decoder emits for bytes that do not (yet) form a whole character.
BROKEN = "\ufffd"
# A character has at most four bytes. With this many tokens unread, waiting for more tokens cannot complete it.
MOST_BROKEN = 8
# The largest number of tokens at the end that may be the beginning of a character.
MOST_BEGUN = 3
# The number of prompt tokens to decode. The larger number is used if the shorter tail has an incomplete character
# or no text.
PROMPT_TAILS = (8, 64)


class TextStream:
    """The text of one completion as its tokens arrive. Special tokens have no text.

    Stop strings within the first `start` tokens do not count. The text continues that of `prompt`, because some
    tokenizers leave out the space before the first word of a text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), start: int = 0, prompt: Sequence[int] = ()):
        self.tokenizer, self.start = tokenizer, start
        specials = special_tokens(tokenizer)
        self.special_ids = specials.ids
        self.stops, written = split_stops(tuple(stops), specials.texts)
        # Stop strings that contain special tokens, with their visible text (the stop string without special tokens).
        self._written = {stop: _without(stop, specials.texts) for stop in written}
        self._tokens: list[int] = []
        # tokens whose text was returned; they give the context to decode the next tokens
        self._before = self._end_of(prompt)
        self._unread: list[int] = []
        self._held = ""  # text that may turn out to be part of a stop string
        self._passed = 0  # characters of `_held` that came before `start`

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the new text that can no longer change or be part of a stop string."""
        known = len(self._tokens)
        if (self.stops or self._written) and known < self.start < known + len(token_ids):
            # Text before `start` must not be searched together with the text after it.
            free = self.start - known
            return self.push(token_ids[:free]) + self.push(token_ids[free:])
        self._tokens += token_ids
        unread = len(self._unread)
        self._unread += token_ids
        text = self._new_text(len(self._unread))
        if text is None:
            # The text ends in an incomplete character. Push single tokens to find where that character begins.
            self._unread, coming = self._unread[:unread], token_ids
            text = "".join(self._push_one(token) for token in coming)
        self._held += text
        if len(self._tokens) <= self.start:
            self._passed = len(self._held)
        keep = self._certain(self._held, len(text))
        text, self._held = self._held[:keep], self._held[keep:]
        self._passed = max(0, self._passed - keep)
        return text

    def finish(self, stopped: bool) -> str:
        """Return the remaining text at the end of the completion.

        If the completion has `stopped`, cut the text before the stop string that ended it.
        """
        rest = self._held + (self._new_text(len(self._unread), waits=False) or "")
        self._held = ""
        if stopped:
            places = [self._place(stop, rest) for stop in self.stops]
            if self._written and len(self._tokens) > self.start:
                ended_by = find_stop(self.tokenizer, np.array(self._tokens), tuple(self._written))
                places += [rest.rfind(self._written[ended_by])] if ended_by is not None else []
            rest = rest[: min((place for place in places if place >= 0), default=len(rest))]
        return rest

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token would add if it came next, independently of the others.

        A special token is returned by its name.
        """
        known = len(self._decode(self._before))
        return [
            token_text(self.tokenizer, token)
            if token in self.special_ids
            else self._decode([*self._before, token])[known:]
            for token in token_ids
        ]

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        found: list[int] = []
        for size in PROMPT_TAILS:
            tail = list(prompt[-size:])
            text = self._decode(tail)
            if BROKEN not in text:
                found = tail
                if text:
                    break
        return found

    def _push_one(self, token_id: int) -> str:
        self._unread.append(token_id)
        text = self._new_text(len(self._unread))
        if text is None and len(self._unread) >= MOST_BROKEN:
            whole = self._decode([*self._before, *self._unread])
            # The last tokens may still become a character, if the text before them does not depend on them.
            sizes = range(len(self._unread) - MOST_BEGUN, 0, -1)
            fits = (n for n in sizes if whole.startswith(self._decode([*self._before, *self._unread[:n]])))
            text = self._new_text(next(fits, len(self._unread)), waits=False)
        return text or ""

    def _new_text(self, count: int, waits: bool = True) -> str | None:
        """Return the text of the first `count` unread tokens, or None if `waits` and the text ends incompletely."""
        if count == 0:
            return ""
        read = self._unread[:count]
        before, after = self._decode(self._before), self._decode([*self._before, *read])
        if waits and after.endswith(BROKEN):
            return None
        self._unread = self._unread[count:]
        text = after[len(before) :]
        # Tokens without text still serve as context, together with the tokens before them. Some such tokens (a first
        # space) change the text that follows.
        self._before = read if text else self._before + [token for token in read if token not in self.special_ids]
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True)) if token_ids else ""

    def _place(self, stop: str, text: str) -> int:
        """Return the position of a stop string in held text, or -1.

        A match that ended before `start` does not count.
        """
        return text.find(stop, max(0, self._passed - len(stop) + 1))

    def _certain(self, text: str, new: int) -> int:
        """Return how many characters of `text` can no longer be part of a stop string.

        The last `new` characters of `text` have just been added.
        """
        keep = len(text)
        for stop in self.stops:
            found = self._place(stop, text)
            keep = min(keep, found if found >= 0 else _begins(stop[:-1], text))
        for visible in filter(None, self._written.values()):
            # A match is held back until the completion ends here or continues. Only then is it known whether the
            # special token was there.
            found = text.rfind(visible)
            keep = min(keep, found if found + len(visible) > len(text) - new and found >= 0 else _begins(visible, text))
        return keep


def _begins(stop: str, text: str) -> int:
    """Return where the longest prefix of a stop string starts at the end of a text, or the text's length."""
    sizes = range(min(len(stop), len(text)), 0, -1)
    return len(text) - next((size for size in sizes if text.endswith(stop[:size])), 0)


def _without(text: str, specials: frozenset[str]) -> str:
    for special in sorted(specials, key=len, reverse=True):
        text = text.replace(special, "")
    return text


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a single token. A special token is returned by its name."""
    return str(tokenizer.decode([token_id], skip_special_tokens=False))


def answer_text(
    tokenizer: Tokenizer,
    params: SamplingParams,
    token_ids: Sequence[int],
    finish_reason: str,
    prompt: Sequence[int] = (),
) -> str:
    """Return the text of a whole completion, without the stop string or stop token that ended it.

    The text continues that of `prompt`.
    """
    stream = TextStream(tokenizer, params.stop, params.min_tokens, prompt)
    stopped = finish_reason == "stop"
    if stopped and token_ids and token_ids[-1] in params.stop_token_ids:
        token_ids = token_ids[:-1]
    return stream.push(token_ids) + stream.finish(stopped)


# Stop strings: detect whether the text of a completion contains one.
#
# A stop string is searched for in the visible text, in which special tokens have no text. A stop string that contains a
# special token (`<|im_end|>`) is searched for in the text with all special tokens written out.

# A character may take up to four tokens of single bytes. The additional tokens allow for tokens without text.
TOKENS_PER_CHARACTER, MORE_TOKENS = 4, 8


class Specials(NamedTuple):
    """A tokenizer's special tokens, as token ids and as texts."""

    ids: frozenset[int]
    texts: frozenset[str]


_known: WeakKeyDictionary[Tokenizer, Specials] = WeakKeyDictionary()


def special_tokens(tokenizer: Tokenizer) -> Specials:
    """Return all tokens that decoding can skip, including special tokens without a role such as `eos`. Cached."""
    found = _known.get(tokenizer)
    if found is None:
        added = {token: text for token, text in tokenizer.added_tokens_decoder.items() if text.special}
        ids = frozenset(added).union(tokenizer.all_special_ids)
        texts = {text.content for text in added.values()}.union(tokenizer.all_special_tokens)
        found = _known[tokenizer] = Specials(ids, frozenset(texts))
    return found


@lru_cache(8)
def special_texts(path: str, trust_remote_code: bool = False) -> frozenset[str]:
    """Load the texts of the special tokens of the tokenizer in a folder, for engines with their own tokenizer."""
    return special_tokens(load_tokenizer(path, trust_remote_code)).texts


@lru_cache(1024)
def split_stops(stops: tuple[str, ...], specials: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split stop strings into those of visible text only and those that contain a special token."""
    written = tuple(stop for stop in stops if any(text in stop for text in specials))
    return tuple(stop for stop in stops if stop not in written), written


def find_stop(tokenizer: Tokenizer, tokens: np.ndarray, stops: Sequence[str]) -> str | None:
    """Return the stop string that the last token has completed in a completion's text, or None."""
    ids, texts = special_tokens(tokenizer)
    seen, written = split_stops(tuple(stops), texts)
    found = None
    if seen and int(tokens[-1]) not in ids:
        found = _completed(tokenizer, _tail(tokens, seen, ids), seen, skip_special=True)
    if found is None and written:
        found = _completed(tokenizer, _tail(tokens, written), written, skip_special=False)
    return found


def _tail(tokens: np.ndarray, stops: Sequence[str], without_text: frozenset[int] = frozenset()) -> list[int]:
    """Return the last tokens that can matter for a match with `stops`.

    Earlier matches were ignored because of min_tokens, and a short tail keeps a step cheap. The tail grows until it has
    enough tokens that are not in `without_text`.
    """
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
    # Compare texts instead of lengths, because the last token may have completed a character that was broken before.
    before = str(tokenizer.decode(tail[:-1], skip_special_tokens=skip_special))
    pairs = zip(before, text, strict=False)
    known = next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(before), len(text)))
    return next((stop for stop, end in ends.items() if end > known), None)
