"""From tokens to text, piece by piece: no half characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.models.loading import load_tokenizer
from meshrl.rollout.requests import SamplingParams

# What a decoder puts for bytes that are no whole character (yet).
BROKEN = "\ufffd"
# More broken tokens than the bytes of a character: they will not be mended by waiting.
MOST_BROKEN = 8
# So many tokens at the end may be the beginning of a character.
MOST_BEGUN = 3
# How many tokens of a prompt to look at; more where these begin or end in the middle of a character.
PROMPT_TAILS = (8, 64)


class TextStream:
    """The text of one answer as its tokens come. Special tokens have none.

    `start` is the number of tokens before which stop strings do not count. Behind a `prompt` the text goes on where
    that ends: some tokenizers leave out the space before a word that comes first.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), start: int = 0, prompt: Sequence[int] = ()):
        self.tokenizer, self.start = tokenizer, start
        specials = special_tokens(tokenizer)
        self.special_ids = specials.ids
        self.stops, written = split_stops(tuple(stops), specials.texts)
        # Stop strings that name special tokens, and what a reader sees of them.
        self._written = {stop: _without(stop, specials.texts) for stop in written}
        self._tokens: list[int] = []
        self._before = self._end_of(prompt)  # tokens that have given their text, and help to read the next
        self._unread: list[int] = []
        self._held = ""  # text that may turn out to be part of a stop string
        self._passed = 0  # how much of it came before `start`

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        known = len(self._tokens)
        if (self.stops or self._written) and known < self.start < known + len(token_ids):
            # What stands before `start` must not be looked at together with the rest.
            free = self.start - known
            return self.push(token_ids[:free]) + self.push(token_ids[free:])
        self._tokens += token_ids
        unread = len(self._unread)
        self._unread += token_ids
        text = self._new_text(len(self._unread))
        if text is None:
            # It ends in a half character: token by token, to know where that begins.
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
        """The rest; of an answer that has `stopped` only what stands before the stop string that did it."""
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
        """What each of these tokens would be if it came next, alone; special ones by name."""
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
            # The last ones may still become a character, if the text stays what it is without them.
            sizes = range(len(self._unread) - MOST_BEGUN, 0, -1)
            fits = (n for n in sizes if whole.startswith(self._decode([*self._before, *self._unread[:n]])))
            text = self._new_text(next(fits, len(self._unread)), waits=False)
        return text or ""

    def _new_text(self, count: int, waits: bool = True) -> str | None:
        """The text of the first `count` unread tokens; None if it is broken at its end and `waits`."""
        if count == 0:
            return ""
        read = self._unread[:count]
        before, after = self._decode(self._before), self._decode([*self._before, *read])
        if waits and after.endswith(BROKEN):
            return None
        self._unread = self._unread[count:]
        text = after[len(before) :]
        # Tokens before those without text still help, and of these some (a first space) do as well.
        self._before = read if text else self._before + [token for token in read if token not in self.special_ids]
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True)) if token_ids else ""

    def _place(self, stop: str, text: str) -> int:
        """Where a stop string stands in held text, or -1; one that was complete before `start` does not count."""
        return text.find(stop, max(0, self._passed - len(stop) + 1))

    def _certain(self, text: str, new: int) -> int:
        """How many characters of `text`, of which the last ones are `new`, no stop string can claim any more."""
        keep = len(text)
        for stop in self.stops:
            found = self._place(stop, text)
            keep = min(keep, found if found >= 0 else _begins(stop[:-1], text))
        for visible in filter(None, self._written.values()):
            # Whether the special token was there is known when the answer ends here or goes on.
            found = text.rfind(visible)
            keep = min(keep, found if found + len(visible) > len(text) - new and found >= 0 else _begins(visible, text))
        return keep


def _begins(stop: str, text: str) -> int:
    """Where, at the end of a text, the beginning of a stop string stands that is as long as possible."""
    sizes = range(min(len(stop), len(text)), 0, -1)
    return len(text) - next((size for size in sizes if text.endswith(stop[:size])), 0)


def _without(text: str, specials: frozenset[str]) -> str:
    for special in sorted(specials, key=len, reverse=True):
        text = text.replace(special, "")
    return text


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """One token by itself, special ones by name."""
    return str(tokenizer.decode([token_id], skip_special_tokens=False))


def answer_text(
    tokenizer: Tokenizer,
    params: SamplingParams,
    token_ids: Sequence[int],
    finish_reason: str,
    prompt: Sequence[int] = (),
) -> str:
    """The text of a whole answer: without the stop that ended it. Behind a `prompt` it goes on where that ends."""
    stream = TextStream(tokenizer, params.stop, params.min_tokens, prompt)
    stopped = finish_reason == "stop"
    if stopped and token_ids and token_ids[-1] in params.stop_token_ids:
        token_ids = token_ids[:-1]
    return stream.push(token_ids) + stream.finish(stopped)


# Stop strings: whether the text of an answer has come to hold one.
#
# A stop string is looked for in what a reader sees, where special tokens have no text; one that names a special token
# itself (`<|im_end|>`) in the text with all of them written out.

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
