"""Prompts that are read, shuffled and tokenized as they are needed: the data never lies in memory as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.data import DataConfig
from meshrl.config.names import count
from meshrl.data.encoding import RowError, encode_prompt
from meshrl.data.files import Row, stream_rows
from meshrl.data.images import PromptImages, check_no_images
from meshrl.data.mixing import Shares
from meshrl.data.prompts import Prompt, fit_prompt, prompt_batch
from meshrl.data.proto import DataProto
from meshrl.data.sampling import RowOrder

T = TypeVar("T")
# A row with its file and its number in it.
Placed = tuple[str, int, Row]

# A stream without end must not be searched without end for a prompt that fits.
MOST_DROPPED = 100_000


class PromptStream(RowOrder):
    """Batches of prompts from files that are read on the way; both the order of the rows and the rows themselves.

    An epoch is one pass over all files, each row once; with weights there is one endless epoch in which every file
    begins anew when it ends. Shuffling draws from a buffer of `data.shuffle_buffer` rows. A resumed run reads up to
    where the earlier one stood.
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
        self._before_epoch = 0, 0  # what was dropped and truncated in earlier epochs
        self._window: dict[int, Prompt] = {}

    def __len__(self) -> int:
        """0: how many rows there are is not known."""
        return 0

    @property
    def batches_per_epoch(self) -> int:
        return 0

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            # what is passed over is counted again
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
        """The prompts of the batch that was given out last."""
        prompts = [self._window[int(number)] for number in numbers]
        return prompt_batch(prompts, numbers, self.tokenizer, self.config, self.images)

    def metrics(self) -> dict[str, float]:
        return {"data/dropped_prompts": self.dropped, "data/truncated_prompts": self.truncated}

    def _prompts(self) -> Iterator[Prompt]:
        if not self.config.train_weights:
            return self._fitting(self._all_files())
        # tokenized before they are mixed: what is dropped must not count as a part of its file's share
        sources = [self._fitting(self._endless(at)) for at in range(len(self.files))]
        return mixed(sources, self.config.train_weights)

    def _fitting(self, rows: Iterator[Placed]) -> Iterator[Prompt]:
        """What is left of the rows after tokenizing."""
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
    """Every row once, each drawn from a buffer of the next ones."""
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
    """What several endless sources give, in the shares of their weights."""
    shares = Shares(weights)
    while True:
        yield next(sources[shares.next()])


def _take(items: Iterator[tuple[int, Prompt]], count: int) -> list[tuple[int, Prompt]]:
    return list(itertools.islice(items, count))
