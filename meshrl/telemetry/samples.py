"""Some samples to look at, and all of them where a folder was asked for."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.data.batch import DataProto, scored_rows
from meshrl.files import naming
from meshrl.telemetry.metrics import histogram
from meshrl.telemetry.run_folder import RunFolder, move_aside

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


logger = logging.getLogger(__name__)
DecodeBatch = Callable[[DataProto], list[str]]
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

    def log_training(self, batch: DataProto, decode: DecodeBatch, step: int) -> None:
        """Takes the samples of a training step."""
        self._log(batch, decode, step, "train")
        if spread := self._spread(batch):
            self.run.append_distributions(spread, step)

    def log_validation(self, batch: DataProto, decode: DecodeBatch, step: int) -> None:
        """Takes the samples of a validation."""
        self._log(batch, decode, step, "val")

    def _forget_after(self, step: int) -> None:
        """Deletes the files of steps that a run which goes on will take again: it would write behind their lines."""
        for folder in filter(None, self.folders.values()):
            for file in _files_of_steps(Path(folder)):
                if int(file.stem) > step:
                    file.unlink()

    def _log(self, batch: DataProto, decode: DecodeBatch, step: int, split: str) -> None:
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

    def _rows(
        self, batch: DataProto, decode: DecodeBatch, split: str, detailed: bool = False
    ) -> Iterator[dict[str, Any]]:
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


# What is kept of single tokens, so that a sample can be read by how likely, how good and how old its tokens are.

# Per sample; a file of a thousand steps with two long samples each stays at some ten megabytes.
MAX_TOKENS = 512
# What a decoder puts for bytes that are no whole character, and how many tokens one may be spread over.
_BROKEN, _MOST_BROKEN = "\ufffd", 8
Decode = Callable[[list[int]], str]


def token_pieces(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; where a character ends in a later token, that one has all of it and the first none."""
    ids, pieces = list(token_ids), []
    context = read = 0  # tokens before `read` have given their text; those from `context` on help
    before = ""
    for end in range(1, len(ids) + 1):
        after = decode(ids[context:end])
        if after.endswith(_BROKEN) and end - read < _MOST_BROKEN and end < len(ids):
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        context, read = read, end
        before = decode(ids[context:read])
    return pieces


def token_details(row: dict[str, Tensor], decode: Decode, limit: int = MAX_TOKENS) -> dict[str, Any] | None:
    """The tokens of one answer with their log-probs, advantages and versions, as far as the batch has them.

    `row` holds tensors of one sample, [response tokens] each; `attention_mask` is that of prompt and response. A column
    whose values are all alike is one number. `of` is the length of an answer that was cut after `limit` tokens; `told`
    is 1 for what the model was told and did not sample.
    """
    ids = row["responses"]
    there = row["attention_mask"][-len(ids) :].bool() if "attention_mask" in row else row["response_mask"].bool()
    places = there.nonzero().ravel()
    kept = places[:limit]
    if len(kept) == 0:
        return None
    found: dict[str, Any] = {"text": token_pieces(decode, ids[kept].tolist())}
    if len(kept) < len(places):
        found["of"] = len(places)
    sampled = row["response_mask"][kept].bool()
    if not sampled.all():
        found["told"] = [int(not s) for s in sampled.tolist()]
    log_probs = row.get("rollout_log_probs", row.get("old_log_probs"))
    if log_probs is not None:
        found["log_prob"] = _column(log_probs[kept], sampled, 3)
    if "rollout_log_probs" in row and "old_log_probs" in row:
        found["mismatch"] = _column((row["old_log_probs"] - row["rollout_log_probs"])[kept], sampled, 2)
    if "advantages" in row:
        found["advantage"] = _column(row["advantages"][kept], sampled, 3)
    if "versions" in row:
        found["version"] = _column(row["versions"][kept], sampled)
    return found


def finish_reasons(batch: dict[str, Tensor], stops: Sequence[int]) -> list[str]:
    """Why each answer ended: `length` if it fills the rectangle without a stop token at its end, else `stop`."""
    import torch

    last = batch["responses"][:, -1]
    fills = batch["attention_mask"][:, -1].bool()
    ended = torch.isin(last, torch.tensor(list(stops), dtype=last.dtype))
    return ["length" if cut else "stop" for cut in (fills & ~ended).tolist()]


def _column(values: Tensor, sampled: Tensor, digits: int | None = None) -> Any:
    """The values of the sampled tokens with so many digits (None: whole numbers), 0 for the others."""
    kept = values.masked_fill(~sampled, 0).tolist()
    # Adding 0.0 turns -0.0, which reads badly, into 0.0.
    numbers = kept if digits is None else [float(f"{value:.{digits}g}") + 0.0 for value in kept]
    different = {number for number, own in zip(numbers, sampled.tolist(), strict=True) if own}
    return different.pop() if len(different) == 1 else numbers
