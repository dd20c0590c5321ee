"""Copies of a run's state in the memory of other machines: a small process, a shelf, on every node of a Ray cluster.

A rank puts its files onto the shelf of its own node and onto the shelf of the next node in a ring. So after the loss of
processes or of one whole node, a copy of every file is left. Shelves belong to no process of the run. They are ended
with the run, or end themselves if they are unused for hours.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.data.serialization import inside
from meshrl.files import write_whole

logger = logging.getLogger(__name__)

BLOCK = 32 << 20
# Seconds after which an unused shelf ends, and seconds between two checks.
UNUSED_SECONDS, LOOK_SECONDS = 4 * 3600.0, 10.0
# Seconds for an answer to a query without payload. A node that takes longer counts as lost.
ANSWER_SECONDS = 30.0
# Seconds in which all shelves should have started.
START_SECONDS = 120.0
# The list of a step's files. The step is complete if this file and all listed files are on some shelf.
LAST = "manifest.json"


class Shelf:
    """The files of some steps in one node's memory, a Ray actor."""

    def __init__(self, unused_seconds: float = UNUSED_SECONDS) -> None:
        self._files: dict[int, dict[str, bytearray]] = {}
        self._unused_seconds, self._used_at = unused_seconds, time.monotonic()
        threading.Thread(target=self._end_unused, name="meshrl-shelf", daemon=True).start()

    def add(self, step: int, name: str, at: int, block: bytes) -> None:
        """Append a block to a file. At offset 0 the file is started again."""
        self._used_at = time.monotonic()
        files = self._files.setdefault(step, {})
        if at == 0:
            files[name] = bytearray()
        files[name] += block

    def complete(self, step: int, files: Mapping[str, bytes]) -> None:
        """Add the last files of a step, and drop the files of all other steps."""
        self._used_at = time.monotonic()
        held = self._files.get(step, {}) | {name: bytearray(content) for name, content in files.items()}
        self._files = {step: held}

    def names(self) -> dict[int, list[str]]:
        """Return the names of the files that are held of each step."""
        self._used_at = time.monotonic()
        return {step: list(files) for step, files in self._files.items()}

    def read(self, step: int, name: str) -> bytes:
        """Return a whole file; meant for small files."""
        return bytes(self._files[step][name])

    def write(self, step: int, names: list[str], folder: str) -> None:
        """Write files into a folder that all nodes share."""
        for name in names:
            file = inside(Path(folder), name)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, self._files[step][name])

    def _end_unused(self) -> None:
        while time.monotonic() - self._used_at < self._unused_seconds:
            time.sleep(LOOK_SECONDS)
        os._exit(0)


@dataclass(frozen=True)
class Shelves:
    """A run's shelves by their nodes' ids, in the order of the ring. `deadline`: seconds to send a block."""

    key: str
    ring: tuple[str, ...]
    deadline: float

    def put(self, step: int, files: Mapping[str, Path]) -> None:
        """Copy a rank's files to the shelf of its own node and to that of the next node."""
        import ray

        shelves = [_shelf(self.key, node) for node in places_of(ray.get_runtime_context().get_node_id(), self.ring)]
        for name, file in files.items():
            with file.open("rb") as stream:
                at = 0
                while (block := stream.read(BLOCK)) or at == 0:
                    ray.get([shelf.add.remote(step, name, at, block) for shelf in shelves], timeout=self.deadline)
                    at += max(1, len(block))

    def complete(self, step: int, files: Mapping[str, Path]) -> None:
        """Copy the controller's files to all shelves. From now on the run can resume from the step."""
        import ray

        contents = ray.put({name: file.read_bytes() for name, file in files.items()})
        shelves = [_shelf(self.key, node) for node in self.ring]
        ray.get([shelf.complete.remote(step, contents) for shelf in shelves], timeout=self.deadline)


def places_of(node: str, ring: tuple[str, ...]) -> tuple[str, str]:
    """Return the nodes that hold the files of a node's ranks: the node itself and the next in the ring."""
    if node not in ring:
        raise ValueError(f"node {node} has no shelf: it did not answer when the copies began")
    at = ring.index(node)
    return node, ring[(at + 1) % len(ring)]


