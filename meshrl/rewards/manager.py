"""From generated answers to token-level scores, whatever the reward functions do."""

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
    """Decorator that enters a subclass of `RewardManager` under `name`."""
    return REWARD_MANAGERS.register(name)


class RewardManager:
    """Decodes answers, asks the reward functions and puts the weighted sum of their scores on the tokens.

    `naive` asks for one sample after the other (a coroutine function: for many at once), `batch` for all in one call,
    `prime` in a pool of processes; `dapo` is naive with a punishment of overlong answers. A score goes onto the last
    token; a list of one number for each response token goes onto them. A function that raises, hangs, dies or gives
    something that is no score stops the run (`on_error=stop`), gives nothing (`zero`), or takes its sample out of the
    training (`drop`), and is counted.
    A subclass changes what `score` gives: everything else goes through it.
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
        # Hears, once, of functions that fail on every sample of the first batch.
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
        """Token-level scores [batch, response], extra infos a sample, and metrics of what was said and went wrong."""
        scores = self.score(data)
        if failing := self._fails_on_all(scores):
            self._tell(failing)
        return scores.token_level, scores.infos, scores.metrics()

    def submit(self, data: DataProto) -> Future[Scores]:
        """Scores a part of a batch beside what goes on; parts are begun in the order given. See `ScoredParts`."""
        return self._threads.submit(lambda: self.score(data))

    def add_scores(self, batch: DataProto) -> dict[str, float]:
        """Scores a whole batch and writes `token_level_scores` and the infos into it; samples to drop are taken out."""
        return self.write(self.score(batch), batch)

    def write(self, scores: Scores, batch: DataProto) -> dict[str, float]:
        """What `add_scores` does with the scores of a whole batch.

        A function of the user's own that fails on every sample of the first one does not work: zeros alone would teach
        nothing. A built-in one does; the service or model that it asks may answer yet.
        """
        if failing := self._fails_on_all(scores):
            if self.on_error == "zero" and not any(spec.is_built_in for spec in self.specs):
                raise RewardError(f"{failing}\nAll rewards would be zero (reward.on_error=zero): fix the function")
            self._tell(failing)
        scores.write_into(batch)
        drop_samples(batch, scores.dropped)
        return scores.metrics()

    def _fails_on_all(self, scores: Scores) -> str | None:
        """In words, where no sample so far got its score."""
        self._works |= scores.failed < len(scores.dropped)
        if self._works:
            return None
        return f"the reward function failed on all {len(scores.dropped)} samples, first on {scores.first_failure}"

    def _tell(self, words: str) -> None:
        if not self._told:
            self.say(f"warning: {words}")
        self._told = True

    def score(self, data: DataProto, again: bool = False) -> Scores:
        """Scores a batch or a part of one; `again`: one that has been scored."""
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
        """One function's checked answers; those that failed give nothing."""
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
        """The answers as text, without special tokens."""
        tensors = data.batch
        sampled = tensors["response_mask"].bool()
        # Of a dropped sample no token counts, and yet it is to be read: all that follows its prompt.
        shown = torch.where(torch.from_numpy(scored_rows(data))[:, None], sampled, _response_mask(data).bool())
        kept = torch.where(shown, tensors["responses"], self.tokenizer.pad_token_id)
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)

    def waits(self) -> list[str]:
        """What the pool of processes is waiting for, in words."""
        return self._pool.waits() if self._pool is not None else []

    def close(self) -> None:
        """Ends the processes of the pool, and the event loops of coroutines."""
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
            # What tools and environments gave, in order; a sample of a single turn has none.
            columns["turn_rewards"] = data.non_tensor_batch.get("turn_rewards", [[] for _ in range(len(data))])
        return [{name: column[at] for name, column in columns.items()} for at in range(len(data))]

    def _token_level(self, answers: list[list[dict[str, Any]]], mask: Tensor) -> Tensor:
        """The weighted sum of all functions' scores, in float64 until it is known to fit."""
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
        """What was said beside the scores, a column each; with several functions under their labels.

        `acc` then is that of the first function that says one.
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
    """What the pool's processes load: a function for batches never runs there and may not be able to travel."""
    return replace(spec, function=None, name="exact_match", path=None, kwargs={}) if _is_batch(spec) else spec


