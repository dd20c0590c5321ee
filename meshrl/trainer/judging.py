"""Asking the judge's workers: what a `Judge` needs of a model, by way of a worker group."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.controller import WorkerGroup
from meshrl.data.proto import DataProto, object_array


class GroupAsk:
    """Asks the judge's worker group, which starts after the reward functions are made: set `group` then."""

    def __init__(self) -> None:
        self.group: WorkerGroup | None = None

    def __call__(self, texts: Sequence[str]) -> list[str | Exception]:
        """A reply to each text, or what went wrong."""
        if self.group is None:
            raise RuntimeError("the judge's workers have not started yet")
        answers = self.group.reply(DataProto(None, {"text": object_array(list(texts))}, {})).non_tensor_batch
        pairs = zip(answers["reply"], answers["error"], strict=True)
        return [reply if error is None else RuntimeError(error) for reply, error in pairs]
