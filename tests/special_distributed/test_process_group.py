"""The harness itself: results in order, failures with their tracebacks, deadlines, and a fresh start after both."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from process_group import RankFailedError, RankTimeoutError, subgroups


def weighted_sum(weight: float, *, offset: float = 0.0) -> tuple[int, float, int]:
    value = torch.tensor(weight * dist.get_rank() + offset)
    dist.all_reduce(value)
    return dist.get_rank(), float(value), os.getpid()


def members_of_axes(*sizes: int) -> list[list[int]]:
    assert subgroups(*sizes) is subgroups(*sizes)
    return [dist.get_process_group_ranks(group) for group in subgroups(*sizes)]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def dawdle_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_rank_answers_in_order_from_a_warm_process(ranks, world_size):
    first = ranks(world_size).run(weighted_sum, 2.0, offset=1.0)
    second = ranks(world_size).run(weighted_sum, 2.0, offset=1.0)
    total = world_size * (world_size - 1) + world_size
    assert [(rank, value) for rank, value, _ in first] == [(rank, total) for rank in range(world_size)]
    assert first == second
    assert len({pid for _, _, pid in first} | {os.getpid()}) == world_size + 1


def test_subgroups_are_the_lines_of_a_row_major_grid(ranks):
    assert ranks(4).run(members_of_axes, 2, 2) == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


def test_a_failure_shows_its_traceback_and_the_group_recovers(ranks):
    with pytest.raises(RankFailedError, match=r"(?s)fail_on failed on ranks \[1.*Traceback.*ValueError: no luck on 1"):
        ranks(2).run(fail_on, 1)
    assert [rank for rank, _, _ in ranks(2).run(weighted_sum, 1.0)] == [0, 1]


def test_a_dead_process_is_named(ranks):
    with pytest.raises(RankFailedError, match=r"(?s)rank 0 of 2\nthe process ended with exit code 3"):
        ranks(2).run(die_on, 0)


def test_a_deadline_names_who_is_late_and_where(ranks):
    with pytest.raises(RankTimeoutError, match=r"(?s)no answer from ranks \[1\] within 0.5 s.*in dawdle_on"):
        ranks(2).run(dawdle_on, 1, timeout=0.5)
    assert [rank for rank, _, _ in ranks(2).run(weighted_sum, 1.0)] == [0, 1]
