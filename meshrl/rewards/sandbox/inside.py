"""The sandbox's own processes, which import the standard library only.

    outer   makes namespaces; ends and reaps everything; says how it ended
      └ init     process 1 of the new PID namespace: when it ends, the kernel ends all that is left in there
          └ program   limits, another user, no privileges, no writes outside its folder, no network; then the program

Where the kernel grants no namespaces the three are ordinary processes in one group, which the program cannot leave.
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
from pathlib import Path
from types import FrameType
from typing import Any

from meshrl.rewards.sandbox import kernel

MEGABYTE = 1 << 20
# Users that nobody else is, one for each sandbox, so that limits count its processes alone.
FIRST_UID = 1_000_000
NOBODY = 65534


def main() -> None:
    """Started with the folder of the job and the number of the pipe for reports as arguments."""
    folder, status = Path(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status, False)
    job = json.loads((folder / "job.json").read_text())
    parent = os.getppid()
    kernel.adopt_orphans()
    uid = choose_user(folder / "work")
    job["namespaces"] = bool(job["namespaces"]) and enter_namespaces()
    init = os.fork()
    if init == 0:
        os.setpgid(0, 0)
        run_init(job, folder, uid, status)
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
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to do it
        return
    say(status, ended=os.waitstatus_to_exitcode(how))


def enter_namespaces() -> bool:
    """Own PIDs, network, IPC and host name; False where the kernel refuses them. Mounts are for `init` alone."""
    wanted = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    try:
        if os.getuid() == 0:
            kernel.unshare(wanted)
        else:
            kernel.enter_user_namespace(wanted)
    except OSError:
        return False
    return True


def end_group(group: int) -> None:
    """Kills what is left of a process group and reaps it."""
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


def run_init(job: dict[str, Any], folder: Path, uid: int, status: int) -> None:
    """Starts the program, reaps what it leaves behind, and never lives much longer than the program may."""
    try:
        mounted = bool(job["namespaces"]) and prepare_mounts(folder / "work", uid, job["limits"])
        program = os.fork()
        if program == 0:
            start_program(job, folder, uid, mounted, status)
    except BaseException as error:
        say(status, error=f"{type(error).__name__}: {error}")
        os._exit(126)
    # Whoever started the sandbox ends it at the limit; this is for the case that they are gone.
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(124))
    signal.setitimer(signal.ITIMER_REAL, job["limits"]["seconds"] + 5)
    for number in (0, 1, 2):
        os.close(number)
    while True:
        pid, how = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(how)
            os._exit(code if code >= 0 else 128 - code)


def choose_user(work: Path) -> int:
    """The user that the program runs as: root makes one up (or takes nobody), others stay who they are."""
    if os.getuid() != 0:
        return os.getuid()
    for uid in (FIRST_UID + os.getpid(), NOBODY):
        try:
            os.chown(work, uid, uid)
        except OSError:  # not mapped in this container
            continue
        return uid
    return 0


def prepare_mounts(work: Path, uid: int, limits: dict[str, Any]) -> bool:
    """Everything read-only but a small file system of its own; False where mounting is refused."""
    size, entries = int(limits["files_mb"] * MEGABYTE), limits["files"] + 1
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.make_all_mounts_read_only()
        options = f"size={size},nr_inodes={entries},mode=0700,uid={uid},gid={uid if os.getuid() == 0 else os.getgid()}"
        kernel.mount("tmpfs", str(work), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    except OSError:
        return False
    with suppress(OSError):  # some containers guard parts of /proc: then the old one stays, without our processes' view
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    return True


def start_program(job: dict[str, Any], folder: Path, uid: int, mounted: bool, status: int) -> None:
    """Gives up all that the program must not have, says what was achieved, and becomes the program."""
    work = folder / "work"
    (work / "main.py").write_text(job["code"])
    stdin = os.open(folder / "stdin", os.O_RDONLY)
    os.dup2(stdin, 0)
    own_user = os.getuid() == 0 and uid != 0
    if own_user:
        os.chown(work / "main.py", uid, uid)
    set_limits(job["limits"], uid, own_user, bool(job["namespaces"]))
    if own_user:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.chdir(work)
    kernel.forbid_new_privileges()
    landlock = kernel.allow_writes_only_in(str(work))
    tables = [kernel.DENIED]
    if not job["namespaces"]:
        tables += [kernel.DENIED_LEAVING] if own_user else [kernel.DENIED_LEAVING, kernel.DENIED_SIGNALS]
    seccomp = kernel.deny_system_calls(*tables)
    isolation = {
        "user": own_user,
        "namespaces": bool(job["namespaces"]),
        "mounts": mounted,
        "landlock": landlock,
        "seccomp": seccomp,
    }
    enough = (own_user or job["namespaces"]) and (job["namespaces"] or seccomp) and (mounted or landlock)
    if job["strict"] and not enough:
        raise PermissionError(
            f"the kernel grants too little for a sandbox ({isolation}): run as root, or where user namespaces are "
            "allowed, or set strict=false if the programs can be trusted"
        )
    say(status, isolation=isolation)
    what = ["main.py"] if job["checks_at"] is None else ["-c", job["launcher"], str(job["checks_at"])]
    os.execve(job["interpreter"], [job["interpreter"], "-B", "-s", *what], environment(work))


def set_limits(limits: dict[str, Any], uid: int, own_user: bool, namespaces: bool) -> None:
    """What the kernel bounds for each process, and how many of them there may be."""
    counted = 0 if own_user else 2 if namespaces else kernel.threads_of_user(uid)
    bounds = {
        resource.RLIMIT_AS: int(limits["memory_mb"] * MEGABYTE),
        resource.RLIMIT_CPU: int(limits["seconds"]) + 2,
        resource.RLIMIT_FSIZE: int(limits["files_mb"] * MEGABYTE),
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"] + counted,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def environment(work: Path) -> dict[str, str]:
    """Nothing of the trainer's own."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(work),
        "TMPDIR": str(work),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def say(status: int, **message: Any) -> None:
    """One line to whoever started the sandbox."""
    os.write(status, (json.dumps(message) + "\n").encode())
