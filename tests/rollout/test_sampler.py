"""The sampler: its numbers against SplitMix64 in plain Python, its choices against soft-max."""

import math

import pytest
import torch
from torch import Tensor

from meshrl.rollout.base import TRAINING, VALIDATION, sample_seeds
from meshrl.rollout.embedded.sampler import Settings, keep_likeliest, uniform
from meshrl.rollout.embedded.sampler import sample as sample_rows
from meshrl.rollout.requests import SamplingParams

WORD = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The generator as published, on Python's own integers."""
    z = state & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def params(**changes) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8} | changes))


def seeds(count: int, step: int = 0) -> Tensor:
    return sample_seeds(11, TRAINING, step, count)


def sample(logits: Tensor, how: SamplingParams, own: Tensor, step: Tensor | int) -> tuple[Tensor, Tensor]:
    """All rows with the same parameters."""
    made = sample_rows(logits, Settings.of([how] * len(logits)), own, step)
    return made.tokens, made.log_probs


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """How many standard deviations the statistic is above what chance gives (normal approximation)."""
    expected = probs * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(probs) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_the_generator_is_splitmix64():
    # the first numbers published for the seed 1234567
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317
    numbers = [1234567, 0, 1, 2**62 - 1, -5, *seeds(20).tolist()]
    for step in (0, 1, 17, 8191):
        wanted = [(splitmix64(n + (step + 1) * 0x9E3779B97F4A7C15) >> 11) / 2**53 for n in numbers]
        assert uniform(torch.tensor(numbers), step).tolist() == wanted


def test_a_step_may_be_a_tensor():
    numbers = seeds(5)
    steps = torch.tensor([0, 3, 1, 9, 2])
    wanted = [float(uniform(numbers[i : i + 1], int(steps[i]))) for i in range(5)]
    assert uniform(numbers, steps).tolist() == wanted


@pytest.mark.parametrize("along", ["seeds", "steps", "neighbouring seeds"])
def test_uniform_numbers_are_uniform_and_uncorrelated(along):
    if along == "seeds":
        found = uniform(seeds(40_000), 3)
    elif along == "steps":
        found = uniform(torch.tensor(12345), torch.arange(40_000))
    else:
        found = uniform(torch.arange(40_000), 0)
    assert found.min() >= 0
    assert found.max() < 1
    assert chi_square(torch.histc(found, 200, 0, 1), torch.full((200,), 1 / 200, dtype=torch.float64)) < 5
    centred = found - 0.5
    assert abs(float((centred[1:] * centred[:-1]).mean() * 12)) < 5 / math.sqrt(len(found))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("vocabulary", [2, 13])
def test_tokens_are_drawn_from_the_soft_max(temperature, vocabulary):
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    tokens, log_probs = sample(
        logits.expand(30_000, -1), params(temperature=temperature), seeds(30_000, vocabulary), step=4
    )
    exact = (logits.double() / temperature).softmax(-1)
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    assert chi_square(counts, exact) < 5
    assert chi_square(counts, (logits.double() / (temperature * 1.2)).softmax(-1)) > 5  # the test has teeth
    torch.testing.assert_close(log_probs.double(), exact.log()[tokens], rtol=1e-5, atol=1e-5)


def test_greedy_takes_the_likeliest_and_tells_its_log_prob_at_temperature_one():
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    tokens, log_probs = sample(logits, params(temperature=0.0, top_k=3, top_p=0.5), seeds(50), 0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1))


def support(logits: Tensor, how: SamplingParams) -> set[int]:
    kept = keep_likeliest(logits[None].log_softmax(-1), Settings.of([how]))[0]
    return set(torch.isfinite(kept).nonzero()[:, 0].tolist())


