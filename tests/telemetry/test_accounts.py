"""Who waited for whom: checked at every moment by a plain look at all processes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.telemetry.time_ledger import (
    IDLE,
    ClockOffset,
    Page,
    Track,
    account,
    ledger_metrics,
    overlay,
    seconds_by_name,
    union,
)

END = 24
NAMES = st.lists(st.sampled_from([IDLE, "generate", "sync"]), min_size=END, max_size=END)
CONTROLLER = st.lists(st.sampled_from(["other", "reward", "wait_actor", "wait_rollout"]), min_size=END, max_size=END)


def track(who, rank, names):
    """A process that does `names[t]` in second t."""
    made = Track(who, rank)
    made.add(Page(0.0, float(END), [(float(t), name) for t, name in enumerate(names)]), 0.0)
    return made


def whom(t, controller, mine, who, groups):
    """What a rank does in second t, said by looking at everybody."""
    if mine[t] != IDLE:
        return mine[t]
    if any(other[t] != IDLE for other in groups[who]):
        return "wait_peers"
    does = controller[t]
    if does == "reward":
        return "wait_reward"
    return does if does.startswith("wait_") and does != f"wait_{who}" else IDLE


@given(CONTROLLER, NAMES, NAMES, NAMES)
def test_every_second_is_explained_as_a_look_at_all_processes_explains_it(controller, first, second, rollout):
    groups = {"actor": [first, second], "rollout": [rollout]}
    tracks = [track(who, rank, names) for who, ranks in groups.items() for rank, names in enumerate(ranks)]
    begin, end = 3.5, 20.25
    found = account(track("controller", 0, controller), tracks, begin, end)
    for who, ranks in groups.items():
        for rank, mine in enumerate(ranks):
            expected = {}
            for t in range(END):
                seconds = min(t + 1, end) - max(t, begin)
                if seconds > 0:
                    name = whom(t, controller, mine, who, groups)
                    expected[name] = expected.get(name, 0.0) + seconds
            assert seconds_by_name(found[who, rank]) == pytest.approx(expected)
    metrics = ledger_metrics(found, {}, end - begin)
    assert [metrics[f"ledger/{who}/booked"] for who in ("controller", "actor", "rollout")] == pytest.approx([1.0] * 3)


def test_means_are_over_the_ranks_and_a_lost_page_shows():
    whole, half = track("actor", 0, ["sync"] * END), Track("actor", 1)
    half.add(Page(12.0, float(END), [(12.0, "generate")]), 0.0)
    found = account(track("controller", 0, ["other"] * END), [whole, half], 0.0, float(END))
    metrics = ledger_metrics(found, {}, float(END))
    assert metrics["ledger_s/actor/sync"] == END / 2
    assert metrics["ledger_s/actor/generate"] == END / 4
    assert metrics["ledger/actor/booked"] == pytest.approx(0.75)


def test_pages_of_another_clock_fall_into_the_same_second():
    ours = track("controller", 0, ["wait_actor"] * END)
    theirs = Track("actor", 0)
    theirs.add(Page(1000.0, 1000.0 + END, [(1000.0, IDLE), (1005.0, "sync"), (1006.0, IDLE)]), -1000.0)
    found = account(ours, [theirs], 4.0, 7.0)
    assert found["actor", 0] == [(4.0, 5.0, IDLE), (5.0, 6.0, "sync"), (6.0, 7.0, IDLE)]
    theirs.forget(7.0)
    assert theirs.segments == [(6.0, float(END), IDLE)]


@pytest.mark.parametrize("better", [-1000.003, -999.997])
def test_a_clock_that_is_known_better_later_neither_tears_time_apart_nor_counts_it_twice(better):
    theirs = Track("actor", 0)
    theirs.add(Page(1000.0, 1010.0, [(1000.0, "sync")]), -1000.0)
    theirs.add(Page(1010.0, 1020.0, [(1010.0, "sync"), (1010.001, IDLE), (1015.0, "generate")]), better)
    found = theirs.between(5.0, 18.0)
    assert sum(end - start for start, end, _ in found) == pytest.approx(13.0)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))


def test_union_and_overlay():
    assert union([(3, 4, "a"), (0, 1, "b"), (1, 2, "c")]) == [(0, 2, "wait_peers"), (3, 4, "wait_peers")]
    assert overlay((0, 10, "x"), [(2, 4, "a"), (6, 20, "b")]) == [(0, 2, "x"), (2, 4, "a"), (4, 6, "x"), (6, 10, "b")]
    assert overlay((5, 7, "x"), []) == [(5, 7, "x")]


@given(
    st.floats(-1e5, 1e5),
    st.lists(st.tuples(st.floats(1e-5, 0.1), st.floats(0.0, 1.0)), min_size=1, max_size=8),
)
def test_the_true_offset_is_within_the_doubt_of_the_measured_one(offset, exchanges):
    clock, now = ClockOffset(), 0.0
    for takes, share in exchanges:
        asked, answered = now, now + takes
        clock.note(asked, asked + share * takes + offset, answered)
        now = answered + 1.0
        assert abs(clock.seconds - offset) <= clock.uncertainty(now) + 1e-9
    best = min(takes for takes, _ in exchanges)
    assert clock.uncertainty(now) <= best / 2 + 50e-6 * (now + 1)


def test_a_clock_that_drifts_is_measured_again():
    clock = ClockOffset()
    clock.note(0.0, 50.0, 1e-4)
    late = 3600.0
    clock.note(late, late + 50.1, late + 1e-2)  # a worse exchange, but the first is an hour old
    assert clock.seconds == pytest.approx(50.1 - 5e-3)
