"""Files that are written completely or not at all, and reading of files that were damaged.

A killed process or a full disk leaves the file as it was before, because all files that are read again are written by
`writing_whole`. There are two exceptions. Journals grow by whole lines, and their readers skip a line that was cut off.
Files inside a folder that gets its name only when it is complete need no such care.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PART = ".part"
STREAMS = ("/dev/std", "/dev/fd/", "/proc/")


class DamagedFileError(ValueError):
    """A file whose content is not what its name promises; the message names the file."""

    needs_no_traceback = True


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add this path to an error of the operating system that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def writing_whole(path: str | os.PathLike[str], on_disk: bool = True) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` only after it was written and is on the disk.

    Without `on_disk` the file may be lost if the machine fails, but not if only the process does. If `path` is a
    symbolic link, its target is replaced. A path that is no regular file (`/dev/stdout`) is written to directly.
    """
    named, path = Path(path), Path(os.path.realpath(path))
    if str(named).startswith(STREAMS) or (path.exists() and not path.is_file()):
        yield named
        return
    aside = path.with_name(path.name + PART)
    try:
        with naming(path):
            yield aside
            if on_disk:
                sync_file(aside)
            aside.replace(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(aside):
            error.filename = str(path)
        raise
    if on_disk:
        sync_folder(path.parent)


def write_whole(path: str | os.PathLike[str], content: str | bytes | bytearray) -> None:
    """Write a file that is complete or as it was before; a lone surrogate is written as its escape."""
    with writing_whole(path) as aside:
        aside.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 1) -> None:
    """Write plain data as a JSON file, complete or not at all."""
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file; raise a `DamagedFileError` for a file that is empty, cut off or no JSON."""
    content = Path(path).read_bytes()
    try:
        return json.loads(content.decode())
    except ValueError as error:
        why = "it is empty" if not content.strip() else f"{error}"
        raise DamagedFileError(f"{path} is not valid JSON: {why}") from error


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, such as that of a file just renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
