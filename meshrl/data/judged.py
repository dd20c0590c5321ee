"""Answers that were judged one by one, good or bad: a sequence each, and one that answers the prompt of another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.preferences import PreferenceDataConfig
from meshrl.data.demonstrations import encode_conversation, fitted, padded, with_answer
from meshrl.data.encoding import RowError, encode_prompt, is_chat, shown
from meshrl.data.files import Row, read_rows
from meshrl.data.pairs import Tokens, ended, prompt_of, turns_before
from meshrl.data.proto import DataProto
from meshrl.data.sampling import chosen_rows

# The column of judgements, and what the columns of answers to other prompts begin with.
GOOD, OTHER = "good", "other_"


class JudgedDataset:
    """Answers as texts after a prompt, or as messages that follow it, each with a label: good or bad."""

    def __init__(self, files: Sequence[str], tokenizer: Tokenizer, config: PreferenceDataConfig, max_samples: int = -1):
        """`max_samples` are taken of the rows (-1: all)."""
        self.tokenizer, self.config = tokenizer, config
        self.truncated = 0
        self.answers: list[Tokens] = []
        good: list[bool] = []
        wanted = (config.prompt_key, config.response_key, config.label_key)
        rows = [(file, number, row) for file in files for number, row in enumerate(read_rows([file], required=wanted))]
        for place in chosen_rows(len(rows), max_samples, config.shuffle, config.seed or 0):
            file, number, row = rows[place]
            try:
                good.append(self._label(row, number))
                self.answers.append(self._answer(row, number))
            except RowError as error:
                raise error.at(file, number) from error
        self.good = torch.tensor(good, dtype=torch.bool)
        self.others = next_of_another_prompt([ids[: learn.argmax()].tobytes() for ids, learn in self.answers])
        if self.answers and self.others is None:
            raise ValueError(
                f"all answers of {', '.join(files)} have the same prompt: the loss compares them with what the policy "
                "thinks of answers to other prompts, and needs two"
            )

    def __len__(self) -> int:
        return len(self.answers)

    def remarks(self) -> list[str]:
        """What became of rows that could not be taken as they are, and of what there is too much."""
        remarks = [f"{self.truncated} of {len(self)} answers truncated"] if self.truncated else []
        if len(set(self.good.tolist())) == 1:
            remarks.append(f"all {len(self)} answers are {'good' if self.good[0] else 'bad'}")
        return remarks

    def _label(self, row: Row, number: int) -> bool:
        key = self.config.label_key
        label = row.get(key)
        if isinstance(label, (bool, np.bool_)) or (isinstance(label, (int, float)) and label in (0, 1)):
            return bool(label)
        raise RowError(number, f"the label {key!r} must be true or false, 1 or 0, got {shown(label)}")

    def _answer(self, row: Row, number: int) -> Tokens:
        config, answer = self.config, row.get(self.config.response_key)
        kwargs = config.apply_chat_template_kwargs
        if isinstance(answer, str):
            asked = prompt_of(row, config, number)
            prompt = encode_prompt(self.tokenizer, asked, number, template_kwargs=kwargs)
            ids, learn = with_answer(self.tokenizer, prompt, answer, number)
        elif answer is not None and is_chat(answer) and answer[0]["role"] == "assistant":
            before = turns_before(row, config, number)
            turns = [*before, *answer]
            ids, learn = encode_conversation(self.tokenizer, turns, number, kwargs, first=len(before))
            ids, learn = ended(ids, learn, self.tokenizer.eos_token_id)
        else:
            raise RowError(
                number,
                f"the answer must be a text or a list of messages that begins with the assistant: {shown(answer)}",
            )
        self.truncated += len(ids) > config.max_length
        return fitted(ids, learn, number, config, "prompt with its answer")

    def _other(self, number: int) -> Tokens:
        """An answer to another prompt in the place of this row's own, within `data.max_length`."""
        assert self.others is not None
        (ids, learn), (theirs, their_learn) = self.answers[number], self.answers[self.others[number]]
        start, from_there = learn.argmax(), their_learn.argmax()
        ids = np.concatenate([ids[:start], theirs[from_there:]])[: self.config.max_length]
        return ids, np.concatenate([learn[:start], their_learn[from_there:]])[: self.config.max_length]

    def batch(self, numbers: np.ndarray) -> DataProto:
        """The answers with these numbers, whether they are good, and in `other_` columns answers to other prompts."""
        own, others = ([take(n) for n in numbers] for take in (self.answers.__getitem__, self._other))
        pad = self.tokenizer.pad_token_id
        columns = padded(own, pad) | {f"{OTHER}{name}": column for name, column in padded(others, pad).items()}
        return DataProto.from_dict(columns | {GOOD: self.good[numbers]})


def next_of_another_prompt(prompts: Sequence[bytes]) -> list[int] | None:
    """For each row the next one, around the end, with another prompt; None where there is no other."""
    if len(set(prompts)) < 2:
        return None
    found = [0] * len(prompts)
    found[-1] = next(at for at, prompt in enumerate(prompts) if prompt != prompts[-1])
    for at in range(len(prompts) - 2, -1, -1):
        found[at] = found[at + 1] if prompts[at] == prompts[at + 1] else at + 1
    return found
