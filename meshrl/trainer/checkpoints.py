"""Checkpoints of a whole run: complete or absent, kept up to a number, found again by the next start.

    checkpoints/global_step_12/
        actor/  critic/        the workers' files (`meshrl.engines.state_files`), configs in `huggingface/`
        trainer.json           step, version, data position, KL controller, the config, ...
        manifest.json          every file's size and checksum, written last

A checkpoint is written into `.global_step_12.partial` and then renamed. So a folder `global_step_12` without a
manifest, or with a file that does not match it, was damaged later. It is skipped, and the previous checkpoint is used.

`Checkpoints` writes and restores; `checkpoint_to_resume` chooses where a run resumes; `Mirror` copies checkpoints to a
second place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import fsspec

import meshrl
from meshrl.config.trainer import RunConfig
from meshrl.controller import ControllerError, WorkerGroup
from meshrl.controller.peer_memory import Shelves
from meshrl.data.batch import DataProto
from meshrl.data.serialization import inside
from meshrl.engines.state_files import FileRecord, checksum, record_file, write_index
from meshrl.files import read_json, sync_folder, write_json
from meshrl.models.saving import new_folder
from meshrl.telemetry.run_folder import flatten_config
from meshrl.telemetry.time_ledger import PhaseTimer
from meshrl.workers.checkpointing import Shelved, Written

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
STATE = "trainer.json"
STEP_FOLDER = re.compile(r"global_step_(\d+)")
FORMAT = 3
# Format 1 had safetensors with listings for the sharded state, format 2 torch's distributed checkpoints. Both had
# pickles of batches, random states and samplers' states.
BEFORE = (1, 2)


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or cannot be used."""


class Resumable(Protocol):
    """A trainer whose state can be saved in a checkpoint.

    `state_dict` holds plain values for JSON. A `DataProto` among them is written to its own file.
    """

    step: int
    timer: PhaseTimer

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Part:
    """A role that is saved: its workers, the contents to save and to load, and whether to save in the background."""

    group: WorkerGroup
    save_contents: Sequence[str]
    load_contents: Sequence[str] | None = None
    background: bool = False


@dataclass(frozen=True)
class Found:
    """A complete checkpoint: its folder, its step, and the content of its `trainer.json`."""

    path: Path
    step: int
    content: dict[str, Any]


@dataclass
class _Pending:
    """A checkpoint that is being written: its temporary folder and what the ranks have written so far."""

    step: int
    aside: Path
    files: list[FileRecord]
    written: dict[str, list[Written | None]] = field(default_factory=dict)


