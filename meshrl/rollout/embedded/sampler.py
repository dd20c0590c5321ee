"""Sampling of tokens from logits: a uniform number per row, from the row's seed, selects on the cumulative sum.

A sample's tokens depend only on its seed and position, not on its neighbours in the batch or on the layout.

Parts: seeds and uniform numbers, `Settings` and `sample`, and `Adjuster`, the logits processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshrl.rollout.embedded.scheduler import Rows, RunningSequence
from meshrl.rollout.requests import SamplingParams

# SplitMix64. Its products wrap around in int64 in the same way as in uint64.
GOLDEN, MIX_1, MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def uniform(seeds: Tensor, step: Tensor | int) -> Tensor:
    """Return a float64 in [0, 1) for each seed and step, computed by a hash."""
    x = seeds + (torch.as_tensor(step, device=seeds.device) + 1) * GOLDEN
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically (torch's own shift keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class Settings:
    """The sampling parameters of a batch's rows, each as a column `[rows, 1]`, or None if every row has the default."""

    greedy: Tensor | None = None
    temperature: Tensor | None = None  # 1 for greedy rows
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    top_log_probs: int = 0
    all_greedy: bool = False

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> Settings:
        """Stack the sampling parameters of the rows into columns `[rows, 1]`."""
        distinct = list({id(p): p for p in params}.values())

        def column(name: str, default: float, dtype: torch.dtype) -> Tensor | None:
            if all(getattr(p, name) == default for p in distinct):
                return None
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)[:, None]

        temperature = column("temperature", 1.0, torch.float32)
        greedy = None
        if temperature is not None and any(p.temperature == 0 for p in distinct):
            greedy = temperature == 0
            temperature = torch.where(greedy, 1.0, temperature)
        return Settings(
            greedy,
            temperature,
            column("top_k", -1, torch.long),
            column("top_p", 1.0, torch.float32),
            column("min_p", 0.0, torch.float32),
            max(p.top_log_probs for p in distinct),
            all(p.temperature == 0 for p in distinct),
        )

    @property
    def cuts(self) -> bool:
        """True if some row uses top-k, top-p or min-p."""
        return not (self.top_k is None and self.top_p is None and self.min_p is None)


@dataclass(frozen=True)
class Sampled:
    """A token and its log-prob for every row.

    Optionally also the likeliest tokens and their log-probs `[rows, top_log_probs]`.
    """

    tokens: Tensor
    log_probs: Tensor
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None


def sample(
    logits: Tensor, how: Settings, seeds: Tensor, steps: Tensor | int, adjusted: Tensor | None = None
) -> Sampled:
    """Sample a token for each row of logits `[rows, vocabulary]`.

    With `adjusted` logits, tokens are sampled from those. The log-probs are always those of `logits`.
    """
    logits = logits.float()
    if how.temperature is not None:
        logits = logits / how.temperature
    log_probs = logits.log_softmax(-1)
    drawn = log_probs
    if adjusted is not None:
        adjusted = adjusted.float() if how.temperature is None else adjusted.float() / how.temperature
        drawn = adjusted.log_softmax(-1)
    if how.all_greedy:
        tokens = drawn.argmax(-1)
    else:
        tokens = draw(keep_likeliest(drawn, how) if how.cuts else drawn, seeds, steps)
        if how.greedy is not None:
            tokens = torch.where(how.greedy[:, 0], drawn.argmax(-1), tokens)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    if not how.top_log_probs:
        return Sampled(tokens, chosen)
    top = log_probs.topk(min(how.top_log_probs, log_probs.shape[-1]))
    return Sampled(tokens, chosen, top.indices, top.values)


def draw(log_probs: Tensor, seeds: Tensor, steps: Tensor | int) -> Tensor:
    """Return the tokens whose interval of the cumulative sum contains the row's number. -inf is never sampled."""
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    point = uniform(seeds, steps)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0].clamp_(max=log_probs.shape[-1] - 1)


