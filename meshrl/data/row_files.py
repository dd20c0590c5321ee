"""Reading of rows from parquet files, jsonl files and folders of saved Hugging Face datasets, and writing of jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.files import write_whole

Row = dict[str, Any]


def read_rows(files: Sequence[str], required: Sequence[str] = ()) -> list[Row]:
    """Read all rows of all files, in order. Raise `ValueError` if a `required` column is missing or null in a row."""
    rows: list[Row] = []
    for file in files:
        found = _read_one(Path(file))
        if not found:
            raise ValueError(f"data file '{file}' has no rows")
        for number, row in enumerate(found):
            _check_columns(file, number, row, required)
        rows.extend(found)
    return rows


def stream_rows(file: str, required: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows of one file while reading it. Raise `ValueError` if a `required` column is missing or null."""
    path, rows = Path(file), 0
    for row in _stream_one(path):
        _check_columns(file, rows, row, required)
        rows += 1
        yield row
    if not rows:
        raise ValueError(f"data file '{file}' has no rows")


def _stream_one(path: Path) -> Iterator[Row]:
    if path.is_file() and path.suffix in (".jsonl", ".json"):
        yield from _lines(path)
    elif path.is_file() and path.suffix == ".parquet":
        import pyarrow.parquet as pq
        from pyarrow import ArrowException

        try:
            for part in pq.ParquetFile(path).iter_batches():
                yield from part.to_pylist()
        except ArrowException as error:
            raise ValueError(f"data file '{path}' is not a readable parquet file: {error}") from error
    elif path.is_dir():
        yield from _load_saved_dataset(path)
    else:
        yield from _read_one(path)  # raises the error that names the problem


def _check_columns(file: str, number: int, row: Row, required: Sequence[str]) -> None:
    for column in required:
        if row.get(column) is None:
            raise ValueError(
                f"data file '{file}', row {number + 1}: column '{column}' is missing or null "
                f"(it has: {', '.join(map(str, row)) or 'nothing'})"
            )


def _read_one(path: Path) -> list[Row]:
    if not path.exists():
        raise FileNotFoundError(f"data file '{path}' does not exist")
    if path.is_dir():
        return _read_saved_dataset(path)
    if path.suffix in (".jsonl", ".json"):
        return list(_lines(path))
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise ValueError(f"data file '{path}': expected .parquet, .jsonl or a folder written by datasets' save_to_disk")


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                raise ValueError(f"data file '{path}', line {number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"data file '{path}', line {number}: expected an object, got {type(row).__name__}")
            yield row


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    try:
        return pq.read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(f"data file '{path}' is not a readable parquet file: {error}") from error


def _read_saved_dataset(path: Path) -> list[Row]:
    return _load_saved_dataset(path).to_list()


def _load_saved_dataset(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"'{path}' is a folder: reading saved datasets needs pip install 'meshrl[datasets]'"
        ) from error
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        raise ValueError(f"'{path}' holds several splits ({', '.join(loaded)}): name one, such as '{path}/train'")
    return loaded


def write_tables(folder: Path, tables: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """Write each table of rows as NAME.jsonl in a folder. Return the paths by name."""
    files = {}
    for name, rows in tables.items():
        path = folder / f"{name}.jsonl"
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
        files[name] = str(path)
    return files
