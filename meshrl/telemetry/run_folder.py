"""The folder of one run: its files, and how they are written and read.

RunFiles:    paths and reading, without any change to the folder
RunFolder:   writing, by one process at a time (`held`)
"""

import contextlib
import json
import logging
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from meshrl.config import quick_yaml
from meshrl.files import naming, write_json, write_whole

logger = logging.getLogger(__name__)

# JSON has no NaN or infinity: they are written as these strings, so that every reader can parse the file.
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_RESERVED = frozenset({"step", "time"})
LOCK = ".lock"


class RunFiles:
    """The files of a run, for reading.

    Reading does not create, move or repair any file, so the folder of a running run can be read as well.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()
        self.config = self.path / "config.yaml"
        self.config_sources = self.path / "config_sources.json"
        self.metrics = self.path / "metrics.jsonl"
        self.generations = self.path / "generations.jsonl"
        self.distributions = self.path / "distributions.jsonl"
        self.report = self.path / "report.html"
        self.curves = self.path / "curves.png"
        self.timeline = self.path / "timeline.json.gz"
        self.log = self.path / "log.txt"
        self.failed_log = self.path / "log-failed-start.txt"
        self.tracker_ids = self.path / "tracker_ids.json"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.batches = self.path / "batches"
        self.nonfinite = self.path / "nonfinite"
        self.dumps = self.path / "dumps"
        self.model = self.path / "model"

    def read_metrics(self) -> list[dict[str, float]]:
        """Read the logged records in order, each a flat dict of `step`, `time` (unix seconds) and the metrics."""
        return [numbers_of(record) for record in _read_lines(self.metrics)]

    def read_generations(self) -> list[dict[str, Any]]:
        """Read the logged samples in order, each with `step`, `prompt`, `response`, `score` and further fields."""
        return _read_lines(self.generations)

    def read_distributions(self) -> list[dict[str, Any]]:
        """Read the distributions per step: histograms of `score` and `response_length`, counts of `finish` reasons."""
        return _read_lines(self.distributions)

    def read_config(self) -> dict[str, Any]:
        """Read the resolved config; return an empty dict if it is missing or unreadable."""
        return _mapping_in(self.config, quick_yaml.parsed)

    def read_tracker_ids(self) -> dict[str, str]:
        """Read the run ids that tracking services gave to this run, by service."""
        return _mapping_in(self.tracker_ids, json.loads)

    def read_config_sources(self) -> dict[str, str]:
        """Read the source of each dotted config key's value ("default", a recipe, ...); empty if unknown."""
        return _mapping_in(self.config_sources, json.loads)


