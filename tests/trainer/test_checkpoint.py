"""When checkpoints are written, how many stay, what happens if writing one fails; with workers that only pretend."""

import errno
import io
import json
import os
import pickle
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from meshrl.config.trainer import RunConfig
from meshrl.controller import ControllerError
from meshrl.controller.peer_memory import Shelves
from meshrl.data.batch import DataProto
from meshrl.engines.old_state_files import Place, StoredTensor, read_index
from meshrl.engines.state_files import Rectangle, Snapshot, record_file, write_index, write_snapshot
from meshrl.engines.state_reader import Stored
from meshrl.telemetry.time_ledger import PhaseTimer
from meshrl.trainer.checkpoints import (
    CheckpointError,
    Checkpoints,
    Mirror,
    Part,
    checkpoint_to_resume,
    newest_complete,
    problems_of,
    set_later_ones_aside,
    step_folders,
)
from meshrl.workers import checkpointing
from meshrl.workers.checkpointing import CheckpointedWorker, Shelved, Written


@dataclass
class PretendGroup:
    """Two ranks that write a file each; `late` calls see the second one still writing."""

    world_size: int = 2
    late: int = 0
    error: Exception | None = None
    loaded: list = field(default_factory=list)

    def save_checkpoint(self, root, role, contents, background):
        if self.error:
            raise self.error
        self.root = Path(root)
        for rank in range(2):
            (self.root / role).mkdir(exist_ok=True)
            (self.root / role / f"{rank}.bin").write_bytes(bytes([rank]) * 100)

    def checkpoint_files(self, root, wait):
        found = [Written([record_file(file, self.root)], 0.1) for file in sorted(self.root.glob("*/*.bin"))]
        if self.late and not wait:
            self.late -= 1
            return [found[0], None]
        return found

    def load_checkpoint(self, folder, contents):
        self.loaded.append((Path(folder).parent.name, Path(folder).name, contents))


class PretendTrainer:
    def __init__(self):
        self.step, self.timer, self.state = 0, PhaseTimer(), {"x": 1}

    def state_dict(self):
        return {"step": self.step, **self.state}

    def load_state_dict(self, state):
        self.step, self.state = state["step"], {k: v for k, v in state.items() if k != "step"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def checkpoints(folder, group=None, **options):
    parts = {"actor": Part(group or PretendGroup(), ["model"])}
    return Checkpoints(folder, parts, **({"every": 2, "last_step": 7} | options))


def take(saver, trainer, *steps):
    for trainer.step in steps:
        saver.save_if_due(trainer)
        saver.commit()


def test_every_second_step_and_the_last(tmp_path):
    take(checkpoints(tmp_path), PretendTrainer(), *range(1, 8))
    assert names(tmp_path) == [f"global_step_{n}" for n in (2, 4, 6, 7)]
    assert not any(problems_of(path) for path in tmp_path.iterdir())
    take(checkpoints(tmp_path / "none", every=-1), PretendTrainer(), *range(1, 8))
    assert not (tmp_path / "none").exists()


def test_keep_n_deletes_the_oldest_and_never_the_last_good_one(tmp_path):
    saver, trainer = checkpoints(tmp_path, keep=2), PretendTrainer()
    take(saver, trainer, 1, 2, 3, 4, 5, 6)
    assert names(tmp_path) == ["global_step_4", "global_step_6"]
    # One that is damaged does not count: the whole one before it stays.
    (tmp_path / "global_step_6" / "actor" / "0.bin").write_bytes(b"short")
    take(checkpoints(tmp_path, keep=2, last_step=8), trainer, 8)
    assert names(tmp_path) == ["global_step_4", "global_step_6", "global_step_8"]
    (tmp_path / "global_step_8" / "manifest.json").unlink()
    said = []
    found = newest_complete(tmp_path, said.append)
    assert found.step == 4
    assert len(said) == 2
    assert "global_step_6" in said[1]
    assert "5 of 100 bytes" in said[1]


def test_one_that_is_still_written_is_not_there_yet(tmp_path):
    group, trainer = PretendGroup(late=2), PretendTrainer()
    saver = checkpoints(tmp_path, group)
    trainer.step = 2
    saver.save_if_due(trainer)
    for _ in range(2):
        saver.commit()
        assert names(tmp_path) == [".global_step_2.partial"]
        assert newest_complete(tmp_path) is None
    saver.commit()
    assert names(tmp_path) == ["global_step_2"]
    # The next save waits for the one before.
    group.late = 5
    take(saver, trainer, 4, 6)
    assert names(tmp_path) == [".global_step_6.partial", "global_step_2", "global_step_4"]
    saver.commit(wait=True)
    assert names(tmp_path) == ["global_step_2", "global_step_4", "global_step_6"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ControllerError("save_checkpoint failed on rank 1: OSError: No space left on device"),
    ],
)
def test_a_failing_save_says_so_and_leaves_the_old_ones(tmp_path, error):
    group, trainer = PretendGroup(), PretendTrainer()
    saver = checkpoints(tmp_path, group)
    take(saver, trainer, 2)
    group.error = error
    trainer.step = 4
    with pytest.raises(CheckpointError, match=r"step 4 could not be written .* GB free.*No space left"):
        saver.save_if_due(trainer)
    assert names(tmp_path) == ["global_step_2"]
    assert newest_complete(tmp_path).step == 2
    group.error = None
    take(saver, trainer, 4)
    assert names(tmp_path) == ["global_step_2", "global_step_4"]


