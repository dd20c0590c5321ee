import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.telemetry.metrics import (
    compute_data_metrics,
    compute_throughput_metrics,
    pass_at_k,
    reduce_metrics,
    validation_metrics,
)


def data_metrics(**changes):
    generator = torch.Generator().manual_seed(3)
    batch, tokens = 5, 7
    lengths = torch.tensor([7, 1, 4, 0, 3])
    given_ = {
        "token_level_scores": torch.randn(batch, tokens, generator=generator),
        "token_level_rewards": torch.randn(batch, tokens, generator=generator),
        "advantages": torch.randn(batch, tokens, generator=generator),
        "returns": torch.randn(batch, tokens, generator=generator),
        "response_mask": (torch.arange(tokens) < lengths[:, None]).long(),
        "prompt_lengths": torch.tensor([3, 9, 9, 2, 5]),
        "response_lengths": lengths,
        "max_response_length": 7,
        "max_prompt_length": 9,
    } | changes
    return given_, compute_data_metrics(**given_)


def test_data_metrics_equal_a_plain_loop():
    batch, metrics = data_metrics()
    scores = [sum(row) for row in batch["token_level_scores"].tolist()]
    assert metrics["critic/score/mean"] == pytest.approx(sum(scores) / 5, rel=1e-5)
    assert metrics["critic/score/max"] == pytest.approx(max(scores), rel=1e-5)
    assert metrics["critic/score/min"] == pytest.approx(min(scores), rel=1e-5)
    for name, field in (("advantages", "advantages"), ("returns", "returns")):
        kept = [
            value
            for row, mask in zip(batch[field].tolist(), batch["response_mask"].tolist(), strict=True)
            for value, used in zip(row, mask, strict=True)
            if used
        ]
        assert len(kept) == 15
        assert metrics[f"critic/{name}/mean"] == pytest.approx(sum(kept) / 15, rel=1e-5)
        assert metrics[f"critic/{name}/max"] == pytest.approx(max(kept))
        assert metrics[f"critic/{name}/min"] == pytest.approx(min(kept))
    assert metrics["response_length/mean"] == pytest.approx(3.0)
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (7, 0)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 5)
    assert metrics["prompt_length/clip_ratio"] == pytest.approx(2 / 5)
    assert metrics["prompt_length/mean"] == pytest.approx(28 / 5)


def test_masked_tokens_do_not_count():
    _, plain = data_metrics()
    batch, _ = data_metrics()
    hidden = batch["response_mask"] == 0
    _, poisoned = data_metrics(advantages=batch["advantages"].masked_fill(hidden, 1e9))
    assert poisoned == plain
    _, shown = data_metrics(
        advantages=batch["advantages"].masked_fill(hidden, 1e9), response_mask=torch.ones_like(batch["response_mask"])
    )
    assert shown["critic/advantages/max"] == 1e9


def test_a_batch_of_empty_responses_has_no_advantage_metrics():
    _, metrics = data_metrics(response_mask=torch.zeros(5, 7), response_lengths=torch.zeros(5, dtype=torch.long))
    assert not [name for name in metrics if "advantages" in name or "returns" in name]
    assert metrics["response_length/max"] == 0
    with pytest.raises(ValueError, match="0 samples"):
        data_metrics(token_level_scores=torch.zeros(0, 7))


