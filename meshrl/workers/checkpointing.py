"""Checkpoints of workers with a trained model: write and read this rank's state, on request in the background."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import traceback
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from meshrl.config.engine import ModelConfig
from meshrl.controller import Dispatch, Worker, register
from meshrl.controller.peer_memory import Shelves
from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.engines.state_files import Entry, FileRecord, Part, Snapshot, record_file, write_snapshot
from meshrl.engines.training_engine import CONTENTS, Engine
from meshrl.models.loading import run_tokenizer
from meshrl.models.lora import save_adapter_config
from meshrl.models.saving import copy_processor, save_configs, save_hf_folder
from meshrl.telemetry.time_ledger import booked

# The subfolder of a role's Hugging Face files: configs and tokenizer always, weights if the contents have `hf_model`.
HF_FOLDER = "huggingface"
MEMORY = Path("/dev/shm")
# Another run's process may live in another container, where /proc does not show it. So its folder is kept for this
# many seconds, which is longer than a copy takes.
LEFT_BEHIND_SECONDS = 3600.0


@dataclass(frozen=True)
class Written:
    """The files that one rank wrote of a checkpoint, the seconds it took, and by folder the places of its tensors."""

    files: list[FileRecord]
    seconds: float
    entries: dict[str, list[Entry]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shelved:
    """The destination of a step's files in the memory of this and another node (`meshrl.controller.peer_memory`)."""

    shelves: Shelves
    step: int

    def new_folder(self) -> Path:
        """Make a folder for this process in `/dev/shm`, and remove the folders that killed processes left there."""
        for folder in MEMORY.glob(f"{self.shelves.key.rpartition('-')[0]}-*-pid-*"):
            of_this_run = folder.name.startswith(f"{self.shelves.key}-")
            if not Path("/proc", folder.name.split("-")[-2]).exists() and (of_this_run or _is_old(folder)):
                shutil.rmtree(folder, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{self.shelves.key}-pid-{os.getpid()}-", dir=MEMORY))


def _is_old(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > LEFT_BEHIND_SECONDS
    except FileNotFoundError:  # another process removes it too
        return False


class CheckpointedWorker(Worker):
    """A worker with one trained engine, which adds `save_checkpoint`, `checkpoint_files` and `load_checkpoint`."""

    preload: ClassVar[Sequence[str]] = ("meshrl.models.preloaded",)

    @cached_property
    def _writings(self) -> dict[Path, ThreadFuture[Written]]:
        """The checkpoints being written, by the folder of all checkpoints.

        One checkpoint may be written to the disk while another is copied to memory.
        """
        return {}

    @abstractmethod
    def _checkpointed(self) -> tuple[Engine, ModelConfig]:
        """Return the trained engine and the config of the model it started from."""

    @abstractmethod
    def _engine_awake(self) -> AbstractContextManager[None]:
        """Keep the engine's weights and optimizer states on its compute device inside the context."""

    def _saved_beside(self) -> dict[str, Engine]:
        """Return engines that are not trained and yet change, by the name of the folder that holds their weights."""
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("checkpoint")
    def save_checkpoint(
        self, root: str, role: str, contents: list[str], background: bool = False, shelved: Shelved | None = None
    ) -> None:
        """Write this rank's files into `root/role`; `checkpoint_files` returns their names.

        In the background the state is copied to host memory and a thread writes it. With `shelved` the files go into
        the memory of this and of another node instead.
        """
        started = time.perf_counter()
        place = Path(root).parent
        if place in self._writings and not self._writings[place].done():
            raise ValueError("the checkpoint before is still being written: wait for its checkpoint_files")
        own = Path(root) if shelved is None else shelved.new_folder()
        folder = own / role
        engine, _ = self._checkpointed()
        try:
            with self._engine_awake():
                files = self._write_hf_files(folder, with_weights="hf_model" in contents)
                beside = {f"{role}/{name}": other.snapshot(("model",)) for name, other in self._saved_beside().items()}
                parts = {name: write_snapshot(state, own / name, self.rank) for name, state in beside.items()}
                snapshot = engine.snapshot([name for name in contents if name in CONTENTS])
                if background:
                    snapshot = snapshot.copied()
                else:
                    parts[role] = write_snapshot(snapshot, folder, self.rank)
        except BaseException:
            if shelved is not None:  # free the memory, which no other process would free
                shutil.rmtree(own, ignore_errors=True)
            raise
        held = time.perf_counter() - started
        left = (role, snapshot) if background else None
        if background:
            pool = ThreadPoolExecutor(1, thread_name_prefix="meshrl-checkpoint")
            self._writings[place] = pool.submit(self._finish, left, own, files, parts, held, shelved)
            pool.shutdown(wait=False)
        else:
            self._writings[place] = ThreadFuture()
            self._writings[place].set_result(self._finish(left, own, files, parts, held, shelved))

    def _write_hf_files(self, folder: Path, with_weights: bool) -> list[Path]:
        """Write the files that Hugging Face needs to read the model; return the files.

        Rank 0 writes. With weights all ranks take part.
        """
        engine, model = self._checkpointed()
        target = folder / HF_FOLDER
        if with_weights:
            save_hf_folder(target, engine.per_tensor_params(), engine.hf_model, writes=self.rank == 0)
        if self.rank != 0:
            return []
        save_configs(target, engine.hf_model)
        tokenizer = Path(model.tokenizer_path or model.path or "")
        if (tokenizer / "tokenizer_config.json").is_file():
            run_tokenizer(model).save_pretrained(target)
        copy_processor(model.path or "", target)
        files = [file for file in target.rglob("*") if file.is_file()]
        if isinstance(engine, FSDPEngine) and engine.has_adapters:
            files += save_adapter_config(folder, engine.hf_model, engine.adapter_scaling, model.path or "")
        return files

    def _finish(
        self,
        left: tuple[str, Snapshot] | None,
        root: Path,
        files: list[Path],
        parts: dict[str, Part],
        seconds: float,
        shelved: Shelved | None,
    ) -> Written:
        started = time.perf_counter()
        snapshot: Snapshot | None = None
        try:
            if left is not None:
                role, snapshot = left
                parts = parts | {role: write_snapshot(snapshot, root / role, self.rank)}
            records = [record_file(file, root) for file in files]
            records += [record for part in parts.values() for record in part.records(root)]
            entries = {folder: part.entries for folder, part in parts.items()}
            if shelved is not None:
                shelved.shelves.put(shelved.step, {record.name: root / record.name for record in records})
        except BaseException as error:
            # The error is raised by `checkpoint_files`, perhaps never. Its frames would hold the state until then.
            left = snapshot = None
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            if shelved is not None:
                shutil.rmtree(root)
        return Written(records, seconds + time.perf_counter() - started, entries)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("checkpoint")
    def checkpoint_files(self, root: str, wait: bool = True) -> Written | None:
        """Return what this rank wrote of the last checkpoint beside `root`.

        While the rank still writes, return None unless `wait` is set.
        """
        writing = self._writings.get(Path(root).parent)
        if writing is None:
            raise ValueError("no checkpoint was asked for: call save_checkpoint first")
        if not wait and not writing.done():
            return None
        return writing.result()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("checkpoint")
    def load_checkpoint(self, folder: str, contents: Sequence[str]) -> None:
        """Load the parts of the state that `contents` names from a role's folder, whatever layout wrote it."""
        engine, _ = self._checkpointed()
        with self._engine_awake():
            engine.load_checkpoint(Path(folder), [name for name in contents if name in CONTENTS])
            for name, other in self._saved_beside().items():
                if (Path(folder) / name).is_dir():
                    other.load_checkpoint(Path(folder) / name, ("model",))
