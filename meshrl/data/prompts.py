"""Prompts for RL: rows with a prompt, tokenized once, batched into a DataProto padded on the left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.data import DataConfig
from meshrl.config.names import count
from meshrl.data.custom import custom_rows
from meshrl.data.encoding import RowError, encode_prompts
from meshrl.data.encoding_pool import OnProgress, encode_in_processes
from meshrl.data.files import Row, read_rows
from meshrl.data.images import PromptImages, check_no_images
from meshrl.data.proto import DataProto, object_array
from meshrl.data.sampling import chosen_rows

# How many prompts are tokenized together.
AT_ONCE = 256
# A row and its prompt's token ids.
Prompt = tuple[Row, np.ndarray]


class PromptDataset:
    """Every prompt of the files as token ids; too long ones are cut or left out, as `truncated` and `dropped` count."""

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
        """`tools` are the schemas of tools that the chat template tells the model about.

        `on_progress` hears how many of how many prompts are tokenized; `max_samples` are taken of the rows (-1: all).
        `images` finds those of the rows, for a model that sees.
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
        # Which of the files each row comes from.
        self.source_of_row = source_of[chosen][kept]

    def __len__(self) -> int:
        return len(self.rows)

    def _take(self, rows: Sequence[Row], encoded: Iterable[np.ndarray]) -> list[int]:
        """Keeps the rows whose prompts fit; returns their numbers."""
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
        """The prompts with these row numbers, padded on the left to the longest of them."""
        prompts = [(self.rows[i], self.prompts[i]) for i in numbers]
        return prompt_batch(prompts, numbers, self.tokenizer, self.config, self.images)


def fit_prompt(
    ids: np.ndarray, number: int, config: DataConfig, images: PromptImages | None = None
) -> np.ndarray | None:
    """A prompt within `data.max_prompt_length`, cut if that is asked for; None if it is to be left out."""
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
    """Prompts and what else their rows say, padded on the left to the longest; `numbers` name them."""
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
    """The reference answer: `reward_model.ground_truth` as in verl's files, or a plain `ground_truth` or `answer`."""
    nested = row.get("reward_model")
    if isinstance(nested, dict) and "ground_truth" in nested:
        return nested["ground_truth"]
    return row.get("ground_truth", row.get("answer"))


def truncate(ids: np.ndarray, limit: int, where: str) -> np.ndarray:
    """Cuts to `limit` tokens: `left` keeps the end, `right` the beginning, `middle` both ends."""
    if where == "left":
        return ids[-limit:]
    if where == "right":
        return ids[:limit]
    head = limit // 2
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])
