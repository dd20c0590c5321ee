"""From generated answers to token-level scores, whatever the reward function does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.data.proto import DataProto

RewardFunction = Callable[..., Any]

# Scores are kept in float32, where a larger one would be infinite.
LARGEST_SCORE = torch.finfo(torch.float32).max


class RewardError(RuntimeError):
    """A reward function failed, and the policy is to stop."""


class RewardManager:
    """Decodes answers, asks the reward function for each (or for all at once) and puts the score on the last token.

    A function that raises or returns something that is no finite number stops the run (`on_error=stop`) or gives that
    sample a score of zero and is counted (`on_error=zero`).
    """

    def __init__(self, function: RewardFunction, tokenizer: Tokenizer, *, per_batch: bool, on_error: str):
        self.function, self.tokenizer = function, tokenizer
        self.per_batch, self.on_error = per_batch, on_error

    def __call__(self, data: DataProto) -> tuple[Tensor, dict[str, np.ndarray], dict[str, float]]:
        """Token-level scores [batch, response], extra infos a sample, and counts of what went wrong."""
        tensors = data.batch
        mask = tensors["attention_mask"][:, -tensors["responses"].shape[1] :]
        texts = self.decode(data)
        results, errors = self._score_batch(data, texts) if self.per_batch else self._score_each(data, texts)
        scores = torch.zeros(mask.shape, dtype=torch.float32)
        last = (mask.sum(1) - 1).clamp(min=0)
        infos: dict[str, list[Any]] = defaultdict(lambda: [None] * len(texts))
        values = torch.zeros(len(texts))
        for at, result in enumerate(results):
            values[at] = result.pop("score")
            for name, value in result.items():
                infos[name][at] = value
        if taken := infos.keys() & data.non_tensor_batch.keys():
            raise RewardError(f"the reward function returned {sorted(taken)}, which the batch has already: rename them")
        scores[torch.arange(len(texts)), last] = values
        extra = {name: np.array([*column, None], dtype=object)[:-1] for name, column in infos.items()}
        return scores, extra, {"reward/errors": float(errors)}

    def decode(self, data: DataProto) -> list[str]:
        """The answers as text, without special tokens."""
        tensors = data.batch
        kept = torch.where(tensors["response_mask"].bool(), tensors["responses"], self.tokenizer.pad_token_id)
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)

    def _score_each(self, data: DataProto, texts: list[str]) -> tuple[list[dict[str, Any]], int]:
        columns = [data.non_tensor_batch[k] for k in ("data_source", "ground_truth", "extra_info")]
        results, errors = [], 0
        for at, (text, source, truth, info) in enumerate(zip(texts, *columns, strict=True)):
            try:
                result = as_result(
                    self.function(data_source=source, solution_str=text, ground_truth=truth, extra_info=info)
                )
            except Exception as error:
                self._failed(error, data, at, text)
                result, errors = {"score": 0.0}, errors + 1
            results.append(result)
        return results, errors

    def _score_batch(self, data: DataProto, texts: list[str]) -> tuple[list[dict[str, Any]], int]:
        try:
            answers = self.function(
                data_sources=list(data.non_tensor_batch["data_source"]),
                solution_strs=texts,
                ground_truths=list(data.non_tensor_batch["ground_truth"]),
                extra_infos=list(data.non_tensor_batch["extra_info"]),
            )
        except Exception as error:
            self._failed(error, data, None, "")
            return [{"score": 0.0} for _ in texts], len(texts)
        if not hasattr(answers, "__len__") or len(answers) != len(texts):
            got = f"{len(answers)} scores" if hasattr(answers, "__len__") else repr(answers)
            raise RewardError(f"the reward function returned {got} for {len(texts)} samples: each needs one")
        results, errors = [], 0
        for at, answer in enumerate(answers):
            try:
                results.append(as_result(answer))
            except Exception as error:
                self._failed(error, data, at, texts[at])
                results.append({"score": 0.0})
                errors += 1
        return results, errors

    def _failed(self, error: Exception, data: DataProto, at: int | None, text: str) -> None:
        if self.on_error == "zero":
            return
        which = "a batch" if at is None else f"sample {at} ({data.non_tensor_batch['uid'][at]}, answer {text[:80]!r})"
        raise RewardError(
            f"the reward function failed on {which}: {type(error).__name__}: {error}. "
            "Fix it, or set reward.on_error=zero to give such samples no reward and count them"
        ) from error


def as_result(answer: Any) -> dict[str, Any]:
    """A score as `{"score": float, ...}`: a finite number, or a mapping with one under 'score'."""
    result = dict(answer) if isinstance(answer, Mapping) else {"score": answer}
    if "score" not in result:
        raise ValueError(f"a reward given as a dict needs the key 'score', got {sorted(map(str, result))}")
    if "acc" in result and not isinstance(result["acc"], bool | int | float | np.number | np.bool_):
        raise ValueError(f"a reward's 'acc' must be a number, got {result['acc']!r}")
    score = result["score"]
    if isinstance(score, bool | int | float | np.number | np.bool_ | Tensor):
        result["score"] = float(score)
        if abs(result["score"]) <= LARGEST_SCORE:  # false for NaN
            return result
    raise ValueError(f"a reward must be a finite number, got {score!r}")
