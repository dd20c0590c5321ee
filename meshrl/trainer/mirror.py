"""A second place for checkpoints, such as `s3://bucket/run` or another disk: anything fsspec can write to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fsspec

from meshrl.models.saving import new_folder

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class Mirror:
    """Copies complete checkpoints in a thread, the manifest last, so that one there is complete or has none."""

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
        files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
        files.sort(key=lambda file: file == checkpoint / MANIFEST)
        for file in files:
            place = f"{target}/{file.relative_to(checkpoint)}"
            self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(file), place)

    def fetch_newest(self, folder: Path) -> Path | None:
        """Brings the newest complete checkpoint here; None where there is none."""
        if not self.files.exists(self.root):
            return None
        names = [str(path).rstrip("/").rpartition("/")[2] for path in self.files.ls(self.root, detail=False)]
        steps = sorted(
            (int(n.removeprefix("global_step_")), n) for n in names if n.removeprefix("global_step_").isdecimal()
        )
        for _, name in reversed(steps):
            if self.files.exists(f"{self.root}/{name}/{MANIFEST}"):
                with new_folder(folder / name) as aside:
                    self._fetch(f"{self.root}/{name}", aside)
                return folder / name
        return None

    def _fetch(self, source: str, folder: Path) -> None:
        for path in self.files.find(source):
            target = folder / str(path)[len(source) :].lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(path, str(target))
