"""Conversion of older files with pickles to plain data: `meshrl convert SOURCE OUT --trust-pickle`.

    a checkpoint of format 1 or 2        a checkpoint of the current format
    a kept batch (*.dataproto)           the same batch
    a run's folder, or checkpoints/      the same folder, with all of these converted and the rest copied
    a model or adapter with only *.bin   the same in safetensors

Reading a pickle executes the code in it. Only this conversion reads pickles, and only if a user asks for it.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from base64 import b64decode
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import meshrl
from meshrl.config.keys import count
from meshrl.config.model_folder import pickle_problem
from meshrl.data import plain_data
from meshrl.data.batch import DataProto
from meshrl.data.curriculum import STATE as SAMPLER_STATE
from meshrl.data.serialization import inside, save_tensors
from meshrl.engines.old_state_files import is_before
from meshrl.engines.state_files import FileRecord, Snapshot, record_file, write_index, write_snapshot
from meshrl.engines.state_reader import Stored
from meshrl.files import read_json, write_json
from meshrl.models.loading import load_pickled_model, named_weights
from meshrl.models.saving import SHARD_BYTES, as_file_tensors, new_folder, write_shards
from meshrl.trainer.checkpoints import BEFORE, FORMAT, MANIFEST, STATE, CheckpointError, batch_file, problems_of

PICKLED_BATCHES = (".dataproto", ".pkl")
PICKLED_ADAPTER, ADAPTER = "adapter_model.bin", "adapter_model.safetensors"
PICKLED_SAMPLER = "pickled_sampler"
EXTRA = re.compile(r"extra-(\d+)\.pt")
# The link to in-memory checkpoints, which belong only to the run that made them.
NOT_COPIED = ("memory_copies.json",)
# Former modules of the classes and functions in pickled batches, and where these are now.
MOVED = {"meshrl.data.proto": "meshrl.data.batch", "meshrl.data.serialize": "meshrl.data.serialization"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(MOVED.get(module, module), name)


def pickles_in(source: Path) -> list[Path]:
    """Return the places that `from_pickles` would convert: checkpoints, batches and a model's folder."""
    if source.is_file():
        return [source] if plain_data.is_pickle(source) else []
    if is_pickled_model(source):
        return [source]
    return [*_checkpoints_of(source), *_batches_of(source)]


def is_pickled_model(folder: Path) -> bool:
    """Return whether a model's or adapter's folder has its weights only as pickles."""
    is_model = (folder / "config.json").is_file() or (folder / PICKLED_ADAPTER).is_file()
    return is_model and pickle_problem(folder) is not None


def refuse_pickles(source: Path) -> None:
    """Raise a `ValueError` with the remedy if a source has pickles."""
    if found := pickles_in(source):
        raise ValueError(
            f"{source} holds pickles ({count(len(found), 'place')}, first of all {found[0]}), which run what they say "
            "when they are read: if you trust it, add --trust-pickle, which makes plain data of it; convert that then"
        )


