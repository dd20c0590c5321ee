"""What every worker with a trained model can do: write its state, in the background if asked, and read it back."""

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

# The role's Hugging Face files lie here: configs and tokenizer always, the weights with `hf_model`.
HF_FOLDER = "huggingface"
MEMORY = Path("/dev/shm")
# Another run's process may live in a container of its own, where /proc does not show it: its folder is left alone for
# longer than a copy takes.
LEFT_BEHIND_SECONDS = 3600.0


@dataclass(frozen=True)
class Written:
    """What one rank wrote of a checkpoint, how long it took, and by folder where its tensors lie."""

    files: list[FileRecord]
    seconds: float
    entries: dict[str, list[Entry]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shelved:
    """Where the files of a step go that is copied to the memory of other nodes."""

    shelves: Shelves
    step: int

    def new_folder(self) -> Path:
        """A folder of this process's in memory; those that killed processes have left there go."""
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
    """Adds `save_checkpoint`, `checkpoint_files` and `load_checkpoint` to a worker that has one trained engine."""

    preload: ClassVar[Sequence[str]] = ("meshrl.models.preloaded",)

    @cached_property
    def _writings(self) -> dict[Path, ThreadFuture[Written]]:
        """By the folder that has all checkpoints: one may go to the disk while another is copied to memory."""
        return {}

    @abstractmethod
    def _checkpointed(self) -> tuple[Engine, ModelConfig]:
        """The trained engine and the model it started from."""

    @abstractmethod
    def _engine_awake(self) -> AbstractContextManager[None]:
        """Inside, the engine's weights and optimizer states are where it computes."""

    def _saved_beside(self) -> dict[str, Engine]:
        """Models that are not trained and yet change: their weights are saved too, in folders of these names."""
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("checkpoint")
    def save_checkpoint(
        self, root: str, role: str, contents: list[str], background: bool = False, shelved: Shelved | None = None
    ) -> None:
        """Writes this rank's files into `root/role`; `checkpoint_files` says which.

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
            if shelved is not None:  # memory that nobody else would free
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
        """Writes what Hugging Face needs to read the model: rank 0 writes, all ranks take part if there are weights."""
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
            # Whoever asks gets it, perhaps never: its frames would hold the whole state until then.
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
        """What this rank wrote of the last checkpoint beside `root`; None while it still writes, unless `wait`."""
        writing = self._writings.get(Path(root).parent)
        if writing is None:
            raise ValueError("no checkpoint was asked for: call save_checkpoint first")
        if not wait and not writing.done():
            return None
        return writing.result()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("checkpoint")
    def load_checkpoint(self, folder: str, contents: Sequence[str]) -> None:
        """Reads what `contents` names of the state in a role's folder, whatever layout wrote it."""
        engine, _ = self._checkpointed()
        with self._engine_awake():
            engine.load_checkpoint(Path(folder), [name for name in contents if name in CONTENTS])
            for name, other in self._saved_beside().items():
                if (Path(folder) / name).is_dir():
                    other.load_checkpoint(Path(folder) / name, ("model",))