def keep_likeliest(log_probs: Tensor, how: Settings) -> Tensor:
    """Set to -inf what top-k, then top-p, then min-p exclude. Each filter works on what is left. Ties are kept."""
    vocabulary = log_probs.shape[-1]
    if how.top_k is not None or how.top_p is not None:
        ordered = log_probs.sort(-1, descending=True).values
        if how.top_k is not None:
            k = torch.where(how.top_k > 0, how.top_k, vocabulary).clamp(max=vocabulary)
            border = ordered.gather(-1, k - 1)
            log_probs = log_probs.masked_fill(log_probs < border, -torch.inf)
            ordered = ordered.masked_fill(ordered < border, -torch.inf)
        if how.top_p is not None:
            probs = ordered.softmax(-1)
            before = probs.cumsum(-1) - probs
            # The last kept token is the one that reaches top_p.
            kept = (before < how.top_p).sum(-1, keepdim=True).clamp_(min=1)
            kept = torch.where(how.top_p < 1, kept, vocabulary)
            border = ordered.gather(-1, kept - 1)
            log_probs = log_probs.masked_fill(log_probs < border, -torch.inf)
    if how.min_p is not None:
        border = log_probs.amax(-1, keepdim=True) + how.min_p.log()
        log_probs = log_probs.masked_fill(log_probs < border, -torch.inf)
    return log_probs


def derived_seed(seed: int, index: int) -> int:
    """Return the int64 seed of completion `index` of a request. Completion 0 has the request's own seed."""
    word = (1 << 64) - 1
    x = (seed + index * 0xD1B54A32D192ED03) & word
    if index:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def step_keys(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return an int64 of random bits for each seed and step. `uniform` makes its numbers from the same bits."""
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) + (steps.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1 % 2**64)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2 % 2**64)
        return (x ^ (x >> np.uint64(31))).view(np.int64)


# Adjustment of a row's logits before sampling: repetition penalty, logit bias, and no stop token before min_tokens.
#
# Log-probs are never adjusted: they are those of the model itself.


class Adjuster:
    """The logits processors of all rows. It tracks the tokens of each row for the repetition penalty."""

    def __init__(self, rows: Rows, vocabulary: int, device: torch.device):
        self.rows, self.vocabulary, self.device = rows, vocabulary, device
        self._seen: Tensor | None = None

    def enter(self, sequence: RunningSequence) -> None:
        """Record the tokens of a sequence whose first token is about to be sampled."""
        if sequence.params.repetition_penalty == 1:
            return
        if self._seen is None:
            self._seen = torch.zeros(self.rows.capacity, self.vocabulary, dtype=torch.bool, device=self.device)
        seen = self._seen[sequence.row]
        seen.zero_()
        seen[torch.from_numpy(sequence.tokens_with(self.rows)).to(self.device)] = True

    def note(self, rows: Tensor, tokens: Tensor) -> None:
        """Record one sampled token for each of these rows."""
        if self._seen is not None:
            self._seen[rows, tokens] = True

    def move(self, source: int, target: int) -> None:
        """Copy a row's record when its sequence moves to another row."""
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def adjust(self, logits: Tensor, rows: np.ndarray) -> Tensor | None:
        """Return adjusted logits, or None if no row needs adjustment. Row i of `logits` belongs to row `rows[i]`."""
        made: Tensor | None = None
        for place, row in enumerate(rows.tolist()):
            sequence = self.rows.sequences[row]
            if sequence is None or not sequence.adjusts:
                continue
            made = logits.float().clone() if made is None else made
            self._adjust_row(made[place], sequence, row)
        return made

    def _adjust_row(self, logits: Tensor, sequence: RunningSequence, row: int) -> None:
        params = sequence.params
        if params.repetition_penalty != 1 and self._seen is not None:
            penalty = params.repetition_penalty
            weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self._seen[row], weaker, logits))
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=self.device)
            logits[tokens] += torch.tensor(list(params.logit_bias.values()), device=self.device)
        if self.rows.launched[row] < params.min_tokens and params.stop_token_ids:
            logits[torch.tensor(params.stop_token_ids, device=self.device)] = -torch.inf
