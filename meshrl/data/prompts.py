"""Prompts for RL, tokenized and batched into a DataProto with padding on the left.

* `PromptDataset`: all prompts are read and tokenized at the start.
* `PromptStream`: prompts are read, shuffled and tokenized when they are needed.
* `custom_rows`: rows from a class of the user.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.data import DataConfig
from meshrl.config.keys import count
from meshrl.config.user_code import load_function
from meshrl.data.batch import DataProto, object_array
from meshrl.data.prompt_images import PromptImages, check_no_images
from meshrl.data.row_files import Row, read_rows, stream_rows
from meshrl.data.sampling import RowOrder, Shares, chosen_rows
from meshrl.data.tokenize import OnProgress, RowError, encode_in_processes, encode_prompt, encode_prompts

# The number of prompts that are tokenized together.
AT_ONCE = 256
# A row and its prompt's token ids.
Prompt = tuple[Row, np.ndarray]


class PromptDataset:
    """All prompts of the files as token ids.

    Prompts that are too long are cut or left out. `truncated` and `dropped` count them.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: Tokenizer,
        config: DataConfig,
        tools: list[dict[str, Any]] | None = None,
        on_progress: OnProgress | None = None,
        max_samples: int = -1,
        images: PromptImages | None = None,
    ):
        """Read the files and tokenize all of their prompts.

        `tools` are the schemas of tools for the chat template. `on_progress` is called with the number of tokenized
        prompts and the number of all prompts. At most `max_samples` rows are used (-1: all). `images` is given for a
        vision-language model.
        """
        self.tokenizer, self.config, self.images = tokenizer, config, images
        self.dropped = self.truncated = 0
        self.rows: list[Row] = []
        self.prompts: list[np.ndarray] = []
        if config.custom_cls.path is not None:
            sources = [custom_rows(files, tokenizer, config)]
        else:
            sources = [read_rows([file], required=(config.prompt_key,)) for file in files]
        rows = [row for source in sources for row in source]
        source_of = np.repeat(np.arange(len(sources)), [len(source) for source in sources])
        chosen = chosen_rows(len(rows), max_samples, config.shuffle, config.seed or 0)
        rows, first_of = [rows[number] for number in chosen], np.searchsorted(source_of, np.arange(len(sources)))
        try:
            kept = self._take(rows, self._encoded(rows, tools, on_progress))
        except RowError as error:
            number = chosen[error.number]
            if config.custom_cls.path is not None:
                raise ValueError(f"row {number + 1} of {config.custom_cls.name}: {error.words}") from error
            source = source_of[number]
            raise error.at(files[source], int(number - first_of[source])) from error
        if not self.rows:
            raise ValueError(
                f"no prompt of {count(len(rows), 'row')} is left within "
                f"data.max_prompt_length={config.max_prompt_length}"
            )
        # The index of each row's file, `[rows]`.
        self.source_of_row = source_of[chosen][kept]

    def __len__(self) -> int:
        return len(self.rows)

    def _take(self, rows: Sequence[Row], encoded: Iterable[np.ndarray]) -> list[int]:
        """Keep the rows whose prompts fit into `max_prompt_length`. Return their numbers."""
        kept = []
        for number, ids in enumerate(encoded):
            if self.images is not None:
                ids = self.images.expanded(ids, self.images.of(rows[number], number), number)
            fitting = fit_prompt(ids, number, self.config, self.images)
            if fitting is None:
                self.dropped += 1
                continue
            self.truncated += len(fitting) < len(ids)
            self.rows.append(rows[number])
            self.prompts.append(fitting)
            kept.append(number)
        return kept

    def _encoded(
        self, rows: Sequence[Row], tools: list[dict[str, Any]] | None, on_progress: OnProgress | None
    ) -> Iterable[np.ndarray]:
        prompts = [row[self.config.prompt_key] for row in rows]
        if self.images is not None:
            prompts = [self.images.with_places(prompt) for prompt in prompts]
        elif self.config.image_key is not None:
            check_no_images(rows, self.config.image_key)
        processes = self.config.filter_overlong_prompts_workers
        if processes > 1:
            kwargs = self.config.apply_chat_template_kwargs
            return encode_in_processes(self.tokenizer, prompts, tools, processes, on_progress, kwargs)
        return self._encoded_here(prompts, tools, on_progress)

    def _encoded_here(
        self, prompts: Sequence[Any], tools: list[dict[str, Any]] | None, on_progress: OnProgress | None
    ) -> Iterator[np.ndarray]:
        for start in range(0, len(prompts), AT_ONCE):
            part = prompts[start : start + AT_ONCE]
            yield from encode_prompts(self.tokenizer, part, start, tools, self.config.apply_chat_template_kwargs)
            if on_progress is not None:
                on_progress(start + len(part), len(prompts))

    def batch(self, numbers: np.ndarray) -> DataProto:
        """Return a batch of the prompts with these row numbers, padded on the left to the longest prompt."""
        prompts = [(self.rows[i], self.prompts[i]) for i in numbers]
        return prompt_batch(prompts, numbers, self.tokenizer, self.config, self.images)