class Checkpoints:
    """Checkpoints of a run every `every` steps and at the last step; `every` < 0 saves none."""

    def __init__(
        self,
        folder: Path,
        parts: Mapping[str, Part],
        *,
        every: int,
        last_step: int,
        keep: int | None = None,
        config: Mapping[str, Any] | None = None,
        mirror: Mirror | None = None,
        say: Callable[[str], None] = logger.info,
    ):
        self.folder, self.parts, self.every, self.last_step, self.keep = folder, parts, every, last_step, keep
        self.config, self.mirror, self.say = dict(config or {}), mirror, say
        self.shelves: Shelves | None = None  # other nodes' memory, where the workers' files go instead of the folder
        self._pending: _Pending | None = None

    def is_due(self, step: int) -> bool:
        """Return whether the run is to be saved after this step."""
        return self.every > 0 and (step % self.every == 0 or step == self.last_step)

    def save_if_due(self, trainer: Resumable) -> None:
        """Save after the step that was just taken, if it is due; `commit` completes the checkpoint."""
        if self.is_due(trainer.step):
            self.save(trainer)

    def save(self, trainer: Resumable) -> None:
        """Write the checkpoint into its temporary folder, or start to write it in the background."""
        with trainer.timer.phase("save_checkpoint"):
            self.commit(wait=True)
            for left_over in self.folder.glob(".global_step_*"):
                shutil.rmtree(left_over)
            aside = self.folder / f".global_step_{trainer.step}.partial"
            try:
                aside.mkdir(parents=True)
                self._pending = _Pending(trainer.step, aside, self._write_state(aside, trainer))
                where = [] if self.shelves is None else [Shelved(self.shelves, trainer.step)]
                for role, part in self.parts.items():
                    what = str(aside.absolute()), role, list(part.save_contents), part.background
                    part.group.save_checkpoint(*what, *where)
            except (OSError, ControllerError) as error:
                raise self._failed(trainer.step, aside, error) from error

    def _write_state(self, aside: Path, trainer: Resumable) -> list[FileRecord]:
        state, files = trainer.state_dict(), []
        for name, value in list(state.items()):
            if isinstance(value, DataProto):
                files.append(aside / batch_file(name))
                value.save_to_disk(files[-1])
                state[name] = {"file": files[-1].name}
        content = {
            "step": trainer.step,
            "state": state,
            "contents": {role: list(part.save_contents) for role, part in self.parts.items()},
            "ranks": {role: part.group.world_size for role, part in self.parts.items()},
            "config_digest": config_digest(self.config),
            "config": self.config,
        }
        files.append(aside / STATE)
        write_json(files[-1], content)
        return [record_file(file, aside) for file in files]

    def commit(self, wait: bool = False) -> Path | None:
        """Complete the pending checkpoint once all ranks have written: manifest, rename, keep-N. Return its folder.

        Return None if no checkpoint is pending, or if ranks are still writing and `wait` is False.
        """
        pending = self._pending
        if pending is None:
            return None
        try:
            for role, part in self.parts.items():
                pending.written[role] = part.group.checkpoint_files(str(pending.aside.absolute()), wait)
            ranks = [written for ranks in pending.written.values() for written in ranks]
            if any(written is None for written in ranks):
                return None
            files = pending.files + [record for written in ranks if written for record in written.files]
            files += self._write_indexes(pending.aside, [written for written in ranks if written])
            path = self._put_in_place(pending, files)
        except (OSError, ControllerError) as error:
            raise self._failed(pending.step, pending.aside, error) from error
        self._pending = None
        size = sum(record.size for record in files)
        seconds = max(written.seconds for written in ranks if written)
        logger.info("checkpoint %s: %.1f MB, written in %.2f s", path, size / 1e6, seconds)
        if self.mirror is not None:
            self.mirror.wait()
        self._delete_old()
        if self.mirror is not None:
            self.mirror.push(path)
        return path

    def _write_indexes(self, aside: Path, ranks: Sequence[Written]) -> list[FileRecord]:
        """Write the indexes of the sharded state, now that all ranks have returned the places of their tensors."""
        folders = dict.fromkeys(name for written in ranks for name in written.entries)
        parts = {name: [written.entries.get(name, []) for written in ranks] for name in folders}
        for name in folders:
            (aside / name).mkdir(parents=True, exist_ok=True)
        return [record_file(write_index(aside / name, entries), aside) for name, entries in parts.items()]

    def finish(self) -> None:
        """Complete the pending checkpoint and its copy at the mirror."""
        self.commit(wait=True)
        if self.mirror is not None:
            self.mirror.wait()

    def _put_in_place(self, pending: _Pending, files: list[FileRecord]) -> Path:
        listed = [asdict(record) for record in sorted(files, key=lambda record: record.name)]
        manifest = pending.aside / MANIFEST
        write_json(manifest, {"format": FORMAT, "meshrl": meshrl.__version__, "step": pending.step, "files": listed})
        path = self.folder / f"global_step_{pending.step}"
        if path.exists():
            path.rename(self.folder / f".global_step_{pending.step}.old")
        pending.aside.rename(path)
        sync_folder(self.folder)
        shutil.rmtree(self.folder / f".global_step_{pending.step}.old", ignore_errors=True)
        return path

    def _failed(self, step: int, aside: Path, error: Exception) -> CheckpointError:
        self._pending = None
        shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder} ({free / 1e9:.1f} GB free); "
            f"the older ones are as they were. {type(error).__name__}: {error}"
        )

    def _delete_old(self) -> None:
        """Delete all but the newest `keep` checkpoints; damaged checkpoints are neither counted nor deleted."""
        if self.keep is None:
            return
        whole = [path for path in step_folders(self.folder) if not problems_of(path, checksums=False)]
        for path in whole[self.keep :]:
            # Rename first, so that a half-deleted folder does not look like a checkpoint.
            gone = path.rename(self.folder / f".{path.name}.deleted")
            shutil.rmtree(gone)

    def restore(self, trainer: Resumable, found: Found) -> None:
        """Restore workers and trainer to the state of a checkpoint."""
        for role, part in self.parts.items():
            held = found.content["contents"].get(role)
            if held is None:
                raise ValueError(f"{found.path} has no {role}, only {', '.join(found.content['contents'])}")
            wanted = part.load_contents or held
            if missing := [name for name in wanted if name not in held]:
                raise ValueError(f"{role}.checkpoint.load_contents asks for {missing}, but {found.path} holds {held}")
            part.group.load_checkpoint(str((found.path / role).absolute()), list(wanted))
        if found.content["state"] is None:  # weights without a run: a new run begins with them
            self.say(f"begins with the weights of {found.path}")
            return
        state = dict(found.content["state"])
        for name, value in state.items():
            if isinstance(value, dict) and set(value) == {"file"}:
                state[name] = DataProto.load_from_disk(_checked_file(found.path, name, value["file"]))
        trainer.load_state_dict(state)
        self.say(f"goes on after step {found.step} ({found.path})")
        for line in changed_keys(found.content["config"], self.config):
            self.say(f"  changed since: {line}")


