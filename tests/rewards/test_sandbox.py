"""Programs that use too much, each bounded in itself, on every backend."""

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from meshrl.rewards.sandbox import backends
from meshrl.rewards.sandbox.backends import SandboxError
from meshrl.rewards.sandbox.root import view_of
from meshrl.rewards.sandbox.run import Limits, chosen_backend, run_python

IS_ROOT = os.getuid() == 0
LIMITS = Limits(seconds=20, memory_mb=256, processes=6, output_kb=8, files_mb=1, files=32)
ROOT = str(Path(__file__).parents[2])


def refusal_of(sandbox):
    """Why the kernel or our user does not allow such a sandbox here; without one there is nothing to test."""
    try:
        chosen_backend(sandbox)
    except SandboxError as error:
        return str(error)
    return ""


KINDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(why := refusal_of(name)), reason=why))
    for name in ("bwrap", "namespaces", "landlock")
]
pytestmark = pytest.mark.parametrize("sandbox", KINDS)


def run(program, sandbox, stdin="", **limits):
    bounds = Limits(**({name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__} | limits))
    return run_python(textwrap.dedent(program), stdin, bounds, backend=chosen_backend(sandbox))


def marked(program, mark):
    """The program, whose processes can be found from outside by a word on their command lines."""
    code = textwrap.dedent(program)
    return f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', {code!r}, {mark!r}])"


def processes_with(mark):
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            found.append(int(entry.parent.name))
    return found


@pytest.fixture
def mark():
    return f"meshrl-mark-{secrets.token_hex(8)}"


