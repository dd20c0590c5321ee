"""The parent of a supervised run: what it starts again, what it passes on, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from meshrl.config.keys import ConfigError
from meshrl.config.trainer import RunConfig
from meshrl.environment import SUPERVISED_PIPE, SUPERVISED_SINCE
from meshrl.telemetry.samples import SampleLog
from meshrl.trainer import fault_tolerance as module
from meshrl.trainer.fault_tolerance import INFRASTRUCTURE_EXIT, Restarts, supervise
from meshrl.trainer.launch import open_run


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Runs a piece of code instead of the command; `starts` counts its starts."""
    (tmp_path / "starts").write_text("")

    def arrange(code):
        head = f"import os, signal, sys, time\nopen({str(tmp_path / 'starts')!r}, 'a').write('x')\n"
        head += f"starts = len(open({str(tmp_path / 'starts')!r}).read())\n"
        real = subprocess.Popen

        def popen(command, **options):
            assert command[1:] == ["-m", "meshrl.cli", "train", "grpo"]
            assert SUPERVISED_SINCE in options["env"]
            return real([sys.executable, "-c", head + code], **options)

        monkeypatch.setattr(module.subprocess, "Popen", popen)

    arrange.starts = lambda: len((tmp_path / "starts").read_text())
    arrange.trainer = RunConfig(default_local_dir=str(tmp_path / "run"), max_restarts=3, restart_wait=0.0)
    return arrange


@pytest.mark.parametrize(
    ("code", "starts", "ends"),
    [
        ("os.kill(os.getpid(), 9) if starts < 3 else sys.exit(0)", 3, 0),
        (f"sys.exit({INFRASTRUCTURE_EXIT} if starts < 2 else 0)", 2, 0),
        ("os.kill(os.getpid(), 9)", 4, 128 + 9),
        (f"sys.exit({INFRASTRUCTURE_EXIT})", 4, INFRASTRUCTURE_EXIT),
        ("sys.exit(1)", 1, 1),
        ("sys.exit(2)", 1, 2),
        ("os.kill(os.getpid(), signal.SIGTERM)", 1, 128 + 15),
    ],
)
def test_what_is_started_again(script, code, starts, ends):
    script(code)
    said = []
    assert supervise(["train", "grpo"], script.trainer, said.append) == ends
    assert script.starts() == starts
    assert len([line for line in said if "restart" in line and "used up" not in line]) == starts - 1


def test_signals_go_to_the_run_and_its_end_is_not_a_failure(script):
    """It hears SIGTERM, and even if it is killed then, nothing is started again."""
    script("signal.signal(15, lambda *_: os.kill(os.getpid(), 9))\nopen('ready', 'w')\ntime.sleep(60)")
    before = os.getcwd()
    os.chdir(os.path.dirname(script.trainer.default_local_dir))
    try:

        def send():
            while not os.path.exists("ready"):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=send)
        thread.start()
        assert supervise(["train", "grpo"], script.trainer, lambda text: None) == 128 + 9
        thread.join(10)
    finally:
        os.chdir(before)
    assert script.starts() == 1


@pytest.mark.parametrize("options", [{"max_restarts": 0}, {"max_restarts": 1, "resume_mode": "disable"}])
def test_what_cannot_be_supervised_is_refused(options, tmp_path):
    with pytest.raises(ConfigError, match="--supervise"):
        supervise(["train"], RunConfig(default_local_dir=str(tmp_path), **options), lambda text: None)


def test_what_a_killed_attempt_of_the_same_command_wrote_is_written_anew(tmp_path):
    """Before its first checkpoint: its samples would stand there twice; those of another command move aside."""

    def attempt(since):
        trainer = RunConfig(default_local_dir=str(tmp_path / "run"))
        with open_run(trainer, None, Restarts(tmp_path / "run", 3, 0.0, since)) as run:
            run.write_config({})
            SampleLog(run, rollout_data_dir=str(tmp_path / "samples"))
            return run.moved_to

    began = time.time() - 1
    assert attempt(began) is None
    (tmp_path / "samples").mkdir(exist_ok=True)
    (tmp_path / "samples" / "1.jsonl").write_text("of an attempt that was killed\n")
    assert attempt(began) is None
    assert not list((tmp_path / "samples").iterdir())
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    os.utime(tmp_path / "run" / "config.yaml", (began, began))
    assert attempt(time.time()) is not None


PARENT = """
import sys, time
from meshrl.config.trainer import RunConfig
from meshrl.trainer import fault_tolerance as module
real = module.subprocess.Popen
code = sys.argv[1]
module.GRACE_SECONDS = 1.0
module.subprocess.Popen = lambda words, **options: real([sys.executable, "-c", code], **options)
trainer = RunConfig(default_local_dir=sys.argv[2], max_restarts=3)
trainer.deadlines.stop = 1.0
sys.exit(module.supervise(["train"], trainer, print))
"""
RUN = """
import os, signal, time
from meshrl.trainer.fault_tolerance import end_with_parent
{handler}
end_with_parent()
print("began", os.getpid(), "pipe" if "MESHRL_SUPERVISED_PIPE" in os.environ else "", flush=True)
time.sleep(600)
"""
HANDLERS = {
    "while it starts": "",
    "within a step": "signal.signal(15, lambda *_: (print('saved', flush=True), os._exit(143)))",
    "and the run does not end": "signal.signal(15, lambda *_: print('saved', flush=True))",
}


@pytest.mark.parametrize("when", HANDLERS)
def test_a_run_ends_with_the_command_that_is_killed(tmp_path, when):
    """SIGKILL, which no handler hears: the run hears SIGTERM, and is killed after its time."""
    words = [sys.executable, "-c", PARENT, RUN.format(handler=HANDLERS[when]), str(tmp_path)]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    began, pid, *inherited = parent.stdout.readline().split()
    assert (began, inherited) == (b"began", [])
    parent.kill()
    parent.wait(10)
    told = parent.stdout.read()  # to its end: nobody has the pipe any more
    assert b"the command that supervised this run has ended" in told
    assert (b"saved" in told) == (when != "while it starts")
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid.decode()}") and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid.decode()}")


def test_a_run_that_nobody_supervises_ends_with_nobody(monkeypatch):
    monkeypatch.delenv(SUPERVISED_PIPE, raising=False)
    before = threading.active_count()
    module.end_with_parent()
    assert threading.active_count() == before