def batch_file(name: str) -> str:
    """Return the file name of a `DataProto` that is saved in the state under this name."""
    return f"{name}.dataproto"


def _checked_file(folder: Path, name: str, file: Any) -> Path:
    """Return the path of a state's batch file, after a check that the state names the file it was written to."""
    if file != batch_file(name):
        raise CheckpointError(f"{folder / STATE} names {file!r} as the file of {name}: it is {batch_file(name)!r}")
    return inside(folder, file)


def step_folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders in a folder, complete or not, the newest first."""
    found = [
        (int(match[1]), path) for path in folder.glob("global_step_*") if (match := STEP_FOLDER.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def problems_of(path: Path, checksums: bool = True, formats: Sequence[int] = (FORMAT,)) -> list[str]:
    """Return why a checkpoint cannot be used: missing files, wrong sizes or, with `checksums`, changed content."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        if (path / "metrics.jsonl").is_file() and not step_folders(path):
            model = "; its model/ is a Hugging Face folder already" if (path / "model").is_dir() else ""
            return [f"it is the folder of a run without checkpoints (trainer.save_freq){model}"]
        return [f"it has no {MANIFEST}: it was not written to its end"]
    try:
        content = read_json(manifest)
        records = [FileRecord(**record) for record in content["files"]]
    except (ValueError, TypeError, KeyError) as error:
        return [f"its {MANIFEST} cannot be read: {error}"]
    if content.get("format") in formats:
        return _file_problems(path, records, checksums)
    if content.get("format") in BEFORE:
        return [
            f"it has format {content['format']}, with pickles, which run what they say when they are read: if you "
            f"trust it, 'meshrl convert {path} NEW --trust-pickle' makes one of plain data of it (of a run's "
            "folder it converts all)"
        ]
    return [f"it has format {content.get('format')}, this version reads {FORMAT}"]


def _file_problems(path: Path, records: Sequence[FileRecord], checksums: bool) -> list[str]:
    problems = [problem for record in records if (problem := _size_problem(path, record))]
    if problems or not checksums:
        return problems
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = pool.map(lambda record: checksum(path / record.name), records)
    return [f"{r.name} has been changed" for r, found in zip(records, sums, strict=True) if found != r.crc32]


def _size_problem(path: Path, record: FileRecord) -> str | None:
    try:
        file = inside(path, record.name)
    except (ValueError, TypeError) as error:
        return str(error)
    if not file.is_file():
        return f"{record.name} is missing"
    size = file.stat().st_size
    return None if size == record.size else f"{record.name} has {size} of {record.size} bytes"


def open_checkpoint(path: Path) -> Found:
    """Return the checkpoint that a user named, or raise a `CheckpointError` if it is not complete."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    if problems := problems_of(path):
        raise CheckpointError(f"the checkpoint {path} cannot be used: {'; '.join(problems[:3])}")
    return _found(path)


def _found(path: Path) -> Found:
    content = read_json(path / STATE)
    return Found(path, int(content["step"]), content)


def _is_whole(path: Path, say: Callable[[str], None]) -> bool:
    """Return whether a checkpoint is complete; if it is not, report why."""
    if problems := problems_of(path):
        say(f"the checkpoint {path} is passed over: {'; '.join(problems[:3])}")
    return not problems


def newest_complete(folder: Path, say: Callable[[str], None] = logger.warning) -> Found | None:
    """Return the newest complete checkpoint, and report which newer ones are not complete and why."""
    paths = step_folders(folder)
    for path in paths:
        if _is_whole(path, say):
            return _found(path)
    if paths:
        raise CheckpointError(
            f"no checkpoint of {len(paths)} in {folder} is whole; trainer.resume_mode=disable begins anew; the newest: "
            f"{'; '.join(problems_of(paths[0])[:1])}"
        )
    return None


def checkpoint_to_resume(
    trainer: RunConfig, say: Callable[[str], None] = logger.warning, again: bool = False
) -> Found | None:
    """Return the checkpoint from which a run resumes under `trainer.resume_mode`, or None to start from the beginning.

    `again` means that an earlier attempt has already written this run's folder, so its checkpoints come first.
    """
    if again and trainer.resume_mode != "auto" and (own := newest_complete(Path(trainer.run_dir) / FOLDER, say)):
        return own
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        return open_checkpoint(Path(trainer.resume_from_path or ""))
    folder = Path(trainer.run_dir) / FOLDER
    try:
        if (found := newest_complete(folder, say)) or not trainer.remote_dir:
            return found
    except CheckpointError:
        if not trainer.remote_dir or not (found := _from_mirror(trainer.remote_dir, folder, say)):
            raise
        return found
    return _from_mirror(trainer.remote_dir, folder, say)


def _from_mirror(address: str, folder: Path, say: Callable[[str], None]) -> Found | None:
    """Fetch the mirror's newest checkpoint that arrives complete."""
    for path in Mirror(address).fetched(folder):
        if _is_whole(path, say):
            say(f"the checkpoint {path} was fetched from {address}")
            return _found(path)
    return None


