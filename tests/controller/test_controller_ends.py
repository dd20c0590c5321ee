"""The controller ends (by itself, by Ctrl-C, by kill -9) and its workers with it, on both backends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from controller_workers import has_ended

HERE = Path(__file__).parent

CONTROLLER = """
print(f"running as {__name__}", flush=True)
import subprocess, sys, time
from controller_workers import Probe
from meshrl.controller import ClassWithInitArgs, Deadlines, ResourcePool, create_worker_group

if __name__ == "__main__":
    backend, address, world_size, call, *args = sys.argv[1:]
    if backend == "ray":
        from meshrl.controller.ray import init_ray

        init_ray(log_to_driver=False, **({"address": address} if address else {"num_cpus": 2}))
    pool = ResourcePool([int(world_size)], use_gpu=False)
    deadlines = Deadlines(start=240)
    group = create_worker_group(pool, ClassWithInitArgs(Probe), backend=backend, deadlines=deadlines)
    group.all_reduce()
    # holds a copy of every socket of ours
    helper = subprocess.Popen(["sleep", "300"], close_fds=False, stdout=-3, stderr=-3)
    print(helper.pid, *[told["pid"] for told in group.about()], flush=True)
    getattr(group, call)(*map(int, args))
"""

STUCK, ASLEEP = ["stuck_in_collective"], ["sleep", "300"]
ENDS = [
    pytest.param(signal.SIGKILL, STUCK, id="kill-9"),
    pytest.param(signal.SIGINT, ASLEEP, id="ctrl-c"),
    pytest.param(None, ["broadcast", "1"], id="end"),
]


def check_workers_end(tmp_path, backend, address, sent, call):
    """Runs a controller, ends it in the middle of a call, and sees all its processes go."""
    # A worker costs Ray seconds; one alone runs on the other backend in the controller's own process.
    world_size = 1 if backend == "ray" and call != STUCK else 2
    script = tmp_path / "user_script.py"
    script.write_text(CONTROLLER)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, str(script), backend, address, str(world_size), *call],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        # A job in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    helper = None
    try:
        assert process.stdout.readline() == "running as __main__\n"
        told = process.stdout.readline().split()
        assert len(told) == 1 + world_size, f"the controller ended before its workers:\n{process.stderr.read()}"
        helper, *pids = map(int, told)
        ours = pids if address else [*pids, psutil.Process(pids[0]).ppid()]
        if sent is not None:
            time.sleep(0.3)
            assert not any(has_ended(pid, within=0.01) for pid in ours)
            process.send_signal(sent)
        assert all(has_ended(pid, within=20) for pid in ours)
        os.kill(helper, signal.SIGKILL)
        rest, errors = process.communicate(timeout=20)
        # Ray's own clean-up turns the signal of a Ctrl-C into an error code.
        on_ctrl_c = 1 if backend == "ray" else -signal.SIGINT
        assert process.returncode == {None: 0, signal.SIGINT: on_ctrl_c, signal.SIGKILL: -signal.SIGKILL}[sent]
        assert ("KeyboardInterrupt" in errors) == (sent is signal.SIGINT)
        assert "running as" not in rest  # workers of an imported class do not run the script again
    finally:
        process.kill()
        if helper is not None and psutil.pid_exists(helper):
            os.kill(helper, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(("sent", "call"), ENDS)
def test_workers_end_with_the_controller(tmp_path, sent, call, backend):
    address = ""
    if backend == "ray":
        import ray

        address = ray.get_runtime_context().gcs_address
    check_workers_end(tmp_path, backend, address, sent, call)


def test_ray_itself_ends_with_the_controller_that_started_it(tmp_path):
    pytest.importorskip("ray")
    check_workers_end(tmp_path, "ray", "", signal.SIGKILL, ASLEEP)
