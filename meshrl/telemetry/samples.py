"""Logs of samples: a few per step in the run folder, and all of them in separate folders if configured.

SampleLog:       writes samples and the distributions of their scores and lengths
token_details:   log-probs, advantages and versions of single tokens
finish_reasons:  the finish reasons of responses from their tokens
"""

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
    """A writer of samples: a few into the run folder, all into `rollout_data_dir` and `validation_data_dir` if given.

    `training_samples` is the number of samples per step in the run folder, `validation_samples` the number per whole
    validation. Files of an earlier run in the two folders are moved aside. With `decode_tokens` (token ids to text),
    samples in the run folder include their tokens with log-probs, advantages and versions. The distributions of scores
    and lengths of a training step go into distributions.jsonl. `stops` are the tokens that end a response.
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
        # Samples written so far per split and step, because a validation may come in several batches.
        self._written: Counter[tuple[str, int]] = Counter()
        self._begun: set[Path] = set()
        if run.last_step is not None:
            self._forget_after(run.last_step)

    def log_training(self, batch: DataProto, decode: DecodeBatch, step: int) -> None:
        """Write the samples and distributions of a training step."""
        self._log(batch, decode, step, "train")
        if spread := self._spread(batch):
            self.run.append_distributions(spread, step)

    def log_validation(self, batch: DataProto, decode: DecodeBatch, step: int) -> None:
        """Write the samples of a validation, or of one of its batches."""
        self._log(batch, decode, step, "val")

    def _forget_after(self, step: int) -> None:
        """Delete the files of steps after `step`.

        A resumed run repeats these steps and would append to the files.
        """
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
        """Create the folder if necessary and return it.

        Before the first samples of a new run, the files of an earlier run in the folder are moved aside.
        """
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
        """Return the finish reason of each sample, from the rollout or else from the sample's tokens.

        The list is empty if neither is available.
        """
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
    """Convert a value that JSON lacks: numpy and torch values to numbers and lists, all others to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# Details of single tokens, so that the report can show how likely, how good and how old the tokens of a sample are.

# The most tokens per sample. A file of a thousand steps with two long samples each stays at some ten megabytes.
MAX_TOKENS = 512
# The character that a decoder emits for an incomplete character, and the most tokens that a character may span.
_BROKEN, _MOST_BROKEN = "\ufffd", 8
Decode = Callable[[list[int]], str]


def token_pieces(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """Decode each token and return one text per token.

    If a character spans several tokens, the last of these tokens has the whole character and the others have "".
    """
    ids, pieces = list(token_ids), []
    context = read = 0  # tokens before `read` are decoded; decoding starts at `context` to have their context
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
    """Return the tokens of one response with their log-probs, advantages and versions, as far as `row` has them.

    `row` holds the tensors of one sample, `[response tokens]` each; only `attention_mask` covers prompt and response.
    Return None for a response without tokens. A column whose values are all equal is one number. `of` is the full
    length of a response that was cut to `limit` tokens. `told` is 1 for tokens that the model did not sample, such as
    tool results.
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
    """Return the finish reason of each response: `length` or `stop`.

    It is `length` if the response fills its row of the batch and does not end with one of the stop tokens `stops`.
    """
    import torch

    last = batch["responses"][:, -1]
    fills = batch["attention_mask"][:, -1].bool()
    ended = torch.isin(last, torch.tensor(list(stops), dtype=last.dtype))
    return ["length" if cut else "stop" for cut in (fills & ~ended).tolist()]


def _column(values: Tensor, sampled: Tensor, digits: int | None = None) -> Any:
    """Return the values of the sampled tokens, rounded to `digits` significant digits (None: whole numbers).

    Tokens that were not sampled get 0. If all sampled tokens have the same value, only that value is returned.
    """
    kept = values.masked_fill(~sampled, 0).tolist()
    # Adding 0.0 turns -0.0 into 0.0, which is easier to read.
    numbers = kept if digits is None else [float(f"{value:.{digits}g}") + 0.0 for value in kept]
    different = {number for number, own in zip(numbers, sampled.tolist(), strict=True) if own}
    return different.pop() if len(different) == 1 else numbers