def start_shelves(key: str, deadline: float) -> Shelves:
    """Start a shelf on every living node, or use the one that is already there, and return the shelves.

    Ray takes seconds to notice the loss of a node, so nodes that do not answer are left out.
    """
    import ray

    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    asked = {node: _ask_shelf(key, node) for node in nodes} if len(nodes) > 1 else {}
    until = time.monotonic() + START_SECONDS
    ring = tuple(node for node, answer in asked.items() if _answers(key, node, answer, until))
    if len(ring) < 2:
        raise ValueError(
            f"copies in the memory of other nodes need two of them; {len(ring)} of the cluster's {len(nodes)} answer"
        )
    return Shelves(key, ring, deadline)


def _ask_shelf(key: str, node: str) -> Any:
    """Query the contents of a node's shelf, which is started if it does not exist.

    Return None if the shelf's name is still taken by a shelf that is ending.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor: Any = ray.remote(Shelf)
    options = actor.options(
        name=f"{key}-{node}",
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    try:
        return options.remote().names.remote()
    except ValueError:  # the name is taken by a shelf that is just ending
        return None


def _answers(key: str, node: str, answer: Any, until: float) -> bool:
    """Return whether a node has a shelf that answers. If the first query fails, a new shelf is tried once."""
    import ray

    problem = "its shelf is ending"
    for asked in (answer, None):
        try:
            told = asked or _ask_shelf(key, node)
            if told is not None:
                ray.get(told, timeout=max(ANSWER_SECONDS, until - time.monotonic()))
                return True
        except ray.exceptions.RayError as error:
            problem = str(error).partition("\n")[0]
    logger.warning("node %s takes no copies: %s", node, problem)
    return False


def write_newest(key: str, newer_than: int, folder: Callable[[int], Path], deadline: float) -> Path | None:
    """Write the newest complete step that the living nodes hold together into `folder(step)`, and return the folder.

    Only steps after `newer_than` count; return None if there is none. A step's list of its files is its file `LAST`.
    """
    import json

    import ray

    found = _living(key)
    steps = {step for _, held in found for step, names in held.items() if LAST in names and step > newer_than}
    for step in sorted(steps, reverse=True):
        first = next(shelf for shelf, held in found if LAST in held.get(step, ()))
        listed = json.loads(ray.get(first.read.remote(step, LAST), timeout=ANSWER_SECONDS))["files"]
        left = {LAST, *(record["name"] for record in listed)}
        writing = []
        for shelf, held in found:
            names = sorted(left & set(held.get(step, ())))
            left -= set(names)
            writing.append((shelf, names))
        if left:
            logger.warning("the copy of step %d in memory lacks %d files, such as %s", step, len(left), min(left))
            continue
        target = folder(step)
        ray.get([shelf.write.remote(step, names, str(target)) for shelf, names in writing], timeout=deadline)
        return target
    return None


def end_shelves(key: str) -> None:
    """End the shelves on all nodes that can be reached, which frees their memory."""
    import ray

    for shelf, _ in _living(key):
        ray.kill(shelf, no_restart=True)


def _shelf(key: str, node: str) -> Any:
    import ray

    return ray.get_actor(f"{key}-{node}")


def _living(key: str) -> list[tuple[Any, dict[int, list[str]]]]:
    """Return the shelves that answer, with the names of the files that each holds."""
    import ray

    if not ray.is_initialized():
        return []
    living: list[tuple[Any, dict[int, list[str]]]] = []
    for name in ray.util.list_named_actors():
        if name.startswith(f"{key}-"):
            try:
                shelf: Any = ray.get_actor(name)
                held = ray.get(shelf.names.remote(), timeout=ANSWER_SECONDS)
                living.append((shelf, held))
            except (ValueError, ray.exceptions.RayError) as error:
                logger.warning("the copies on %s are lost: %s", name, error)
    return living
