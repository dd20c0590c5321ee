"""Files of a run that is still being written, read on from where the last look ended."""

import os
from pathlib import Path
from typing import Any

from meshrl.telemetry.run_folder import parse_line

# So much of a file's beginning tells it from another one that was given its name and number on the disk.
_HEAD = 512


class FollowedFile:
    """The JSON lines of a growing file. A line without its end is left until it has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.offset = 0
        self.began_anew = 0
        self._identity: tuple[int, bytes] | None = None

    def read_on(self) -> None:
        """Takes what is new; a file that was cut or replaced is read anew, one that is missing is empty."""
        try:
            with open(self.path, "rb") as stream:
                self._read(stream)
        except FileNotFoundError:
            self._forget()
        except NotADirectoryError:
            self._forget()

    def _read(self, stream: Any) -> None:
        status = os.fstat(stream.fileno())
        head = stream.read(_HEAD)
        known = self._identity
        if known is not None:
            same = known[0] == status.st_ino and head.startswith(known[1]) and status.st_size >= self.offset
            if not same:
                self._forget()
        stream.seek(self.offset)
        data = stream.read()
        end = data.rfind(b"\n") + 1
        self.rows += [record for line in data[:end].split(b"\n") if (record := parse_line(line)) is not None]
        self.offset += end
        # Only what is known for certain: a short file's head grows with it.
        self._identity = (status.st_ino, head[: min(_HEAD, self.offset)])

    def _forget(self) -> None:
        if self._identity is not None:
            self.rows, self.offset, self._identity = [], 0, None
            self.began_anew += 1
