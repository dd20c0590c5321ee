"""Several runs on one page."""

from pathlib import Path

import pytest
from test_report import HOSTILE, Page, write_run

from meshrl.telemetry.report import config_differences, overlaid, run_names, side_by_side, write_comparison
from meshrl.telemetry.run_folder import RunFolder


def test_runs_are_named_by_what_sets_their_paths_apart():
    def names(*paths):
        return run_names([Path(path) for path in paths])

    assert names("/a/one", "/a/two") == ["one", "two"]
    assert names("/a/one/grpo", "/a/two/grpo") == ["one", "two"]
    assert names("/a/one/grpo", "/b/one/ppo") == ["grpo", "ppo"]
    assert names("/x/s1/grpo", "/y/s1/grpo") == ["x", "y"]
    assert names("/a/r", "/a/r") == ["a/r (1)", "a/r (2)"]


def test_each_metric_has_a_curve_of_each_run_that_has_it():
    one = [{"step": s, "critic/score/mean": 0.1 * s, "actor/ppo_kl": 1e-3, "actor/kl_loss": 0.5} for s in range(1, 5)]
    two = [{"step": s, "critic/score/mean": 0.2 * s, "actor/ppo_kl": 2e-3} for s in range(1, 9)]
    panels = {panel.note: panel for panel in overlaid([one, two], ["one", "two"])}
    assert set(panels) == {"critic/score/mean", "actor/ppo_kl", "actor/kl_loss"}
    assert [(c.label, c.color, len(c.values)) for c in panels["critic/score/mean"].series] == [
        ("one", 0, 4),
        ("two", 1, 8),
    ]
    assert [c.label for c in panels["actor/kl_loss"].series] == ["one"]
    assert panels["actor/kl_loss"].title == "KL: loss term vs. reference"


def test_numbers_stand_side_by_side():
    one = [{"step": s, "critic/score/mean": float(s)} for s in range(1, 21)]
    rows = side_by_side([one, [{"step": 1, "actor/entropy": 0.5}]])
    assert rows == [
        {
            "label": "Reward, training mean",
            "cells": [{"recent": "15.500", "best": "20 at step 20"}, {"recent": "–", "best": ""}],
        },
        {"label": "Entropy", "cells": [{"recent": "–", "best": ""}, {"recent": "0.500", "best": ""}]},
    ]


def test_only_what_differs_is_listed():
    one = {"a": {"b": 1, "c": [1, 2]}, "trainer": {"experiment_name": "x"}, "same": 0}
    two = {"a": {"b": 2, "c": [1, 2]}, "trainer": {"experiment_name": "y"}, "same": 0, "new": None}
    rows, alike = config_differences([one, two])
    assert rows == [("a.b", ["1", "2"]), ("new", ["–", "null"])]
    assert alike == 2


def test_the_page_holds_both_runs_and_nothing_from_outside(tmp_path):
    write_run(tmp_path / "one", steps=30, config={"k": 1, "z": 3})
    write_run(tmp_path / "two", steps=12, config={"k": 2, "z": 3})
    file = write_comparison([tmp_path / "one", tmp_path / "two"])
    assert file == tmp_path / "one" / "comparison.html"
    page = Page(file.read_text(encoding="utf-8"))
    assert "Comparison of 2 runs" in page.text
    assert "1 keys are the same" in page.text
    assert not [item for item in page.attributes if item[1] in ("src", "xlink:href")]
    elsewhere = tmp_path / "deep" / "page.html"
    assert write_comparison([tmp_path / "one", tmp_path / "two"], elsewhere) == elsewhere
    assert elsewhere.read_text() == file.read_text()


def test_hostile_names_and_values_stay_text(tmp_path):
    pages = []
    for name, value in (("tame", "v"), ("wild", HOSTILE)):
        folder = tmp_path / name
        write_run(folder / "a", config={"k": value})
        write_run(folder / "b", config={"k": value + "2"}, names=(value.replace("\n", ""),))
        pages.append(Page(write_comparison([folder / "a", folder / "b"]).read_text(encoding="utf-8")))
    assert pages[0].tags == pages[1].tags


def test_one_run_and_strange_folders_are_refused(tmp_path):
    RunFolder(tmp_path / "young").write_config({"k": 1})
    with pytest.raises(ValueError, match="2 to 12 runs, got 1"):
        write_comparison([tmp_path / "young"])
    with pytest.raises(ValueError, match="no run folder"):
        write_comparison([tmp_path / "young", tmp_path / "nowhere"])
    # A run without a step is no reason to show nothing of the others.
    write_run(tmp_path / "old", steps=8)
    assert "young" in write_comparison([tmp_path / "old", tmp_path / "young"]).read_text()
