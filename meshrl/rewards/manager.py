"""The reward manager: calls reward functions for generated responses and returns token-level scores.

* `RewardManager`, `register_reward_manager`: scoring of batches, with a policy for failures of reward functions.
* `drop_samples`: removal of samples from the training.
* `OverlongBuffer`: DAPO's penalty on overlong responses.
* `ScoredParts`: scoring of a batch's parts while generation continues.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.keys import count
from meshrl.config.reward import MANAGERS
from meshrl.config.user_code import is_async, is_batch_function
from meshrl.data.batch import DROPPED, DataProto, object_array, scored_rows
from meshrl.registry import REWARD_MANAGERS
from meshrl.rewards.process_pool import InPool, WorkerPool
from meshrl.rewards.results import LARGEST_SCORE, BadAnswerError, RewardError, Scores, as_result
from meshrl.rewards.reward_calls import (
    AtOnce,
    AtOnceAwaited,
    Failure,
    InTurn,
    RewardFunction,
    RewardFunctionSpec,
    Sample,
    Together,
    extras_of,
)
from meshrl.threads import Threads

__all__ = ["RewardError", "RewardManager", "as_result", "drop_samples", "register_reward_manager"]

logger = logging.getLogger(__name__)

POLICIES = ("stop", "zero", "drop")
POOL_TIMEOUT = 300.0
Caller = Callable[[Sequence[Sample]], list[Any]]


def register_reward_manager(name: str) -> Callable[[type[RewardManager]], type[RewardManager]]:
    """Return a decorator that registers a subclass of `RewardManager` under `name`."""
    return REWARD_MANAGERS.register(name)


class RewardManager:
    """A manager that decodes responses, calls the reward functions and puts the weighted sum of scores on the tokens.

    The manager's name selects how functions are called:

    * `naive` calls a function for one sample after the other, and a coroutine function for many samples concurrently.
    * `batch` calls a function once for all samples.
    * `prime` calls a function for single samples in a pool of processes.
    * `dapo` is `naive` with a penalty on overlong responses.

    A single score goes on the last token of the response. A list with one number per response token goes on these
    tokens. A call fails if the function raises, hangs, dies or returns no valid score. Failures are counted, and
    `on_error` selects their effect: `stop` ends the run, `zero` gives score 0, and `drop` removes the sample from the
    training. Subclasses override `score`, which all other methods use.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunctionSpec],
        tokenizer: Tokenizer,
        *,
        name: str = "naive",
        on_error: str = "stop",
        timeout: float | None = None,
        num_processes: int = 8,
        max_concurrent_calls: int = 64,
        overlong: OverlongBuffer | None = None,
        log_overlong: bool = False,
    ):
        if name not in MANAGERS or on_error not in POLICIES:
            raise ValueError(f"no reward manager '{name}' ({', '.join(MANAGERS)}) or policy '{on_error}' ({POLICIES})")
        self.specs = [RewardFunctionSpec("reward", function=functions)] if callable(functions) else list(functions)
        labels = [spec.label for spec in self.specs]
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(f"a reward manager needs functions with different labels, got {labels}")
        self.tokenizer, self.name, self.on_error = tokenizer, name, on_error
        self.timeout, self.num_processes, self.max_concurrent_calls = timeout, num_processes, max_concurrent_calls
        self.overlong, self.log_overlong = overlong, log_overlong
        self._pool: WorkerPool | None = None
        self._extras: set[str] = set()
        self._callers = [self._caller(at, spec) for at, spec in enumerate(self.specs)]
        self._threads = Threads(num_processes if name == "prime" else 1, "reward-parts")
        # Called once with a warning if the functions fail on every sample of the first batch.
        self.say: Callable[[str], None] = logger.warning
        self._works = self._told = False

    def _caller(self, at: int, spec: RewardFunctionSpec) -> Caller:
        function = spec.load()
        self._extras |= set(extras_of(function))
        awaited = is_async(function)
        if self.name == "batch" or is_batch_function(function):
            return AtOnceAwaited(function, self.timeout) if awaited else AtOnce(function, self.timeout)
        if self.name != "prime":
            return (
                Together(function, self.timeout, self.max_concurrent_calls)
                if awaited
                else InTurn(function, self.timeout)
            )
        if awaited:
            raise ValueError(
                f"reward function '{spec.label}' is a coroutine, which prime cannot call: use naive or batch"
            )
        if self._pool is None:
            timeout = POOL_TIMEOUT if self.timeout is None else self.timeout
            self._pool = WorkerPool(list(map(_for_processes, self.specs)), self.num_processes, timeout)
        return InPool(self._pool, at)

    def __call__(self, data: DataProto) -> tuple[Tensor, dict[str, np.ndarray], dict[str, float]]:
        """Score a batch, and return token-level scores `[B, T]`, a column of values per extra info, and metrics."""
        scores = self.score(data)
        if failing := self._fails_on_all(scores):
            self._tell(failing)
        return scores.token_level, scores.infos, scores.metrics()

    def submit(self, data: DataProto) -> Future[Scores]:
        """Score a part of a batch in a thread. Parts are started in the order of submission. See `ScoredParts`."""
        return self._threads.submit(lambda: self.score(data))

    def add_scores(self, batch: DataProto) -> dict[str, float]:
        """Score a whole batch, write the scores and infos into it, drop failed samples, and return the metrics.

        See `write` for the effects on the batch.
        """
        return self.write(self.score(batch), batch)

    def write(self, scores: Scores, batch: DataProto) -> dict[str, float]:
        """Write `token_level_scores` and the infos into the batch, drop failed samples, and return the metrics.

        If every sample so far has failed with `on_error=zero` and no function is built-in, raise `RewardError`, because
        zeros alone teach nothing. In other cases warn once: the service or model that a built-in function calls may
        become available later.
        """
        if failing := self._fails_on_all(scores):
            if self.on_error == "zero" and not any(spec.is_built_in for spec in self.specs):
                raise RewardError(f"{failing}\nAll rewards would be zero (reward.on_error=zero): fix the function")
            self._tell(failing)
        scores.write_into(batch)
        drop_samples(batch, scores.dropped)
        return scores.metrics()

    def _fails_on_all(self, scores: Scores) -> str | None:
        """Return an error message if no sample of any batch so far has been scored without failure, else None."""
        self._works |= scores.failed < len(scores.dropped)
        if self._works:
            return None
        return f"the reward function failed on all {len(scores.dropped)} samples, first on {scores.first_failure}"

    def _tell(self, words: str) -> None:
        if not self._told:
            self.say(f"warning: {words}")
        self._told = True

    def score(self, data: DataProto, again: bool = False) -> Scores:
        """Score a batch or a part of a batch.

        Raise `RewardError` if an info has the name of an existing column of the batch. `again` allows this, for a batch
        that was scored before.
        """
        mask = _response_mask(data)
        lengths = mask.sum(1)
        samples = self._samples(data, mask)
        failed = _Failed(self.on_error, data, [sample["solution_str"] for sample in samples])
        answers = [self._ask(caller, samples, lengths, failed) for caller in self._callers]
        parts = {
            spec.label: np.array([float(np.sum(answer["score"])) for answer in column])
            for spec, column in zip(self.specs, answers, strict=True)
        }
        token_level = self._token_level(answers, mask)
        infos = self._infos(answers, parts)
        if self.overlong is not None:
            penalties = self.overlong.penalties(lengths)
            token_level[torch.arange(len(samples)), _last(lengths)] += penalties
            if self.log_overlong:
                infos["overlong_reward"] = object_array(penalties.tolist())
                infos["overlong"] = object_array((penalties < 0).tolist())
        too_large = (token_level.amax(1) > LARGEST_SCORE) | (token_level.amin(1) < -LARGEST_SCORE)
        for row in torch.nonzero(too_large).flatten().tolist():
            failed.count(row, Failure("nan", "its weighted scores add up to more than float32 holds"))
            token_level[row] = 0
        failed.stop_if_asked()
        if self.on_error == "drop":
            token_level[torch.as_tensor(failed.dropped)] = 0
            infos[DROPPED] = object_array(failed.dropped.tolist())
        if not again and (taken := infos.keys() & data.non_tensor_batch.keys()):
            raise RewardError(f"the reward function returned {sorted(taken)}, which the batch has already: rename them")
        count, first = int(failed.rows.sum()), failed.first_words()
        return Scores(token_level.float(), infos, parts, failed.dropped, failed.kinds, count, first)

    def _ask(self, caller: Caller, samples: list[Sample], lengths: Tensor, failed: _Failed) -> list[dict[str, Any]]:
        """Call one function for all samples, and return its checked results. Failed samples get score 0."""
        answers = []
        for at, (answer, tokens) in enumerate(zip(caller(samples), lengths.tolist(), strict=True)):
            checked = _checked(answer, tokens)
            if isinstance(checked, Failure):
                failed.count(at, checked)
                checked = {"score": 0.0}
            answers.append(checked)
        failed.stop_if_asked()
        return answers

    def decode(self, data: DataProto) -> list[str]:
        """Decode the responses to text, without special tokens and without tool output."""
        tensors = data.batch
        sampled = tensors["response_mask"].bool()
        # The response mask of a dropped sample is zero everywhere. Decode all tokens after its prompt instead.
        shown = torch.where(torch.from_numpy(scored_rows(data))[:, None], sampled, _response_mask(data).bool())
        kept = torch.where(shown, tensors["responses"], self.tokenizer.pad_token_id)
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)

    def waits(self) -> list[str]:
        """Return one line for each process of the pool that is busy with a sample, for diagnosis of a hang."""
        return self._pool.waits() if self._pool is not None else []

    def close(self) -> None:
        """End the processes of the pool and the event loops of coroutine functions."""
        if self._pool is not None:
            self._pool.close()
        for caller in self._callers:
            if isinstance(caller, Together | AtOnceAwaited):
                caller.close()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _samples(self, data: DataProto, mask: Tensor) -> list[Sample]:
        columns: dict[str, Any] = {
            name: data.non_tensor_batch[name] for name in ("data_source", "ground_truth", "extra_info")
        }
        columns["solution_str"] = self.decode(data)
        if "prompt" in self._extras:
            columns["prompt"] = data.non_tensor_batch["raw_prompt"]
        if "response_ids" in self._extras:
            rows = zip(data.batch["responses"], mask.bool(), strict=True)
            columns["response_ids"] = [response[inside].tolist() for response, inside in rows]
        if "turn_rewards" in self._extras:
            # Rewards from tools and environments, in order of turns. A single-turn sample has an empty list.
            columns["turn_rewards"] = data.non_tensor_batch.get("turn_rewards", [[] for _ in range(len(data))])
        return [{name: column[at] for name, column in columns.items()} for at in range(len(data))]

    def _token_level(self, answers: list[list[dict[str, Any]]], mask: Tensor) -> Tensor:
        """Return the weighted sum of all functions' scores as `[B, T]`.

        The result is float64, so that the caller can check that the sum fits into float32.
        """
        scores = torch.zeros(mask.shape, dtype=torch.float64)
        rows, last = torch.arange(len(mask)), _last(mask.sum(1))
        for spec, column in zip(self.specs, answers, strict=True):
            found = [answer["score"] for answer in column]
            whole = [0.0 if isinstance(score, list) else score for score in found]
            scores[rows, last] += spec.weight * torch.tensor(whole, dtype=torch.float64)
            for at, score in enumerate(found):
                if isinstance(score, list):
                    scores[at, mask[at].bool()] += spec.weight * torch.tensor(score, dtype=torch.float64)
        return scores

    def _infos(self, answers: list[list[dict[str, Any]]], parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return one column for each extra value that the functions returned besides the score.

        With several functions, column names begin with the function's label, and each function's score is a column as
        well. The column `acc` is then taken from the first function that returned this value.
        """
        count = len(answers[0])
        several = len(self.specs) > 1
        infos: dict[str, list[Any]] = defaultdict(lambda: [None] * count)
        for spec, column in zip(self.specs, answers, strict=True):
            for at, answer in enumerate(column):
                for name, value in answer.items():
                    if name != "score":
                        infos[f"{spec.label}/{name}" if several else name][at] = value
                    if several and name == "acc" and infos["acc"][at] is None:
                        infos["acc"][at] = value
        columns = {name: object_array(values) for name, values in infos.items()}
        if several:
            columns |= {f"{label}/score": object_array(part.tolist()) for label, part in parts.items()}
        return columns


def _for_processes(spec: RewardFunctionSpec) -> RewardFunctionSpec:
    """Return the spec that the processes of the pool load.

    A batch function is replaced by a placeholder, because it never runs in the pool and may not be picklable.
    """
    return replace(spec, function=None, name="exact_match", path=None, kwargs={}) if _is_batch(spec) else spec


def _is_batch(spec: RewardFunctionSpec) -> bool:
    return is_batch_function(spec.load())


class _Failed:
    """The failures of one batch: their counts by kind, the affected samples, and the policy `on_error`."""

    def __init__(self, policy: str, data: DataProto, texts: list[str]):
        self.policy, self.data, self.texts = policy, data, texts
        self.kinds: Counter[str] = Counter()
        self.rows, self.dropped = np.zeros(len(texts), dtype=bool), np.zeros(len(texts), dtype=bool)
        self.first: tuple[int, Failure] | None = None

    def count(self, at: int, failure: Failure) -> None:
        """Record the failure of a function on the sample in row `at`."""
        self.kinds[failure.kind] += 1
        self.rows[at] = True
        self.dropped[at] |= self.policy == "drop"
        self.first = self.first or (at, failure)

    def stop_if_asked(self) -> None:
        """Raise `RewardError` if the policy is `stop` and any sample failed.

        The message distinguishes a failure of all samples from a failure of some.
        """
        if self.policy != "stop" or self.first is None:
            return
        failure = self.first[1]
        if self.rows.all() and len(self.rows) > 1 and not failure.whole:
            words = f"all {len(self.rows)} samples, first on {self.first_words()}"
        else:
            advice = "Fix it, or set reward.on_error=zero to give such samples no reward and count them"
            words = self.first_words(f". {advice}")
        raise RewardError(f"the reward function failed on {words}") from failure.error

    def first_words(self, more: str = "") -> str:
        """Describe the first failure: the sample, the error and, one line each, the frames in the function's code."""
        if self.first is None:
            return ""
        at, failure = self.first
        uid = self.data.non_tensor_batch["uid"][at] if "uid" in self.data.non_tensor_batch else "no uid"
        which = "a batch" if failure.whole else f"sample {at} ({uid}, answer {self.texts[at][:80]!r})"
        return "\n  ".join((f"{which}: {failure.text}{more}", *failure.frames))


def drop_samples(batch: DataProto, dropped: np.ndarray) -> None:
    """Remove samples from the training: set their response mask to zero, and give each sample a group of its own.

    `dropped` is a bool mask `[B]`. The mask and the column `uid` are copied before they are changed.
    """
    rows = np.flatnonzero(dropped)
    if len(rows) == 0:
        return
    batch.batch["response_mask"] = batch.batch["response_mask"].clone()
    batch.batch["response_mask"][torch.as_tensor(rows)] = 0
    uids = object_array(list(batch.non_tensor_batch["uid"]))
    for row in rows:
        uids[row] = f"{uids[row]}/dropped{row}"
    batch.non_tensor_batch["uid"] = uids


def _response_mask(data: DataProto) -> Tensor:
    """Return a mask `[B, T]` of all tokens after the prompt, sampled by the policy or from a tool."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def _last(lengths: Tensor) -> Tensor:
    return (lengths - 1).clamp(min=0)


def _checked(answer: Any, tokens: int) -> dict[str, Any] | Failure:
    if isinstance(answer, Failure):
        return answer
    try:
        return as_result(answer, tokens)
    except Exception as error:  # a user's mapping or number may raise anything
        kind = error.kind if isinstance(error, BadAnswerError) else "invalid"
        return Failure(kind, f"{type(error).__name__}: {error}", error)


# DAPO's soft penalty on responses that come close to the maximum length.


@dataclass(frozen=True)
class OverlongBuffer:
    """DAPO's overlong penalty: grows linearly to `penalty_factor` over the last `length` of `max_length` tokens."""

    max_length: int
    length: int
    penalty_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.length <= self.max_length:
            raise ValueError(
                f"reward_manager.overlong_buffer.len ({self.length}) must be between 1 and data.max_response_length "
                f"({self.max_length})"
            )

    def penalties(self, lengths: Tensor) -> Tensor:
        """Return the penalty, 0 or negative, of each response from the lengths `[B]` in tokens."""
        over = (lengths - (self.max_length - self.length)).clamp(min=0).float()
        return -over / self.length * self.penalty_factor


# Scoring that overlaps with generation: parts are scored as they arrive, and collected in the order of the batch.


class ScoredParts:
    """The parts of one batch that a reward manager scores in its threads.

    `add` returns immediately. The result equals that of scoring the whole batch at once, for every order of the parts.
    """

    def __init__(self, manager: RewardManager):
        self.manager = manager
        self._futures: list[Future[Scores]] = []
        self._rows: list[np.ndarray] = []
        self._next = 0

    def add(self, part: DataProto, rows: Sequence[int] | np.ndarray | None = None) -> None:
        """Start scoring a part, which consists of the given `rows` of the batch.

        `rows` defaults to the rows that follow the parts added so far.
        """
        if rows is None:
            rows = np.arange(self._next, self._next + len(part))
        if len(rows) != len(part):
            raise ValueError(f"a part of {count(len(part), 'sample')} came with {count(len(rows), 'row')}")
        self._next += len(part)
        self._rows.append(np.asarray(rows, dtype=np.int64))
        self._futures.append(self.manager.submit(part))

    def collect(self, timeout: float | None = None) -> Scores:
        """Wait for all parts, and return their scores in the order of the batch's rows.

        Raise `TimeoutError` if the parts together are not scored within `timeout` seconds.
        """
        if not self._futures:
            raise ValueError("no parts were added to collect scores of")
        rows = np.concatenate(self._rows)
        if not np.array_equal(np.sort(rows), np.arange(len(rows))):
            raise ValueError(f"the parts' rows must be 0 to {len(rows) - 1}, each once; got {sorted(rows.tolist())}")
        deadline = None if timeout is None else time.monotonic() + timeout
        found = []
        for at, future in enumerate(self._futures):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                found.append(future.result(left))
            except FutureTimeout:
                if future.done():
                    raise  # a TimeoutError of the scoring itself
                late = sum(not other.done() for other in self._futures)
                raise TimeoutError(
                    f"{late} of {len(self._futures)} parts were not scored within {timeout} s; the first is part {at}"
                ) from None
        return Scores.concat(found).reorder(rows)

    def add_scores(self, batch: DataProto, timeout: float | None = None) -> dict[str, float]:
        """Wait for all parts, write their scores into the whole batch by `RewardManager.write`, and return metrics.

        `timeout` in seconds bounds the wait for all parts together.
        """
        return self.manager.write(self.collect(timeout), batch)