def test_an_honest_program(sandbox, monkeypatch):
    monkeypatch.setenv("MESHRL_SECRET", "s")
    done = run(
        """
        import os, subprocess, sys
        open("mine", "w").write("x" * 1000)
        child = subprocess.run(["/bin/echo", "child"], capture_output=True, text=True)
        print(input()[::-1], child.stdout.strip(), os.path.getsize("mine"), os.environ.get("MESHRL_SECRET"), hash("a"))
        print("bad", file=sys.stderr)
        sys.exit(3)
        """,
        sandbox,
        stdin="abc\n",
    )
    hashed = subprocess.run(
        [chosen_backend(sandbox).interpreter, "-c", "print(hash('a'))"],
        env={"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"cba child 1000 None {hashed.stdout}"
    assert (done.status, done.exit_code, done.stderr) == ("failed", 3, "bad\n")
    assert done.isolation == {
        "root": sandbox != "landlock",
        "user": IS_ROOT,
        "landlock": done.isolation["landlock"],
        "seccomp": True,
    }


def test_a_sleep_past_the_limit(sandbox, mark):
    started = time.monotonic()
    done = run(marked("import os, time; print(os.getcwd(), flush=True); time.sleep(100)", mark), sandbox, seconds=2)
    assert done.status == "timeout"
    assert done.exit_code is None
    assert time.monotonic() - started < 60
    assert processes_with(mark) == []
    assert done.stdout == "/job\n" or not Path(done.stdout.strip()).exists()


def test_many_children(sandbox, mark):
    done = run(
        marked(
            """
            import os, time
            for count in range(60):
                try:
                    if os.fork() == 0:
                        try:
                            os.setsid()
                        except OSError:
                            pass
                        os.closerange(0, 3)
                        time.sleep(100)
                        os._exit(0)
                except OSError:
                    break
            print(count)
            """,
            mark,
        ),
        sandbox,
    )
    assert done.status == "ok"
    assert processes_with(mark) == []
    # An ordinary user without namespaces has other processes, which come and go.
    assert int(done.stdout) == LIMITS.processes - 1 or (sandbox == "landlock" and not IS_ROOT)


def test_a_large_allocation(sandbox):
    done = run("try:\n    b = bytearray(1 << 30)\nexcept MemoryError:\n    print('no')", sandbox)
    assert (done.status, done.stdout) == ("ok", "no\n")


@pytest.mark.parametrize("stream", [1, 2])
def test_endless_output(sandbox, stream):
    done = run(f"import os\nfor _ in range(4000): os.write({stream}, b'x' * 4096)", sandbox)
    assert done.status == "output"
    assert (done.stdout if stream == 1 else done.stderr) == "x" * 8192


def test_writes_outside_its_folder(sandbox, tmp_path):
    tmp_path.chmod(0o777)
    name = f"meshrl-sandbox-{os.getpid()}"
    places = [f"{place}/{name}" for place in (tmp_path, "/tmp", "/var/tmp", "/dev/shm", "/", "/etc", "..")]
    done = run(
        f"""
        for path in {places}:
            try:
                open(path, "w").close()
                print("wrote", path)
            except OSError:
                pass
        open("inside", "w").close()
        open("/dev/null", "w").write("x")
        print("end")
        """,
        sandbox,
    )
    assert (done.status, done.stdout) == ("ok", "end\n")
    assert not any(Path(place).exists() for place in places)


def test_large_files(sandbox):
    done = run(
        """
        written = 0
        try:
            with open("big", "wb", buffering=0) as out:
                for _ in range(64):
                    written += out.write(b"x" * 65536)
        except OSError:
            pass
        print(written)
        """,
        sandbox,
    )
    assert int(done.stdout) <= 1 << 20
    assert int(done.stdout) > 1 << 19


def test_many_files(sandbox):
    program = """
        count = 0
        try:
            for count in range(100):
                open(f"f{count}", "wb").write(b"x" * 65536)
        except OSError:
            pass
        print(count)
        """
    count = int(run(program, sandbox).stdout)
    if sandbox != "landlock":
        assert count <= 16  # of 64 KiB in 1 MiB
    else:
        assert count == 99  # no file system of its own: each file is bounded, their number only by time


def test_no_network(sandbox):
    socket.socket().close()  # possible out here
    done = run(
        """
        import socket
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            try:
                socket.socket(family)
                print("socket", family)
            except PermissionError:
                pass
        a, b = socket.socketpair()
        print("end")
        """,
        sandbox,
    )
    assert (done.status, done.stdout) == ("ok", "end\n")


def test_no_privileges_and_no_signals_outside(sandbox):
    done = run(
        f"""
        import ctypes, os
        for name, attempt in dict(
            setuid=lambda: os.setuid(0),
            kill=lambda: os.kill({os.getpid()}, 0),
            passwords=lambda: open("/etc/shadow").read() if {IS_ROOT} else os.setuid(0),
            chown=lambda: os.chown(".", 0, 0),
        ).items():
            try:
                attempt()
                print("could", name)
            except OSError:
                pass
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.unshare(0x10000000), libc.ptrace(0, 0, 0, 0), os.getuid() == {os.getuid()})
        """,
        sandbox,
    )
    assert done.stdout == f"-1 -1 {not IS_ROOT}\n"


@pytest.fixture
def open_folder():
    """A temporary folder that others can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="meshrl-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_it_ends_with_whoever_started_it(sandbox, open_folder, mark):
    """Even if they are killed, nothing runs on and no folder stays."""
    program = marked("import time; time.sleep(100)", mark)
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from meshrl.rewards.sandbox.run import *\n"
        f"run_python({program!r}, limits=Limits(seconds=100), backend=chosen_backend({sandbox!r}))\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(open_folder)})
    deadline = time.monotonic() + 60
    while not processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    while (processes_with(mark) or list(open_folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark) == []
    assert list(open_folder.iterdir()) == []


def test_a_temporary_folder_of_roots_own_is_not_used(sandbox, tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = run("import os; print(os.getcwd())", sandbox)
    assert done.status == "ok"
    if sandbox != "landlock":
        assert done.stdout == "/job\n"
        assert list(tmp_path.iterdir()) == []
    else:
        assert done.stdout.startswith(str(tmp_path)) != IS_ROOT


def test_what_a_program_sees(sandbox):
    done = run(
        """
        import json, os, ssl, sqlite3, zoneinfo
        def listed(path):
            try:
                return sorted(os.listdir(path))
            except OSError:
                return None
        def readable(path):
            try:
                return bool(open(path, "rb").read(1))
            except OSError:
                return False
        files = ["/etc/passwd", "/proc/self/environ", "/proc/1/environ", "/sys/kernel/notes"]
        print(json.dumps([listed("/"), listed("/dev"), listed("."), [path for path in files if readable(path)]]))
        print(zoneinfo.ZoneInfo("Europe/Berlin"), "ssl" in dir(ssl) or ssl.OPENSSL_VERSION[:7])
        """,
        sandbox,
    )
    root, devices, own, read = json.loads(done.stdout.splitlines()[0])
    assert (own, read) == (["main.py"], [])
    if sandbox == "landlock":
        assert (root, devices) == (None, None)
    else:
        parts = {path.split("/")[1] for path in view_of(chosen_backend(sandbox).interpreter).paths}
        assert root == sorted({"job", *parts})
        assert devices == ["null", "random", "urandom", "zero"]
    assert done.stdout.splitlines()[1] == "Europe/Berlin OpenSSL"


def test_the_trainer_hears_which_sandbox_runs(sandbox, caplog):
    backends.log_backend.cache_clear()
    with caplog.at_level(logging.INFO, logger="meshrl"):
        backends.log_backend(chosen_backend(sandbox))
    assert f"programs run in the sandbox {sandbox}, {backends.BACKENDS[sandbox]}" in caplog.text
