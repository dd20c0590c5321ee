"""The processes of a sandbox, which import only the standard library.

    outer   creates namespaces; ends and reaps all processes; exits with the program's exit code
      └ init     process 1 of the new PID namespace: when init ends, the kernel ends all other processes inside
          └ program   gets its own root, limits, another user, no privileges, no network; then becomes the program

With bubblewrap, the outer process and init belong to bubblewrap, and `start_in_bubblewrap` is the first code of the
program's process. With Landlock alone, all three are ordinary processes. Init and the program then form one process
group, which the program cannot leave.
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

# User IDs that no other process has, one for each sandbox, so that limits count only the sandbox's processes.
FIRST_UID = 1_000_000
NOBODY = 65534


def main() -> None:
    """Run the outer process: start init, wait for its end, end all remaining processes and exit with init's code.

    The command line arguments are the file descriptors of the job file and of the pipe for reports.
    """
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
    with suppress(OSError):  # init may have done this itself, or have ended
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
    if job["folder"]:  # the process that started the sandbox may be gone
        shutil.rmtree(job["folder"], ignore_errors=True)
    code = os.waitstatus_to_exitcode(how)
    os._exit(code if code >= 0 else 128 - code)


def start_in_bubblewrap() -> None:
    """Start the program inside the root that bubblewrap made. The command line arguments are those of `main`."""
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
    """Enter new namespaces of PIDs, network, IPC and host name. Init alone gets a mount namespace, later."""
    wanted = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    if os.getuid() == 0:
        kernel.unshare(wanted)
    else:
        kernel.enter_user_namespace(wanted)


def end_group(group: int) -> None:
    """Kill the remaining processes of a process group and reap all children, for at most 5 seconds."""
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
    """Run init: start the program, reap orphans, and exit with the program's code or after its time limit."""
    try:
        if job["backend"] == "namespaces":
            enter_own_root(job["visible"])
        program = os.fork()
        if program == 0:
            start_program(job, status)
    except BaseException as error:
        say(status, error=f"{type(error).__name__}: {error}")
        os._exit(126)
    # The process that started the sandbox ends it at the limit. This timer is for the case that it is gone.
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
    """Return the user ID that the program runs as: for root `own`, else nobody; for other users the current one.

    Return 0 if root can become neither user.
    """
    if os.getuid() != 0:
        return os.getuid()
    for uid in (own, NOBODY):
        with suppress(OSError):  # the ID may not be mapped in a container
            for saved in (uid, 0):
                os.setresgid(-1, -1, saved)
                os.setresuid(-1, -1, saved)
            return uid
    return 0


def start_program(job: dict[str, Any], status: int) -> None:
    """Drop all rights that the program must not have, report the achieved isolation, and become the program."""
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
    # Before version 3, Landlock does not stop the owner of a readable file from truncating the file.
    if job["strict"] and not (has_root or (seccomp and landlock >= (3 if shares_user else 1))):
        raise PermissionError(f"too little keeps the program in: {isolation}, Landlock's version is {landlock}")
    if job["quiet"]:
        nowhere = os.open("/dev/null", os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    say(status, isolation=isolation)
    os.execve(job["command"][0], job["command"], environment(work))


def set_limits(job: dict[str, Any], uid: int, own_user: bool) -> None:
    """Set the kernel's resource limits of each process, and the limit of the number of processes.

    If the program shares its user with other processes, the kernel counts these as well, so the limit is raised by
    their number.
    """
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
    """Return the environment variables of the program, which contain nothing of the trainer's environment."""
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
    """Write a report as one line of JSON to the pipe `status`, for the process that started the sandbox."""
    os.write(status, (json.dumps(message) + "\n").encode())
