"""Pairs of answers to one prompt, of which one was preferred: two sequences each, with masks over the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.preferences import PreferenceDataConfig
from meshrl.data.demonstrations import encode_conversation, fitted, padded, with_answer
from meshrl.data.encoding import RowError, encode_prompt, is_chat, shown
from meshrl.data.files import Row, read_rows
from meshrl.data.proto import DataProto
from meshrl.data.sampling import chosen_rows

# The ids of a sequence, and which of them are the answer.
Tokens = tuple[np.ndarray, np.ndarray]


class PairDataset:
    """Answers as texts after a prompt, or as messages: whole conversations, or what follows the prompt's.

    Pairs whose sequences are equal are left out and counted.
    """

    def __init__(self, files: Sequence[str], tokenizer: Tokenizer, config: PreferenceDataConfig, max_samples: int = -1):
        """`max_samples` are taken of the rows (-1: all)."""
        self.tokenizer, self.config = tokenizer, config
        self.truncated = self.equal = 0
        self.pairs: list[Tokens] = []  # chosen, rejected, chosen, ...
        wanted = (config.chosen_key, config.rejected_key)
        rows = [(file, number, row) for file in files for number, row in enumerate(read_rows([file], required=wanted))]
        for place in chosen_rows(len(rows), max_samples, config.shuffle, config.seed or 0):
            file, number, row = rows[place]
            try:
                pair = self._pair(row, number)
            except RowError as error:
                raise error.at(file, number) from error
            if np.array_equal(pair[0][0], pair[1][0]):
                self.equal += 1  # nothing can be learned of them
            else:
                self.pairs += pair
        if self.equal and not self.pairs:
            raise ValueError(
                f"all {self.equal} pairs of {', '.join(files)} have equal answers (within data.max_length="
                f"{config.max_length}): nothing is left to learn"
            )

    def __len__(self) -> int:
        return len(self.pairs) // 2

    def remarks(self) -> list[str]:
        """What became of rows that could not be taken as they are."""
        rows = len(self) + self.equal
        counts = {"truncated": self.truncated, "left out, whose answers are equal": self.equal}
        return [f"{count} of {rows} pairs {what}" for what, count in counts.items() if count]

    def _pair(self, row: Row, number: int) -> list[Tokens]:
        answers = {name: row[getattr(self.config, f"{name}_key")] for name in ("chosen", "rejected")}
        kinds = {"text" if isinstance(a, str) else "messages" if is_chat(a) else "neither" for a in answers.values()}
        if "neither" in kinds or len(kinds) > 1:
            told = "; ".join(f"{name}: {shown(answer)}" for name, answer in answers.items())
            raise RowError(
                number, f"both answers must be texts, or both lists of messages with role and content: {told}"
            )
        pair = self._texts(row, answers, number) if kinds == {"text"} else self._conversations(row, answers, number)
        self.truncated += any(len(ids) > self.config.max_length for ids, _ in pair)
        return [
            fitted(ids, learn, number, self.config, f"prompt with the {name} answer")
            for name, (ids, learn) in zip(answers, pair, strict=True)
        ]

    def _texts(self, row: Row, answers: dict[str, Any], number: int) -> list[Tokens]:
        kwargs = self.config.apply_chat_template_kwargs
        asked = prompt_of(row, self.config, number)
        prompt = encode_prompt(self.tokenizer, asked, number, template_kwargs=kwargs)
        return [
            with_answer(self.tokenizer, prompt, answer, number, f"{name} answer") for name, answer in answers.items()
        ]

    def _conversations(self, row: Row, answers: dict[str, Any], number: int) -> list[Tokens]:
        """Both as whole conversations; what they begin with in common is the prompt."""
        whole: list[list[dict[str, Any]]] = []
        for answer in answers.values():
            before = turns_before(row, self.config, number) if answer[0]["role"] == "assistant" else []
            whole.append([*before, *answer])
        said = [[(turn["role"], turn["content"]) for turn in turns] for turns in whole]
        shared = 0
        while shared < min(map(len, said)) and said[0][shared] == said[1][shared]:
            shared += 1
        after = [turns[shared][0] for turns in said if len(turns) > shared]
        if shared == 0 or any(role != "assistant" for role in after):
            raise RowError(
                number,
                f"the answers do not follow the same prompt: they differ in turn {shared + 1}, not the assistant's",
            )
        if len(after) == 1:
            raise RowError(number, "one conversation is the beginning of the other: both need an answer of their own")
        kwargs = self.config.apply_chat_template_kwargs
        shared = shared if after else 0  # equal ones are left out later, as sequences
        end = self.tokenizer.eos_token_id
        return [ended(*encode_conversation(self.tokenizer, turns, number, kwargs, shared), end) for turns in whole]

    def batch(self, numbers: np.ndarray) -> DataProto:
        """The pairs with these numbers, chosen and rejected answers by turns; `response_mask` marks the answers."""
        picked = [self.pairs[2 * number + which] for number in numbers for which in (0, 1)]
        return DataProto.from_dict(padded(picked, self.tokenizer.pad_token_id))


def prompt_of(row: Row, config: PreferenceDataConfig, number: int) -> Any:
    """The row's prompt, which must be there."""
    key = config.prompt_key
    if row.get(key) is None:
        raise RowError(number, f"the answers need a prompt, and there is no {key!r}: name its column (data.prompt_key)")
    return row[key]


def turns_before(row: Row, config: PreferenceDataConfig, number: int) -> list[dict[str, Any]]:
    """The row's prompt as messages; a text is a user's turn."""
    before = prompt_of(row, config, number)
    before = [{"role": "user", "content": before}] if isinstance(before, str) else before
    if not is_chat(before):
        raise RowError(
            number, f"the prompt must be a string or a list of messages with role and content, got {shown(before)}"
        )
    return list(before)


def ended(ids: np.ndarray, learn: np.ndarray, end_token: int) -> Tokens:
    """As a policy would have ended its answers: without what a template writes after the end token of a turn."""
    if not learn.any():
        return ids, learn
    begins = np.flatnonzero(learn & ~np.r_[False, learn[:-1]])
    ends = (ids == end_token) & learn
    so_far = np.cumsum(ends) - ends  # before each token, from the first on
    at = np.searchsorted(begins, np.arange(len(ids)), side="right") - 1
    is_tail = learn & (so_far > so_far[begins[np.maximum(at, 0)]])
    learn = learn & ~is_tail
    last = int(np.flatnonzero(learn)[-1]) + 1
    return ids[:last], learn[:last]
