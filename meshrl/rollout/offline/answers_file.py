"""The output of an offline run: the columns of the prompts' file, and the answers beside them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.data.files import Row
from meshrl.files import writing_whole
from meshrl.rollout.offline.journal import Result

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("responses", "finish_reasons", "error")
TOKEN_COLUMNS = ("response_token_ids", "response_log_probs")
SUFFIXES = (".parquet", ".jsonl")


def check_output(out: Path, prompts: Path, rows: Sequence[Row], token_ids: bool, restart: bool) -> None:
    """Raises, before anything is computed, if the output could not be written."""
    if out.suffix not in SUFFIXES:
        raise ValueError(f"--out '{out}' must end in {' or '.join(SUFFIXES)}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder '{out.parent}' to write '{out.name}' into")
    if out.resolve() == prompts.resolve():
        raise ValueError(f"--out '{out}' is the file of the prompts: choose another")
    if out.exists() and not restart:
        raise ValueError(f"'{out}' is there already: choose another --out, or write it anew with --restart")
    names = COLUMNS + (TOKEN_COLUMNS if token_ids else ())
    taken = next((name for name in names if any(name in row for row in rows)), None)
    if taken is not None:
        raise ValueError(f"the prompts have a column '{taken}', where an answer would be written: rename it")
    if out.suffix == ".parquet" and prompts.suffix != ".parquet":
        _table(prompts, rows)


def write_output(out: Path, prompts: Path, rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Writes all rows with their results; the file appears when it is complete."""
    with writing_whole(out) as aside:
        if out.suffix == ".parquet":
            _write_parquet(aside, prompts, rows, results)
            return
        # A lone surrogate, which JSON may hold and UTF-8 may not, becomes the escape that it came from.
        with aside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for row, result in zip(rows, results, strict=True):
                file.write(json.dumps(row | result, ensure_ascii=False, default=_as_text) + "\n")


def _as_text(value: Any) -> str:
    """What JSON does not know; bytes, such as those of an image, so that they can be read again."""
    return (
        f"data:application/octet-stream;base64,{b64encode(value).decode()}" if isinstance(value, bytes) else str(value)
    )


def _write_parquet(aside: Path, prompts: Path, rows: Sequence[Row], results: Sequence[Result]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _table(prompts, rows)
    types: dict[str, Any] = {
        "responses": pa.list_(pa.string()),
        "finish_reasons": pa.list_(pa.string()),
        "error": pa.string(),
        "response_token_ids": pa.list_(pa.list_(pa.int32())),
        "response_log_probs": pa.list_(pa.list_(pa.float32())),
    }
    for name in results[0]:
        column = pa.array([result[name] for result in results], types[name])
        table = table.append_column(name, column)
    pq.write_table(table, aside)


def _table(prompts: Path, rows: Sequence[Row]) -> pa.Table:
    """The prompts as a table: with the types of their own file where it has any."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if prompts.suffix == ".parquet":
        return pq.read_table(prompts)
    # Not `from_pylist`, which takes the columns of the first row for all there are.
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(table.schema.empty_table(), pa.BufferOutputStream())  # some types are no parquet
        return table
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise ValueError(f"the rows of '{prompts}' do not fit into a parquet table, write .jsonl: {error}") from error
