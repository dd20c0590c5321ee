"""Pairs of answers to one prompt, of which one was preferred: two sequences each, with masks over the answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.preferences import PreferenceDataConfig
from meshrl.data.demonstrations import encode_conversation, fitted, padded, with_answer
from meshrl.data.encoding import RowError, encode_prompt, is_chat, shown
from meshrl.data.files import Row, read_rows
from meshrl.data.proto import DataProto
from meshrl.data.sampling import chosen_rows


class PairDataset:
    """Answers as texts after a prompt, or as messages: whole conversations, or what follows the prompt's.

    Pairs of equal answers are left out and counted.
    """

    def __init__(self, files: Sequence[str], tokenizer: Tokenizer, config: PreferenceDataConfig, max_samples: int = -1):
        """`max_samples` are taken of the rows (-1: all)."""
        self.tokenizer, self.config = tokenizer, config
        self.truncated = self.equal = 0
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []  # chosen, rejected, chosen, ...: ids, and which to learn
        wanted = (config.chosen_key, config.rejected_key)
        rows = [(file, number, row) for file in files for number, row in enumerate(read_rows([file], required=wanted))]
        for place in chosen_rows(len(rows), max_samples, config.shuffle, config.seed or 0):
            file, number, row = rows[place]
            if row[config.chosen_key] == row[config.rejected_key]:
                self.equal += 1  # of which nothing can be learned
                continue
            try:
                self.pairs += self._pair(row, number)
            except RowError as error:
                raise error.at(file, number) from error

    def __len__(self) -> int:
        return len(self.pairs) // 2

    def _pair(self, row: Row, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        answers = {name: row[getattr(self.config, f"{name}_key")] for name in ("chosen", "rejected")}
        if all(isinstance(answer, str) for answer in answers.values()):
            kwargs = self.config.apply_chat_template_kwargs
            prompt = encode_prompt(self.tokenizer, self._prompt(row, number), number, template_kwargs=kwargs)
            pair = [with_answer(self.tokenizer, prompt, answers[name], number, f"{name} answer") for name in answers]
        else:
            pair = self._conversations(row, answers, number)
        self.truncated += any(len(ids) > self.config.max_length for ids, _ in pair)
        return [
            fitted(ids, learn, number, self.config, f"prompt with the {name} answer")
            for name, (ids, learn) in zip(answers, pair, strict=True)
        ]

    def _prompt(self, row: Row, number: int) -> object:
        key = self.config.prompt_key
        if row.get(key) is None:
            raise RowError(
                number, f"the answers need a prompt, and there is no {key!r}: name its column (data.prompt_key)"
            )
        return row[key]

    def _conversations(self, row: Row, answers: dict[str, object], number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Both as whole conversations; what they begin with in common is the prompt."""
        whole: list[list[dict[str, str]]] = []
        for name, answer in answers.items():
            if not isinstance(answer, list) or not answer or not is_chat(answer):
                raise RowError(
                    number,
                    f"the {name} answer must be a text, or both answers lists of messages with role and content, got "
                    f"{shown(answer)}",
                )
            if answer[0]["role"] == "assistant":
                before = self._prompt(row, number)
                before = [{"role": "user", "content": before}] if isinstance(before, str) else before
                answer = [*before, *answer]  # type: ignore[misc]
            whole.append(answer)
        shared = 0
        while shared < min(map(len, whole)) and whole[0][shared] == whole[1][shared]:
            shared += 1
        kwargs = self.config.apply_chat_template_kwargs
        return [encode_conversation(self.tokenizer, turns, number, kwargs, shared) for turns in whole]

    def batch(self, numbers: np.ndarray) -> DataProto:
        """The pairs with these numbers, chosen and rejected answers by turns; `response_mask` marks the answers."""
        picked = [self.pairs[2 * number + which] for number in numbers for which in (0, 1)]
        return DataProto.from_dict(padded(picked, self.tokenizer.pad_token_id))
