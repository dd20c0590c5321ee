"""Messages over a Unix socket, with the memory of tensors passed as file descriptors.

A parcel is one serialised object. What is large in it lies in one anonymous file (memfd): the sender copies it there
once, the receiver maps it and builds tensors on the mapping without a copy. The file has no name, so nothing is left
behind whatever is killed, and it is no part of /dev/shm, so no container limit on that applies. A parcel for several
receivers is written once; each maps it privately and does not see the others' writes.
"""

import mmap
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.data.serialize import dumps, loads

INLINE_BYTES = 32 * 1024  # parcels up to this size travel through the socket itself
MAX_FDS = 200  # Linux passes at most 253 descriptors in one message
_ALIGN = 64
_PREAMBLE = struct.Struct("<QI")  # bytes of the body, number of descriptors
_MAX_WRITE = 1 << 30


@dataclass(frozen=True)
class Parcel:
    """One serialised object: through the socket (`inline`), or in the file `fd` at `extents` (offset, size).

    The first of `inline` or `extents` is the pickle, the others are its out-of-band buffers.
    """

    inline: list[bytes]
    extents: list[tuple[int, int]]
    private: bool
    fd: int | None = None

    @staticmethod
    def pack(obj: Any, receivers: int = 1, may_use_fd: bool = True) -> "Parcel":
        """Serialise an object for so many receivers."""
        data, buffers = dumps(obj)
        views: list[Any] = [data, *buffers]
        if not may_use_fd or sum(memoryview(view).nbytes for view in views) <= INLINE_BYTES:
            return Parcel([bytes(view) for view in views], [], False)
        fd = anonymous_file()
        try:
            extents = _write_aligned(fd, [memoryview(view) for view in views])
        except BaseException:
            os.close(fd)
            raise
        return Parcel([], extents, receivers > 1, fd)

    def unpack(self) -> Any:
        """The object; its tensors lie on the mapped file. Closes the descriptor."""
        if self.fd is None:
            return loads(self.inline[0], [bytearray(view) for view in self.inline[1:]])
        try:
            # a private mapping cannot be filled in ahead: that would copy every page
            flags = mmap.MAP_PRIVATE if self.private else mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            offset, size = self.extents[-1]
            mapped = memoryview(mmap.mmap(self.fd, offset + size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))
        finally:
            self.close()
        views = [mapped[offset : offset + size] for offset, size in self.extents]
        return loads(views[0], views[1:])  # type: ignore[arg-type]

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd is not None:
            os.close(self.fd)


def anonymous_file() -> int:
    """A descriptor of a file without a name, in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("meshrl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_aligned(fd: int, views: Sequence[memoryview]) -> list[tuple[int, int]]:
    extents: list[tuple[int, int]] = []
    offset = 0
    for view in views:
        extents.append((offset, view.nbytes))
        flat, written = view.cast("B"), 0
        while written < view.nbytes:
            written += os.pwrite(fd, flat[written : written + _MAX_WRITE], offset + written)
        offset = -(-(offset + view.nbytes) // _ALIGN) * _ALIGN
    return extents


def send_message(sock: socket.socket, header: Any, parcels: Sequence[Parcel]) -> None:
    """Send a small picklable header and parcels. The caller closes the parcels, after their last receiver."""
    fds = [parcel.fd for parcel in parcels if parcel.fd is not None]
    body = pickle.dumps(
        (header, [(parcel.inline, parcel.extents, parcel.private, parcel.fd is not None) for parcel in parcels]), 5
    )
    preamble = _PREAMBLE.pack(len(body), len(fds))
    socket.send_fds(sock, [preamble], fds) if fds else sock.sendall(preamble)
    sock.sendall(body)


def receive_message(sock: socket.socket) -> tuple[Any, list[Parcel]] | None:
    """The next message, or None at the end of the stream."""
    preamble, fds = b"", []
    while len(preamble) < _PREAMBLE.size:
        part, new_fds, _, _ = socket.recv_fds(
            sock, _PREAMBLE.size - len(preamble), MAX_FDS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
        if not part:
            return None
        preamble += part
        fds += new_fds
    size, expected_fds = _PREAMBLE.unpack(preamble)
    body = _receive_exactly(sock, size)
    if body is None or len(fds) != expected_fds:
        for fd in fds:
            os.close(fd)
        return None
    header, described = pickle.loads(body)
    remaining = iter(fds)
    parcels = [
        Parcel(inline, extents, private, next(remaining) if has_fd else None)
        for inline, extents, private, has_fd in described
    ]
    return header, parcels


def _receive_exactly(sock: socket.socket, size: int) -> bytearray | None:
    body = bytearray(size)
    view, filled = memoryview(body), 0
    while filled < size:
        count = sock.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
    return body
