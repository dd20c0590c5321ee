"""What the data files say that a config must fit: their columns and how many rows they have. Reads little of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.chat_template import template_text
from meshrl.config.names import MODEL, count
from meshrl.config.preferences import PreferenceConfig
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SFTDataConfig, SupervisedConfig

LINES, TABLE = (".jsonl", ".json"), ".parquet"


@dataclass(frozen=True)
class Glance:
    """The columns of a file's first row, and how many rows there are (at least: counting stops where it may)."""

    columns: tuple[str, ...]
    rows: int
    lists: tuple[str, ...] = ()  # those of the columns that hold lists, such as chat messages


def data_file_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Files that are not there or cannot be read, that have no rows, too few, or not the columns asked for."""
    batch = prompts_of_a_batch(config)
    trained, problems = _rows_and_problems(config, "train_files", batch)
    problems += _rows_and_problems(config, "val_files", 1)[1]
    # A stream with weights begins a file anew when it has come to its end.
    is_endless = isinstance(config, PPOConfig) and config.data.streaming and bool(config.data.train_weights)
    if config.data.train_files and not problems and not is_endless and trained < batch:
        problems.append(
            f"data.train_files have {count(trained, 'row')} together, fewer than one batch of {batch}: "
            "add data or lower data.train_batch_size"
        )
    return problems


def _rows_and_problems(config: PPOConfig | SupervisedConfig, name: str, enough: int) -> tuple[int, list[str]]:
    rows, problems = 0, []
    for entry in getattr(config.data, name):
        if Path(entry).is_dir():
            rows += enough  # a saved data set is not opened here
            problems += [f"data.{name}: {problem}" for problem in _folder_problems(Path(entry))]
            continue
        try:
            seen = glance(Path(entry), enough)
        except (ValueError, OSError) as error:
            problems.append(f"data.{name}: {error}" if str(entry) in str(error) else f"data.{name}: {entry}: {error}")
            continue
        problems += [f"data.{name}: {entry} {problem}" for problem in _column_problems(config, seen)]
        rows += seen.rows
    return rows, problems


def prompts_of_a_batch(config: PPOConfig | SupervisedConfig) -> int:
    """The rows that one batch takes."""
    given = config.data.gen_batch_size if isinstance(config, PPOConfig) else None
    return given or config.data.train_batch_size


def glance(path: Path, enough: int) -> Glance:
    """Looks at a file's first row and counts its rows, lines only up to `enough`; a `ValueError` says what is wrong."""
    if not path.exists():
        hint = f"; write several as [{path}]" if "," in str(path) else ""
        raise ValueError(f"there is no {path}{hint}")
    if path.suffix not in (*LINES, TABLE):
        raise ValueError(f"{path} is none of {', '.join((TABLE, *LINES))}, nor a folder")
    seen = _glance_at_table(path) if path.suffix == TABLE else _glance_at_lines(path, enough)
    if not seen.rows:
        raise ValueError(f"{path} has no rows")
    return seen


def _folder_problems(path: Path) -> list[str]:
    """What `save_to_disk` has written has a state; where it is one of several splits, one must be named."""
    if (path / "dataset_dict.json").is_file():
        return [f"{path} holds several splits: name one, such as {path / 'train'}"]
    return (
        [] if (path / "state.json").is_file() else [f"{path} is a folder, but none that datasets' save_to_disk wrote"]
    )


def _glance_at_table(path: Path) -> Glance:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    try:
        with pq.ParquetFile(path) as table:
            lists = tuple(field.name for field in table.schema_arrow if pa.types.is_list(field.type))
            return Glance(tuple(table.schema_arrow.names), table.metadata.num_rows, lists)
    except ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _glance_at_lines(path: Path, enough: int) -> Glance:
    first: dict[str, Any] = {}
    rows = 0
    with path.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            if not rows:
                first = _row_in(path, line)
            rows += 1
            if rows >= enough:
                break
    return Glance(tuple(first), rows, tuple(name for name, value in first.items() if isinstance(value, list)))


def _row_in(path: Path, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"the first line of {path} is not valid JSON, one object a line: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"the first line of {path} is a {type(row).__name__}: each line must be a JSON object")
    return row


def _column_problems(config: PPOConfig | SupervisedConfig, seen: Glance) -> list[str]:
    there = f"it has: {', '.join(seen.columns) or 'nothing'}"
    return [
        f"has no column {getattr(config.data, key)!r} ({there}): name the right one with data.{key}"
        for key in (*_column_keys(config, seen), *_named_columns(config))
        if getattr(config.data, key) not in seen.columns
    ] + _template_problems(config, seen)


def _named_columns(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Keys of columns that rows may lack, where another one than the usual is named."""
    if not isinstance(config.data, SFTDataConfig):
        return []
    usual = SFTDataConfig()
    names = ("tools_key", "enable_thinking_key")
    return [name for name in names if getattr(config.data, name) not in (None, getattr(usual, name))]


def _template_problems(config: PPOConfig | SupervisedConfig, seen: Glance) -> list[str]:
    """Chat messages become tokens by the tokenizer's chat template; not all models have one."""
    prefix = MODEL if isinstance(config, PPOConfig) else "model"
    model = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    folder = Path(model.tokenizer_path or model.path or "nowhere")
    # A tokenizer's own code may bring a template that no file shows.
    if model.trust_remote_code or not folder.is_dir() or (model.custom_chat_template or template_text(folder)):
        return []
    # A demonstration's response is always a text, and a label no text at all.
    others: tuple[str, ...] = ("label_key",) if isinstance(config, PreferenceConfig) else ("response_key",)
    if isinstance(config.data, SFTDataConfig) and config.data.prompt_dict_keys:
        others += ("prompt_key",)  # the prompt is somewhere inside
    keys = [key for key in _column_keys(config, seen) if key not in others]
    return [
        f"has chat messages in {getattr(config.data, key)!r} (data.{key}), but {folder} has no chat template: put one "
        f"there as chat_template.jinja, set {prefix}.tokenizer_path to a folder that has one, or write plain text"
        for key in keys
        if getattr(config.data, key) in seen.lists
    ][:1]


def _column_keys(config: PPOConfig | SupervisedConfig, seen: Glance) -> Sequence[str]:
    """The keys that name the columns which the rows must have."""
    if isinstance(config, PPOConfig):
        return ("prompt_key",)
    if isinstance(config, PreferenceConfig):
        if config.is_judged:
            return ("prompt_key", "response_key", "label_key")
        # Conversations may bring their prompt.
        has_texts = config.data.chosen_key not in seen.lists
        return ("chosen_key", "rejected_key", "prompt_key") if has_texts else ("chosen_key", "rejected_key")
    assert isinstance(config.data, SFTDataConfig)
    return ("prompt_key", "response_key") if config.data.messages_key is None else ("messages_key",)
