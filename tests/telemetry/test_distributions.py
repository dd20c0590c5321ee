"""Histograms of a step against plain counting, and their sums over a run."""

import json
import math
import random
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.telemetry.charts import draw_spread, quantile
from meshrl.telemetry.metrics import BINS, MOST_VALUES, finish_shares, histogram, spread_of


def test_a_few_values_are_counted_one_by_one():
    found = histogram(np.array([0.0, 1.0, 1.0, 0.5, math.nan, -math.inf]))
    assert found == {"values": [0.0, 0.5, 1.0], "counts": [1, 1, 2], "nonfinite": 2}
    assert histogram(np.array([])) == {"values": [], "counts": []}


def test_many_values_go_into_equal_bins():
    rng = random.Random(0)
    values = [rng.gauss(3, 2) for _ in range(1001)]
    found = histogram(np.array(values))
    low, high = min(values), max(values)
    places = Counter(min(int((v - low) / (high - low) * BINS), BINS - 1) for v in values)
    assert (found["low"], found["high"]) == (low, high)
    assert found["counts"] == [places[i] for i in range(BINS)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(allow_nan=True), max_size=60))
def test_every_value_is_counted_and_the_record_is_plain_json(values):
    found = histogram(np.array(values))
    assert sum(found["counts"]) + found.get("nonfinite", 0) == len(values)
    json.dumps(found, allow_nan=False)


def test_spans_too_small_to_divide_are_counted_too():
    assert sum(histogram(np.arange(40) * 5e-324)["counts"]) == 40


def steps(*columns):
    return [{"step": i, "score": histogram(np.array(values))} for i, values in enumerate(columns, start=1)]


def test_single_values_keep_their_names_and_missing_ones_are_zero():
    spread = spread_of("score", "t", "u", [*steps([0, 0, 1], [1, 1], [0.5]), {"step": 9}])
    assert spread.labels == ["0", "0.5", "1"]
    assert spread.shares == [[2 / 3, 0, 1 / 3], [0, 0, 1], [0, 1, 0]]
    assert spread.steps == [1, 2, 3]


def test_bins_of_different_spans_keep_their_weight_and_place():
    rng = random.Random(1)
    columns = [[rng.uniform(0, 10 * k) for _ in range(500)] for k in (1, 3, 7)]
    spread = spread_of("score", "t", "u", steps(*columns), rows=14)
    assert spread.labels == []
    low, high = min(map(min, columns)), max(map(max, columns))
    size = (high - low) / 14
    for values, shares in zip(columns, spread.shares, strict=True):
        assert sum(shares) == pytest.approx(1)
        exact = Counter(min(int((v - low) / size), 13) for v in values)
        # Bins are spread evenly over the rows they lie across: right up to what one bin holds.
        assert max(abs(share - exact[i] / 500) for i, share in enumerate(shares)) < 0.08
    # Where all lie in one row, all of it is there.
    assert spread_of("score", "t", "u", steps([2.0] * 5, range(20))).shares[0].count(1.0) == 1


def test_too_many_steps_share_columns_by_their_counts():
    spread = spread_of("score", "t", "u", steps(*([[0]] * 3), [1] * 3, *([[1]] * 6)), columns=5)
    assert spread.steps == [1.5, 3.5, 5.5, 7.5, 9.5]
    assert spread.shares[1] == [1 / 4, 3 / 4]


def test_nothing_kept_is_no_picture():
    assert spread_of("score", "t", "u", [{"step": 1}, {"step": 2, "score": {"values": [], "counts": []}}]) is None
    assert spread_of("score", "t", "u", [{"step": 1, "score": "nonsense"}]) is None


def test_finish_reasons_as_shares():
    rows = finish_shares([{"step": 1, "finish": {"stop": 3, "length": 1}}, {"step": 2}, {"step": 3, "finish": {}}])
    assert rows == [{"step": 1, "stop": 0.75, "length": 0.25}]


def test_quantiles_against_sorted_values():
    values = np.random.default_rng(0).normal(size=4000)
    spread = spread_of("score", "t", "u", steps(values))
    size = (spread.high - spread.low) / BINS
    for share in (0.1, 0.5, 0.9):
        assert quantile(spread, 0, share) == pytest.approx(np.quantile(values, share), abs=size / 2)
    assert abs(quantile(spread, 0, 0.5) - np.quantile(values, 0.9)) > size


@pytest.mark.parametrize("columns", [[[1.0]], [[0, 1], [1]], [[-1e9, 1e9]], [list(range(MOST_VALUES + 5))] * 130])
def test_pictures_are_well_formed_and_have_a_cell_for_every_share(columns):
    spread = spread_of("score", "a & b", "<u>", steps(*columns))
    root = ElementTree.fromstring(draw_spread(spread))
    cells = sum(path.get("d").count("M") for path in root.iter("path"))
    assert cells == sum(share > 0 for shares in spread.shares for share in shares)
    assert len([e for e in root.iter("g") if e.get("class") == "hit"]) == len(spread.steps)
