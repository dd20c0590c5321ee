"""The order of rows: every row once an epoch, repeatable, resumable at any batch."""

import itertools

import numpy as np
import pytest

from meshrl.data.sampling import BatchOrder, chosen_rows


def take(order: BatchOrder, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(iter(order), count)]


@pytest.mark.parametrize(("rows", "size"), [(10, 3), (9, 3), (5, 5), (7, 1)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_row_at_most_once_and_no_small_batch(rows, size, shuffle):
    order = BatchOrder(rows, size, shuffle, seed=3)
    for _ in range(3):
        epoch = take(order, order.batches_per_epoch)
        seen = list(itertools.chain(*epoch))
        assert all(len(batch) == size for batch in epoch)
        assert len(set(seen)) == len(seen) == rows - rows % size
        assert set(seen) <= set(range(rows))


def test_without_shuffling_rows_come_in_order_every_epoch():
    assert take(BatchOrder(5, 2, False, seed=0), 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = take(BatchOrder(50, 50, True, seed=1), 2)
    (other,) = take(BatchOrder(50, 50, True, seed=2), 1)
    assert first != second
    assert first != other
    assert sorted(first) == sorted(second) == list(range(50))
    assert take(BatchOrder(50, 50, True, seed=1), 2) == [first, second]


def test_rows_left_out_of_one_epoch_come_in_another():
    seen = set(itertools.chain(*take(BatchOrder(10, 4, True, seed=0), 20)))
    assert seen == set(range(10))


@pytest.mark.parametrize("done", range(8))
def test_it_resumes_where_it_stood(done):
    """Also right after the last batch of an epoch (3 batches each)."""
    whole = take(BatchOrder(11, 3, True, seed=5), 10)
    order = BatchOrder(11, 3, True, seed=5)
    take(order, done)
    resumed = BatchOrder(11, 3, True, seed=5, epoch=order.epoch, position=order.position)
    assert take(resumed, 10 - done) == whole[done:]
    # an iterator made anew on the same object goes on as well
    assert take(order, 10 - done) == whole[done:]


def test_a_batch_is_counted_before_it_is_used():
    order = BatchOrder(4, 2, False, seed=0)
    batches = iter(order)
    assert next(batches).tolist() == [0, 1]
    assert (order.epoch, order.position) == (0, 2)
    next(batches)
    assert (order.epoch, order.position) == (0, 4)
    next(batches)
    assert (order.epoch, order.position) == (1, 2)


def test_the_global_generator_plays_no_part():
    np.random.seed(0)
    first = take(BatchOrder(20, 5, True, seed=1), 3)
    np.random.seed(1)
    assert take(BatchOrder(20, 5, True, seed=1), 3) == first


def test_less_data_than_a_batch_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"3 rows, fewer than one batch of 4: add data or lower data.train_batch_size"):
        BatchOrder(3, 4, True, seed=0)


def test_so_many_rows_are_the_first_or_drawn_by_the_seed():
    assert chosen_rows(10, -1, True, 0).tolist() == chosen_rows(10, 10, True, 0).tolist() == list(range(10))
    assert chosen_rows(10, 4, False, 0).tolist() == [0, 1, 2, 3]
    drawn = chosen_rows(1000, 40, True, 3)
    assert (np.diff(drawn) > 0).all()  # in the files' order, none twice
    assert len(drawn) == 40
    assert drawn[-1] < 1000
    assert drawn.tolist() == chosen_rows(1000, 40, True, 3).tolist()
    assert drawn.tolist() != chosen_rows(1000, 40, True, 4).tolist()
