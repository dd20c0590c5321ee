"""Mixing by weights: exact shares at every moment, each source's rows once before any again, resumable anywhere."""

import itertools

import numpy as np
import pytest

from meshrl.data.sampling import MixedOrder, Shares

SOURCE_OF_ROW = np.array([0] * 7 + [1] * 20 + [2] * 3)


def order(weights=(0.5, 0.3, 0.2), size=6, shuffle=True, seed=3):
    return MixedOrder(SOURCE_OF_ROW, weights, size, shuffle, seed)


def take(batches, count):
    return [batch.tolist() for batch in itertools.islice(iter(batches), count)]


@pytest.mark.parametrize("weights", [(1, 1, 1), (0.5, 0.3, 0.2), (8, 1, 1), (0, 1, 2), (0.97, 0.02, 0.01)])
def test_after_any_number_of_draws_every_source_has_its_share(weights):
    shares, counts = Shares(weights), np.zeros(3)
    wanted = np.array(weights) / sum(weights)
    for drawn in range(1, 400):
        counts[shares.next()] += 1
        assert np.abs(counts - wanted * drawn).max() < 1.5
    assert counts.sum() == 399


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_gives_every_row_before_any_again(shuffle):
    rows = list(itertools.chain(*take(order(shuffle=shuffle), 40)))
    for source, size in ((0, 7), (1, 20), (2, 3)):
        # Batches are shuffled as a whole, so a source's rows are told apart by batch, not by place.
        own = [row for row in rows if SOURCE_OF_ROW[row] == source]
        counts = np.bincount(own, minlength=30)[source == SOURCE_OF_ROW]
        assert counts.max() - counts.min() <= 1
        assert counts.sum() == len(own) > size


def test_small_sources_come_again_and_epochs_count_the_whole():
    mixed = order((0, 0, 1))
    batches = iter(mixed)
    assert sorted(next(batches).tolist()) == [27, 27, 28, 28, 29, 29]
    for _ in range(4):
        next(batches)
    assert (mixed.epoch, mixed.position) == (0, 30)
    next(batches)
    assert (mixed.epoch, mixed.position) == (1, 6)


def test_it_goes_on_from_any_batch():
    whole = take(order(), 14)
    for done in range(14):
        first = order()
        take(first, done)
        later = order()
        later.load_state_dict(first.state_dict())
        assert take(later, 14 - done) == whole[done:]
    assert take(order(seed=4), 14) != whole
    assert take(order(shuffle=False), 14) != whole


def test_epochs_end_after_a_change_of_the_batch_size():
    mixed = order(size=4)
    mixed.load_state_dict({"epoch": 0, "position": 27})  # no multiple of 4
    assert len(take(mixed, 2)) == 2
    assert (mixed.epoch, mixed.position) == (1, 4)


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(ValueError, match="not all 0"):
        Shares((0, 0))
    with pytest.raises(ValueError, match="file 4 of 4 has no row left"):
        MixedOrder(SOURCE_OF_ROW, (1, 1, 1, 1), 6, True, 0)
    with pytest.raises(ValueError, match="fewer than one batch of 31"):
        order(size=31)
