"""What an offline run has finished so far: one line a row, kept through a kill and read again by the next run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from meshrl.files import naming

Result = dict[str, Any]


class Journal:
    """A file beside the output. Its first line says what was asked: results of something else are not mixed in."""

    def __init__(self, path: Path, fingerprint: str):
        self.path = path
        self.results: dict[int, Result] = {}
        self.failed = 0
        good = self._read(fingerprint) if path.exists() and _has_results(path) else 0
        self._file = path.open("r+b" if path.exists() else "w+b")
        # A kill may have cut the last line short.
        self._file.truncate(good)
        self._file.seek(good)
        if not good:
            self._file.write(json.dumps({"fingerprint": fingerprint}).encode() + b"\n")
            self._flush()

    def _read(self, fingerprint: str) -> int:
        """Takes in the whole lines and returns where they end."""
        good = 0
        with self.path.open("rb") as lines:
            for line in lines:
                entry = _entry(line)
                if entry is None:
                    return good
                if good == 0 and entry.get("fingerprint") != fingerprint:
                    raise ValueError(
                        f"'{self.path}' is of a run with another model, engine, prompts or sampling: "
                        "finish that one, choose another --out, or forget it with --restart"
                    )
                if good:
                    self._keep(entry.pop("row"), entry)
                good += len(line)
        return good

    def add(self, results: Iterable[tuple[int, Result]]) -> None:
        """Keeps the results of some rows for good."""
        for row, result in results:
            self._keep(row, result)
            self._file.write(json.dumps({"row": row, **result}).encode() + b"\n")
        self._flush()

    def _keep(self, row: int, result: Result) -> None:
        self.results[row] = result
        self.failed += result["error"] is not None

    def _flush(self) -> None:
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Takes the file away, once the output is in place."""
        self._file.close()
        self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _has_results(path: Path) -> bool:
    """A run that failed before its first answer (a mistyped model, say) leaves only the line that says what it was."""
    with path.open("rb") as lines:
        return sum(1 for _, _ in zip(lines, range(2), strict=False)) > 1


def _entry(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and ("fingerprint" in entry or "row" in entry) else None