def set_later_ones_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints after this step, because a run that resumes here will not lead to them."""
    for path in step_folders(folder):
        if int(path.name.rpartition("_")[2]) > step:
            aside = path.with_name(path.name + ".superseded")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def config_digest(config: Mapping[str, Any]) -> str:
    """Return a short hash of a whole config, 16 hex digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield `key: old -> new` for every key in which two configs differ."""
    old, new = dict(flatten_config(before)), dict(flatten_config(now))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)} -> {new.get(name)}"


# Copies of checkpoints in a second place, such as `s3://bucket/run` or another disk: anything fsspec can write to.

MANIFEST = "manifest.json"
SUPERSEDED = "manifest.superseded.json"
PREFIX = "global_step_"


class Mirror:
    """Copies of complete checkpoints in a second place, made in a thread.

    The manifest is copied last, so a copy is complete if it has one. A copy that is replaced loses its manifest first.
    """

    def __init__(self, address: str, say: Callable[[str], None] = logger.warning):
        self.address, self.say = address, say
        self.files, self.root = fsspec.core.url_to_fs(address)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="meshrl-mirror")
        self._pushing: Future[None] | None = None

    def push(self, checkpoint: Path) -> None:
        """Begin to copy a checkpoint, after the previous copy has ended."""
        self.wait()
        self._pushing = self._pool.submit(self._push, checkpoint)

    def wait(self) -> None:
        """Wait for the copy in progress. A failed copy is only reported, because the run has its own checkpoint."""
        pushing, self._pushing = self._pushing, None
        if pushing is None:
            return
        try:
            pushing.result()
        except Exception as error:
            self.say(f"a checkpoint could not be copied to {self.address}: {type(error).__name__}: {error}")

    def _push(self, checkpoint: Path) -> None:
        target = f"{self.root}/{checkpoint.name}"
        # Copies of this step or later ones are of an earlier attempt, because the run has resumed before them.
        for step, name in self._steps():
            if step >= int(checkpoint.name.removeprefix(PREFIX)):
                self._supersede(f"{self.root}/{name}")
        files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
        files.sort(key=lambda file: file == checkpoint / MANIFEST)
        for file in files:
            place = f"{target}/{file.relative_to(checkpoint)}"
            self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(file), place)

    def fetched(self, folder: Path) -> Iterator[Path]:
        """Fetch the complete checkpoints into `folder`, the newest first, each when the iterator reaches it."""
        for _, name in self._steps():
            if self.files.exists(f"{self.root}/{name}/{MANIFEST}"):
                with new_folder(folder / name) as aside:
                    self._fetch(f"{self.root}/{name}", aside)
                yield folder / name

    def _steps(self) -> list[tuple[int, str]]:
        """Return the number and name of each checkpoint at the mirror, complete or not, the newest first."""
        if not self.files.exists(self.root):
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in self.files.ls(self.root, detail=False)]
        numbers = [(name.removeprefix(PREFIX), name) for name in names if name.startswith(PREFIX)]
        return sorted(((int(number), name) for number, name in numbers if number.isdecimal()), reverse=True)

    def _supersede(self, folder: str) -> None:
        """Rename the manifest of a copy, which then no longer counts as a checkpoint."""
        if self.files.exists(f"{folder}/{MANIFEST}"):
            self.files.mv(f"{folder}/{MANIFEST}", f"{folder}/{SUPERSEDED}")

    def _fetch(self, source: str, folder: Path) -> None:
        for path in self.files.find(source):
            target = inside(folder, str(path)[len(source) :].lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(path, str(target))
