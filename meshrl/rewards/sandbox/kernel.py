"""Isolation of processes by the Linux kernel: namespaces, mounts, Landlock and seccomp, by ctypes.

This file imports only the standard library, because every sandbox starts a process that loads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ANY_NAMESPACE = 0x7E020000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 0x1000, 0x4000, 0x40000, 2
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = -100, 0x8000, 1, 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 28, 36, 38
SECURE_NO_ROOT, CAPABILITY_VERSION = 0x3, 0x20080522

# Landlock's rights on files and folders by ABI version: 1 has execute, write, read, list, remove and make; 2 adds moves
# between folders, 3 truncation, 5 ioctl on devices. ABI 6 keeps signals and abstract sockets within the sandbox.
LANDLOCK_FIRST, LANDLOCK_REFER, LANDLOCK_TRUNCATE, LANDLOCK_IOCTL = 0x1FFF, 1 << 13, 1 << 14, 1 << 15
LANDLOCK_READ, LANDLOCK_WRITE_FILE, LANDLOCK_SCOPES = 0x1 | 0x4 | 0x8, 0x2, 0x3
LANDLOCK_OF_FILES = 0x1 | 0x2 | 0x4 | LANDLOCK_TRUNCATE | LANDLOCK_IOCTL

# System calls that a purely computing program does not need, with their numbers on x86_64 and on aarch64.
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
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "pidfd_getfd": (438, 438),
}
# Without a PID namespace: all processes of a program must stay in its process group, so that all can be ended.
DENIED_LEAVING = {"setsid": (112, 157), "setpgid": (109, 154)}
# If the program also runs as the trainer's user, it must not signal, slow down or limit the trainer.
DENIED_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "prlimit64": (302, 261),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
# For the same case: Landlock prevents opening of files, but does not stop their owner from changing their metadata.
DENIED_CHANGES = {
    "truncate": (76, 45),
    "chmod": (90, 53),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 54),
    "fchown": (93, 55),
    "lchown": (94, 54),
    "fchownat": (260, 54),
    "utime": (132, 88),
    "utimes": (235, 88),
    "futimesat": (261, 88),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# For the same case: values of a call's second argument by which the kernel would signal another process for the program
# (F_SETOWN, F_SETSIG and F_SETOWN_EX of fcntl; FIOSETOWN and SIOCSPGRP of ioctl).
DENIED_SECOND_ARGUMENTS = {(72, 25): (8, 10, 15), (16, 29): (0x8901, 0x8902)}
CLONE, CLONE3 = (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces. A new PID namespace applies to its children only."""
    _check(_libc.unshare(flags), "unshare")


def enter_user_namespace(flags: int) -> None:
    """Enter a user namespace and the namespaces in `flags`, as an ordinary user who stays the same user inside."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system by mount(2), and raise `OSError` if the kernel refuses."""
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


def unmount(target: str) -> None:
    """Detach a mount and all mounts below it from this mount namespace."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    """Make the mount `new_root` the root of this mount namespace, and move the former root to `old_root`."""
    number = SYS_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no number of pivot_root is known for {platform.machine()}")
    _check(_libc.syscall(number, new_root.encode(), old_root.encode()), "pivot_root")


def make_all_mounts_read_only() -> None:
    """Make all mounts of this mount namespace read-only, and disable the set-user-ID bit of programs in them."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    _check(
        _libc.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, b"/", ctypes.c_uint(AT_RECURSIVE), attributes, ctypes.c_size_t(len(attributes))
        ),
        "mount_setattr",
    )


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose own parent ends (a subreaper)."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(subreaper)")


def signal_when_orphaned(number: int) -> None:
    """Request the signal `number` for this process when the thread that started it ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl(pdeathsig)")


def forbid_new_privileges() -> None:
    """Prevent this process and its children from gaining privileges, for example by set-user-ID programs."""
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")


def drop_capabilities() -> None:
    """Drop all capabilities permanently. If this process is root, starting a program does not restore them."""
    if os.getuid() == 0:
        _check(_libc.prctl(PR_SET_SECUREBITS, SECURE_NO_ROOT, 0, 0, 0), "prctl(securebits)")
    head, none = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
    _check(_libc.capset(head, none), "capset")


def counts_by_namespace() -> bool:
    """Return whether the kernel counts RLIMIT_NPROC per user namespace (Linux 5.14), not over all of the user."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)))) >= (5, 14)


