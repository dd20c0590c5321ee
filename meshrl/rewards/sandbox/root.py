"""The root folder of a program: its interpreter, the interpreter's libraries, four devices and the job's folder.

This file imports only the standard library, because the sandbox's own processes load it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.rewards.sandbox import kernel

JOB_FOLDER = "/job"
# The system's programs and shared libraries, the files by which the loader finds the libraries, and time zones.
SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec"),
    *("/usr/local/bin", "/usr/local/lib", "/usr/local/lib64", "/usr/share/zoneinfo"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# The visible entries of the folder that a Python is installed in. The folder itself may be a home folder or a project
# with other files, so the rest of it stays hidden.
OF_A_PREFIX = ("bin", "lib", "lib64", "lib32", "pyvenv.cfg")
ASK_SECONDS = 60.0
ASK = """
import ctypes, json, site, sys, sysconfig
prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
names = ("stdlib", "platstdlib", "purelib", "platlib")
folders = [*site.getsitepackages(), *(sysconfig.get_path(name) for name in names)]
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(None, 5)[5].strip() for line in maps if line.count("/")})
print(json.dumps([sys.executable, prefixes, folders, mapped]))
"""


@dataclass(frozen=True)
class View:
    """An interpreter, and the paths visible to its programs, each mapped to its real path on this machine."""

    interpreter: str
    paths: Mapping[str, str]


@cache
def view_of(interpreter: str) -> View:
    """Return the view of an interpreter's programs, from the folders that the interpreter itself reports.

    Folders that `.pth` files add (editable installs) are outside the interpreter's own folders and are left out.
    """
    executable, prefixes, folders, mapped = _ask(interpreter)
    wanted = [*SYSTEM, *DEVICES, *_links_of(executable)]
    wanted += [f"{prefix.rstrip('/')}/{name}" for prefix in prefixes for name in OF_A_PREFIX]
    wanted += [*folders, *mapped]
    found: dict[str, str] = {}
    for path in sorted({os.path.normpath(path) for path in wanted}, key=lambda path: (path.count("/"), path)):
        real = os.path.realpath(path)
        if os.path.exists(real) and real != "/" and not _is_shown(path, found):
            found[path] = real
    return View(executable, found)


def _is_shown(path: str, found: dict[str, str]) -> bool:
    """Return whether a folder in `found` contains this path already, if only as a symbolic link."""
    above = (str(parent) for parent in Path(path).parents)
    return any(parent in found and os.path.lexists(found[parent] + path[len(parent) :]) for parent in above)


def _links_of(interpreter: str) -> list[str]:
    """Return the interpreter's path and the path after each symbolic link, up to the real file."""
    paths = [interpreter]
    while os.path.islink(paths[-1]) and len(paths) < 40:
        paths.append(os.path.join(os.path.dirname(paths[-1]), os.readlink(paths[-1])))
    return paths


def _ask(interpreter: str) -> Any:
    """Run an interpreter, and return its path, prefixes, library folders and mapped files."""
    done = subprocess.run(
        [interpreter, "-B", "-s", "-c", ASK], env={}, cwd="/", capture_output=True, text=True, timeout=ASK_SECONDS
    )
    if done.returncode != 0:
        raise OSError(f"{interpreter} does not say where its libraries are: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def enter_own_root(visible: Mapping[str, str]) -> None:
    """Build a new read-only root of the visible paths, and leave the machine's root.

    The process needs the right to create a mount namespace.
    """
    base = next(path for path in ("/tmp", "/run", "/dev") if os.path.isdir(path))
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    os.mkdir(f"{base}/machine")
    kernel.pivot_root(base, f"{base}/machine")
    os.chdir("/")
    os.mkdir(JOB_FOLDER)
    for path, real in visible.items():
        source = "/machine" + real
        if os.path.isdir(source):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if not os.path.exists(path):
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(source, path, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.unmount("/machine")
    os.rmdir("/machine")
    kernel.make_all_mounts_read_only()


def mount_job_folder(limits: dict[str, Any], uid: int) -> None:
    """Mount a file system in memory at the job's folder, with limits on its size and number of files."""
    size, entries = int(limits["files_mb"] * (1 << 20)), limits["files"] + 1
    gid = uid if os.getuid() == 0 else os.getgid()
    options = f"size={size},nr_inodes={entries},mode=0700,uid={uid},gid={gid}"
    kernel.mount("tmpfs", JOB_FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def bubblewrap_command(bwrap: str, visible: Mapping[str, str], status: int, as_root: bool) -> list[str]:
    """Return the bubblewrap command line without the command, for the root of `enter_own_root` in new namespaces.

    The first code inside keeps the capabilities to mount the job's folder and to become another user.
    """
    namespaces = ["pid", "net", "ipc", "uts"] if as_root else ["user", "pid", "net", "ipc", "uts"]
    kept = (
        ["CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_OVERRIDE"]
        if as_root
        else ["CAP_SYS_ADMIN"]
    )
    command = [bwrap, *(f"--unshare-{name}" for name in namespaces), "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--json-status-fd", str(status), "--cap-drop", "ALL"]
    for name in kept:
        command += ["--cap-add", name]
    parents = {str(parent) for path in visible for parent in Path(path).parents} - {"/"} - set(visible)
    for parent in sorted(parents, key=lambda parent: parent.count("/")):  # so that all users can enter them
        command += ["--dir", parent]
    for path, real in visible.items():
        command += ["--dev-bind" if path in DEVICES else "--ro-bind", real, path]
    return [*command, "--dir", JOB_FOLDER, "--remount-ro", "/", "--chdir", "/", "--"]
