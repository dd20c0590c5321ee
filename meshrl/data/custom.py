"""Rows from a class of the user's own, in the place of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshrl.config.data import DataConfig
from meshrl.config.functions import load_function
from meshrl.data.files import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def custom_rows(files: Sequence[str], tokenizer: Tokenizer, config: DataConfig) -> list[Row]:
    """All rows of `data.custom_cls`, made with these arguments: what `[number]` gives for each number below its length.

    A row is what a line of a data file would be: a mapping with the prompt, and what the reward function wants.
    """
    name = config.custom_cls.name or ""
    make = load_function(config.custom_cls.path or "", name)
    try:
        dataset = make(list(files), tokenizer, config)
        rows = [dataset[number] for number in range(len(dataset))]
    except Exception as error:  # it is the user's code: its traceback is worth seeing
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