def allow_files(folder: str, readable: Sequence[str]) -> int:
    """Restrict this process by Landlock: only `folder` can be written, only `folder` and `readable` can be opened.

    Devices among `readable` can be written as well. Return the kernel's Landlock version, or 0 without Landlock.
    """
    abi = _libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < 1:
        return 0
    handled = LANDLOCK_FIRST | (LANDLOCK_REFER if abi >= 2 else 0) | (LANDLOCK_TRUNCATE if abi >= 3 else 0)
    handled |= LANDLOCK_IOCTL if abi >= 5 else 0
    attributes = struct.pack("QQQ", handled, 0, LANDLOCK_SCOPES) if abi >= 6 else struct.pack("Q", handled)
    rules = _check(
        _libc.syscall(SYS_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)), "landlock"
    )
    for path in (folder, *readable):
        opened = os.open(path, os.O_PATH)
        mode = os.fstat(opened).st_mode
        rights = handled if path == folder else handled & LANDLOCK_READ
        if stat.S_ISCHR(mode):
            rights |= handled & (LANDLOCK_WRITE_FILE | LANDLOCK_TRUNCATE)
        if not stat.S_ISDIR(mode):
            rights &= LANDLOCK_OF_FILES
        beneath = struct.pack("=Qi", rights, opened)
        _check(_libc.syscall(SYS_LANDLOCK_ADD, rules, 1, beneath, ctypes.c_uint(0)), f"landlock {path}")
        os.close(opened)
    _check(_libc.syscall(SYS_LANDLOCK_RESTRICT, rules, ctypes.c_uint(0)), "landlock")
    os.close(rules)
    return int(abi)


def deny_system_calls(*tables: dict[str, tuple[int, int]], signals: bool = False) -> bool:
    """Make the system calls in these tables, and the creation of namespaces, fail with EPERM, by seccomp.

    With `signals`, calls fail as well by which the kernel would send a signal to another process. Return False if the
    kernel has no seccomp or the machine's architecture is unknown.
    """
    if platform.machine() not in ARCHITECTURES:
        return False
    column, architecture = ARCHITECTURES[platform.machine()]
    numbers = [pair[column] for table in tables for pair in table.values()]
    arguments = {pair[column]: values for pair, values in DENIED_SECOND_ARGUMENTS.items()} if signals else {}
    program = _filter(architecture, numbers, arguments, CLONE[column], CLONE3[column])
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    return _libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(head), 0, 0) == 0


def _filter(
    architecture: int, denied: list[int], arguments: dict[int, tuple[int, ...]], clone: int, clone3: int
) -> list[bytes]:
    """Build the seccomp filter as instructions of classic BPF.

    The input is `struct seccomp_data`: the call's number is at byte 0, the architecture at 4, and the low halves of the
    arguments are at 16, 24, ...
    """
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000

    def line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    lines = [line(load, 4), line(equal, architecture, 1, 0), line(give, kill), line(load, 0)]
    lines += [line(at_least, 0x40000000, 0, 1), line(give, kill)]  # the x32 numbers of x86_64
    for number in denied:
        lines += [line(equal, number, 0, 1), line(give, refuse | errno.EPERM)]
    for number, values in arguments.items():
        lines += [line(equal, number, 0, 2 + 2 * len(values)), line(load, 24)]
        for value in values:
            lines += [line(equal, value, 0, 1), line(give, refuse | errno.EPERM)]
        lines += [line(give, allow)]
    # The flags of clone3 are in memory, which a filter cannot read. With ENOSYS, C libraries fall back to clone.
    lines += [line(equal, clone3, 0, 1), line(give, refuse | errno.ENOSYS)]
    lines += [line(equal, clone, 0, 3), line(load, 16), line(any_bit, ANY_NAMESPACE, 0, 1)]
    lines += [line(give, refuse | errno.EPERM), line(give, allow)]
    return lines


def threads_of_user(uid: int) -> int:
    """Count the current threads of a user, because RLIMIT_NPROC includes them."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process may have ended
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(entry / "task"))
    return count
