"""LLM judges: reward functions that ask a language model behind a URL or in a rollout to grade responses.

* `Judge`: fills the prompt template, calls an `Ask` and parses the scores.
* `judge`, `UrlAsk`: a model behind an OpenAI-compatible URL.
* `RolloutAsk`: a model in one of meshrl's rollouts.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from meshrl.rollout.base import Rollout
    from meshrl.rollout.requests import Completion, SamplingParams

Ask = Callable[[Sequence[str]], Sequence[str | Exception]]

TEMPLATE = """Grade the answer to the question below. Judge only whether it is right and complete.

Question:
{prompt}

Reference answer (may be missing):
{ground_truth}

Answer to grade:
{solution_str}

Think briefly, then end with one line: Score: X, where X is a number from 0 (wrong) to 1 (right)."""
# Also matches the formats that models often write: **Score:** 0.8, Score: $.5$, 1e-1.
SCORE = r"Score:[\s*_`$]*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
INSTALL = "a judge behind a URL needs the package httpx: pip install httpx"
_judgements = itertools.count()


class Judge:
    """A batch reward function that fills a template, asks a judge model and parses the last score of each reply.

    `ask` takes the filled texts and returns one reply per text: a text or an exception. An exception, or a reply
    without a score, is the failure of that sample only. Scores are clamped to the range from `low` to `high`.
    """

    per_batch = True

    def __init__(
        self, ask: Ask, template: str = TEMPLATE, pattern: str = SCORE, low: float = 0.0, high: float = 1.0
    ) -> None:
        if re.compile(pattern).groups != 1:
            raise ValueError(f"the judge's pattern {pattern!r} must have exactly one group: the score")
        if not low < high:
            raise ValueError(f"the judge's low ({low}) must be below its high ({high})")
        self.ask, self.template, self.pattern, self.low, self.high = ask, template, pattern, low, high

    def __call__(
        self,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Mapping[str, Any]],
        prompts: Sequence[Any],
    ) -> list[dict[str, Any] | Exception]:
        texts = [
            fill(self.template, prompt=as_text(prompt), solution_str=solution, ground_truth="" if t is None else str(t))
            for prompt, solution, t in zip(prompts, solution_strs, ground_truths, strict=True)
        ]
        replies = self.ask(texts)
        if len(replies) != len(texts):
            raise RuntimeError(f"the judge gave {len(replies)} replies to {len(texts)} questions")
        return [reply if isinstance(reply, Exception) else self.read(reply) for reply in replies]

    def read(self, reply: str) -> dict[str, Any] | Exception:
        """Parse the last score in a reply, and return a `ValueError` if the reply has no score."""
        found = re.findall(self.pattern, reply)
        try:
            score = float(found[-1]) if found else math.nan
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            return ValueError(f"the judge's reply holds no score: {reply[-80:]!r}")
        return {"score": min(max(score, self.low), self.high), "judgement": reply}


def judge(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    prompts: Sequence[Any],
    *,
    url: str,
    model: str,
    template: str = TEMPLATE,
    pattern: str = SCORE,
    low: float = 0.0,
    high: float = 1.0,
    max_tokens: int = 512,
    temperature: float = 0.0,
    timeout: float = 60.0,
    retries: int = 3,
    backoff: float = 1.0,
    concurrency: int = 8,
    api_key_env: str = "OPENAI_API_KEY",
) -> list[dict[str, Any] | Exception]:
    """Grade responses by a chat model behind an OpenAI-compatible `url`, which ends in `/v1`.

    See `Judge` for the template, pattern and score range, and `UrlAsk` for the request parameters.
    """
    ask = UrlAsk(
        url,
        model,
        max_tokens=max_tokens,
        temperature=temperature,
        timeout=timeout,
        retries=retries,
        backoff=backoff,
        concurrency=concurrency,
        api_key=os.environ.get(api_key_env),
    )
    asked = Judge(ask, template, pattern, low, high)
    return asked(data_sources, solution_strs, ground_truths, extra_infos, prompts)


judge.per_batch = True  # type: ignore[attr-defined]


class UrlAsk:
    """A client of a chat model behind an OpenAI-compatible URL, with `concurrency` requests at a time.

    Temporary failures (no connection, timeouts, the status codes in `RETRIED`) are retried up to `retries` times. The
    wait starts at about `backoff` seconds and doubles with each attempt. A `Retry-After` header of the server replaces
    the wait. No wait is longer than a minute.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 8,
        api_key: str | None = None,
    ):
        if concurrency < 1 or retries < 0 or not timeout > 0:
            raise ValueError(
                f"a judge needs concurrency >= 1, retries >= 0 and timeout > 0, got {concurrency}, {retries}, {timeout}"
            )
        self.url = url.rstrip("/") + "/chat/completions"
        self.body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self.timeout, self.retries, self.backoff, self.concurrency = timeout, retries, backoff, concurrency
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def __call__(self, texts: Sequence[str]) -> list[str | Exception]:
        try:
            import httpx
        except ImportError as error:
            raise ImportError(INSTALL) from error
        limits = httpx.Limits(max_connections=self.concurrency)
        with (
            httpx.Client(timeout=self.timeout, headers=self.headers, limits=limits) as client,
            ThreadPoolExecutor(self.concurrency, thread_name_prefix="judge") as threads,
        ):
            return list(threads.map(lambda text: self._ask(client, text), texts))

    def _ask(self, client: Any, text: str) -> str | Exception:
        import httpx

        body = self.body | {"messages": [{"role": "user", "content": text}]}
        problem: Exception = RuntimeError("the judge was not asked")
        for attempt in range(self.retries + 1):
            wait = self.backoff * 2**attempt * (1 + random.random() / 4)  # jitter against simultaneous retries
            try:
                response = client.post(self.url, json=body)
                if response.status_code == 200:
                    return _content(response)
                problem = RuntimeError(f"the judge answered {response.status_code}: {response.text[:200]}")
                if response.status_code not in RETRIED:
                    return problem
                after = response.headers.get("retry-after", "")
                wait = float(after) if after.isdigit() else wait
            except httpx.InvalidURL as error:
                return RuntimeError(f"the judge's address {self.url!r} is not a URL: {error}")
            except httpx.HTTPError as error:
                problem = RuntimeError(f"the judge cannot be reached: {type(error).__name__}: {error}")
            except (ValueError, KeyError, IndexError, TypeError) as error:
                return RuntimeError(f"the judge's reply is not that of a chat model: {type(error).__name__}: {error}")
            if attempt < self.retries:
                time.sleep(min(wait, 60.0))
        return problem


