"""The virtual clock against closed forms and a longest path computed another way."""

import random
from functools import cache

import pytest

from meshrl.parallel.pipeline import bubble, ideal_bubble, replay
from meshrl.telemetry.pipeline_timeline import Span


def span(kind, chunk, micro_batch, work):
    return Span(kind, chunk, micro_batch, 0.0, 0.0, work)


def one_forward_one_backward(pp, count, work):
    """Each stage runs ahead by its distance from the end, then alternates."""
    stages = []
    for stage in range(pp):
        ahead = min(pp - 1 - stage, count)
        order = [("forward", n) for n in range(ahead)]
        for n in range(count - ahead):
            order += [("forward", ahead + n), ("backward", n)]
        order += [("backward", n) for n in range(count - ahead, count)]
        stages.append([span(kind, 0, n, work(stage, 0, n, kind)) for kind, n in order])
    return stages


def interleaved(pp, vpp, count, work):
    """Groups of `pp` micro-batches pass one chunk after the other; a stage runs ahead by chunks and its distance."""
    table = [(n, chunk) for low in range(0, count, pp) for chunk in range(vpp) for n in range(low, low + pp)]
    back = [(n, vpp - 1 - chunk) for n, chunk in table]
    stages = []
    for stage in range(pp):
        ahead = min((pp - stage - 1) * 2 + (vpp - 1) * pp, len(table))
        order = [("forward", *pair) for pair in table[:ahead]]
        for number in range(len(table) - ahead):
            order += [("forward", *table[ahead + number]), ("backward", *back[number])]
        order += [("backward", *pair) for pair in back[len(table) - ahead :]]
        stages.append([span(kind, chunk, n, work(stage, chunk, n, kind)) for kind, n, chunk in order])
    return stages


def unit(stage, chunk, micro_batch, kind):
    return 1.0 if kind == "forward" else 2.0


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 8, 16])
def test_equal_micro_batches_give_the_known_bubble(pp, count):
    found = bubble(replay(one_forward_one_backward(pp, count, unit)))
    assert found == pytest.approx((pp - 1) / (count + pp - 1))
    assert found == pytest.approx(ideal_bubble(pp, 1, count))


@pytest.mark.parametrize(("pp", "vpp", "groups"), [(2, 2, 2), (2, 3, 4), (4, 2, 1), (4, 2, 4), (8, 4, 2)])
def test_chunks_shrink_the_bubble_as_known(pp, vpp, groups):
    stages = interleaved(pp, vpp, pp * groups, unit)
    assert bubble(replay(stages)) == pytest.approx(ideal_bubble(pp, vpp, pp * groups))
    assert ideal_bubble(pp, vpp, pp * groups) < ideal_bubble(pp, 1, pp * groups)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2)])
def test_unequal_work_takes_the_longest_path(pp, vpp):
    draw = random.Random(pp * 10 + vpp)
    costs = {}

    def work(stage, chunk, micro_batch, kind):
        return costs.setdefault((stage, chunk, micro_batch, kind), draw.lognormvariate(0.0, 1.0))

    count = pp * 3
    stages = interleaved(pp, vpp, count, work) if vpp > 1 else one_forward_one_backward(pp, count, work)
    keys = [[(stage, s.chunk, s.micro_batch, s.kind) for s in spans] for stage, spans in enumerate(stages)]
    before = {key: order[place - 1] for order in keys for place, key in enumerate(order) if place}

    def needs(stage, chunk, n, kind):
        place = chunk * pp + stage
        if kind == "forward":
            return (place - 1, n, kind) if place else None
        return (place, n, "forward") if place == pp * vpp - 1 else (place + 1, n, kind)

    @cache
    def ends(key):
        found = 0.0 if key not in before else ends(before[key])
        needed = needs(*key)
        if needed is not None:
            place, n, kind = needed
            found = max(found, ends((place % pp, place // pp, n, kind)))
        return found + costs[key]

    replayed = replay(stages)
    for stage, spans in enumerate(replayed):
        for s in spans:
            assert s.end == pytest.approx(ends((stage, s.chunk, s.micro_batch, s.kind)))
            assert s.end - s.start == pytest.approx(costs[stage, s.chunk, s.micro_batch, s.kind])
    whole = max(ends(key) for order in keys for key in order)
    first = min(s.start for spans in replayed for s in spans)
    assert bubble(replayed) == pytest.approx(1 - sum(costs.values()) / pp / (whole - first))


def test_work_can_be_given_and_waits_do_not_count():
    stages = one_forward_one_backward(2, 4, lambda *key: 0.0)
    stages[1].insert(0, span("wait", -1, -1, 100.0))
    replayed = replay(stages, work=lambda stage, s: 1.0 + stage if s.kind == "forward" else 2.0)
    assert [s.kind for s in replayed[1]].count("wait") == 0
    # Stage 1 starts after one forward of stage 0 and never waits again; stage 0 has the last backward.
    assert max(s.end for spans in replayed for s in spans) == 1.0 + 4 * (2.0 + 2.0) + 2.0


def test_an_order_that_cannot_run_is_refused():
    stages = [[span("backward", 0, 0, 1.0), span("forward", 0, 0, 1.0)]]
    with pytest.raises(ValueError, match="every stage waits for another"):
        replay(stages)
