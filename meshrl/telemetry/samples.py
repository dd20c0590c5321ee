"""Some samples to look at, and all of them where a folder was asked for."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.data.proto import DataProto
from meshrl.data.scored import scored_rows
from meshrl.files import naming
from meshrl.telemetry.distributions import histogram
from meshrl.telemetry.run_folder import RunFolder, move_aside
from meshrl.telemetry.token_details import finish_reasons, token_details

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)
Decode = Callable[[DataProto], list[str]]
_OF_TOKENS = (
    *("responses", "response_mask", "attention_mask", "rollout_log_probs", "old_log_probs", "advantages", "versions"),
)


class SampleLog:
    """Writes sampled generations: a few into the run folder, all into `rollout_data_dir` / `validation_data_dir`.

    The few are those of a step or of a whole validation. What an earlier run has left in the folders moves aside.
    With `decode_tokens` (text of token ids) the few have their tokens with log-probs, advantages and versions. How the
    scores and lengths of a training step are spread goes into distributions.jsonl. `stops` are the tokens that end an
    answer.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        training_samples: int = 2,
        validation_samples: int = 8,
        rollout_data_dir: str | None = None,
        validation_data_dir: str | None = None,
        decode_tokens: Callable[[list[int]], str] | None = None,
        stops: Collection[int] = (),
    ):
        self.run, self.decode_tokens, self.stops = run, decode_tokens, tuple(stops)
        self.few = {"train": training_samples, "val": validation_samples}
        self.folders = {"train": rollout_data_dir, "val": validation_data_dir}
        # How many of the few are written: a validation may come in several batches.
        self._written: Counter[tuple[str, int]] = Counter()
        self._begun: set[Path] = set()
        if run.last_step is not None:
            self._forget_after(run.last_step)

    def log_training(self, batch: DataProto, decode: Decode, step: int) -> None:
        """Takes the samples of a training step."""
        self._log(batch, decode, step, "train")
        if spread := self._spread(batch):
            self.run.append_distributions(spread, step)

    def log_validation(self, batch: DataProto, decode: Decode, step: int) -> None:
        """Takes the samples of a validation."""
        self._log(batch, decode, step, "val")

    def _forget_after(self, step: int) -> None:
        """Deletes the files of steps that a run which goes on will take again: it would write behind their lines."""
        for folder in filter(None, self.folders.values()):
            for file in _files_of_steps(Path(folder)):
                if int(file.stem) > step:
                    file.unlink()

    def _log(self, batch: DataProto, decode: Decode, step: int, split: str) -> None:
        folder = self.folders[split]
        few = batch.slice(0, min(self.few[split] - self._written[split, step], len(batch)))
        self._written[split, step] += len(few)
        self.run.append_generations(self._rows(few, decode, split, detailed=True), step)
        if folder is not None:
            file = self._begin(Path(folder).resolve()) / f"{step}.jsonl"
            with naming(file), file.open("a", encoding="utf-8", errors="backslashreplace") as out:
                for row in self._rows(batch, decode, split):
                    out.write(json.dumps({"step": step, **row}, ensure_ascii=False, default=_plain) + "\n")

    def _begin(self, folder: Path) -> Path:
        """The folder; before the first samples of a new run, what an earlier one has left there moves aside."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.run.is_new and folder not in self._begun:
            moved_to = move_aside(_files_of_steps(folder), folder)
            if moved_to is not None:
                logger.warning("%s holds samples of an earlier run: they are now in %s", folder, moved_to)
        self._begun.add(folder)
        return folder

    def _rows(self, batch: DataProto, decode: Decode, split: str, detailed: bool = False) -> Iterator[dict[str, Any]]:
        if batch.batch is None or len(batch) == 0:
            return
        scored = scored_rows(batch).tolist()
        scores = [score if there else None for score, there in zip(_scores(batch).tolist(), scored, strict=True)]
        columns, reasons = batch.non_tensor_batch, self._finish(batch)
        for at, (text, score) in enumerate(zip(decode(batch), scores, strict=True)):
            row = {
                "split": split,
                "prompt": columns["raw_prompt"][at],
                "response": text,
                "score": score,
                "ground_truth": columns["ground_truth"][at],
                "data_source": columns["data_source"][at],
            }
            if reasons:
                row["finish"] = reasons[at]
            if detailed and self.decode_tokens is not None and "responses" in batch.batch.keys():
                tensors = {name: batch.batch[name][at] for name in _OF_TOKENS if name in batch.batch.keys()}
                row["tokens"] = token_details(tensors, self.decode_tokens)
            yield row

    def _finish(self, batch: DataProto) -> list[str]:
        """Why each sample ended, as the rollout said, or else by its tokens; empty where neither is known."""
        if "ending" in batch.non_tensor_batch:
            return [str(reason) for reason in batch.non_tensor_batch["ending"]]
        if not {"responses", "attention_mask"} <= set(batch.batch.keys()):
            return []
        return finish_reasons({name: batch.batch[name] for name in ("responses", "attention_mask")}, self.stops)

    def _spread(self, batch: DataProto) -> dict[str, Any]:
        if batch.batch is None or len(batch) == 0 or "responses" not in batch.batch.keys():
            return {}
        width = batch.batch["responses"].shape[1]
        lengths = batch.batch["attention_mask"][:, -width:].sum(1)
        return {
            "score": histogram(_scores(batch)[scored_rows(batch)]),
            "response_length": histogram(lengths.numpy()),
            "finish": dict(Counter(self._finish(batch))),
        }


def _scores(batch: DataProto) -> np.ndarray:
    return batch.batch["token_level_scores"].sum(1).numpy()


def _files_of_steps(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*.jsonl") if file.stem.isdecimal()]


def _plain(value: Any) -> Any:
    """Numbers and lists for numpy's and torch's values, text for all else that JSON does not know."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