def _is_batch(spec: RewardFunctionSpec) -> bool:
    return is_batch_function(spec.load())


class _Failed:
    """What went wrong in one batch, and what is done about it."""

    def __init__(self, policy: str, data: DataProto, texts: list[str]):
        self.policy, self.data, self.texts = policy, data, texts
        self.kinds: Counter[str] = Counter()
        self.rows, self.dropped = np.zeros(len(texts), dtype=bool), np.zeros(len(texts), dtype=bool)
        self.first: tuple[int, Failure] | None = None

    def count(self, at: int, failure: Failure) -> None:
        """Takes note of a failure."""
        self.kinds[failure.kind] += 1
        self.rows[at] = True
        self.dropped[at] |= self.policy == "drop"
        self.first = self.first or (at, failure)

    def stop_if_asked(self) -> None:
        """Ends the run at a failure where that is the policy; says whether other samples fared better."""
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
        """The sample that failed first, how and, a line each, where in the function's code."""
        if self.first is None:
            return ""
        at, failure = self.first
        uid = self.data.non_tensor_batch["uid"][at] if "uid" in self.data.non_tensor_batch else "no uid"
        which = "a batch" if failure.whole else f"sample {at} ({uid}, answer {self.texts[at][:80]!r})"
        return "\n  ".join((f"{which}: {failure.text}{more}", *failure.frames))


def drop_samples(batch: DataProto, dropped: np.ndarray) -> None:
    """Takes samples out of the training: no token of theirs counts, and they are in no other sample's group."""
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
    """1 for every token after the prompt, sampled or from a tool."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def _last(lengths: Tensor) -> Tensor:
    return (lengths - 1).clamp(min=0)


def _checked(answer: Any, tokens: int) -> dict[str, Any] | Failure:
    if isinstance(answer, Failure):
        return answer
    try:
        return as_result(answer, tokens)
    except Exception as error:  # a user's mapping or number may fail in any way
        kind = error.kind if isinstance(error, BadAnswerError) else "invalid"
        return Failure(kind, f"{type(error).__name__}: {error}", error)


# DAPO's soft punishment of answers that come close to the longest allowed.


@dataclass(frozen=True)
class OverlongBuffer:
    """Over the last `length` tokens before `max_length` an answer loses up to `penalty_factor`, in a straight line."""

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
        """0 or below, for each answer by its length in tokens."""
        over = (lengths - (self.max_length - self.length)).clamp(min=0).float()
        return -over / self.length * self.penalty_factor


# Scoring that overlaps with generation: parts are scored as they come and collected in the batch's order.


class ScoredParts:
    """The parts of one batch on their way through a reward manager.

    `add` returns at once. The result is the same as that of the whole batch at once, in whatever order parts came.
    """

    def __init__(self, manager: RewardManager):
        self.manager = manager
        self._futures: list[Future[Scores]] = []
        self._rows: list[np.ndarray] = []
        self._next = 0

    def add(self, part: DataProto, rows: Sequence[int] | np.ndarray | None = None) -> None:
        """Begins to score a part, which is `rows` of the batch; without them, the rows after those added so far."""
        if rows is None:
            rows = np.arange(self._next, self._next + len(part))
        if len(rows) != len(part):
            raise ValueError(f"a part of {count(len(part), 'sample')} came with {count(len(rows), 'row')}")
        self._next += len(part)
        self._rows.append(np.asarray(rows, dtype=np.int64))
        self._futures.append(self.manager.submit(part))

    def collect(self, timeout: float | None = None) -> Scores:
        """The scores of all parts in the order of the batch's rows; `timeout` is for all of them together."""
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
                    raise  # the function's own
                late = sum(not other.done() for other in self._futures)
                raise TimeoutError(
                    f"{late} of {len(self._futures)} parts were not scored within {timeout} s; the first is part {at}"
                ) from None
        return Scores.concat(found).reorder(rows)

    def add_scores(self, batch: DataProto, timeout: float | None = None) -> dict[str, float]:
        """Collects, and writes the scores into the whole batch as `RewardManager.add_scores` does."""
        return self.manager.write(self.collect(timeout), batch)
