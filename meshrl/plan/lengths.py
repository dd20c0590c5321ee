"""Lengths of prompts and responses: read from a file, or drawn as RL runs have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Responses are log-normal with this spread of the logarithm, cut at the longest allowed.
SPREAD = 0.6
MEAN_SHARE = 0.5


@dataclass(frozen=True)
class Lengths:
    """Tokens of every sample of a step, and where the numbers come from, in words."""

    prompts: np.ndarray
    responses: np.ndarray
    source: str
    # Micro-batches that others have cut of these samples and need again.
    notes: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def totals(self) -> np.ndarray:
        return self.prompts + self.responses

    @property
    def response_share(self) -> float:
        """Of all tokens, those that are predicted."""
        return float(self.responses.sum() / self.totals.sum())

    def part(self, number: int, parts: int, samples: int) -> Lengths:
        """The samples that one of `parts` data-parallel ranks gets of the first `samples`."""
        rows = slice(number, samples, parts)
        return Lengths(self.prompts[rows], self.responses[rows], self.source)

    def cut(self, longest: int) -> Lengths:
        """Samples end after `longest` tokens, and at least one of them is the response's."""
        prompts = np.minimum(self.prompts, max(longest - 1, 0))
        return Lengths(prompts, np.minimum(self.responses, longest - prompts), self.source)


def drawn_lengths(samples: int, per_prompt: int, longest_prompt: int, longest_response: int, mean: int) -> Lengths:
    """Prompts uniform in the upper half, responses log-normal around `mean` and cut; equal prompts are neighbours."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(max(1, longest_prompt // 4), longest_prompt + 1, -(-samples // per_prompt))
    responses = np.exp(rng.normal(np.log(mean) - SPREAD**2 / 2, SPREAD, samples))
    return Lengths(
        np.repeat(prompts, per_prompt)[:samples].astype(np.int64),
        np.clip(responses, 1, longest_response).astype(np.int64),
        f"drawn: responses log-normal, mean {mean}, cut at {longest_response}",
    )


def read_lengths(file: str, samples: int, longest_prompt: int, longest_response: int) -> Lengths:
    """Lines of `prompt response` tokens, repeated until there are enough."""
    rows = []
    if not Path(file).is_file():
        raise ValueError(f"--lengths: there is no file {file}")
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdigit() for word in words):
            raise ValueError(f"{file}:{number}: expected two numbers, tokens of prompt and response, got '{line}'")
        rows.append((int(words[0]), int(words[1])))
    if not rows:
        raise ValueError(f"{file} has no lengths: lines of two numbers, tokens of prompt and response")
    table = np.resize(np.array(rows, np.int64), (samples, 2))
    return Lengths(
        np.clip(table[:, 0], 1, longest_prompt), np.clip(table[:, 1], 1, longest_response), f"{len(rows)} of {file}"
    )
