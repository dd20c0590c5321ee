"""Datasets for supervised training: whole sequences with a mask over the tokens to learn.

* `DemonstrationDataset`: demonstrations for supervised fine-tuning.
* `PairDataset`: chosen and rejected answers to one prompt, for preference losses and reward models.
* `JudgedDataset`: answers with single labels, for KTO.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.supervised import PreferenceDataConfig, SequenceDataConfig, SFTDataConfig
from meshrl.data.batch import DataProto
from meshrl.data.prompt_images import PromptImages, check_no_images
from meshrl.data.prompts import truncate
from meshrl.data.row_files import Row, read_rows
from meshrl.data.sampling import chosen_rows
from meshrl.data.tokenize import RowError, encode_prompt, is_chat, render_chat, shown


class DemonstrationDataset:
    """Demonstrations as token ids: prompts with responses, or whole conversations.

    Only responses and assistant turns are learned.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: Tokenizer,
        config: SFTDataConfig,
        max_samples: int = -1,
        images: PromptImages | None = None,
    ):
        """Read the files and tokenize all of their demonstrations.

        At most `max_samples` rows are used (-1: all). `images` is given for a vision-language model.
        """
        self.tokenizer, self.config, self.images = tokenizer, config, images
        wanted = (config.messages_key,) if config.messages_key else (config.prompt_key, config.response_key)
        self.truncated = 0
        self.sequences: list[tuple[np.ndarray, np.ndarray]] = []
        self.images_of: list[tuple[Row, int]] = []  # for each sequence: its column of images, and its row number
        rows = [(file, number, row) for file in files for number, row in enumerate(read_rows([file], required=wanted))]
        for place in chosen_rows(len(rows), max_samples, config.shuffle, config.seed or 0):
            file, number, row = rows[place]
            self.sequences.append(self._sequence(row, number, file))
            if self.images is not None:
                key = self.config.image_key
                self.images_of.append(({} if key is None else {key: row.get(key)}, number))

    def __len__(self) -> int:
        return len(self.sequences)

    def remarks(self) -> list[str]:
        """Return a remark on the number of truncated sequences, if there are any."""
        return [f"{self.truncated} of {len(self)} sequences truncated"] if self.truncated else []

    def _sequence(self, row: Row, number: int, file: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a row's token ids and the mask of those to learn, both `[tokens]`.

        Raise `ValueError` with the file and the row if the row cannot be used.
        """
        try:
            if self.images is None:
                if self.config.image_key is not None:
                    check_no_images([row], self.config.image_key, number)
                return self._fit(*self._encode(row, number), number)
            ids, learn = self._encode(row, number)
            times = self.images.times(ids, self.images.of(row, number), number)
            learn &= ids != self.images.image_token
            return self._fit(np.repeat(ids, times), np.repeat(learn, times), number)
        except RowError as error:
            raise error.at(file, number) from error

    def _with_places(self, text: Any) -> Any:
        return text if self.images is None else self.images.with_places(text)

    def _encode(self, row: Row, number: int) -> tuple[np.ndarray, np.ndarray]:
        config = self.config
        kwargs, tools = template_variables(row, config, number), row_tools(row, config, number)
        if config.messages_key:
            messages = self._with_places(row[config.messages_key])
            return encode_conversation(self.tokenizer, messages, number, kwargs, tools=tools)
        asked = self._with_places(inside(row[config.prompt_key], config.prompt_dict_keys, number, config.prompt_key))
        if config.prompt_as_message and isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]
        prompt = encode_prompt(self.tokenizer, asked, number, tools, template_kwargs=kwargs)
        answer = inside(row[config.response_key], config.response_dict_keys, number, config.response_key)
        return with_answer(self.tokenizer, prompt, answer, number)

    def _fit(self, ids: np.ndarray, learn: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        limit = self.config.max_length
        if self.config.truncation != "error" and len(ids) > limit:
            if self.images is not None and (ids == self.images.image_token).any():
                raise RowError(
                    number,
                    f"the demonstration has {len(ids)} tokens, more than data.max_length={limit}, and one with images "
                    "cannot be cut: raise it, or leave the row out",
                )
            self.truncated += 1
        return fitted(ids, learn, number, self.config, "demonstration")

    def batch(self, numbers: np.ndarray) -> DataProto:
        """Return a batch of the sequences with these numbers, padded on the right.

        `response_mask` `[sequences, width]` marks the tokens to learn.
        """
        made = padded([self.sequences[i] for i in numbers], self.tokenizer.pad_token_id)
        seen = {} if self.images is None else self.images.column(self.images_of[i] for i in numbers)
        return DataProto.from_dict(made, seen)


def inside(value: Any, keys: Sequence[str], number: int, column: str) -> Any:
    """Return a column's value, or the value that is nested in it under the keys. Raise `RowError` if a key is missing.

    A list of one entry is replaced by its entry.
    """
    for at, key in enumerate(keys):
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not isinstance(value, Mapping) or key not in value:
            where, has = ".".join([column, *keys[:at]]), sorted(value) if isinstance(value, Mapping) else shown(value)
            raise RowError(number, f"there is no {key!r} in {where!r}: it has {has}")
        value = value[key]
    return value


def row_tools(row: Row, config: SFTDataConfig, number: int) -> list[dict[str, Any]] | None:
    """Return the schemas of a row's tools (given as a list or as JSON), or None if it has no tools."""
    found = None if config.tools_key is None else row.get(config.tools_key)
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except ValueError as error:
            raise RowError(number, f"data.tools_key={config.tools_key}: not JSON ({error}): {shown(found)}") from error
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise RowError(number, f"data.tools_key={config.tools_key}: it must be a list of schemas, got {shown(found)}")
    return [dict(tool) for tool in found]


def template_variables(row: Row, config: SFTDataConfig, number: int) -> dict[str, Any]:
    """Return the variables for the chat template: those of the config, and `enable_thinking` from the row."""
    thinks = None if config.enable_thinking_key is None else row.get(config.enable_thinking_key)
    if thinks is None:
        return config.apply_chat_template_kwargs
    if not isinstance(thinks, bool):
        raise RowError(
            number, f"data.enable_thinking_key={config.enable_thinking_key}: not true or false: {shown(thinks)}"
        )
    return {**config.apply_chat_template_kwargs, "enable_thinking": thinks}


def with_answer(
    tokenizer: Tokenizer, prompt: np.ndarray, answer: object, number: int, what: str = "response"
) -> tuple[np.ndarray, np.ndarray]:
    """Append an answer and the end token to a prompt's token ids.

    Return the ids and the mask of the tokens to learn, both `[tokens]`. `what` names the answer in error messages.
    """
    if not isinstance(answer, str):
        raise RowError(number, f"the {what} must be a string, got {shown(answer)}")
    try:
        told = tokenizer(answer, add_special_tokens=False)["input_ids"]
    except TypeError as error:  # half of a surrogate pair
        raise RowError(number, f"the {what} cannot be tokenized ({error}): {shown(answer)}") from error
    ids = np.concatenate([prompt, np.asarray([*told, tokenizer.eos_token_id], dtype=np.int64)])
    return ids, np.arange(len(ids)) >= len(prompt)


def fitted(
    ids: np.ndarray, learn: np.ndarray, number: int, config: SequenceDataConfig, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a sequence and its mask within `data.max_length`, cut if `data.truncation` permits it.

    Raise `RowError` if the sequence may not be cut, or has no token left to learn.
    """
    limit, where = config.max_length, config.truncation
    if len(ids) > limit:
        if where == "error":
            raise RowError(
                number,
                f"the {what} has {len(ids)} tokens, more than data.max_length={limit}: raise it or set "
                "data.truncation=left|right",
            )
        ids, learn = truncate(ids, limit, where), truncate(learn, limit, where)
    if not learn[1:].any():
        longer = "raise data.max_length, set data.truncation=left to keep the row's end, or "
        raise RowError(
            number,
            f"the {what} has no token left to learn within data.max_length={limit} "
            f"(data.truncation={where}): {longer if len(ids) == limit else ''}leave the row out",
        )
    return ids, learn


def padded(sequences: Sequence[tuple[np.ndarray, np.ndarray]], pad_token: int) -> dict[str, torch.Tensor]:
    """Stack sequences, padded on the right, to tensors `[sequences, width]`.

    `response_mask` marks the tokens to learn.
    """
    shape = len(sequences), max(len(ids) for ids, _ in sequences)
    tokens = np.full(shape, pad_token, dtype=np.int64)
    mask, learned = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, (ids, learn) in enumerate(sequences):
        tokens[row, : len(ids)], mask[row, : len(ids)], learned[row, : len(ids)] = ids, 1, learn
    learned[:, 0] = 0  # no output predicts the first token
    names = ("input_ids", "attention_mask", "response_mask")
    return {n: torch.from_numpy(x) for n, x in zip(names, (tokens, mask, learned), strict=True)}


def encode_conversation(
    tokenizer: Tokenizer,
    messages: object,
    number: int,
    template_kwargs: Mapping[str, Any] | None = None,
    first: int = 0,
    tools: list[dict[str, Any]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a conversation's token ids and the mask of its assistant turns, both `[tokens]`.

    The turns are found by rendering the conversation turn by turn. Turns with a number below `first` are not learned.
    """
    if not isinstance(messages, list) or not is_chat(messages):
        raise RowError(
            number, f"the demonstration must be a list of messages with role and content, got {shown(messages)}"
        )
    if messages[0]["role"] == "assistant":
        raise RowError(number, "the demonstration begins with the assistant: it needs a turn to answer to")
    try:
        return _assistant_turns(tokenizer, messages, number, template_kwargs, first, tools)
    except (TypeError, TemplateError) as error:
        raise RowError(number, f"the demonstration cannot be tokenized: {error}") from error


def _assistant_turns(
    tokenizer: Tokenizer,
    messages: list[Any],
    number: int,
    template_kwargs: Mapping[str, Any] | None,
    first: int,
    tools: list[dict[str, Any]] | None,
) -> tuple[np.ndarray, np.ndarray]:
    def render(turns: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        return render_chat(tokenizer, turns, add_generation_prompt, tools, template_kwargs=template_kwargs)

    whole = render(messages, add_generation_prompt=False)
    learn = np.zeros(len(whole), dtype=bool)
    for turn, message in enumerate(messages):
        if turn < first or message["role"] != "assistant":
            continue
        before = render(messages[:turn], add_generation_prompt=True)
        after = render(messages[: turn + 1], add_generation_prompt=False)
        if whole[: len(before)] != before or whole[: len(after)] != after:
            raise RowError(
                number,
                f"turn {turn + 1}: the chat template renders earlier turns differently once later ones follow, so the "
                "assistant's tokens cannot be told apart: use prompt and response columns instead",
            )
        learn[len(before) : len(after)] = True
    return np.asarray(whole, dtype=np.int64), learn


# Pairs of a chosen and a rejected answer to one prompt: two sequences each, with masks over the answers.

# The token ids of a sequence, and the mask of the answer's tokens.
Tokens = tuple[np.ndarray, np.ndarray]


class PairDataset:
    """Pairs of a chosen and a rejected answer.

    An answer is a text after the prompt, a list of messages after the prompt's, or a whole conversation. Pairs whose
    sequences are equal are left out and counted.
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
                self.equal += 1  # nothing can be learned from equal answers
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
        """Return remarks on the numbers of truncated pairs and of pairs that were left out, if there are any."""
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
        """Tokenize two answers that are messages, as whole conversations. Their common first turns are the prompt."""
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
        shared = shared if after else 0  # equal conversations are left out later, by their token ids
        end = self.tokenizer.eos_token_id
        return [ended(*encode_conversation(self.tokenizer, turns, number, kwargs, shared), end) for turns in whole]

    def batch(self, numbers: np.ndarray) -> DataProto:
        """Return a batch of the pairs with these numbers, with chosen and rejected answers in alternating rows.

        `response_mask` `[2 * pairs, width]` marks the answers.
        """
        picked = [self.pairs[2 * number + which] for number in numbers for which in (0, 1)]
        return DataProto.from_dict(padded(picked, self.tokenizer.pad_token_id))


def prompt_of(row: Row, config: PreferenceDataConfig, number: int) -> Any:
    """Return the row's prompt. Raise `RowError` if the row has none."""
    key = config.prompt_key
    if row.get(key) is None:
        raise RowError(number, f"the answers need a prompt, and there is no {key!r}: name its column (data.prompt_key)")
    return row[key]


def turns_before(row: Row, config: PreferenceDataConfig, number: int) -> list[dict[str, Any]]:
    """Return the row's prompt as a list of messages. A text becomes a message of the user."""
    before = prompt_of(row, config, number)
    before = [{"role": "user", "content": before}] if isinstance(before, str) else before
    if not is_chat(before):
        raise RowError(
            number, f"the prompt must be a string or a list of messages with role and content, got {shown(before)}"
        )
    return list(before)


def ended(ids: np.ndarray, learn: np.ndarray, end_token: int) -> Tokens:
    """Remove the text that a chat template writes after the end token of a turn, as a policy would end its answers.

    In inner turns such tokens are only unmarked. After the last answer they are cut off.
    """
    if not learn.any():
        return ids, learn
    begins = np.flatnonzero(learn & ~np.r_[False, learn[:-1]])
    ends = (ids == end_token) & learn
    so_far = np.cumsum(ends) - ends  # the number of end tokens before each token
    at = np.searchsorted(begins, np.arange(len(ids)), side="right") - 1
    is_tail = learn & (so_far > so_far[begins[np.maximum(at, 0)]])
    learn = learn & ~is_tail
    last = int(np.flatnonzero(learn)[-1]) + 1
    return ids[:last], learn[:last]


# Answers with single labels, good or bad (KTO): a sequence for each answer, and one with an answer to another prompt.

# The column of labels, and the prefix of the columns with answers to other prompts.
GOOD, OTHER = "good", "other_"


class JudgedDataset:
    """Answers with labels (good or bad) for KTO. An answer is a text or a list of messages after the prompt."""

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
        """Return remarks on the number of truncated answers, and on labels that are all good or all bad."""
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
        """Return the row's prompt with an answer to another prompt, cut to `data.max_length`."""
        assert self.others is not None
        (ids, learn), (theirs, their_learn) = self.answers[number], self.answers[self.others[number]]
        start, from_there = learn.argmax(), their_learn.argmax()
        ids = np.concatenate([ids[:start], theirs[from_there:]])[: self.config.max_length]
        return ids, np.concatenate([learn[:start], their_learn[from_there:]])[: self.config.max_length]

    def batch(self, numbers: np.ndarray) -> DataProto:
        """Return a batch of the answers with these numbers and their labels.

        Columns with the prefix `other_` have the same prompts with answers to other prompts.
        """
        own, others = ([take(n) for n in numbers] for take in (self.answers.__getitem__, self._other))
        pad = self.tokenizer.pad_token_id
        columns = padded(own, pad) | {f"{OTHER}{name}": column for name, column in padded(others, pad).items()}
        return DataProto.from_dict(columns | {GOOD: self.good[numbers]})


def next_of_another_prompt(prompts: Sequence[bytes]) -> list[int] | None:
    """Return for each row the next row with another prompt, cyclically, or None if all prompts are equal."""
    if len(set(prompts)) < 2:
        return None
    found = [0] * len(prompts)
    found[-1] = next(at for at, prompt in enumerate(prompts) if prompt != prompts[-1])
    for at in range(len(prompts) - 2, -1, -1):
        found[at] = found[at + 1] if prompts[at] == prompts[at + 1] else at + 1
    return found
