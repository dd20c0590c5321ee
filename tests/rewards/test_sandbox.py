"""Hostile programs, each bounded in itself, with the kernel's namespaces and without them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from meshrl.rewards.sandbox.run import Limits, SandboxError, default_interpreter, run_python

IS_ROOT = os.getuid() == 0
LIMITS = Limits(seconds=20, memory_mb=256, processes=6, output_kb=8, files_mb=1, files=32)
ROOT = str(Path(__file__).parents[2])


def is_granted(namespaces: bool) -> bool:
    """Whether the kernel and our user allow such a sandbox here; without one there is nothing to test."""
    try:
        return run_python("", namespaces=namespaces, limits=LIMITS).status == "ok"
    except SandboxError:
        return False


KINDS = [
    pytest.param(namespaces, id=name, marks=pytest.mark.skipif(not is_granted(namespaces), reason="not granted here"))
    for name, namespaces in (("namespaces", True), ("plain", False))
]
pytestmark = pytest.mark.parametrize("namespaces", KINDS)


def run(program, namespaces, stdin="", **limits):
    bounds = Limits(**({name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__} | limits))
    return run_python(textwrap.dedent(program), stdin, bounds, namespaces=namespaces)


def processes_in(folder):
    """Processes whose working folder it is, or was."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd").startswith(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_an_honest_program(namespaces, monkeypatch):
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
        namespaces,
        stdin="abc\n",
    )
    hashed = subprocess.run(
        [default_interpreter(), "-c", "print(hash('a'))"], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True
    )
    assert done.stdout == f"cba child 1000 None {hashed.stdout}"
    assert (done.status, done.exit_code, done.stderr) == ("failed", 3, "bad\n")
    assert done.isolation["namespaces"] == namespaces


def test_a_sleep_past_the_limit(namespaces):
    started = time.monotonic()
    done = run("import os, time; print(os.getcwd(), flush=True); time.sleep(100)", namespaces, seconds=1)
    assert done.status == "timeout"
    assert done.exit_code is None
    assert time.monotonic() - started < 60
    assert processes_in(done.stdout.strip()) == []
    assert not Path(done.stdout.strip()).exists()


def test_many_children(namespaces):
    done = run(
        """
        import os, time
        print(os.getcwd(), flush=True)
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
        namespaces,
    )
    folder, count = done.stdout.split()
    assert int(count) == LIMITS.processes - 1
    assert done.status == "ok"
    assert processes_in(folder) == []


def test_a_large_allocation(namespaces):
    done = run("try:\n    b = bytearray(1 << 30)\nexcept MemoryError:\n    print('no')", namespaces)
    assert (done.status, done.stdout) == ("ok", "no\n")


@pytest.mark.parametrize("stream", [1, 2])
def test_endless_output(namespaces, stream):
    done = run(f"import os\nfor _ in range(4000): os.write({stream}, b'x' * 4096)", namespaces)
    assert done.status == "output"
    assert (done.stdout if stream == 1 else done.stderr) == "x" * 8192


def test_writes_outside_its_folder(namespaces, tmp_path):
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
        namespaces,
    )
    assert (done.status, done.stdout) == ("ok", "end\n")
    assert not any(Path(place).exists() for place in places)


def test_large_files(namespaces):
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
        namespaces,
    )
    assert int(done.stdout) <= 1 << 20
    assert int(done.stdout) > 1 << 19


def test_many_files(namespaces):
    program = """
        count = 0
        try:
            for count in range(100):
                open(f"f{count}", "wb").write(b"x" * 65536)
        except OSError:
            pass
        print(count)
        """
    count = int(run(program, namespaces).stdout)
    if namespaces:
        assert count <= 16  # of 64 KiB in 1 MiB
    else:
        assert count == 99  # no file system of its own: each file is bounded, their number only by time


def test_no_network(namespaces):
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
        namespaces,
    )
    assert (done.status, done.stdout) == ("ok", "end\n")


def test_no_privileges_and_no_signals_outside(namespaces):
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
        namespaces,
    )
    assert done.stdout == f"-1 -1 {not IS_ROOT}\n"


@pytest.fixture
def open_folder():
    """A temporary folder that others can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="meshrl-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_it_ends_with_whoever_started_it(namespaces, open_folder):
    """Even if they are killed, nothing runs on and no folder stays."""
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from meshrl.rewards.sandbox.run import *\n"
        f"run_python('import time\\ntime.sleep(100)', limits=Limits(seconds=100), namespaces={namespaces})\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(open_folder)})
    deadline = time.monotonic() + 60
    while not processes_in(str(open_folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_in(str(open_folder))
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    while (processes_in(str(open_folder)) or list(open_folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_in(str(open_folder)) == []
    assert list(open_folder.iterdir()) == []


def test_a_temporary_folder_of_roots_own_is_not_used(namespaces, tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = run("import os; print(os.getcwd())", namespaces)
    assert done.status == "ok"
    assert done.stdout.startswith(str(tmp_path)) != IS_ROOT


@pytest.mark.skipif(not IS_ROOT or not Path("/usr/bin/python3").exists(), reason="becomes another user")
def test_an_ordinary_user_has_a_sandbox_only_with_namespaces(namespaces):
    """Else a program could do to the trainer what the trainer's user can."""
    code = (
        f"import sys, os; sys.path.insert(0, {ROOT!r})\n"
        "from meshrl.rewards.sandbox.run import *\n"
        'program = \'import os\\nprint(os.getuid())\\ntry: open("/tmp/meshrl-other", "w")\\nexcept OSError: pass\'\n'
        "program += '\\nfor i in range(60):\\n  try:\\n    if os.fork() == 0: import time; time.sleep(100)\\n'\n"
        "program += '  except OSError: break\\nprint(i)'\n"
        f"done = run_python(program, limits=Limits(processes=6), namespaces={namespaces})\n"
        "print(done.status, done.stdout.split(), sorted(k for k, v in done.isolation.items() if v))\n"
    )
    probe = subprocess.run(
        ["/usr/bin/python3", "-c", f"import os; os.listdir({ROOT!r})"], user=12345, group=12345, capture_output=True
    )
    if probe.returncode:
        pytest.skip("the other user cannot read the package")
    done = subprocess.run(
        ["/usr/bin/python3", "-B", "-c", code], user=12345, group=12345, extra_groups=[], cwd="/", capture_output=True,
        text=True, env={},
    )  # fmt: skip
    assert not Path("/tmp/meshrl-other").exists()
    if namespaces:
        assert done.stdout == "ok ['12345', '5'] ['landlock', 'mounts', 'namespaces', 'seccomp']\n", done.stderr
    else:
        assert "SandboxError: cannot run a program in a sandbox: PermissionError" in done.stderr
        assert "strict=false" in done.stderr
