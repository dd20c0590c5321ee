"""Results of reward functions: validation of return values, and `Scores`, the scores and infos of a batch.

* `as_result`, `BadAnswerError`: validation of the return value of a reward function.
* `Scores`: token-level scores, extra columns and failures of some samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.data.batch import DataProto
from meshrl.rewards.reward_calls import KINDS

# Scores are stored in float32, in which a larger score would be infinite.
LARGEST_SCORE = float(np.finfo(np.float32).max)
NUMBER = bool | int | float | np.number | np.bool_


class RewardError(RuntimeError):
    """An error that stops the run: a reward function failed with `reward.on_error=stop`, or cannot be used at all."""

    # The message contains the frames in the user's code. The frames of meshrl would only hide them.
    needs_no_traceback = True


class BadAnswerError(ValueError):
    """An error for a return value that is no valid score. `kind` is one of `reward_calls.KINDS`."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def as_result(answer: Any, tokens: int | None = None) -> dict[str, Any]:
    """Return the return value of a reward function as a dict `{"score": ..., ...}`, or raise `BadAnswerError`.

    The score is one finite number or a list of `tokens` finite numbers, one for each response token.
    """
    result = dict(answer) if isinstance(answer, Mapping) else {"score": answer}
    if "score" not in result:
        raise BadAnswerError(
            "invalid", f"a reward given as a dict needs the key 'score', got {sorted(map(str, result))}"
        )
    if "acc" in result:
        _number(result["acc"], "a reward's 'acc'")
    score = result["score"]
    if isinstance(score, Tensor | np.ndarray):
        flat = torch.as_tensor(score)
        score = flat.item() if flat.numel() == 1 else flat.tolist()
    if isinstance(score, list | tuple):
        result["score"] = _token_scores(score, tokens)
    else:
        result["score"] = _number(score)
    return result


def _number(score: Any, what: str = "a reward") -> float:
    if not isinstance(score, NUMBER):
        raise BadAnswerError("invalid", f"{what} must be a finite number, got {score!r}")
    value = _as_float(score)
    if not abs(value) <= LARGEST_SCORE:  # true for NaN
        raise BadAnswerError("nan", f"{what} must be a finite number, got {_brief(score)}")
    return value


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int may be too large for a float
        return math.inf


def _token_scores(scores: Sequence[Any], tokens: int | None) -> list[float]:
    if tokens is None or len(scores) != tokens:
        wanted = "one number" if tokens is None else f"one number, or one for each of the {tokens} response tokens"
        raise BadAnswerError("length", f"a reward must be {wanted}; got {len(scores)} of them")
    return [_number(score) for score in scores]


def _brief(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else repr(value)[:80]


@dataclass
class Scores:
    """The scores of some samples, with their extra columns, dropped samples and counts of failures."""

    token_level: Tensor  # [samples, response]
    infos: dict[str, np.ndarray]  # extra columns by name, [samples] objects each
    parts: dict[str, np.ndarray]  # the unweighted score of each sample by each function, by label
    dropped: np.ndarray  # [samples], bool
    failures: Counter[str] = field(default_factory=Counter)
    failed: int = 0  # samples on which any function failed
    first_failure: str = ""  # a description of the first failure

    @staticmethod
    def concat(scores: Sequence[Scores]) -> Scores:
        """Concatenate the scores of several parts. An info that a part lacks is None for the part's samples."""
        names = dict.fromkeys(name for part in scores for name in part.infos)
        infos = {
            name: np.concatenate([part.infos.get(name, _nones(len(part.dropped))) for part in scores]) for name in names
        }
        return Scores(
            torch.cat([part.token_level for part in scores]),
            infos,
            {name: np.concatenate([part.parts[name] for part in scores]) for name in scores[0].parts},
            np.concatenate([part.dropped for part in scores]),
            sum((part.failures for part in scores), Counter()),
            sum(part.failed for part in scores),
            next((part.first_failure for part in scores if part.first_failure), ""),
        )

    def reorder(self, rows: np.ndarray) -> Scores:
        """Return scores in which row `rows[i]` is row i of these scores."""
        back = np.argsort(rows, kind="stable")
        return Scores(
            self.token_level[torch.as_tensor(back)],
            {name: column[back] for name, column in self.infos.items()},
            {name: column[back] for name, column in self.parts.items()},
            self.dropped[back],
            self.failures,
            self.failed,
            self.first_failure,
        )

    def write_into(self, batch: DataProto) -> None:
        """Write `token_level_scores` and the infos into the batch, whose rows must be in the same order."""
        batch.batch["token_level_scores"] = self.token_level
        batch.non_tensor_batch.update(self.infos)

    def metrics(self) -> dict[str, float]:
        """Return the failures by kind, the mean score of each function if there are several, and the mean of each info.

        Only finite numbers count for the mean of an info.
        """
        metrics = {"reward/errors": float(self.failures.total())}
        metrics |= {f"reward/errors/{kind}": float(self.failures[kind]) for kind in KINDS if self.failures[kind]}
        if self.dropped.any():
            metrics["reward/dropped"] = float(self.dropped.sum())
        kept = ~self.dropped
        if len(self.parts) > 1 and kept.any():
            metrics |= {f"reward/{name}/mean": float(np.mean(column[kept])) for name, column in self.parts.items()}
        own = {f"{name}/score" for name in self.parts} if len(self.parts) > 1 else set()
        for name, column in self.infos.items():
            numbers = [_as_float(value) for value in column if isinstance(value, NUMBER)]
            if (numbers := [number for number in numbers if math.isfinite(number)]) and name not in own:
                metrics[f"reward_extra/{name}/mean"] = float(np.mean(numbers))
        return metrics


def _nones(count: int) -> np.ndarray:
    return np.full(count, None, dtype=object)
