"""Copies of the state in memory: the newest of them and the checkpoints is taken, and none outlives its use."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_checkpoint import PretendGroup, PretendTrainer

from meshrl.config.trainer import RunConfig
from meshrl.controller import ControllerError, GroupBrokenError
from meshrl.trainer import memory_checkpoints, shm_cleaner
from meshrl.trainer.checkpoints import FOLDER, CheckpointError, Checkpoints, Part
from meshrl.trainer.memory_checkpoints import MemoryCopies, copies_folder, held_copies, state_to_resume


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A folder instead of the machine's shared memory."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(memory_checkpoints, "MEMORY", tmp_path / "shm")
    return tmp_path / "shm"


def settings(tmp_path, **options):
    return RunConfig(default_local_dir=str(tmp_path / "run"), **({"memory_copy_freq": 1} | options))


def writer(folder, every, group=None, background=False):
    parts = {"actor": Part(group or PretendGroup(), ["model"], None, background)}
    return Checkpoints(folder, parts, every=every, last_step=9, keep=1)


def take_steps(copies, disk, *steps):
    """As the loop does: state after the step, completed once its metrics are logged."""
    trainer = PretendTrainer()
    for trainer.step in steps:
        disk.save_if_due(trainer)
        copies.copy_if_due(trainer, disk)
        disk.commit(wait=True)
        copies.commit()


def kept_steps(folder):
    return sorted(path.name for path in folder.glob("global_step_*"))


def test_the_newest_is_taken_and_all_is_given_back(tmp_path, memory):
    trainer = settings(tmp_path)
    with held_copies(trainer):
        folder = copies_folder(trainer.run_dir)
        assert folder.parent == memory
        disk, copies = writer(tmp_path / "run" / FOLDER, 4), MemoryCopies(writer(folder, 1), print)
        take_steps(copies, disk, 1, 2, 3)
        assert state_to_resume(trainer).path == folder / "global_step_3"
        assert kept_steps(folder) == ["global_step_3"]
        take_steps(copies, disk, 4)  # on the disk already: no copy
        assert kept_steps(folder) == ["global_step_3"]
        assert state_to_resume(trainer).path == tmp_path / "run" / FOLDER / "global_step_4"
        take_steps(copies, disk, 5)
        assert state_to_resume(trainer).step == 5
        # A copy that is damaged is passed over, with a word.
        (folder / "global_step_5" / "actor" / "1.bin").write_bytes(b"x" * 100)
        said = []
        assert state_to_resume(trainer, said.append).step == 4
        assert "1.bin has been changed" in said[0]
    assert not list(memory.iterdir())
    assert copies_folder(trainer.run_dir) is None


def test_beside_a_checkpoint_in_the_background_there_is_a_copy(tmp_path, memory):
    """Whoever dies before the file is complete loses nothing."""
    trainer = settings(tmp_path)
    with held_copies(trainer):
        folder = copies_folder(trainer.run_dir)
        late = PretendGroup(late=1)
        copies, disk = MemoryCopies(writer(folder, 2, late), print), writer(tmp_path / "run" / FOLDER, 4, None, True)
        take_steps(copies, disk, 3, 4)
        assert kept_steps(folder) == []  # a rank still writes
        take_steps(copies, disk, 5)
        assert kept_steps(folder) == ["global_step_4"]


@pytest.mark.parametrize(("error", "kept"), [(ValueError("a bug"), False), (GroupBrokenError("gone"), True)])
def test_they_stay_where_a_run_may_be_taken_up_again(tmp_path, memory, error, kept):
    trainer = settings(tmp_path)

    def run():
        with held_copies(trainer):
            copies = MemoryCopies(writer(copies_folder(trainer.run_dir), 1), print)
            take_steps(copies, writer(tmp_path / "run" / FOLDER, -1), 1)
            raise error

    with pytest.raises(type(error)):
        run()
    folder = copies_folder(trainer.run_dir)
    assert bool(list(memory.iterdir())) == kept
    if kept:  # the next command finds them, one that begins anew does not
        with held_copies(trainer):
            assert (copies_folder(trainer.run_dir), state_to_resume(trainer).step) == (folder, 1)
            new = settings(tmp_path, resume_mode="disable")
            assert state_to_resume(new) is None
            assert state_to_resume(new, again=True).step == 1
        with held_copies(new):
            assert state_to_resume(new, again=True) is None


class FullGroup(PretendGroup):
    def save_checkpoint(self, root, role, contents, background):
        raise ControllerError("rank 1: OSError: No space left on device")


class LostGroup(PretendGroup):
    def save_checkpoint(self, root, role, contents, background):
        raise GroupBrokenError("gone")


class FarGroup(PretendGroup):
    """Writes where this process cannot look."""

    def checkpoint_files(self, root, wait):
        found = super().checkpoint_files(root, wait)
        (self.root / "actor" / "1.bin").unlink()
        return found


@pytest.mark.parametrize(("group", "why"), [(FullGroup, "No space left"), (FarGroup, "1.bin is missing")])
def test_what_cannot_be_copied_is_said_once_and_the_run_goes_on(tmp_path, group, why):
    said = []
    copies = MemoryCopies(writer(tmp_path / "copies", 1, group()), said.append)
    take_steps(copies, writer(tmp_path / FOLDER, -1), 1, 2, 3)
    (line,) = said
    assert why in line


def test_a_death_while_copying_is_no_reason_to_go_on(tmp_path):
    copies = MemoryCopies(writer(tmp_path / "copies", 1, LostGroup()), print)
    with pytest.raises(CheckpointError):
        take_steps(copies, writer(tmp_path / FOLDER, -1), 1)


def wait_for(condition, seconds=30.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_lock_that_is_held_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'wb+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); "
    for seconds, limit in ((0.3, 10.0), (10.0, 0.3)):
        monkeypatch.setattr(memory_checkpoints, "LOCK_SECONDS", limit)
        words = [sys.executable, "-c", f"{hold} time.sleep({seconds})", str(tmp_path / "lock")]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as holder, open(tmp_path / "lock", "wb+") as stream:
            holder.stdout.readline()
            if seconds < limit:
                memory_checkpoints._take_lock(stream)
            else:
                with pytest.raises(BlockingIOError):
                    memory_checkpoints._take_lock(stream)
            holder.kill()


def test_the_warden_waits_while_the_folder_is_in_use_and_then_removes_it(tmp_path):
    """A process that holds it is killed; a second warden ends at once."""
    folder = tmp_path / "copies"
    folder.mkdir()
    hold = f"import fcntl, time; f = open({str(folder / shm_cleaner.LOCK)!r}, 'wb+'); fcntl.lockf(f, fcntl.LOCK_EX)"
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", f"{hold}; print('held', flush=True); time.sleep(60)"], stdout=-1
    )
    assert holder.stdout.readline() == b"held\n"
    words = [sys.executable, "-I", str(Path(shm_cleaner.__file__)), str(folder), "0.1"]
    warden = subprocess.Popen(words)
    wait_for((folder / shm_cleaner.OWN_LOCK).exists)
    time.sleep(3 * shm_cleaner.LOOK_SECONDS)
    assert subprocess.Popen(words).wait(30) == 0
    assert folder.is_dir()
    assert warden.poll() is None
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(30)
    wait_for(lambda: not folder.exists())
    assert warden.wait(30) == 0


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"folder": "/dev/shm/meshrl-copies-1"}', '{"run": 3, "folder": 4}']
)
def test_a_damaged_link_costs_the_copies_and_nothing_else(tmp_path, memory, caplog, content):
    """As a disk that is full left it: the next start says so and goes on from the disk."""
    trainer = settings(tmp_path)
    run_dir = Path(trainer.run_dir)
    take_steps(MemoryCopies(None, print), writer(run_dir / FOLDER, 1), 1)
    (run_dir / memory_checkpoints.LINK).write_text(content)
    assert copies_folder(run_dir) is None
    assert state_to_resume(trainer).step == 1
    with held_copies(trainer):
        assert "is passed over" in caplog.text
        assert copies_folder(run_dir).parent == memory
    assert not list(memory.iterdir())


@pytest.mark.parametrize("way", ["copied", "copied before its original was moved", "named by hand", "linked by hand"])
def test_a_copied_run_folder_has_copies_of_its_own(tmp_path, memory, caplog, way):
    """It neither goes on from its original's copies nor removes them."""
    trainer = settings(tmp_path)
    run_dir, other_dir = Path(trainer.run_dir), tmp_path / "copied"

    def run():
        with held_copies(trainer):
            take_steps(MemoryCopies(writer(copies_folder(run_dir), 1), print), writer(run_dir / FOLDER, -1), 1, 2)
            raise GroupBrokenError("gone")

    with pytest.raises(GroupBrokenError):
        run()
    folder = copies_folder(run_dir)
    if way.endswith("by hand"):  # a link to something that is no folder of copies: it would be removed
        folder = tmp_path / "precious" / "global_step_2"
        folder.mkdir(parents=True)
        other_dir.mkdir()
        named = memory / f"{memory_checkpoints.PREFIX}link"
        named.symlink_to(folder)
        said = {
            "folder": str(named if way == "linked by hand" else folder),
            "run": memory_checkpoints.identity(other_dir),
        }
        memory_checkpoints.write_json(other_dir / memory_checkpoints.LINK, said)
    else:
        shutil.copytree(run_dir, other_dir)
    if way == "copied before its original was moved":
        run_dir.rename(tmp_path / "moved")
        other_dir.rename(run_dir)
        run_dir, other_dir = tmp_path / "moved", run_dir
        assert copies_folder(run_dir) == folder  # which goes on to have them
    for mode in ("auto", "disable"):
        other = RunConfig(default_local_dir=str(other_dir), memory_copy_freq=1, resume_mode=mode)
        assert state_to_resume(other) is None
        with held_copies(other):
            assert copies_folder(other_dir) not in (None, folder)
    assert "is passed over" in caplog.text
    assert folder.is_dir()
    if not way.endswith("by hand"):
        own = RunConfig(default_local_dir=str(run_dir), memory_copy_freq=1)
        with held_copies(own):
            assert state_to_resume(own).path == folder / "global_step_2"
        assert not folder.exists()


def test_the_warden_removes_what_a_killed_run_was_removing(tmp_path):
    folder = tmp_path / "copies"
    words = [sys.executable, "-I", str(Path(shm_cleaner.__file__)), str(folder), "60"]
    warden = subprocess.Popen(words)  # before the folder is there, as a run starts it
    folder.mkdir()
    wait_for((folder / shm_cleaner.OWN_LOCK).exists)
    (folder / "big").write_bytes(b"x")
    folder.rename(shm_cleaner.half_removed(folder))
    assert warden.wait(30) == 0
    assert not list(tmp_path.iterdir())


def test_what_a_kill_while_removing_has_left_is_removed_by_the_next_attempt(tmp_path, memory):
    trainer = settings(tmp_path)
    with held_copies(trainer):
        gone = shm_cleaner.half_removed(copies_folder(trainer.run_dir))
        (gone / "global_step_1").mkdir(parents=True)
    assert not list(memory.iterdir())
