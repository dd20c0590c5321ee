"""What only the local backend promises: how workers are started, how they end, and that nothing is left of them."""

import contextlib
import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from controller_workers import Probe, has_ended

from meshrl.controller import (
    ClassWithInitArgs,
    Deadlines,
    GroupBrokenError,
    ResourcePool,
    WorkerDied,
    WorkerError,
    create_worker_group,
)
from meshrl.controller.calls import Future, SerialThread
from meshrl.controller.forkserver import get_nursery
from meshrl.data.batch import DataProto

HERE = Path(__file__).parent


def start(world_size=2, deadlines=None, **kwargs):
    pool = ResourcePool([world_size], use_gpu=False)
    return create_worker_group(pool, ClassWithInitArgs(Probe, **kwargs), deadlines=deadlines, in_process=False)


def script_environment():
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def run_script(tmp_path, text, **options):
    script = tmp_path / "user_script.py"
    script.write_text(text)
    env = {**script_environment(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options
    )


def named_shared_memory(pids):
    """The files in /dev/shm that these processes hold open or have mapped; those of others on the machine are not."""
    found = set()
    for pid in pids:
        names = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                names.append(os.readlink(fd))
        found |= {name for name in names if name.startswith("/dev/shm/")}
    return found


def test_nothing_is_left_in_shared_memory_when_all_is_killed():
    before = named_shared_memory([os.getpid()])
    with start(2) as group:
        future = group.slow_shard(DataProto.from_dict({"x": torch.zeros(4, 1_000_000)}), 30)
        until = time.monotonic() + 30
        while group._backend.stacks().count("in slow_shard") < 2:  # both have their batch
            assert time.monotonic() < until
        pids = [rank.pid for rank in group._backend._ranks]
        held = named_shared_memory([os.getpid(), *pids]) - before
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            future.get(10)
    assert not [name for name in held if os.path.exists(name)]


def test_shared_memory_with_a_name_would_be_seen():
    file = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115
    file.truncate(1)
    assert file.name in named_shared_memory([os.getpid()])
    with mmap.mmap(file.fileno(), 1):
        name = file.name
        file.close()
        assert f"{name} (deleted)" in named_shared_memory([os.getpid()])
    assert not [found for found in named_shared_memory([os.getpid()]) if name in found]


def test_a_death_tells_how(tmp_path):
    with start(2) as group, pytest.raises(WorkerDied, match="exited with code 41") as caught:
        group.exit_with(41)
    assert (caught.value.exitcode, caught.value.rank) == (41, 0)
    with start(2) as group:
        pid = group.about()[1]["pid"]
        waiting = group.sleep_later(30)
        time.sleep(0.3)
        os.kill(pid, signal.SIGSEGV)
        with pytest.raises(WorkerDied, match=r"signal 11 \(SIGSEGV\)") as caught:
            waiting.get(10)
        assert "controller_workers.py" in str(caught.value)  # where it was, from the crash dump
        assert (caught.value.exitcode, caught.value.pid) == (-11, pid)


def test_a_kill_is_reported_within_seconds():
    with start(4) as group:
        pids = [told["pid"] for told in group.about()]
        waiting = group.sleep_later(30)
        time.sleep(0.2)
        began = time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank 2 .*signal 9 \(SIGKILL\).*out-of-memory"):
            waiting.get(10)
        assert time.monotonic() - began < 10


def test_a_worker_whose_socket_is_held_by_its_child_is_still_found_dead():
    with start(2) as group:
        pid = group.about()[0]["pid"]
        child = group.execute_rank(0, "fork_a_sleeper")
        waiting = group.sleep_later(30)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            waiting.get(5)
        assert has_ended(child)


def test_children_end_with_their_workers():
    group = start(2)
    children = group.execute_all("fork_a_sleeper")
    group.shutdown()
    assert all(has_ended(child) for child in children)


def test_nd_dispatch_over_three_axes():
    with start(8) as group:
        group.lay_out("grid", {"pp": 2, "dp": 2, "tp": 2})
        result = group.on_grid(DataProto.from_dict({"x": torch.arange(5)}), offset=10)
        logs = group.execute_all("read_log")
    assert result.batch["x"].tolist() == [10, 11, 12, 13, 14]
    assert result.batch["rank"].tolist() == [0, 0, 0, 2, 2]
    # rank = 4 pp + 2 dp + tp: ranks 0, 1, 4, 5 have the first shard
    assert [log[0] for log in logs] == [[0, 1, 2], [0, 1, 2], [3, 4, 0], [3, 4, 0]] * 2


def test_all_ranks_get_the_calls_of_several_threads_in_the_same_order():
    with start(3) as group:
        threads = [
            threading.Thread(target=lambda n=n: [group.note((n, i)) for i in range(50)], name=str(n)) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        logs = group.execute_all("read_log")
    assert len(logs[0]) == 200
    assert logs[0] == logs[1] == logs[2]


@pytest.mark.gpu
def test_workers_use_the_gpu_though_the_controller_does_too():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    here = torch.ones(3, device="cuda")
    pool = ResourcePool([1], use_gpu=True)
    with create_worker_group(pool, ClassWithInitArgs(Probe), in_process=False) as group:
        there = group.execute_rank_zero("square_on_gpu", here)
    assert there.device.type == "cpu"
    assert there.tolist() == [1, 1, 1]


@pytest.mark.gpu
def test_workers_use_the_gpu_that_their_module_asks_for():
    from asking_workers import DEVICE, Asking

    if DEVICE == "cpu":
        pytest.skip("needs a GPU")
    pool = ResourcePool([1], use_gpu=True)
    with create_worker_group(pool, ClassWithInitArgs(Asking), in_process=False) as group:
        assert group.execute_rank_zero("square", torch.full((2,), 3.0)).tolist() == [9, 9]


def test_a_group_that_nobody_holds_ends():
    group = start(2)
    pids = [told["pid"] for told in group.about()]
    del group
    gc.collect()
    assert all(has_ended(pid) for pid in pids)


def test_views_keep_the_workers_alive():
    from controller_workers import Counter

    from meshrl.controller import create_colocated_worker_cls

    spec = create_colocated_worker_cls({"critic": ClassWithInitArgs(Counter, 1)})
    views = create_worker_group(ResourcePool([2], use_gpu=False), spec).spawn()
    gc.collect()
    assert [count for count, _, _ in views["critic"].add(1)] == [2, 2]
    views["critic"].shutdown()


def test_starting_again_is_quick_and_survives_the_loss_of_the_nursery():
    with start(2):
        pass
    began = time.monotonic()
    with start(4) as group:
        assert group.world_size == 4
    assert time.monotonic() - began < 10
    nursery = get_nursery()
    with start(2) as group:
        os.kill(nursery._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="exit code is unknown"):
            group.sleep(30)
    with start(2) as group:
        assert group.broadcast(1) == [(0, 1), (1, 1)]


def test_start_deadline():
    with pytest.raises(TimeoutError, match=r"__init__ on 'actor' has not finished after 1\.\d s \(deadline: 1 s\)"):
        start(2, deadlines=Deadlines(start=1), sleep_in_init=30)


def test_cores_are_shared_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with start(2) as group:
        assert [told["threads"] for told in group.about()] == [3, 3]
    monkeypatch.delenv("OMP_NUM_THREADS")
    with start(2) as group:
        cores = len(os.sched_getaffinity(0))
        assert [told["threads"] for told in group.about()] == [max(1, cores // 2)] * 2


SCRIPT = """
from meshrl.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, create_worker_group, register
print(f"the script runs as {__name__}\\n", end="", flush=True)

class Mine(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def hello(self):
        return f"hello from {self.rank}"

if __name__ == "__main__":
    with create_worker_group(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Mine)) as group:
        print(group.hello())
"""


def test_a_class_of_the_users_script_is_found(tmp_path):
    out, err = run_script(tmp_path, SCRIPT).communicate(timeout=180)
    assert "['hello from 0', 'hello from 1']" in out, err
    assert out.count("the script runs as __mp_main__") == 2


INTERACTIVE = """
import sys, traceback
import meshrl.controller as c
assert "ray" not in sys.modules
from controller_workers import Probe

class Mine(c.Worker):
    pass

for cls, backend in ((Mine, "local"), (Probe, "ray")):
    sys.modules["ray"] = None
    try:
        c.create_worker_group(c.ResourcePool([2], use_gpu=False), c.ClassWithInitArgs(cls), backend=backend)
    except Exception:
        traceback.print_exc()
"""


def test_an_interactive_class_and_the_absence_of_ray_are_explained():
    done = subprocess.run(
        [sys.executable, "-"],
        input=INTERACTIVE,
        capture_output=True,
        text=True,
        env=script_environment(),
        timeout=180,
    )
    assert "ValueError: worker class Mine is defined in an interactive session" in done.stderr
    assert "ImportError: the Ray backend needs Ray: pip install 'meshrl[ray]'" in done.stderr
    assert done.returncode == 0


def test_more_nodes_than_one_need_ray():
    with pytest.raises(ValueError, match=r"spans 2 nodes and the local backend has one: set trainer.nnodes=1"):
        create_worker_group(ResourcePool([1, 1], use_gpu=True), ClassWithInitArgs(Probe))


def test_each_rank_sees_the_gpus_of_its_pool(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    _, right = ResourcePool([4], use_gpu=True).split([1, 3])
    with create_worker_group(right, ClassWithInitArgs(Probe)) as group:
        assert group.execute_all("variable", "CUDA_VISIBLE_DEVICES") == ["5,6,7"] * 3
        assert [told["info"][2] for told in group.about()] == [0, 1, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match=r"needs GPUs \[1, 2, 3\], but CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        create_worker_group(right, ClassWithInitArgs(Probe))


def test_in_process_errors_keep_their_cause():
    group = create_worker_group(ResourcePool([1], use_gpu=False), ClassWithInitArgs(Probe))
    with pytest.raises(WorkerError) as caught:
        group.fail([0])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.fixture
def in_process():
    with create_worker_group(ResourcePool([1], use_gpu=False), ClassWithInitArgs(Probe)) as group:
        yield group


def test_an_in_process_group_ends_after_what_is_queued(in_process):
    worker = in_process._backend._worker
    running, queued = in_process.sleep_later(0.2), in_process.note("queued")
    in_process.shutdown()
    assert running.get(0) == [None]
    assert queued.get(0) == [1]
    assert worker.log == ["queued", "closed"]
    with pytest.raises(GroupBrokenError, match="it was shut down"):
        in_process.note("later")


def test_an_in_process_call_that_outlasts_the_shutdown_is_not_waited_for():
    group = create_worker_group(
        ResourcePool([1], use_gpu=False), ClassWithInitArgs(Probe), deadlines=Deadlines(shutdown=0.1)
    )
    worker = group._backend._worker
    running, queued = group.wait_for_release(), group.note("queued")
    group.shutdown()
    assert not running.done()
    worker.released.set()
    assert running.get(5) == [True]
    with pytest.raises(GroupBrokenError, match="it was shut down"):
        queued.get(5)
    assert worker.log == []  # closing it beside its own call would be worse than not closing it


def test_what_is_no_exception_is_an_answer_too(in_process):
    for _ in range(2):  # the thread lives on
        with pytest.raises(WorkerError, match="CancelledError: by itself"):
            in_process.cancelled().get(5)
    with start(2) as group:
        with pytest.raises(WorkerError, match="CancelledError: by itself"):
            group.cancelled().get(5)
        assert group.broadcast(1) == [(0, 1), (1, 1)]


def test_the_end_of_the_run_is_the_callers(in_process, monkeypatch):
    def interrupt(x):
        raise KeyboardInterrupt

    monkeypatch.setattr(in_process._backend._worker, "broadcast", interrupt)
    with pytest.raises(KeyboardInterrupt):
        in_process.broadcast(1)


def test_a_thread_of_jobs_keeps_nothing_of_the_last():
    class Large:
        """What a job is called with."""

    thread, given, done = SerialThread("jobs"), Large(), threading.Event()
    kept = weakref.ref(given)
    thread.submit(partial(lambda value: None, given))
    thread.submit(done.set)
    assert done.wait(10)
    del given
    thread.submit(partial(lambda value: None, Large()))
    until = time.monotonic() + 10
    while thread.busy:
        assert time.monotonic() < until
    gc.collect()
    assert kept() is None
    assert not [thing for thing in gc.get_objects() if type(thing) is Large]


def test_a_serial_thread_survives_a_job_that_raises(caplog):
    thread, done = SerialThread("jobs"), threading.Event()
    thread.submit(sys.exit)
    thread.submit(done.set)
    assert done.wait(5)
    assert "a job of thread jobs failed" in caplog.text


def test_a_call_from_before_a_restart_is_none_for_the_new_workers(in_process):
    argument = Future()
    call = in_process.note(argument)
    in_process.restart()
    argument.set_result("old")
    with pytest.raises(GroupBrokenError, match="it is being started again"):
        call.get(5)
    assert in_process.execute_all("read_log") == [[]]


def test_a_group_that_was_lost_can_be_started_again():
    """The object stays: whoever holds the group calls the new workers."""
    with start(2) as group:
        before = [rank.pid for rank in group._backend._ranks]
        future = group.execute_all_async("sleep", 30)
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            future.get(10)
        assert not group.is_alive()
        group.restart()
        assert group.is_alive()
        after = [rank.pid for rank in group._backend._ranks]
        assert not set(before) & set(after)
        assert [entry["info"][0] for entry in group.about()] == [0, 1]
        assert "rank 0:" in group.stacks()
        assert group.waits() == []
    assert all(has_ended(pid) for pid in after)


def test_a_warmed_up_nursery_has_imported_what_it_was_told(tmp_path):
    """Before any worker is asked for: the module says in which process it was imported."""
    told = tmp_path / "told.txt"
    (tmp_path / "early_module.py").write_text(f"import os\nopen({str(told)!r}, 'w').write(str(os.getpid()))\n")
    script = """
import sys, time
from meshrl.controller import warm_up
from meshrl.controller.forkserver import get_nursery
warm_up("early_module", "no_such_module")
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        imported = int(open(sys.argv[0].replace("user_script.py", "told.txt")).read())
        break
    except (OSError, ValueError):
        time.sleep(0.05)
print(imported == get_nursery()._process.pid, "torch" in sys.modules, "early_module" in sys.modules)
"""
    done = run_script(tmp_path, script, cwd=tmp_path)
    output, errors = done.communicate(timeout=90)
    assert output.split() == ["True", "False", "False"], errors