def test_state_comes_back_with_its_batches(tmp_path):
    group, trainer = PretendGroup(), PretendTrainer()
    trainer.state = {"kl": {"value": 0.25}, "pending": DataProto.from_dict({"x": torch.arange(6).view(2, 3)})}
    take(checkpoints(tmp_path, group, config={"a": {"b": 1}}), trainer, 2)
    again, said = PretendTrainer(), []
    saver = checkpoints(tmp_path, group, config={"a": {"b": 2}}, say=said.append)
    saver.restore(again, newest_complete(tmp_path))
    assert again.step == 2
    assert again.state["kl"] == {"value": 0.25}
    assert torch.equal(again.state["pending"].batch["x"], torch.arange(6).view(2, 3))
    assert group.loaded == [("global_step_2", "actor", ["model"])]
    assert "  changed since: a.b: 1 -> 2" in said
    with pytest.raises(ValueError, match="has no critic, only actor"):
        Checkpoints(tmp_path, {"critic": Part(group, ["model"])}, every=2, last_step=7).restore(
            again, newest_complete(tmp_path)
        )
    wants = {"actor": Part(group, ["model"], ["model", "optimizer"])}
    with pytest.raises(ValueError, match=r"asks for \['optimizer'\]"):
        Checkpoints(tmp_path, wants, every=2, last_step=7).restore(again, newest_complete(tmp_path))


def test_later_ones_are_set_aside(tmp_path):
    take(checkpoints(tmp_path), PretendTrainer(), 2, 4, 6)
    set_later_ones_aside(tmp_path, 4)
    assert [path.name for path in step_folders(tmp_path)] == ["global_step_4", "global_step_2"]
    assert (tmp_path / "global_step_6.superseded" / "manifest.json").is_file()


def test_a_checkpoint_of_another_format_is_named(tmp_path):
    take(checkpoints(tmp_path), PretendTrainer(), 2)
    manifest = tmp_path / "global_step_2" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    assert problems_of(tmp_path / "global_step_2") == ["it has format 99, this version reads 3"]


