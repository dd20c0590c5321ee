import io
import math
import re

import pytest
from rich.console import Console

from meshrl.telemetry.console import SFT_COLUMNS, StepConsole, time_shares, validation_accuracies

METRICS = {
    "critic/score/mean": 0.3125,
    "response_length/mean": 7.25,
    "actor/ppo_kl": 1.24e-4,
    "training/rollout_log_prob_diff_mean": 3.1e-7,
    "actor/entropy": 0.412,
    "actor/grad_norm": 0.981,
    "perf/throughput": 1923.4,
    "timing_s/gen": 1.0,
    "timing_s/update_actor": 0.6,
    "timing_s/old_log_prob": 0.3,
    "timing_s/sync": 0.06,
    "timing_s/other": 0.04,
    "timing_s/step": 2.0,
}


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal(width=140):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, _environ={"TERM": "xterm-256color"})


def test_a_line_says_each_number_under_its_heading():
    console = plain_console()
    StepConsole(200, console).log(METRICS | {"val-core/sort/acc/mean@1": 0.84, "val-core/sort/acc/pass@1": 0.84}, 12)
    header, line = console.file.getvalue().splitlines()
    expected = {
        "step": "12/200",
        "reward": "0.312",
        "length": "7.2",
        "kl": "1.2e-04",
        "logp diff": "3.1e-07",
        "entropy": "0.412",
        "grad norm": "0.981",
        "tokens/s": "1,923",
        "seconds": "2.00",
        "val acc": "0.840",
    }
    for heading, text in expected.items():
        end = re.search(rf"(?<!\S){re.escape(heading)}(?= |$)", header).end()
        assert line[:end].endswith(" " + text), heading
    start = header.index("where the time went")
    assert line[start:] == "gen 50%, update 30%, old logp 15%"
    assert max(len(header), len(line)) <= 150


def test_output_without_a_terminal_has_no_control_characters_and_is_not_wrapped():
    console = plain_console()
    step_console = StepConsole(None, console)
    with step_console.phase("gen"):
        for step in range(1, 61):
            step_console.log(METRICS | {"actor/grad_norm": math.nan, "actor/ppo_kl": 0.0}, step)
    step_console.message("done")
    step_console.finish()
    text = console.file.getvalue()
    assert not re.search(r"[^\x20-\x7e\n]", text)
    lines = text.splitlines()
    headers = [i for i, line in enumerate(lines) if "reward" in line]
    assert headers == [0, 26, 52]
    assert len(lines) == 60 + 3 + 1
    assert all("nan" in line for i, line in enumerate(lines[:-1]) if i not in headers)


def test_missing_metrics_leave_a_dash_and_columns_stay_aligned():
    step_console = StepConsole(10, plain_console())
    full, sparse = step_console.line(METRICS, 3), step_console.line({"critic/score/mean": -1234567.0}, 10)
    assert sparse.count(" -") - 1 == 7
    assert full.index("0.312") + 5 == sparse.index("-1.2e+06") + 8


def test_a_validation_alone_gets_its_own_line_and_several_are_all_shown():
    console = plain_console()
    step_console = StepConsole(10, console)
    step_console.log({"val-core/a/acc/mean@4": 0.25, "val-core/a/acc/pass@1": 0.25, "val-core/a/acc/pass@4": 0.5}, 0)
    step_console.log(METRICS | {"val-core/a/acc/mean@1": 0.2, "val-core/b/x/acc/mean@1": 0.6}, 1)
    step_console.log(METRICS | {"val-core/a/acc/mean@1": 0.3}, 2)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "validation at step 0: a mean@4 0.250, a pass@4 0.500"
    assert " 0.400 " in lines[2]
    assert lines[3] == "validation at step 1: a mean@1 0.200, b/x mean@1 0.600"
    assert " 0.300 " in lines[4]
    assert len(lines) == 5


def test_accuracies_are_read_from_the_names():
    metrics = {"val-core/a/b/acc/mean@8": 0.1, "val-core/a/acc/short_groups": 3, "val-aux/a/acc/mean@8": 0.3}
    assert validation_accuracies(metrics) == {"a/b mean@8": 0.1}


def test_time_shares_survive_odd_timings():
    assert time_shares({}) == ""
    assert time_shares({"timing_s/step": 0.0, "timing_s/gen": 0.0}) == ""
    assert time_shares({"timing_s/gen": 3.0, "timing_s/reward": 1.0}) == "gen 75%, reward 25%"
    assert time_shares({"timing_s/gen": math.nan, "timing_s/reward": 1.0, "timing_s/step": 2.0}) == "reward 50%"


def test_a_terminal_gets_a_bar_with_steps_and_phase_below_the_lines():
    console = terminal()
    with StepConsole(200, console) as step_console:
        with step_console.phase("gen"):
            with step_console.phase("sync"):
                step_console._bar.refresh()
            step_console._bar.refresh()
        step_console.log(METRICS, 50)
        step_console._bar.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    assert "0/200 steps" in text
    assert "50/200 steps" in text
    assert "eta" in text
    assert text.index("gen") < text.index("sync") < text.rindex("gen")
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor must be shown again"


@pytest.mark.parametrize("width", [60, 100, 140])
def test_a_line_is_cut_to_a_narrow_terminal_not_wrapped(width):
    console = terminal(width)
    step_console = StepConsole(200, console)
    step_console.finish()
    step_console.log(METRICS, 50)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()).splitlines()
    assert len(lines) == 2
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(("width", "told"), [(80, True), (200, False)])
def test_an_accuracy_whose_column_is_cut_off_gets_a_line(width, told):
    console = terminal(width)
    step_console = StepConsole(200, console)
    step_console.finish()
    step_console.log(METRICS | {"val-core/a/acc/mean@1": 0.375}, 50)
    assert ("validation at step 50: a mean@1 0.375" in console.file.getvalue()) == told


def test_after_finish_the_bar_stays_down():
    console = terminal()
    step_console = StepConsole(3, console)
    step_console.finish()
    with step_console.phase("gen"):
        step_console.log(METRICS, 1)
    assert "steps" not in console.file.getvalue()


def test_supervised_runs_have_their_own_columns():
    console = plain_console()
    StepConsole(5, console, columns=SFT_COLUMNS).log({"train/loss": 1.25, "train/lr": 1e-3, "timing_s/step": 0.5}, 2)
    header, line = console.file.getvalue().splitlines()
    assert line[: header.index("loss") + 4].endswith("1.2500")
    assert "val acc" not in header
    assert "reward" not in header