def from_pickles(source: Path, out: Path) -> tuple[int, int]:
    """Convert SOURCE to OUT without pickles; return the number of converted places and OUT's size in bytes."""
    found = pickles_in(source)
    if not found:
        raise ValueError(f"--trust-pickle: {source} holds no pickles that need converting")
    if source.is_file():
        batch = _load_batch(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        batch.save_to_disk(out)
        return 1, out.stat().st_size
    with new_folder(out) as aside:
        if is_pickled_model(source):
            _convert_model(source, aside)
        else:
            _convert_tree(source, aside)
    return len(found), sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def _checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints of an older format in a folder, possibly the folder itself."""
    return [file.parent for file in sorted(folder.rglob(MANIFEST)) if _format_of(file) in BEFORE]


def _format_of(manifest: Path) -> Any:
    try:
        content = read_json(manifest)
    except ValueError:
        return None
    return content.get("format") if isinstance(content, dict) else None


def _batches_of(folder: Path) -> list[Path]:
    """Return the pickled batches in a folder, except those inside checkpoints of an older format."""
    inner = _checkpoints_of(folder)
    files = [file for suffix in PICKLED_BATCHES for file in sorted(folder.rglob(f"*{suffix}")) if file.is_file()]
    return [
        file for file in files if plain_data.is_pickle(file) and not any(file.is_relative_to(path) for path in inner)
    ]


def _convert_tree(source: Path, out: Path) -> None:
    checkpoints, batches = set(_checkpoints_of(source)), set(_batches_of(source))

    def convert(folder: Path, target: Path) -> None:
        if folder in checkpoints:
            _convert_checkpoint(folder, target)
            return
        target.mkdir(exist_ok=True)
        for path in sorted(folder.iterdir()):
            if path.is_symlink():
                (target / path.name).symlink_to(os.readlink(path))
            elif path.is_dir():
                convert(path, target / path.name)
            elif path in batches:
                _load_batch(path).save_to_disk(target / f"{path.stem}.dataproto")
            elif path.name not in NOT_COPIED:
                shutil.copy2(path, target / path.name)

    convert(source, out)


def _convert_checkpoint(source: Path, out: Path) -> None:
    """Write a checkpoint of the current format with the same tensors, states and batches."""
    if problems := problems_of(source, formats=BEFORE):
        raise CheckpointError(f"the checkpoint {source} cannot be used: {'; '.join(problems[:3])}")
    out.mkdir(parents=True, exist_ok=True)
    old = read_json(source / MANIFEST)
    content = read_json(source / STATE)
    records: list[FileRecord] = []
    taken = {MANIFEST, STATE}
    for folder in sorted({path.parent for path in source.rglob("*") if is_before(path.parent)}):
        target = out / folder.relative_to(source)
        part = write_snapshot(Snapshot(Stored(folder, before=True).rectangles()), target, 0)
        records += [*part.records(out), record_file(write_index(target, [part.entries]), out)]
        for file in folder.iterdir():
            if file.is_file() and (match := EXTRA.fullmatch(file.name)):
                extra = torch.load(file, weights_only=True)
                plain_data.save(extra, target / f"extra-{match[1]}.plain", f"{file.name}: ")
                records.append(record_file(target / f"extra-{match[1]}.plain", out))
            tensors = file.name.startswith(("tensors-", "__", ".metadata", "extra-"))
            taken |= {str(file.relative_to(source))} if file.is_file() and tensors else set()
    state = content["state"]
    for name, value in list((state or {}).items()):
        if isinstance(value, dict) and set(value) == {"file"}:
            taken.add(value["file"])
            _load_batch(inside(source, value["file"])).save_to_disk(out / batch_file(name))
            records.append(record_file(out / batch_file(name), out))
            state[name] = {"file": batch_file(name)}
        else:
            state[name] = _with_plain_sampler(value)
    for name in (record["name"] for record in old["files"]):
        if name not in taken:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(inside(source, name), out / name)
            records.append(record_file(out / name, out))
    write_json(out / STATE, content)
    records.append(record_file(out / STATE, out))
    listed = [asdict(record) for record in sorted(records, key=lambda record: record.name)]
    manifest = {"format": FORMAT, "meshrl": meshrl.__version__, "step": content["step"], "files": listed}
    write_json(out / MANIFEST, manifest)


def _with_plain_sampler(value: Any) -> Any:
    """Convert a pickled sampler state to plain data, at any depth of a part of the trainer's state."""
    if not isinstance(value, dict):
        return value
    found = {name: _with_plain_sampler(part) for name, part in value.items() if name != PICKLED_SAMPLER}
    if PICKLED_SAMPLER in value:
        own = pickle.loads(b64decode(value[PICKLED_SAMPLER]))
        found[SAMPLER_STATE] = plain_data.to_json(own, "the state of data.sampler")
    return found


def _load_batch(file: Path) -> DataProto:
    with file.open("rb") as stream:
        try:
            loaded = _Unpickler(stream).load()
        except (pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, ImportError) as error:
            raise ValueError(f"{file} is no whole file of DataProto.save_to_disk: {error}") from error
    if not isinstance(loaded, DataProto):
        raise ValueError(f"{file} holds a {type(loaded).__name__}, not a DataProto")
    return loaded


def _convert_model(source: Path, out: Path) -> None:
    """Write the weights as safetensors under the names that Transformers uses, and copy the other files."""
    if (source / PICKLED_ADAPTER).is_file():
        save_tensors(torch.load(source / PICKLED_ADAPTER, map_location="cpu", weights_only=True), out / ADAPTER)
    else:
        model = load_pickled_model(source)
        write_shards(out, as_file_tensors(named_weights(model).items(), model), SHARD_BYTES, copies=False)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".bin", ".bin.index.json")):
            shutil.copy2(file, out / file.name)
