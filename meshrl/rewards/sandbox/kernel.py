"""The kernel's means of keeping a process in: namespaces, mounts, Landlock and seccomp, by ctypes.

Standard library only: every sandbox starts a process that loads this.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ANY_NAMESPACE = 0x7E020000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38

# All that changes a file system (Landlock's ABI 1), then what ABI 2 and 3 added: moving between folders, truncating.
LANDLOCK_WRITE = 0x2 | 0x1FF0
LANDLOCK_REFER, LANDLOCK_TRUNCATE, LANDLOCK_WRITE_FILE = 1 << 13, 1 << 14, 0x2

# Numbers on x86_64 and on aarch64 of what no program needs that only computes.
DENIED = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
# Without a PID namespace: a program must stay in its process group, so that the whole of it can be ended.
DENIED_LEAVING = {"setsid": (112, 157), "setpgid": (109, 154)}
# Where it runs as the trainer's own user too, it must not signal the trainer.
DENIED_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
CLONE, CLONE3 = (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Moves this process (children, for PIDs) into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def enter_user_namespace(flags: int) -> None:
    """New namespaces for an ordinary user, who stays the same user inside."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    _check(
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            options.encode() if options else None,
        ),
        f"mount {target}",
    )


def make_all_mounts_read_only() -> None:
    """In this mount namespace and nowhere else."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    _check(
        _libc.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, b"/", ctypes.c_uint(AT_RECURSIVE), attributes, ctypes.c_size_t(len(attributes))
        ),
        "mount_setattr",
    )


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(subreaper)")


def signal_when_orphaned(number: int) -> None:
    """This signal comes when the thread that started this process ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl(pdeathsig)")


def forbid_new_privileges() -> None:
    """No set-user-ID program gives this process and its children anything from now on."""
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")


def allow_writes_only_in(folder: str) -> bool:
    """Landlock: nothing outside `folder` (but /dev/null) can be written; False where the kernel has no Landlock."""
    abi = _libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < 1:
        return False
    handled = LANDLOCK_WRITE | (LANDLOCK_REFER if abi >= 2 else 0) | (LANDLOCK_TRUNCATE if abi >= 3 else 0)
    attributes = struct.pack("Q", handled)
    rules = _check(
        _libc.syscall(SYS_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)), "landlock"
    )
    for path, rights in ((folder, handled), ("/dev/null", handled & (LANDLOCK_WRITE_FILE | LANDLOCK_TRUNCATE))):
        opened = os.open(path, os.O_PATH)
        beneath = struct.pack("=Qi", rights, opened)
        _check(_libc.syscall(SYS_LANDLOCK_ADD, rules, 1, beneath, ctypes.c_uint(0)), f"landlock {path}")
        os.close(opened)
    _check(_libc.syscall(SYS_LANDLOCK_RESTRICT, rules, ctypes.c_uint(0)), "landlock")
    os.close(rules)
    return True


def deny_system_calls(*tables: dict[str, tuple[int, int]]) -> bool:
    """seccomp: the calls of these tables, and new namespaces, fail with EPERM; False where that cannot be had."""
    if platform.machine() not in ARCHITECTURES:
        return False
    column, architecture = ARCHITECTURES[platform.machine()]
    numbers = [pair[column] for table in tables for pair in table.values()]
    program = _filter(architecture, numbers, CLONE[column], CLONE3[column])
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    return _libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(head), 0, 0) == 0


def _filter(architecture: int, denied: list[int], clone: int, clone3: int) -> list[bytes]:
    """Classic BPF over `struct seccomp_data`: number at 0, architecture at 4, low half of the first argument at 16."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000

    def line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    lines = [line(load, 4), line(equal, architecture, 1, 0), line(give, kill), line(load, 0)]
    lines += [line(at_least, 0x40000000, 0, 1), line(give, kill)]  # the x32 numbers of x86_64
    for number in denied:
        lines += [line(equal, number, 0, 1), line(give, refuse | errno.EPERM)]
    # clone3's flags lie in memory, where no filter sees them: C libraries then take clone.
    lines += [line(equal, clone3, 0, 1), line(give, refuse | errno.ENOSYS)]
    lines += [line(equal, clone, 0, 3), line(load, 16), line(any_bit, ANY_NAMESPACE, 0, 1)]
    lines += [line(give, refuse | errno.EPERM), line(give, allow)]
    return lines


def threads_of_user(uid: int) -> int:
    """How many threads this user runs now: where RLIMIT_NPROC starts to count."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(entry / "task"))
    return count