def brute_support(logits: Tensor, top_k: int, top_p: float) -> set[int]:
    """By the definition: the k likeliest; of these, renormalised, the fewest that together reach p."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    if top_k > 0:
        order = order[:top_k]
    probs = logits.double()[order].softmax(-1).tolist()
    total, kept = 0.0, set()
    for token, prob in zip(order, probs, strict=True):
        if total >= top_p:
            break
        kept.add(token)
        total += prob
    return kept


@pytest.mark.parametrize("top_k", [-1, 1, 2, 5, 12, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_top_k_and_top_p_keep_what_the_definition_keeps(top_k, top_p):
    for seed in range(8):
        logits = torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 2
        assert support(logits, params(top_k=top_k, top_p=top_p)) == brute_support(logits, top_k, top_p), seed


def test_cut_distributions_are_drawn_in_proportion_and_reported_uncut():
    logits = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0, 1.0])
    how = params(top_k=4, top_p=0.9, temperature=0.8)
    tokens, log_probs = sample(logits.expand(20_000, -1), how, seeds(20_000), 0)
    kept = sorted(brute_support(logits / 0.8, 4, 0.9))
    assert len(kept) == 3
    assert set(tokens.unique().tolist()) == set(kept)
    counts = torch.bincount(tokens, minlength=6)[kept].double()
    assert chi_square(counts, (logits[kept].double() / 0.8).softmax(-1)) < 5
    torch.testing.assert_close(log_probs, (logits / 0.8).log_softmax(-1)[tokens])


def test_ties_at_the_border_stay():
    assert support(torch.tensor([1.0, 3.0, 1.0, 0.0]), params(top_k=2)) == {0, 1, 2}
    assert support(torch.zeros(4), params(top_p=0.1)) == {0, 1, 2, 3}


def test_one_likely_token_alone_is_kept_whatever_top_p():
    assert support(torch.tensor([0.0, 40.0, 0.0]), params(top_p=1e-9)) == {1}


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    tokens, log_probs = sample(logits.expand(5_000, -1), params(), seeds(5_000), 0)
    assert set(tokens.tolist()) == {1, 3}
    torch.testing.assert_close(log_probs, torch.full((5_000,), -math.log(2)))


def seed_of(number: int) -> int:
    """The seed whose first number is `number` (64 bits): SplitMix64 backwards."""
    z = number ^ (number >> 31) ^ (number >> 62)
    z = (z * pow(0x94D049BB133111EB, -1, 2**64)) & WORD
    z = z ^ (z >> 27) ^ (z >> 54)
    z = (z * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & WORD
    z = z ^ (z >> 30) ^ (z >> 60)
    seed = (z - 0x9E3779B97F4A7C15) & WORD
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize("tail", [0.0, -1.0, 3.0])
def test_the_smallest_and_the_largest_number_pick_possible_tokens(tail):
    extremes = torch.tensor([seed_of(0), seed_of(WORD)])
    assert uniform(extremes, 0).tolist() == [0.0, 1 - 2.0**-53]
    logits = torch.tensor([-torch.inf, -torch.inf, 0.0, 1.0, tail, -torch.inf])
    tokens, _ = sample(logits.expand(2, -1), params(), extremes, 0)
    assert tokens.tolist() == [2, 4]


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(5))
    how, own = params(top_k=10, top_p=0.9), seeds(64)
    tokens, log_probs = sample(logits, how, own, 2)
    picked = torch.tensor([40, 3, 3, 63])
    some, some_log_probs = sample(logits[picked], how, own[picked], 2)
    assert torch.equal(some, tokens[picked])
    assert torch.equal(some_log_probs, log_probs[picked])
    for row in (0, 17):
        alone, _ = sample(logits[row : row + 1], how, own[row : row + 1], 2)
        assert alone.item() == tokens[row]


def test_half_precision_logits_are_drawn_in_float32():
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(5)).bfloat16()
    half, exact = (sample(x, params(), seeds(20), 0) for x in (logits, logits.float()))
    assert torch.equal(half[0], exact[0])
    assert half[1].dtype == torch.float32


def test_seeds_depend_on_run_purpose_and_step_alone():
    assert torch.equal(sample_seeds(1, TRAINING, 5, 8), sample_seeds(1, TRAINING, 5, 8))
    # fewer samples are the first ones of more
    assert torch.equal(sample_seeds(1, TRAINING, 5, 8)[:3], sample_seeds(1, TRAINING, 5, 3))
    kinds = [(1, TRAINING, 5), (2, TRAINING, 5), (1, VALIDATION, 5), (1, TRAINING, 6)]
    all_seeds = torch.cat([sample_seeds(*kind, 50) for kind in kinds])
    assert len(all_seeds.unique()) == 200


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
    ],
)
def test_settings_without_meaning_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        params(**bad)
