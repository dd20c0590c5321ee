"""A second place for checkpoints, such as `s3://bucket/run` or another disk: anything fsspec can write to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fsspec

from meshrl.data.tensor_file import inside
from meshrl.models.saving import new_folder

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SUPERSEDED = "manifest.superseded.json"
PREFIX = "global_step_"


class Mirror:
    """Copies complete checkpoints in a thread, the manifest last, so that one there is complete or has none.

    One that another takes the place of loses its manifest first.
    """

    def __init__(self, address: str, say: Callable[[str], None] = logger.warning):
        self.address, self.say = address, say
        self.files, self.root = fsspec.core.url_to_fs(address)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="meshrl-mirror")
        self._pushing: Future[None] | None = None

    def push(self, checkpoint: Path) -> None:
        """Begins to copy a checkpoint, after the one before."""
        self.wait()
        self._pushing = self._pool.submit(self._push, checkpoint)

    def wait(self) -> None:
        """Waits for the copy under way. One that fails is said; the run has its own copy and goes on."""
        pushing, self._pushing = self._pushing, None
        if pushing is None:
            return
        try:
            pushing.result()
        except Exception as error:
            self.say(f"a checkpoint could not be copied to {self.address}: {type(error).__name__}: {error}")

    def _push(self, checkpoint: Path) -> None:
        target = f"{self.root}/{checkpoint.name}"
        # Steps are copied as they are taken: what is there of this one or of later ones, the run has gone back from.
        for step, name in self._steps():
            if step >= int(checkpoint.name.removeprefix(PREFIX)):
                self._supersede(f"{self.root}/{name}")
        files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
        files.sort(key=lambda file: file == checkpoint / MANIFEST)
        for file in files:
            place = f"{target}/{file.relative_to(checkpoint)}"
            self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(file), place)

    def fetched(self, folder: Path) -> Iterator[Path]:
        """Brings the complete checkpoints here, one when it is asked for, the newest first."""
        for _, name in self._steps():
            if self.files.exists(f"{self.root}/{name}/{MANIFEST}"):
                with new_folder(folder / name) as aside:
                    self._fetch(f"{self.root}/{name}", aside)
                yield folder / name

    def _steps(self) -> list[tuple[int, str]]:
        """Those that are there, complete or not, by number and name, the newest first."""
        if not self.files.exists(self.root):
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in self.files.ls(self.root, detail=False)]
        numbers = [(name.removeprefix(PREFIX), name) for name in names if name.startswith(PREFIX)]
        return sorted(((int(number), name) for number, name in numbers if number.isdecimal()), reverse=True)

    def _supersede(self, folder: str) -> None:
        """Takes its manifest from a checkpoint, which is then no longer one."""
        if self.files.exists(f"{folder}/{MANIFEST}"):
            self.files.mv(f"{folder}/{MANIFEST}", f"{folder}/{SUPERSEDED}")

    def _fetch(self, source: str, folder: Path) -> None:
        for path in self.files.find(source):
            target = inside(folder, str(path)[len(source) :].lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(path, str(target))
