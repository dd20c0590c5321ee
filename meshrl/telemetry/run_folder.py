"""The folder of one run: which files it has, and how they are written and read."""

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
    """The files of a run, to read: nothing is created, moved or repaired, so a running run can be read too."""

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
        """The logged records in order: `step`, `time` (unix seconds) and the metrics, flat."""
        return [numbers_of(record) for record in _read_lines(self.metrics)]

    def read_generations(self) -> list[dict[str, Any]]:
        """The sampled generations in order: `step`, `prompt`, `response`, `score` and what else was written."""
        return _read_lines(self.generations)

    def read_distributions(self) -> list[dict[str, Any]]:
        """Per step the histograms of its samples' `score` and `response_length`, and the counts of `finish` reasons."""
        return _read_lines(self.distributions)

    def read_config(self) -> dict[str, Any]:
        """The resolved config, empty where none was written or it cannot be read."""
        return _mapping_in(self.config, quick_yaml.parsed)

    def read_tracker_ids(self) -> dict[str, str]:
        """The names under which tracking services know this run, by service."""
        return _mapping_in(self.tracker_ids, json.loads)

    def read_config_sources(self) -> dict[str, str]:
        """Where each dotted config key got its value ("default", a recipe, ...), empty where it is not known."""
        return _mapping_in(self.config_sources, json.loads)


class _LogFile(logging.FileHandler):
    """A log that cannot be written, as on a full disk, does not hide what else there is to say."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Leave the record out if its file takes nothing."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class RunFolder(RunFiles):
    """The folder a run writes, alone. The files of an earlier run there move into `previous-N/` first.

    `resume=True` continues the files that are there instead; with `last_step`, records of later steps are cut off.
    Other things in the folder stay.
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
        """Writes the resolved config and, if given, where each dotted key came from ("default", a recipe, ...)."""
        text = quick_yaml.as_text(_plain(config), sort_keys=False, width=120)
        write_whole(self.config, text)
        if sources is not None:
            write_json(self.config_sources, dict(sources))

    def keep_tracker_id(self, service: str, name: str) -> None:
        """Remembers the name that a tracking service has for this run: what goes on with it goes on there too."""
        write_json(self.tracker_ids, self.read_tracker_ids() | {service: name})

    def append_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds one line to metrics.jsonl: the metrics with `step` and the time."""
        if taken := _RESERVED & metrics.keys():
            raise ValueError(f"metrics cannot be named {sorted(taken)}: the record itself has these fields")
        record = {"step": step, "time": round(time.time(), 3), **{k: _json_number(v) for k, v in metrics.items()}}
        append_line(self.metrics, record)

    def append_generations(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Adds sampled generations to generations.jsonl; rows have `prompt`, `response`, `score`, ..."""
        for row in rows:
            record = {"step": step, **{key: _plain(value) for key, value in row.items()}}
            append_line(self.generations, record)

    def append_distributions(self, found: Mapping[str, Any], step: int) -> None:
        """Adds one line to distributions.jsonl: how the samples of a step are spread."""
        append_line(self.distributions, {"step": step, **_plain(found)})

    def start_log(self, source: str = "meshrl", level: int = logging.INFO) -> None:
        """From now on, what `source` logs is also written to log.txt."""
        handler = _LogFile(self.log, encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.setLevel(level)
        log_source = logging.getLogger(source)
        self._log_handlers.append((log_source, handler, log_source.level))
        if log_source.getEffectiveLevel() > level:
            log_source.setLevel(level)
        log_source.addHandler(handler)

    def close(self) -> None:
        """Ends log.txt. The other files are complete after each write."""
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
        """Brings an earlier run's files back where this one has failed before it kept anything of its own.

        What it has written of its start goes, but for its log, which stays beside the earlier run's.
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
        # A checkpoint that a killed run was writing or deleting is nobody's, and as large as a whole one.
        for left_over in (*self.checkpoints.glob(".*.partial"), *self.checkpoints.glob(".*.deleted")):
            shutil.rmtree(left_over, ignore_errors=True)
        self.moved_to = move_aside(self._files(), self.path)

    def _files(self) -> list[Path]:
        """What there is of a run."""
        own = (self.config, self.config_sources, self.metrics, self.generations, self.distributions, self.tracker_ids)
        made = (self.report, self.curves, self.log, self.tensorboard, self.timeline)
        kept = (self.checkpoints, self.batches, self.nonfinite, self.dumps, self.model)
        return [file for file in (*own, *made, *kept, *self.path.glob("stall-*.txt")) if file.exists()]


def held(folder: Path) -> IO[str] | None:
    """A file whose lock says that this process writes into a folder; raises where another one does.

    Such a lock ends with its process, however that ends. Not all file systems have them: None.
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
    with contextlib.suppress(OSError):  # a full disk: the lock is held, only its words are missing
        stream.truncate(0)
        os.write(stream.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return stream


def check_unheld(folder: str | os.PathLike[str]) -> None:
    """Raises if another process writes into a folder."""
    if (Path(folder) / LOCK).is_file() and (found := held(Path(folder))) is not None:
        found.close()


def move_aside(old: Sequence[Path], folder: Path) -> Path | None:
    """Moves what an earlier run has left in a folder into a new `previous-N/` there, which it returns."""
    if not old:
        return None
    moved_to = _new_numbered_folder(folder)
    for file in old:
        file.rename(moved_to / file.name)
    return moved_to


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, or nothing where it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def numbers_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of metrics as it was before it became JSON, which has no NaN."""
    return {name: _number(value) for name, value in record.items()}


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested config as (dotted key, value)."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _new_numbered_folder(parent: Path) -> Path:
    """Creates the first free `previous-N`; mkdir decides, so two runs never share one."""
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
    """Add a record to a journal, on a line of its own also behind one that a kill or a full disk has cut off."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    # A lone surrogate has no UTF-8 form; backslashreplace turns it into the escape that JSON has for it.
    data = line.encode("utf-8", errors="backslashreplace")
    with naming(file), open(file, "ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            data = data if stream.read(1) == b"\n" else b"\n" + data
        stream.write(data)


def _mapping_in(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """What a file holds; one that cannot be read is named and left out."""
    if not file.exists():
        return {}
    try:
        read = parse(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, yaml.YAMLError) as error:
        logger.warning("%s cannot be read, it is left out: %s", file, " ".join(str(error).split()))
        return {}
    return read if isinstance(read, dict) else {}


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a .jsonl file; a last line that is still being written is left out."""
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
    """Takes the records of later steps out of a .jsonl file; the rest stays to the byte."""
    if not file.exists():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= step]
    if len(kept) < len(lines):
        write_whole(file, b"".join(kept))


def _step_of(line: bytes) -> float:
    """The step of a record; a line that is none (cut off by a kill) belongs to no step that is kept."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def _number(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """Plain Python data for JSON and YAML: numpy and torch values become numbers and lists, the rest text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, bool | int | float | str):
        # Enum members that are also str or int would not survive yaml's safe writer as they are.
        return value if type(value) in (type(None), bool, int, float, str) else getattr(value, "value", str(value))
    return str(value)