def _content(response: Any) -> str:
    content = response.json()["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise TypeError(f"its content is {content!r}")
    return content


class RolloutAsk:
    """A client of a judge model in a meshrl rollout. Applies the tokenizer's chat template to texts if it has one."""

    def __init__(self, rollout: Rollout, tokenizer: Tokenizer, params: SamplingParams, seed: int = 0):
        self.rollout, self.tokenizer, self.params, self.seed = rollout, tokenizer, params, seed

    def __call__(self, texts: Sequence[str]) -> list[str | Exception]:
        from meshrl.rollout.requests import Request

        number = next(_judgements)
        requests = [
            Request(f"judge{number}-{at}", self._ids(text), self.params, self.seed) for at, text in enumerate(texts)
        ]
        return [self._reply(answer) for answer in self.rollout.complete(requests) if answer.index == 0]

    def _reply(self, answer: Completion) -> str | Exception:
        if answer.finish_reason in ("error", "abort"):
            return RuntimeError(f"the judge's rollout ended with {answer.finish_reason}: {answer.error}")
        return str(self.tokenizer.decode(answer.token_ids, skip_special_tokens=True))

    def _ids(self, text: str) -> tuple[int, ...]:
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": text}]
            chat = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tuple(self.tokenizer(str(chat), add_special_tokens=False)["input_ids"])
        return tuple(self.tokenizer(text)["input_ids"])


def fill(template: str, **values: str) -> str:
    """Replace `{name}` in a template by the value of that name. Other braces stay, also braces inside values."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda found: values[found.group(1)], template)


def as_text(prompt: Any) -> str:
    """Return a prompt as text. Chat messages are joined by blank lines, each with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
