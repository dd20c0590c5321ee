"""The sandbox's own processes, which import the standard library only.

    outer   makes namespaces; ends and reaps everything; passes on how it ended
      └ init     process 1 of the new PID namespace: when it ends, the kernel ends all that is left in there
          └ program   a root of its own, limits, another user, no privileges, no network; then the program

With bubblewrap, the outer process and init are its own, and `start_in_bubblewrap` is the program's first code. With
Landlock alone, all three are ordinary processes in one group, which the program cannot leave.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from meshrl.rewards.sandbox import kernel
from meshrl.rewards.sandbox.root import DEVICES, JOB_FOLDER, enter_own_root, mount_job_folder

# Users that nobody else is, one for each sandbox, so that limits count its processes alone.
FIRST_UID = 1_000_000
NOBODY = 65534


def main() -> None:
    """Started with the numbers of the file that holds the job and of the pipe for reports as arguments."""
    status = int(sys.argv[2])
    job = _read_job(int(sys.argv[1]), status)
    parent = os.getppid()
    kernel.adopt_orphans()
    has_namespaces = job["backend"] == "namespaces"
    try:
        if has_namespaces:
            enter_namespaces()
    except OSError as error:
        say(status, error=f"the kernel refuses namespaces ({error})")
        return
    init = os.fork()
    if init == 0:
        os.setpgid(0, 0)
        run_init(job, status)
    with suppress(OSError):  # it may have done so itself, or have ended
        os.setpgid(init, init)

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(init, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    kernel.signal_when_orphaned(signal.SIGTERM)
    if os.getppid() != parent:
        end(0, None)
    _, how = os.waitpid(init, 0)
    end_group(init)
    if job["folder"]:  # perhaps nobody else is left to do it
        shutil.rmtree(job["folder"], ignore_errors=True)
    code = os.waitstatus_to_exitcode(how)
    os._exit(code if code >= 0 else 128 - code)


def start_in_bubblewrap() -> None:
    """Started by bubblewrap in its root, with the same arguments as `main`."""
    status = int(sys.argv[2])
    job = _read_job(int(sys.argv[1]), status)
    try:
        start_program(job, status)
    except BaseException as error:
        say(status, error=f"{type(error).__name__}: {error}")
        os._exit(126)


def _read_job(number: int, status: int) -> Any:
    os.set_inheritable(status, False)
    with os.fdopen(number, "rb") as file:
        return json.loads(file.read())


def enter_namespaces() -> None:
    """Own PIDs, network, IPC and host name. Mounts are for `init` alone."""
    wanted = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    if os.getuid() == 0:
        kernel.unshare(wanted)
    else:
        kernel.enter_user_namespace(wanted)


def end_group(group: int) -> None:
    """Kill what is left of a process group and reap it."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def run_init(job: dict[str, Any], status: int) -> None:
    """Start the program, reap what it leaves behind, and never live much longer than the program may."""
    try:
        if job["backend"] == "namespaces":
            enter_own_root(job["visible"])
        program = os.fork()
        if program == 0:
            start_program(job, status)
    except BaseException as error:
        say(status, error=f"{type(error).__name__}: {error}")
        os._exit(126)
    # Whoever started the sandbox ends it at the limit; this is for the case that they are gone.
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(124))
    signal.setitimer(signal.ITIMER_REAL, job["limits"]["seconds"] + 5)
    for number in {0, 1, 2, status, *job["inherited"]}:
        os.close(number)
    while True:
        pid, how = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(how)
            os._exit(code if code >= 0 else 128 - code)


def choose_user(own: int) -> int:
    """The user that the program runs as: root takes `own` (or nobody), others stay who they are."""
    if os.getuid() != 0:
        return os.getuid()
    for uid in (own, NOBODY):
        with suppress(OSError):  # a container may not know the number
            for saved in (uid, 0):
                os.setresgid(-1, -1, saved)
                os.setresuid(-1, -1, saved)
            return uid
    return 0


def start_program(job: dict[str, Any], status: int) -> None:
    """Give up all that the program must not have, report what was achieved, and become the program."""
    has_root = job["backend"] in ("bwrap", "namespaces")
    uid = choose_user(FIRST_UID + job["number"])
    own_user = os.getuid() == 0 and uid != 0
    work = JOB_FOLDER if has_root else job["folder"] + "/work"
    if has_root:
        mount_job_folder(job["limits"], uid)
    os.chdir(work)
    with open("main.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["code"])
    if own_user and not has_root:
        os.chown("main.py", uid, uid)
        os.chown(".", uid, uid)
    set_limits(job, uid, own_user)
    kernel.forbid_new_privileges()
    readable = ["/", *DEVICES] if has_root else sorted(set(job["visible"].values()))
    landlock = 0 if job["backend"] == "none" else kernel.allow_files(work, readable)
    if own_user:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()
    tables = [kernel.DENIED]
    shares_user = not has_root and not own_user
    if not has_root:
        tables.append(kernel.DENIED_LEAVING)
    if shares_user:
        tables += [kernel.DENIED_SIGNALS, kernel.DENIED_CHANGES]
    seccomp = kernel.deny_system_calls(*tables, signals=shares_user)
    isolation = {"root": has_root, "user": own_user, "landlock": landlock > 0, "seccomp": seccomp}
    # Before its third version, Landlock lets the owner of a file that it may read cut it off.
    if job["strict"] and not (has_root or (seccomp and landlock >= (3 if shares_user else 1))):
        raise PermissionError(f"too little keeps the program in: {isolation}, Landlock's version is {landlock}")
    if job["quiet"]:
        nowhere = os.open("/dev/null", os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    say(status, isolation=isolation)
    os.execve(job["command"][0], job["command"], environment(work))


def set_limits(job: dict[str, Any], uid: int, own_user: bool) -> None:
    """What the kernel bounds for each process, and how many of them there may be."""
    limits = job["limits"]
    if own_user:
        counted = 0
    elif job["backend"] in ("bwrap", "namespaces") and kernel.counts_by_namespace():
        counted = {"bwrap": 1, "namespaces": 2}[job["backend"]]
    else:
        counted = job["threads_of_user"]
    bounds = {
        resource.RLIMIT_AS: int(limits["memory_mb"] * (1 << 20)),
        resource.RLIMIT_CPU: int(limits["seconds"]) + 2,
        resource.RLIMIT_FSIZE: int(limits["files_mb"] * (1 << 20)),
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"] + counted,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def environment(work: str) -> dict[str, str]:
    """Nothing of the trainer's own."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def say(status: int, **message: Any) -> None:
    """One line to whoever started the sandbox."""
    os.write(status, (json.dumps(message) + "\n").encode())
