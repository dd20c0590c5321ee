"""Some samples to look at, and all of them where a folder was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshrl.data.proto import DataProto
from meshrl.telemetry.run_folder import RunFolder

Decode = Callable[[DataProto], list[str]]


class SampleLog:
    """Writes sampled generations: a few into the run folder, all into `rollout_data_dir` / `validation_data_dir`."""

    def __init__(
        self,
        run: RunFolder,
        *,
        training_samples: int = 2,
        validation_samples: int = 8,
        rollout_data_dir: str | None = None,
        validation_data_dir: str | None = None,
    ):
        self.run = run
        self.few = {"train": training_samples, "val": validation_samples}
        self.folders = {"train": rollout_data_dir, "val": validation_data_dir}
        if run.last_step is not None:
            self._forget_after(run.last_step)

    def log_training(self, batch: DataProto, decode: Decode, step: int) -> None:
        """Takes the samples of a training step."""
        self._log(batch, decode, step, "train")

    def log_validation(self, batch: DataProto, decode: Decode, step: int) -> None:
        """Takes the samples of a validation."""
        self._log(batch, decode, step, "val")

    def _forget_after(self, step: int) -> None:
        """Deletes the files of steps that a run which goes on will take again: it would write behind their lines."""
        for folder in filter(None, self.folders.values()):
            for file in Path(folder).glob("*.jsonl"):
                if file.stem.isdecimal() and int(file.stem) > step:
                    file.unlink()

    def _log(self, batch: DataProto, decode: Decode, step: int, split: str) -> None:
        folder = self.folders[split]
        few = batch.slice(0, min(self.few[split], len(batch)))
        self.run.append_generations(_rows(few, decode, split), step)
        if folder is not None:
            file = Path(folder) / f"{step}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8", errors="backslashreplace") as out:
                for row in _rows(batch, decode, split):
                    out.write(json.dumps({"step": step, **row}, ensure_ascii=False, default=_plain) + "\n")


def _rows(batch: DataProto, decode: Decode, split: str) -> Iterator[dict[str, Any]]:
    if batch.batch is None or len(batch) == 0:
        return
    scores = batch.batch["token_level_scores"].sum(1).tolist()
    columns = batch.non_tensor_batch
    for at, (text, score) in enumerate(zip(decode(batch), scores, strict=True)):
        yield {
            "split": split,
            "prompt": columns["raw_prompt"][at],
            "response": text,
            "score": score,
            "ground_truth": columns["ground_truth"][at],
            "data_source": columns["data_source"][at],
        }


def _plain(value: Any) -> Any:
    """Numbers and lists for numpy's and torch's values, text for all else that JSON does not know."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
