"""Files that are there whole or not at all, and the reading of those that something else has damaged.

A process that is killed and a disk that is full leave the file as it was before: all that is written to be read again
goes through `writing_whole`. Not so journals, which grow by whole lines and whose readers pass over a cut one, and
files inside a folder that takes its own name only when it is whole.
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
    """A file that does not hold what its name promises; the message names it."""

    needs_no_traceback = True


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have an error of the system that names no file, as that of a full disk, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def writing_whole(path: str | os.PathLike[str], on_disk: bool = True) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of `path` only after it was written and is on the disk.

    Without `on_disk` it may be lost with the machine, though not with the process. A link stays one, and what is no
    file (`/dev/stdout`) is written to as it is.
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
    """Write a file that is complete or as it was before; half of a surrogate pair becomes its escape."""
    with writing_whole(path) as aside:
        aside.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 1) -> None:
    """Write plain data as JSON, complete or not at all."""
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what a JSON file holds; a `DamagedFileError` names a file that is empty, cut off or no JSON."""
    content = Path(path).read_bytes()
    try:
        return json.loads(content.decode())
    except ValueError as error:
        why = "it is empty" if not content.strip() else f"{error}"
        raise DamagedFileError(f"{path} is not valid JSON: {why}") from error


def sync_file(path: Path) -> None:
    """Put a file's content on the disk."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk, such as one that was just given."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