def test_rectangles_are_put_together_from_other_cuts(tmp_path):
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    cuts = [(0, 0, 3, 5), (3, 0, 4, 2), (3, 2, 4, 3)]
    written = []
    for rank, (r, c, h, w) in enumerate(cuts):
        parts = [Rectangle("param", "w", (7, 5), (r, c), whole[r : r + h, c : c + w])]
        parts += [Rectangle("step", "w", (), (), torch.tensor(4.0))] if rank == 1 else []
        written.append(write_snapshot(Snapshot(parts), tmp_path, rank).entries)
    write_index(tmp_path, written)
    stored = Stored(tmp_path)
    assert torch.equal(stored.whole("w"), whole)
    assert stored.steps_of("w") == stored.steps_of("of no other number") == stored.steps_of() == 4
    for r, c, h, w in ((2, 1, 3, 3), (0, 0, 7, 1), (6, 4, 1, 1)):
        target = torch.zeros(h, w, dtype=torch.float64)
        stored.fill("param", "w", (7, 5), (r, c), target)
        assert torch.equal(target.float(), whole[r : r + h, c : c + w])
    for other in ((8, 5), (6, 5), (7, 5, 1)):  # a smaller one would fit into it
        with pytest.raises(ValueError, match=r"'w' \(param\) is \[7, 5\] in the checkpoint and \[" + str(other[0])):
            stored.fill("param", "w", other, (5, 0), torch.zeros(1, 5))
    write_index(tmp_path, written[:2])
    with pytest.raises(ValueError, match="holds 23 of 35 elements of 'w'"):
        Stored(tmp_path).whole("w")
    write_index(tmp_path, written)
    third = tmp_path / "tensors-2.safetensors"
    third.write_bytes(third.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"'model.w' ends at \d+: it is truncated"):
        Stored(tmp_path).whole("w")
    third.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks '.*tensors-2.safetensors', which holds 'model.w'"):
        Stored(tmp_path).whole("w")


def test_files_of_format_1_are_read(tmp_path):
    """Safetensors with a listing a rank, as they were written then."""
    whole, moment = torch.randn(6, 3), torch.randn(5).bfloat16()
    parts = [(0, whole[:4]), (1, whole[4:])]
    for rank, part in parts:
        tensors = {"0": part.clone()} | ({"1": moment} if rank else {})
        save_file(tensors, tmp_path / f"tensors-{rank}-0.safetensors")
        place = {"file": f"tensors-{rank}-0.safetensors"}
        listed = [
            {"kind": "param", "name": "w", "shape": [6, 3], "start": [4 * rank, 0], "size": list(part.shape)},
            {"kind": "exp_avg", "name": "b", "shape": [5], "start": [0], "size": [5]},
        ]
        entries = [entry | place | {"entry": str(n)} for n, entry in enumerate(listed[: 1 + rank])]
        (tmp_path / f"tensors-{rank}.json").write_text(json.dumps({"steps": {"*": 7 + rank}, "tensors": entries}))
    with pytest.raises(FileNotFoundError, match=r"it has no tensors\.json"):
        Stored(tmp_path)
    stored = Stored(tmp_path, before=True)
    assert stored.names() == ["w"]
    assert torch.equal(stored.whole("w"), whole)
    assert torch.equal(stored.whole("b", "exp_avg"), moment)
    target = torch.zeros(2, 2)
    stored.fill("param", "w", (6, 3), (3, 1), target)
    assert torch.equal(target, whole[3:5, 1:])
    assert stored.steps_of("w") == 8


class Runs:
    """A pickle of it runs something when it is read."""

    def __reduce__(self):
        return os.mkdir, ("here-it-was-run",)


class Calls:
    """A pickle of it calls this with these."""

    def __init__(self, what, *given):
        self.call = what, given

    def __reduce__(self):
        return self.call


def changing(owner, name):
    """A pickle by hand: the class, then a state (None, {name: 1}) that is built into it."""
    module = b"torch.distributed.checkpoint.metadata"
    start = b"\x80\x02c" + module + b"\n" + owner.encode() + b"\n"
    return start + b"(N}X" + len(name).to_bytes(4, "little") + name.encode() + b"K\x01stb."


