"""From tokens to text, piece by piece: no half characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.rollout.requests import SamplingParams

# What a decoder puts for bytes that are no whole character (yet).
BROKEN = "\ufffd"
# More broken tokens than the bytes of a character: they will not be mended by waiting.
MOST_BROKEN = 8


class TextStream:
    """The text of one answer as its tokens come. Special tokens have none.

    `start` is the number of tokens before which stop strings do not count.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), start: int = 0):
        self.tokenizer, self.stops, self.start = tokenizer, tuple(stops), start
        self._tokens: list[int] = []
        self._context = self._read = 0  # tokens before `_read` have given their text; those from `_context` on help
        self._held = ""  # text that may turn out to be part of a stop string

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        known = len(self._tokens)
        if self.stops and known < self.start < known + len(token_ids):
            # What stands before `start` must not be looked at together with the rest.
            free = self.start - known
            return self.push(token_ids[:free]) + self.push(token_ids[free:])
        self._tokens += token_ids
        text = self._new_text(len(self._tokens), waits=True)
        if text is None:
            # It ends in a half character: token by token, to know where that begins.
            ends = range(known + 1, len(self._tokens) + 1)
            text = "".join(self._new_text(end, waits=end - self._read < MOST_BROKEN) or "" for end in ends)
        self._held += text
        if not self.stops or len(self._tokens) <= self.start:
            text, self._held = self._held, ""
            return text
        keep = self._certain(self._held)
        text, self._held = self._held[:keep], self._held[keep:]
        return text

    def finish(self, stopped: bool) -> str:
        """The rest; of an answer that has `stopped` only what stands before the first stop string."""
        rest = self._held + (self._new_text(len(self._tokens), waits=False) or "")
        self._held = ""
        if stopped:
            found = [place for place in map(rest.find, self.stops) if place >= 0]
            rest = rest[: min(found, default=len(rest))]
        return rest

    def _new_text(self, end: int, waits: bool) -> str | None:
        """The text of the tokens up to `end` that has not been given; None if it is broken at its end and `waits`."""
        if self._read == end:
            return ""
        before = self._decode(self._tokens[self._context : self._read])
        after = self._decode(self._tokens[self._context : end])
        if waits and after.endswith(BROKEN):
            return None
        self._context, self._read = self._read, end
        return after[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True)) if token_ids else ""

    def _certain(self, text: str) -> int:
        """How many characters of `text` no stop string can claim any more."""
        keep = len(text)
        for stop in self.stops:
            found = text.find(stop)
            if found >= 0:
                keep = min(keep, found)
                continue
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    keep = min(keep, len(text) - size)
                    break
        return keep


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """One token by itself, special ones by name."""
    return str(tokenizer.decode([token_id], skip_special_tokens=False))


def answer_text(tokenizer: Tokenizer, params: SamplingParams, token_ids: Sequence[int], finish_reason: str) -> str:
    """The text of a whole answer: without the stop that ended it."""
    stream = TextStream(tokenizer, params.stop, params.min_tokens)
    stopped = finish_reason == "stop"
    if stopped and token_ids and token_ids[-1] in params.stop_token_ids:
        token_ids = token_ids[:-1]
    return stream.push(token_ids) + stream.finish(stopped)
