"""Where time, memory and tokens go: the ledger's books against sums by hand."""

import itertools
from pathlib import Path

import pytest

from meshrl.telemetry import panels, report
from meshrl.telemetry.charts import PNG_COLORS
from meshrl.telemetry.panels import accounts, color_of, time_panels


def records(**names):
    return [{"step": s, **{name: value * s for name, value in names.items()}} for s in range(1, 6)]


LEDGER = {
    "ledger_s/actor_rollout_ref/update_backward": 2.0,
    "ledger_s/actor_rollout_ref/generate": 5.0,
    "ledger_s/actor_rollout_ref/wait_controller": 1.0,
    "ledger_s/actor_rollout_ref/other": 0.5,
    "ledger_s/controller/reward": 0.25,
    "timing_s/gen": 7.0,
}


def test_the_ledger_comes_before_the_phases():
    actor, controller = accounts(records(**LEDGER))
    assert (actor.who, controller.who) == ("actor_rollout_ref", "controller")
    # Mean of the steps 1..5 is three times the first.
    assert actor.seconds == pytest.approx(8.5 * 3)
    assert [entry.what for entry in actor.entries] == ["generate", "update_backward", "wait_controller", "other"]
    assert actor.entries[0].share == pytest.approx(5 / 8.5)
    assert sum(entry.share for entry in actor.entries) == pytest.approx(1)
    (phases,) = accounts(records(**{"timing_s/gen": 7.0, "timing_s/step": 9.0}))
    assert [(entry.what, entry.seconds) for entry in phases.entries] == [("gen", 21.0)]


def test_steps_without_the_ledger_do_not_thin_it():
    some = [*records(**LEDGER), {"step": 6, "val": 1.0}]
    assert accounts(some)[0].seconds == pytest.approx(8.5 * 3)


def test_booked_is_the_mean_of_the_steps():
    found = records(**LEDGER)
    for i, record in enumerate(found):
        record["ledger/controller/booked"] = 0.98 + i * 0.01
    assert accounts(found)[1].booked == pytest.approx(1.0)
    assert accounts(found)[0].booked is None


def test_every_second_is_drawn_and_the_order_is_that_of_a_step():
    phases = ["sync", "gen", "zeta", "reward", "ref", "a1", "a2", "a3", "a4", "update_actor", "other"]
    rows = [{"step": s, **{f"timing_s/{p}": i + s for i, p in enumerate(phases)}} for s in range(1, 6)]
    rows[2].pop("timing_s/sync")
    (panel,) = time_panels(rows)
    assert len(panel.series) == 8
    assert panel.series[-1].label == "other"
    drawn = [sum(curve.values[i] for curve in panel.series) for i in range(5)]
    assert drawn == [sum(v for k, v in record.items() if k != "step") for record in rows]
    known = [curve.label for curve in panel.series if curve.label in ("gen", "reward", "update_actor")]
    assert known == sorted(known, key=["gen", "reward", "update_actor"].index)


def test_utilisation_and_memory_have_a_curve_for_each_phase():
    rows = records(
        **{
            "mfu/gen": 0.1,
            "mfu/update_actor": 0.3,
            "memory/update_actor/max_allocated_gib": 7.0,
            "memory/update_actor/before_gib": 1.0,
            "memory/gen/max_allocated_gib": 3.0,
            "memory/switch_sync/max_allocated_gib": 5.0,
            "memory/switch_load/max_allocated_gib": 4.0,
        }
    )
    mfu, memory = time_panels(rows)
    assert [curve.label for curve in mfu.series] == ["gen", "update_actor"]
    assert {curve.label: curve.values[0] for curve in memory.series} == {"update_actor": 7.0, "gen": 3.0, "switch": 5.0}


def test_without_a_known_peak_there_are_plain_flops_and_on_a_cpu_the_memory_of_the_host():
    rows = records(**{"perf/tflops/gen": 4.0, "memory/update_actor/max_rss_gib": 2.0})
    assert [panel.title for panel in time_panels(rows)] == ["Model FLOPs", "Peak memory of the host"]
    known = records(**{"perf/tflops/gen": 4.0, "mfu/gen": 0.3})
    assert [panel.title for panel in time_panels(known)] == ["Model-FLOPs utilisation"]


def test_balance_is_the_fullest_rank_above_the_mean():
    names = {"global_seqlen/max": 150.0, "global_seqlen/balanced_max": 101.0, "global_seqlen/mean": 100.0}
    (panel,) = time_panels(records(**names))
    assert [curve.values[2] for curve in panel.series] == [pytest.approx(50.0), pytest.approx(1.0)]
    # One rank has nothing to balance.
    assert time_panels(records(**dict.fromkeys(names, 100.0))) == []


def test_each_wait_has_a_colour_of_its_own_that_can_be_told_from_the_others():
    waits = ["wait_controller", "wait_peers", "wait_reward", "wait_rollout", "wait_actor_rollout_ref", "wait_critic"]
    shades = [[int(PNG_COLORS[color_of(name)][at : at + 2], 16) for at in (1, 3, 5)] for name in [*waits, "other"]]
    for first, second in itertools.combinations(shades, 2):
        assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 40
    assert color_of("generate") not in map(color_of, waits)
    assert color_of("something new") == color_of("something new")


def test_page_and_picture_have_the_same_colours():
    css = (Path(report.__file__).parent / "report.css").read_text()
    assert len(PNG_COLORS) == panels.COLORS
    for number, color in enumerate(PNG_COLORS):
        assert f"--c{number}: light-dark({color}, " in css
        assert f".c{number} {{ color: var(--c{number}); }}" in css