@pytest.mark.parametrize("before", [False, True])
def test_reading_an_index_runs_nothing(tmp_path, monkeypatch, before):
    monkeypatch.chdir(tmp_path)
    by_way_of_its_imports = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08os.mkdir\x93"
    attacks = {
        "mkdir is no part of an index": pickle.dumps(Runs()),
        "metadata.os.mkdir is no part of an index": by_way_of_its_imports + b"\x8c\x0fhere-it-was-run\x85R.",
        "eval is no part of an index": pickle.dumps(Calls(eval, "__import__('os').mkdir('here-it-was-run')")),
        "_read_text is no part": pickle.dumps(Calls(_read_text)),
    }
    for said, content in attacks.items():
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises((ValueError, FileNotFoundError), match=said if before else r"it has no tensors\.json"):
            Stored(tmp_path, before)
    assert not (tmp_path / "here-it-was-run").exists()


def _read_text():
    """A function that no index names."""


def test_an_index_changes_no_class_of_torch(tmp_path):
    (tmp_path / ".metadata").write_bytes(changing("MetadataIndex", "changed"))
    with pytest.raises(ValueError, match="it holds a type"):
        read_index(tmp_path / ".metadata")
    assert not hasattr(MetadataIndex, "changed")
    pickle.loads((tmp_path / ".metadata").read_bytes())  # the control: plain unpickling does change it
    assert MetadataIndex.changed == 1
    del MetadataIndex.changed


class ByAttribute:
    """What a pickle of Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) calls where others name a member of an enum."""

    def __init__(self, owner, name):
        self.what = owner, name

    def __reduce__(self):
        return getattr, self.what


