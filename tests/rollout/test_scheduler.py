"""The scheduler alone: who gets rows, blocks and tokens of the budget, in which order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.rollout.embedded import scheduler as module
from meshrl.rollout.embedded.scheduler import BlockManager, Piece, Rows, RunningSequence, Scheduler
from meshrl.rollout.requests import SamplingParams


def made(rows: int = 4, blocks: int = 20, budget: int = 100, size: int = 4) -> Scheduler:
    return Scheduler(Rows(rows), BlockManager(blocks, size), budget)


def sequence(name: str, length: int, limit: int = 50, first: int = 0) -> RunningSequence:
    return RunningSequence(name, 0, np.arange(first, first + length), SamplingParams(limit), 0, limit)


def step(scheduler: Scheduler) -> list[Piece]:
    """One engine step without a model: all prefill pieces are computed, every alive row samples a token."""
    done = []
    for group in scheduler.schedule():
        done += group
        for piece in group:
            if piece.is_last:
                takers = (piece.sequence, *piece.sequence.followers)
                piece.sequence.followers = []
                for taker in takers:
                    scheduler.start(taker)
                scheduler.register(piece.sequence, piece.end, piece.sequence.tokens)
                sample(scheduler, takers)
    rows = scheduler.rows
    alive = [s for s in rows.held() if rows.alive[s.row]]
    for held in alive:
        assert rows.length[held.row] < len(held.blocks) * scheduler.blocks.block_size  # the next token has a place
        rows.length[held.row] += 1
    sample(scheduler, alive)
    return done


def sample(scheduler: Scheduler, sequences) -> None:
    rows = scheduler.rows
    for each in sequences:
        index = np.array([each.row])
        rows.launched[index] += 1
        if rows.write(index, np.array([7]), np.array([0.0]))[0]:
            scheduler.remove(each)


def names(pieces: list[Piece]) -> list[tuple[str, int, int]]:
    return [(p.sequence.request_id, p.start, p.end) for p in pieces]


def test_requests_enter_in_order_as_rows_allow():
    scheduler = made(rows=2)
    scheduler.waiting.extend(sequence(name, 3, limit=2, first=i * 10) for i, name in enumerate("abc"))
    assert names(step(scheduler)) == [("a", 0, 3), ("b", 0, 3)]
    assert scheduler.rows.num_held == 0  # both had their two tokens
    assert names(step(scheduler)) == [("c", 0, 3)]


def test_long_prompts_are_cut_by_the_budget_and_go_on_before_new_ones():
    scheduler = made(budget=5)
    scheduler.waiting.extend([sequence("a", 12), sequence("b", 3, first=50)])
    assert names(step(scheduler)) == [("a", 0, 5)]
    assert names(step(scheduler)) == [("a", 5, 10)]
    assert names(step(scheduler)) == [("a", 10, 12), ("b", 0, 3)]


def test_decoding_rows_count_against_the_budget_but_never_stop_a_prompt():
    scheduler = made(rows=4, budget=2)
    scheduler.waiting.extend(sequence(name, 1, first=i) for i, name in enumerate("ab"))
    step(scheduler)
    scheduler.waiting.append(sequence("c", 3, first=40))
    assert names(step(scheduler)) == [("c", 0, 1)]
    assert names(step(scheduler)) == [("c", 1, 2)]


def test_groups_are_launched_before_all_have_been_admitted(monkeypatch):
    monkeypatch.setattr(module, "LAUNCH_TOKENS", 6)
    scheduler = made(rows=8)
    scheduler.waiting.extend(sequence(name, 3, first=i * 10) for i, name in enumerate("abcde"))
    sizes = []
    for group in scheduler.schedule():
        sizes.append((len(group), len(scheduler.waiting)))
    assert sizes == [(2, 3), (2, 1), (1, 0)]


def test_samples_share_the_full_blocks_of_their_prompt():
    scheduler = made(size=4)
    prompt = np.arange(10)
    scheduler.waiting.extend(RunningSequence("a", i, prompt, SamplingParams(9), i, 9) for i in range(3))
    (group,) = scheduler.schedule()
    leader = group[0].sequence
    assert len(group) == 1
    assert [f.blocks[:2] for f in leader.followers] == [leader.blocks[:2]] * 2
    assert len({f.blocks[2] for f in (leader, *leader.followers)}) == 3
    assert scheduler.blocks.num_free == 20 - 5


def test_without_blocks_the_last_to_come_gives_way_and_loses_nothing():
    scheduler = made(blocks=6)
    scheduler.waiting.extend(sequence(name, 6, limit=10, first=i * 20) for i, name in enumerate("ab"))
    seen = []
    for _ in range(40):
        seen += names(step(scheduler))
        if not scheduler.has_work():
            break
    assert scheduler.preemptions == 1
    first, second, again = seen
    assert (first, second) == (("a", 0, 6), ("b", 0, 6))
    assert again[0] == "b"
    assert again[2] > 6  # its own tokens are computed again
    assert scheduler.blocks.num_free == 6


def test_restarting_puts_everyone_back_in_order():
    scheduler = made(rows=3, budget=7)
    scheduler.waiting.extend(sequence(name, 5, first=i * 10) for i, name in enumerate("abcd"))
    step(scheduler)
    step(scheduler)
    scheduler.restart()
    assert [s.request_id for s in scheduler.waiting] == list("abcd")
    assert scheduler.blocks.num_free == 20
    assert scheduler.rows.num_held == 0
    assert scheduler.prefilling == []
    assert [len(s.output) for s in scheduler.waiting] == [3, 2, 0, 0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 30),
    st.integers(0, 8),
)
def test_everyone_finishes_and_every_block_comes_back(sizes, rows, budget, spare):
    longest = max(length + limit for length, limit, _ in sizes)
    scheduler = made(rows=rows, blocks=-(-longest // 4) + spare, budget=budget)
    everyone = []
    for number, (length, limit, n) in enumerate(sizes):
        prompt = np.arange(length) % 3
        everyone += [RunningSequence(f"r{number}", i, prompt, SamplingParams(limit), 0, limit) for i in range(n)]
    scheduler.waiting.extend(everyone)
    for _ in range(4000):
        spent = sum(len(piece.tokens) for piece in step(scheduler))
        assert spent <= budget
        if not scheduler.has_work():
            break
    assert all(len(s.output) == s.limit for s in everyone)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


@pytest.mark.parametrize("taken", [["a"], ["b"], ["a", "b", "c"], ["nobody"]])
def test_taking_requests_out_frees_what_they_hold(taken):
    scheduler = made(rows=2, budget=6)
    scheduler.waiting.extend(sequence(name, 8, first=i * 10) for i, name in enumerate("abc"))
    step(scheduler)
    found = scheduler.take(taken)
    assert sorted(s.request_id for s in found) == sorted(set(taken) & set("abc"))
    for _ in range(200):
        step(scheduler)
    assert scheduler.blocks.num_free == 20