def test_reduce_metrics_goes_by_whole_words_of_the_last_part():
    reduced = reduce_metrics(
        {
            "actor/pg_loss": [1.0, [2.0, 6.0]],
            "response_length/max": [3, 9.0, 4],
            "perf/max_memory": [torch.tensor(2.0), 1.0],
            "critic/score/min": [np.float32(3), -1],
            "training/skipped_sum": [1, 2, 4],
            "timing_s/gen": [1.0, 3.0],
            "max_things/mean": [1.0, 3.0],
            "actor/lr": 0.5,
            "actor/entropy": torch.tensor([1.0, 2.0, 6.0]),
            "actor/none": [],
        }
    )
    assert reduced == {
        "actor/pg_loss": 3.0,
        "response_length/max": 9.0,
        "perf/max_memory": 2.0,
        "critic/score/min": -1.0,
        "training/skipped_sum": 7.0,
        "timing_s/gen": 2.0,
        "max_things/mean": 2.0,
        "actor/lr": 0.5,
        "actor/entropy": 3.0,
    }
    assert math.isnan(reduce_metrics({"actor/pg_loss": [1.0, math.nan]})["actor/pg_loss"])
    with pytest.raises(ValueError):
        reduce_metrics({"actor/name": "text"})


def test_throughput_is_per_second_and_device():
    metrics = compute_throughput_metrics(num_tokens=12_000, seconds=4.0, n_gpus=3)
    assert metrics == {"perf/total_num_tokens": 12_000, "perf/time_per_step": 4.0, "perf/throughput": 1_000}
    with pytest.raises(ValueError, match="n_gpus"):
        compute_throughput_metrics(1, 1.0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_the_subsets_with_a_right_sample(case):
    n, right, k = case
    samples = [True] * right + [False] * (n - right)
    subsets = list(itertools.combinations(samples, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(np.array([n]), np.array([right]), k)[0] == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_large_groups_equals_the_closed_form():
    n, right = np.array([512, 512, 512, 512]), np.array([0, 1, 7, 500])
    expected = [1 - math.comb(512 - c, 256) / math.comb(512, 256) for c in right.tolist()]
    np.testing.assert_allclose(pass_at_k(n, right, 256), expected, rtol=1e-12)


def test_validation_of_unequal_groups_equals_a_plain_loop():
    rng = random.Random(0)
    rows = []
    for source, sizes in (("openai/gsm8k", [4, 4, 4, 1, 3, 4]), ("sort", [1, 1, 1]), ("mixed", [5, 2])):
        # The same ids in all sources: groups must not run together.
        rows += [(source, f"id{g}", float(rng.random() < 0.5)) for g, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(rows)
    metrics = validation_metrics(*zip(*rows, strict=True))

    expected = {}
    for source in {row[0] for row in rows}:
        groups: dict[str, list[float]] = {}
        for s, g, score in rows:
            if s == source:
                groups.setdefault(g, []).append(score)
        n = max(map(len, groups.values()))
        means = [sum(scores) / len(scores) for scores in groups.values()]
        expected[f"val-core/{source}/acc/mean@{n}"] = sum(means) / len(means)
        for k in (1, 2, 4, 8):
            large = [scores for scores in groups.values() if len(scores) >= k]
            if k <= n:
                values = [1 - math.comb(scores.count(0.0), k) / math.comb(len(scores), k) for scores in large]
                expected[f"val-core/{source}/acc/pass@{k}"] = sum(values) / len(values)
        short = sum(len(scores) < n for scores in groups.values())
        if short:
            expected[f"val-core/{source}/acc/short_groups"] = short
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert "val-core/openai/gsm8k/acc/pass@4" in metrics
    assert "val-core/openai/gsm8k/acc/pass@8" not in metrics
    assert "val-core/sort/acc/short_groups" not in metrics


def test_validation_takes_tensors_other_prefixes_and_signed_scores():
    metrics = validation_metrics(["a"] * 4, [0, 0, 1, 1], torch.tensor([1.0, -1.0, -1.0, -1.0]), prefix="val-aux")
    assert metrics == {
        "val-aux/a/acc/mean@2": -0.5,
        "val-aux/a/acc/pass@1": 0.25,
        "val-aux/a/acc/pass@2": 0.5,
    }
    assert validation_metrics([], [], []) == {}
    with pytest.raises(ValueError, match="2, 2 and 3"):
        validation_metrics(["a", "a"], [0, 1], [1.0, 0.0, 1.0])