class _LogFile(logging.FileHandler):
    """A log file whose write errors, such as a full disk, print no traceback over the other output."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop the record if the file cannot be written; report all other errors as usual."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class RunFolder(RunFiles):
    """The folder that one run writes, locked against other processes.

    The files of an earlier run in the folder are first moved into `previous-N/`. With `resume=True`, the existing
    files are continued instead, and with `last_step`, records of later steps are removed. Files that do not belong to
    a run stay.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False, last_step: int | None = None) -> None:
        super().__init__(path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"the run folder {self.path} is a file: choose another path (trainer.default_local_dir)")
        self.path.mkdir(parents=True, exist_ok=True)
        self.moved_to: Path | None = None
        self.last_step, self.is_new = last_step, not resume
        self._log_handlers: list[tuple[logging.Logger, logging.Handler, int]] = []
        self._lock = held(self.path)
        if resume:
            for file in (self.metrics, self.generations, self.distributions):
                if last_step is not None:
                    _cut_after(file, last_step)
        else:
            self._move_aside()

    def write_config(self, config: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> None:
        """Write the resolved config and, if given, the source of each dotted key ("default", a recipe, ...)."""
        text = quick_yaml.as_text(_plain(config), sort_keys=False, width=120)
        write_whole(self.config, text)
        if sources is not None:
            write_json(self.config_sources, dict(sources))

    def keep_tracker_id(self, service: str, name: str) -> None:
        """Store the id that a tracking service gave to this run, so that a resumed run continues under this id."""
        write_json(self.tracker_ids, self.read_tracker_ids() | {service: name})

    def append_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line to metrics.jsonl: the metrics with `step` and the time."""
        if taken := _RESERVED & metrics.keys():
            raise ValueError(f"metrics cannot be named {sorted(taken)}: the record itself has these fields")
        record = {"step": step, "time": round(time.time(), 3), **{k: _json_number(v) for k, v in metrics.items()}}
        append_line(self.metrics, record)

    def append_generations(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Append samples to generations.jsonl; rows have `prompt`, `response`, `score`, ..."""
        for row in rows:
            record = {"step": step, **{key: _plain(value) for key, value in row.items()}}
            append_line(self.generations, record)

    def append_distributions(self, found: Mapping[str, Any], step: int) -> None:
        """Append one line to distributions.jsonl: the distributions over the samples of a step."""
        append_line(self.distributions, {"step": step, **_plain(found)})

    def start_log(self, source: str = "meshrl", level: int = logging.INFO) -> None:
        """Write the records of the logger `source` to log.txt as well, from now on."""
        handler = _LogFile(self.log, encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.setLevel(level)
        log_source = logging.getLogger(source)
        self._log_handlers.append((log_source, handler, log_source.level))
        if log_source.getEffectiveLevel() > level:
            log_source.setLevel(level)
        log_source.addHandler(handler)

    def close(self) -> None:
        """Close log.txt and release the folder's lock; all other files are complete after each write."""
        for log_source, handler, level_before in self._log_handlers:
            log_source.removeHandler(handler)
            log_source.setLevel(level_before)
            with contextlib.suppress(OSError):
                handler.close()
        self._log_handlers.clear()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put_back(self) -> bool:
        """Restore the earlier run's files if this run failed before it wrote results; return whether they are back.

        The files of this run's start are deleted, except its log, which is kept as log-failed-start.txt.
        """
        started = {self.config, self.config_sources, self.log, self.tracker_ids, self.tensorboard}
        if self.moved_to is None or not started.issuperset(self._files()):
            return False
        if self.log.exists():
            self.log.replace(self.failed_log)
        for file in started.intersection(self._files()):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        for file in self.moved_to.iterdir():
            file.rename(self.path / file.name)
        self.moved_to.rmdir()
        self.moved_to = None
        return True

    def _move_aside(self) -> None:
        # Checkpoints that a killed run was writing or deleting are useless, but can be as large as whole checkpoints.
        for left_over in (*self.checkpoints.glob(".*.partial"), *self.checkpoints.glob(".*.deleted")):
            shutil.rmtree(left_over, ignore_errors=True)
        self.moved_to = move_aside(self._files(), self.path)

    def _files(self) -> list[Path]:
        """Return the files and folders of a run that exist."""
        own = (self.config, self.config_sources, self.metrics, self.generations, self.distributions, self.tracker_ids)
        made = (self.report, self.curves, self.log, self.tensorboard, self.timeline)
        kept = (self.checkpoints, self.batches, self.nonfinite, self.dumps, self.model)
        return [file for file in (*own, *made, *kept, *self.path.glob("stall-*.txt")) if file.exists()]


def held(folder: Path) -> IO[str] | None:
    """Lock a folder for writing by this process and return the lock file.

    Raise a ValueError if another process holds the lock. The lock ends with its process, even if the process is
    killed. Return None if the file system does not support locks.
    """
    import fcntl

    stream = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        stream.seek(0)
        who = stream.read().strip() or "another process"
        stream.close()
        raise ValueError(
            f"a run is writing into {folder} ({who}): wait for its end, or choose another folder "
            "(trainer.default_local_dir)"
        ) from error
    except OSError:
        stream.close()
        return None
    with contextlib.suppress(OSError):  # on a full disk the lock is held, without its text
        stream.truncate(0)
        os.write(stream.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return stream


def check_unheld(folder: str | os.PathLike[str]) -> None:
    """Raise a ValueError if another process holds the lock of a folder."""
    if (Path(folder) / LOCK).is_file() and (found := held(Path(folder))) is not None:
        found.close()


def move_aside(old: Sequence[Path], folder: Path) -> Path | None:
    """Move the files `old` of an earlier run into a new folder `previous-N/` inside `folder`, and return its path.

    Return None if there is no file to move.
    """
    if not old:
        return None
    moved_to = _new_numbered_folder(folder)
    for file in old:
        file.rename(moved_to / file.name)
    return moved_to


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON object; return None if it is not one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def numbers_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a metrics record read from JSON: the strings for NaN and infinity become numbers again."""
    return {name: _number(value) for name, value in record.items()}


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested config as (dotted key, value) pairs."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _new_numbered_folder(parent: Path) -> Path:
    """Create and return the first free folder `previous-N`.

    The atomic mkdir decides which number is free, so two runs never share a folder.
    """
    number = 1
    while True:
        folder = parent / f"previous-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a .jsonl file on a separate line.

    If a kill or a full disk has cut off the last line, a line break is inserted first.
    """
    line = json.dumps(record, ensure_ascii=False) + "\n"
    # A lone surrogate has no UTF-8 form; backslashreplace turns it into its JSON escape.
    data = line.encode("utf-8", errors="backslashreplace")
    with naming(file), open(file, "ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            data = data if stream.read(1) == b"\n" else b"\n" + data
        stream.write(data)


def _mapping_in(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Parse a file into a mapping; unreadable files are logged, and give an empty dict like missing files."""
    if not file.exists():
        return {}
    try:
        read = parse(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, yaml.YAMLError) as error:
        logger.warning("%s cannot be read, it is left out: %s", file, " ".join(str(error).split()))
        return {}
    return read if isinstance(read, dict) else {}


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a .jsonl file; an incomplete last line is skipped, as it may still be being written."""
    if not file.exists():
        return []
    *lines, tail = file.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate([*lines, tail], start=1):
        if not line.strip():
            continue
        record = parse_line(line)
        if record is not None:
            records.append(record)
        elif number <= len(lines):
            logger.warning("%s:%d is not a JSON object, the line is left out", file, number)
    return records


def _cut_after(file: Path, step: int) -> None:
    """Remove the records of steps after `step` from a .jsonl file; the remaining lines stay byte for byte."""
    if not file.exists():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= step]
    if len(kept) < len(lines):
        write_whole(file, b"".join(kept))


def _step_of(line: bytes) -> float:
    """Return the step of a record, or infinity for a line that is not a record, for example one cut off by a kill."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def _number(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """Convert a value to plain Python data for JSON and YAML.

    numpy and torch values become numbers and lists. NaN, infinity and unknown types become strings.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, bool | int | float | str):
        # YAML's safe writer refuses Enum members that are also str or int, so their plain value is used.
        return value if type(value) in (type(None), bool, int, float, str) else getattr(value, "value", str(value))
    return str(value)