def test_torchs_own_index_is_read(tmp_path):
    """Also one that an earlier Python wrote, in which `getattr` names a member of an enum."""
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16),
        torch.Size([4, 2]),
        [ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 2]))],
    )
    where = MetadataIndex("model.w", torch.Size([2, 0]), 0)
    meta = StorageMeta(checkpoint_id=Path("somewhere"))
    paths = {"model.w": ("model", "w"), "format": ByAttribute(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")}
    index = Metadata({"model.w": tensor}, paths, {where: _StorageInfo("f", 3, 5)}, meta)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    found = read_index(tmp_path / ".metadata")
    assert found.tensors["model.w"] == StoredTensor((4, 2), torch.bfloat16, [((2, 0), (2, 2))])
    assert found.places == {("model.w", (2, 0)): Place("f", 3, 5)}
    assert found.paths == {"model.w": ("model", "w")}


NAMES_OUT = ("../out.safetensors", "/tmp/out.safetensors", "a/../../out.safetensors", "link.safetensors", "")


@pytest.mark.parametrize("name", NAMES_OUT)
def test_names_stay_in_their_folder(tmp_path, name):
    """Whatever a checkpoint's files name, nothing outside of it is read."""
    folder = tmp_path / "checkpoints"
    take(checkpoints(folder), PretendTrainer(), 2)
    whole, role = folder / "global_step_2", folder / "global_step_2" / "actor"
    save_file({"model.w": torch.ones(2)}, tmp_path / "out.safetensors")
    (role / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (whole / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    entry = ["param", "w", [2], [0], [2], "float32"]
    (role / "tensors.json").write_text(json.dumps({"format": 3, "tensors": [[*entry, name]]}))
    with pytest.raises(ValueError, match=r"does not lie in it|a link out of its folder"):
        Stored(role)
    listed = json.loads((whole / "manifest.json").read_text())
    record = {"name": name, "size": (tmp_path / "out.safetensors").stat().st_size, "crc32": 0}
    (whole / "manifest.json").write_text(json.dumps(listed | {"files": [*listed["files"], record]}))
    (problem,) = problems_of(whole)
    assert "does not lie in it" in problem or "a link out of its folder" in problem


@pytest.mark.parametrize("file", ["../batch.dataproto", "/tmp/batch.dataproto", "other.dataproto", 3])
def test_the_state_names_its_own_batches_alone(tmp_path, file):
    trainer = PretendTrainer()
    trainer.state = {"pending": DataProto.from_dict({"x": torch.arange(6)})}
    saver = checkpoints(tmp_path)
    take(saver, trainer, 2)
    found = newest_complete(tmp_path)
    found.content["state"]["pending"]["file"] = file
    with pytest.raises(CheckpointError, match=r"as the file of pending: it is 'pending.dataproto'"):
        saver.restore(PretendTrainer(), found)


@pytest.mark.parametrize("number", [1, 2])
def test_one_of_before_is_refused_with_what_to_do(tmp_path, number):
    take(checkpoints(tmp_path), PretendTrainer(), 2)
    manifest = tmp_path / "global_step_2" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": number}))
    with pytest.raises(CheckpointError, match=rf"has format {number}, .*'meshrl convert .*_2 NEW --trust-pickle'"):
        newest_complete(tmp_path)


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    class Disk(io.FileIO):
        def write(self, data):
            if data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return 0

    monkeypatch.setattr(Path, "open", lambda file, mode: Disk(file, "w"))
    with pytest.raises(OSError, match=r"No space left on device: .*tensors-0.safetensors"):
        write_snapshot(Snapshot([Rectangle("param", "w", (3,), (0,), torch.zeros(3))]), tmp_path, 0)


def test_a_mirror_gets_every_checkpoint_and_gives_the_newest_back(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    saver = checkpoints(here, keep=1, mirror=Mirror(f"file://{there}"))
    take(saver, PretendTrainer(), 2, 4, 6)
    saver.finish()
    assert names(here) == ["global_step_6"]
    assert names(there) == ["global_step_2", "global_step_4", "global_step_6"]
    assert not any(problems_of(path) for path in there.iterdir())
    # One that was not copied to its end has no manifest and is not fetched.
    (there / "global_step_6" / "manifest.json").unlink()
    trainer = RunConfig(default_local_dir=str(tmp_path / "new"), remote_dir=f"file://{there}")
    said = []
    assert checkpoint_to_resume(trainer, said.append).step == 4
    assert "was fetched from file://" in said[0]
    assert names(tmp_path / "new" / "checkpoints") == ["global_step_4"]


def test_a_mirror_writes_nothing_outside_of_the_checkpoint(tmp_path):
    """Object stores have keys with `..` in them."""
    saver = checkpoints(tmp_path / "here", mirror=Mirror(f"file://{tmp_path / 'there'}"))
    take(saver, PretendTrainer(), 2)
    saver.finish()
    mirror = Mirror(f"file://{tmp_path / 'there'}")
    (tmp_path / "there" / "evil").write_text("x")
    mirror.files.find = lambda source: [f"{source}/manifest.json", f"{source}/../evil"]
    try:
        with pytest.raises(ValueError, match="which does not lie in it"):
            list(mirror.fetched(tmp_path / "new"))
    finally:
        del mirror.files.find
    assert [file for file in tmp_path.rglob("*evil*") if "there" not in file.parts] == []


def test_a_copy_over_an_older_one_is_whole_or_absent(tmp_path):
    """A run that takes a step again copies over what is at the mirror: cut short, that must not look like one."""
    here, there = tmp_path / "here", tmp_path / "there"
    said = []
    mirror = Mirror(f"file://{there}", said.append)
    saver, trainer = checkpoints(here, mirror=mirror), PretendTrainer()
    take(saver, trainer, 2, 4)
    saver.finish()
    put, trainer.state = mirror.files.put_file, {"x": 2}

    def cut_short(file, place):
        if place.endswith("1.bin"):
            raise OSError("no connection")
        put(file, place)

    mirror.files.put_file = cut_short
    try:
        take(saver, trainer, 4)
        saver.finish()
    finally:
        del mirror.files.put_file
    assert "no connection" in said[0]
    run = RunConfig(default_local_dir=str(tmp_path / "new"), remote_dir=f"file://{there}")
    assert checkpoint_to_resume(run, said.append).step == 2


def test_a_mirror_forgets_what_the_run_went_back_from(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    saver = checkpoints(here, mirror=Mirror(f"file://{there}"))
    take(saver, PretendTrainer(), 2, 4, 6)
    saver.finish()
    # Another start goes on from step 2, or anew, and dies with its machine after step 4.
    again = checkpoints(here, mirror=Mirror(f"file://{there}"))
    take(again, PretendTrainer(), 4)
    again.finish()
    run = RunConfig(default_local_dir=str(tmp_path / "new"), remote_dir=f"file://{there}")
    assert checkpoint_to_resume(run, [].append).step == 4
    assert (there / "global_step_6" / "actor" / "0.bin").is_file()  # nothing but its word is gone


def test_damaged_checkpoints_are_made_good_by_the_mirror(tmp_path):
    run = RunConfig(default_local_dir=str(tmp_path), remote_dir=f"file://{tmp_path / 'there'}")
    here, there = tmp_path / "checkpoints", tmp_path / "there"
    saver = checkpoints(here, mirror=Mirror(run.remote_dir))
    take(saver, PretendTrainer(), 2, 4)
    saver.finish()
    for step in (2, 4):
        (here / f"global_step_{step}" / "actor" / "0.bin").write_bytes(b"short")
    # The mirror's newest is damaged as well.
    (there / "global_step_4" / "actor" / "1.bin").write_bytes(bytes(100))
    said = []
    assert checkpoint_to_resume(run, said.append).step == 2
    assert not problems_of(here / "global_step_2")
    assert "has been changed" in said[-2]
    shutil.rmtree(there)
    (here / "global_step_2" / "actor" / "0.bin").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="no checkpoint of 2 in"):
        checkpoint_to_resume(run, said.append)


def test_a_mirror_that_fails_is_said_and_the_run_goes_on(tmp_path):
    (tmp_path / "there").write_text("a file where the folder should be")
    said = []
    saver = checkpoints(tmp_path / "here", mirror=Mirror(f"file://{tmp_path / 'there'}", said.append))
    take(saver, PretendTrainer(), 2, 4)
    saver.finish()
    assert names(tmp_path / "here") == ["global_step_2", "global_step_4"]
    assert len(said) == 2
    assert "could not be copied" in said[0]


class Lost(Shelves):
    """Shelves that nobody answers for."""

    def put(self, step, files):
        raise TimeoutError("a node does not answer")


class PretendWorker(CheckpointedWorker):
    def _checkpointed(self):
        return None, None

    def _engine_awake(self):
        raise MemoryError("no room for the engine")


@pytest.fixture
def shelved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "MEMORY", tmp_path)
    return Shelved(Lost("meshrl-copies-ours", ("a", "b"), 1.0), 7)


def test_a_copy_that_fails_leaves_nothing_in_memory(tmp_path, shelved):
    own = shelved.new_folder()
    (own / "state.bin").write_bytes(b"x")
    with pytest.raises(TimeoutError):
        PretendWorker()._finish(None, own, [own / "state.bin"], {}, 0.0, shelved)
    assert names(tmp_path) == []
    with pytest.raises(MemoryError):
        PretendWorker().save_checkpoint(str(tmp_path / "aside"), "actor", ["model"], False, shelved)
    assert names(tmp_path) == []


def test_what_killed_processes_have_left_in_memory_goes(tmp_path, shelved):
    gone = subprocess.Popen(["true"])
    gone.wait()
    pid = {"ours": gone.pid, "another": gone.pid, "fresh": gone.pid, "alive": os.getpid()}
    for key, number in pid.items():
        (tmp_path / f"meshrl-copies-{key}-pid-{number}-x").mkdir()
    for key in ("another", "alive"):
        os.utime(tmp_path / f"meshrl-copies-{key}-pid-{pid[key]}-x", (0, 0))
    own = shelved.new_folder()
    # a fresh one of another run may be of a process that /proc does not show here
    left = [f"meshrl-copies-{key}-pid-{pid[key]}-x" for key in ("alive", "fresh")]
    assert names(tmp_path) == sorted([*left, own.name])


def test_a_run_without_checkpoints_is_told_from_one_that_was_not_written(tmp_path):
    assert problems_of(tmp_path) == ["it has no manifest.json: it was not written to its end"]
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "model").mkdir()
    (problem,) = problems_of(tmp_path)
    assert problem.startswith("it is the folder of a run without checkpoints (trainer.save_freq); its model/ is")