def fit_prompt(
    ids: np.ndarray, number: int, config: DataConfig, images: PromptImages | None = None
) -> np.ndarray | None:
    """Return a prompt within `data.max_prompt_length`, cut if `data.truncation` permits it.

    The result is None if the prompt is to be left out. Raise `RowError` for a prompt that may not be cut.
    """
    limit = config.max_prompt_length
    if len(ids) <= limit:
        return ids
    if config.filter_overlong_prompts:
        return None
    if config.truncation == "error":
        raise RowError(
            number,
            f"the prompt has {len(ids)} tokens, more than data.max_prompt_length={limit}: raise it, or set "
            "data.filter_overlong_prompts=true or data.truncation=left|right|middle",
        )
    if images is not None and (ids == images.image_token).any():
        raise RowError(
            number,
            f"the prompt has {len(ids)} tokens, more than data.max_prompt_length={limit}, and one with images cannot "
            "be cut: raise it, or set data.filter_overlong_prompts=true",
        )
    return truncate(ids, limit, config.truncation)


def prompt_batch(
    prompts: Sequence[Prompt],
    numbers: np.ndarray,
    tokenizer: Tokenizer,
    config: DataConfig,
    images: PromptImages | None = None,
) -> DataProto:
    """Make a batch of prompts, padded on the left to the longest, with the other columns of their rows.

    `numbers` are the row numbers, which become part of the `uid` of each prompt. The tensors are `input_ids` and
    `attention_mask`, both `[prompts, width]`.
    """
    width = max(len(ids) for _, ids in prompts)
    tokens = np.full((len(prompts), width), tokenizer.pad_token_id, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, (_, ids) in enumerate(prompts):
        tokens[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = 1
    rows = [row for row, _ in prompts]
    seen = {} if images is None else images.column(zip(rows, numbers.tolist(), strict=True))
    return DataProto.from_dict(
        tensors={"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask)},
        non_tensors={
            "uid": object_array([f"row-{i}-{at}" for at, i in enumerate(numbers)]),
            "data_source": object_array([row.get(config.reward_fn_key, "unknown") for row in rows]),
            "raw_prompt": object_array([row[config.prompt_key] for row in rows]),
            "ground_truth": object_array([ground_truth(row) for row in rows]),
            "extra_info": object_array([row.get("extra_info") or {} for row in rows]),
            **seen,
        },
    )


def ground_truth(row: Row) -> Any:
    """Return a row's reference answer: `reward_model.ground_truth` as in verl's files, `ground_truth` or `answer`."""
    nested = row.get("reward_model")
    if isinstance(nested, dict) and "ground_truth" in nested:
        return nested["ground_truth"]
    return row.get("ground_truth", row.get("answer"))


def truncate(ids: np.ndarray, limit: int, where: str) -> np.ndarray:
    """Cut to `limit` tokens. `left` keeps the end, `right` keeps the beginning, and `middle` keeps both ends."""
    if where == "left":
        return ids[-limit:]
    if where == "right":
        return ids[:limit]
    head = limit // 2
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])


# Streaming: prompts are read, shuffled and tokenized when they are needed. The whole data is never in memory.

T = TypeVar("T")
# A row with its file and its number in that file.
Placed = tuple[str, int, Row]

# The number of dropped prompts in a row after which an endless stream gives up the search for a prompt that fits.
MOST_DROPPED = 100_000


class PromptStream(RowOrder):
    """A stream of batches of prompts, which is both the order of the rows and the dataset of the rows.

    An epoch is one pass over all files, with each row once. With weights there is one endless epoch, in which every
    file starts again when it ends. Shuffling draws from a buffer of `data.shuffle_buffer` rows. A resumed run reads
    the data again up to its position.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: Tokenizer,
        config: DataConfig,
        batch_size: int,
        seed: int,
        tools: list[dict[str, Any]] | None = None,
        images: PromptImages | None = None,
    ):
        self.files, self.tokenizer, self.config, self.tools = list(files), tokenizer, config, tools
        self.images = images
        self.batch_size, self.seed = batch_size, seed
        self.dropped = self.truncated = 0
        self.epoch = self.position = 0
        self._before_epoch = 0, 0  # the numbers of dropped and truncated prompts in earlier epochs
        self._window: dict[int, Prompt] = {}

    def __len__(self) -> int:
        """Return 0, because the number of rows is not known."""
        return 0

    @property
    def batches_per_epoch(self) -> int:
        return 0

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            # Skipped prompts are counted again, so that the counts begin with those of earlier epochs.
            self.dropped, self.truncated = self._before_epoch
            passed_over, prompts = self.position, enumerate(self._prompts())
            for _ in range(passed_over):
                next(prompts, None)
            while len(batch := _take(prompts, self.batch_size)) == self.batch_size:
                self._window = dict(batch)
                self.position += self.batch_size
                yield np.array(list(self._window))
            if self.position == 0:
                raise ValueError(
                    f"a pass over data.train_files gives {count(len(batch), 'prompt')}, fewer than one batch of "
                    f"{self.batch_size} ({self.dropped} were dropped as too long): add data or lower the batch size"
                )
            self.epoch, self.position = self.epoch + 1, 0
            self._before_epoch = self.dropped, self.truncated

    def state_dict(self) -> dict[str, Any]:
        dropped, truncated = self._before_epoch
        return super().state_dict() | {"dropped_before": dropped, "truncated_before": truncated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._before_epoch = state.get("dropped_before", 0), state.get("truncated_before", 0)

    def batch(self, numbers: np.ndarray) -> DataProto:
        """Return the batch of prompts with these numbers, which must be those of the last yielded batch."""
        prompts = [self._window[int(number)] for number in numbers]
        return prompt_batch(prompts, numbers, self.tokenizer, self.config, self.images)

    def metrics(self) -> dict[str, float]:
        return {"data/dropped_prompts": self.dropped, "data/truncated_prompts": self.truncated}

    def _prompts(self) -> Iterator[Prompt]:
        if not self.config.train_weights:
            return self._fitting(self._all_files())
        # Prompts are tokenized before files are mixed, so that dropped prompts do not count in their file's share.
        sources = [self._fitting(self._endless(at)) for at in range(len(self.files))]
        return mixed(sources, self.config.train_weights)

    def _fitting(self, rows: Iterator[Placed]) -> Iterator[Prompt]:
        """Tokenize the rows and yield the prompts that fit. Raise `ValueError` if too many in a row are dropped."""
        in_a_row = 0
        for file, number, row in rows:
            kwargs = self.config.apply_chat_template_kwargs
            try:
                prompt = row[self.config.prompt_key]
                if self.images is not None:
                    prompt = self.images.with_places(prompt)
                elif self.config.image_key is not None:
                    check_no_images([row], self.config.image_key, number)
                ids = encode_prompt(self.tokenizer, prompt, number, self.tools, kwargs)
                if self.images is not None:
                    ids = self.images.expanded(ids, self.images.of(row, number), number)
                fitting = fit_prompt(ids, number, self.config, self.images)
            except RowError as error:
                raise error.at(file, number) from error
            if fitting is None:
                self.dropped, in_a_row = self.dropped + 1, in_a_row + 1
                if in_a_row == MOST_DROPPED:
                    raise ValueError(
                        f"the last {in_a_row} prompts were all over data.max_prompt_length="
                        f"{self.config.max_prompt_length}: raise it, or look at the data"
                    )
                continue
            in_a_row = 0
            self.truncated += len(fitting) < len(ids)
            yield row, fitting

    def _all_files(self) -> Iterator[Placed]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(len(self.files)) if self.config.shuffle else np.arange(len(self.files))
        rows = (placed for at in order for placed in self._rows_of(at))
        return shuffled(rows, self.config.shuffle_buffer, rng) if self.config.shuffle else rows

    def _endless(self, at: int) -> Iterator[Placed]:
        epoch = 0
        while True:
            rows = self._rows_of(at)
            if self.config.shuffle:
                rows = shuffled(rows, self.config.shuffle_buffer, np.random.default_rng((self.seed, epoch, at)))
            yield from rows
            epoch += 1

    def _rows_of(self, at: int) -> Iterator[Placed]:
        file = self.files[at]
        return ((file, number, row) for number, row in enumerate(stream_rows(file, (self.config.prompt_key,))))


def shuffled(rows: Iterable[T], buffer_size: int, rng: np.random.Generator) -> Iterator[T]:
    """Yield every row once, drawn at random from a buffer of the next `buffer_size` rows."""
    buffer: list[T] = []
    for row in rows:
        if len(buffer) < buffer_size:
            buffer.append(row)
            continue
        at = int(rng.integers(buffer_size))
        yield buffer[at]
        buffer[at] = row
    for at in rng.permutation(len(buffer)):
        yield buffer[at]


def mixed(sources: Sequence[Iterator[T]], weights: Sequence[float]) -> Iterator[T]:
    """Yield items of several endless sources, in shares that are proportional to `weights`."""
    shares = Shares(weights)
    while True:
        yield next(sources[shares.next()])


def _take(items: Iterator[tuple[int, Prompt]], count: int) -> list[tuple[int, Prompt]]:
    return list(itertools.islice(items, count))


# Rows from a class of the user instead of files.


def custom_rows(files: Sequence[str], tokenizer: Tokenizer, config: DataConfig) -> list[Row]:
    """Read all rows of the class `data.custom_cls`, which is instantiated with these arguments.

    The instance has a length and returns a row for each number. A row is a mapping like a line of a data file, with the
    prompt and the columns that the reward function needs.
    """
    name = config.custom_cls.name or ""
    make = load_function(config.custom_cls.path or "", name)
    try:
        dataset = make(list(files), tokenizer, config)
        rows = [dataset[number] for number in range(len(dataset))]
    except Exception as error:  # the error is in the user's code, whose traceback is worth seeing
        raise RuntimeError(f"data.custom_cls: {name} failed: {type(error).__name__}: {error}") from error
    if not rows:
        raise ValueError(f"data.custom_cls: {name} has no rows for {list(files)}")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or row.get(config.prompt_key) is None:
            has = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            raise ValueError(
                f"data.custom_cls: row {number + 1} of {name} must be a mapping with {config.prompt_key!r} (a text, or "
                f"chat messages): it has {has or 'nothing'}"
            )
    return [dict(row) for row in rows]
