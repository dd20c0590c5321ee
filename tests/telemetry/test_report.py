import base64
import hashlib
import json
import math
import random
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshrl.telemetry import report
from meshrl.telemetry.charts import HEIGHT, WIDTH, curves_figure, draw_panel, nice_ticks, sparkline
from meshrl.telemetry.page import duration, number, visible
from meshrl.telemetry.panels import Panel, Series, build_panels, merge_steps, smooth, thin
from meshrl.telemetry.report import RunData, latest_by_step, read_run, run_page, write_report
from meshrl.telemetry.run_folder import RunFolder

HOSTILE = (
    "</pre></td></table><script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}{% raw %}"
    "\u202e\x00\x1b[31m\r\x85\ud800&lt;<style>*{display:none}</style><!-- $\\frac$ "
)


class Page(HTMLParser):
    """Which tags a page has, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.parts = [], [], []
        self.feed(html)
        self.close()
        self.text = "".join(self.parts)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data):
        self.parts.append(data)


def write_run(path, steps=40, config=None, sources=None, names=("sort",)):
    rng = random.Random(0)
    run = RunFolder(path)
    run.write_config(config or {"trainer": {"project_name": "p", "experiment_name": "e"}}, sources)
    for step in range(1, steps + 1):
        seconds = {"gen": 1.0, "reward": 0.1, "update_actor": 2.0 + rng.random(), "other": 0.05}
        metrics = {
            "critic/score/mean": step / steps,
            "response_length/mean": 7 + rng.random(),
            "actor/entropy": 1 / step,
            "actor/ppo_kl": rng.gauss(0, 1e-4),
            "actor/pg_clipfrac": 0.01,
            "training/rollout_log_prob_diff_mean": 10 ** rng.uniform(-8, -4),
            "actor/grad_norm": math.inf if step == 7 else rng.random(),
            "perf/throughput": 1000.0,
            **{f"timing_s/{name}": value for name, value in seconds.items()},
            "timing_s/step": sum(seconds.values()),
        }
        if step % 10 == 0:
            metrics |= {f"val-core/{name}/acc/mean@1": 0.5 + step / 100 for name in names}
        run.append_metrics(metrics, step)
        run.append_generations([{"prompt": f"prompt {step}", "response": f"answer {step}", "score": 1.0}], step)
    return run


def html_of(folder):
    """The report without the picture beside it, which takes most of the time."""
    return run_page(read_run(folder))


def test_a_report_has_curves_summary_timing_samples_and_config(tmp_path):
    sources = {"trainer.project_name": "recipe x.yaml", "actor.lr": "command line", "actor.clip": "default"}
    config = {"trainer": {"project_name": "p", "experiment_name": "e"}, "actor": {"clip": 0.2, "lr": 3e-4}}
    run = write_run(tmp_path, config=config, sources=sources)
    assert write_report(tmp_path) == run.report
    page = Page(run.report.read_text(encoding="utf-8"))
    for heading in ("Reward", "Response length", "Entropy", "KL", "Clip fraction", "Gradient norm", "Throughput"):
        assert heading in page.text
    assert "Rollout vs. trainer log-probs" in page.text
    assert "Time of a step" in page.text
    assert page.tags.count("figure") == 9
    for question in ("Is it learning?", "Is it healthy?", "Where does the time go?"):
        assert page.text.count(question) == 2  # the verdict and the section
    assert "0.025 → 1" in page.text
    assert "validation, sort mean@1" in page.text
    assert "prompt 40" in page.text
    # Non-default values stand before the fold with defaults.
    html = run.report.read_text()
    assert html.index("actor.lr") < html.index("<details", html.index("<h2>Config")) < html.index("actor.clip")
    assert "command line" in html
    # update_actor takes 2.5 of 3.65 seconds.
    rows = re.findall(r"</i>update_actor</th>.*?([\d.]+) %", html)
    assert float(rows[0]) == pytest.approx(68.5, abs=2)
    assert run.curves.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(tmp_path.glob("*.part"))


def test_the_page_needs_nothing_from_outside(tmp_path):
    write_run(tmp_path)
    html = html_of(tmp_path)
    page = Page(html)
    assert not {"img", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not [item for item in page.attributes if item[1] in ("src", "xlink:href", "action")]
    assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
    assert "url(" not in html
    assert "@import" not in html
    assert not re.search(r"https?://", html)
    # Both colour schemes, and a picture that follows them.
    assert "color-scheme: light dark" in html


def test_only_the_pages_own_script_may_run(tmp_path):
    write_run(tmp_path)
    html = html_of(tmp_path)
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(value for tag, name, value in Page(html).attributes if (tag, name) == ("meta", "content"))
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    # Data is read, not run, and cannot end its element.
    assert html.count("</script>") == 2


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html).group(1))


def test_samples_come_as_data_the_latest_first_and_within_bounds(tmp_path):
    run = write_run(tmp_path, steps=3)
    tokens = {"text": ["a", "</script>"], "log_prob": [-0.5, "nan"], "version": 3, "advantage": [1.0], "of": 9}
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "response": "x" * 9000, "score": "nan", "tokens": tokens}]
    run.append_generations(rows, 4)
    samples = data_of(html_of(tmp_path))["samples"]
    assert [sample["step"] for sample in samples] == [4, 3, 2, 1]
    assert samples[0]["prompt"] == "user: hi"
    assert len(samples[0]["response"]) < 4100
    assert samples[0]["score"] is None
    # A column that does not fit its tokens is left out.
    assert samples[0]["tokens"] == {"text": ["a", "</script>"], "log_prob": [-0.5, None], "version": 3, "of": 9}
    odd = report.page_samples([{"step": 10**400, "score": True}, {"score": None}])
    assert [(sample["step"], sample["score"]) for sample in odd] == [(None, None), (None, 1)]
    many = [{"step": i, "prompt": "p", "response": "r", "tokens": {"text": ["t"] * 500}} for i in range(1000)]
    chosen = report.page_samples(many)
    assert len(chosen) == 200
    assert [sample["step"] for sample in chosen[:2]] == [999, 994]
    assert sum(len(sample["tokens"]["text"]) for sample in chosen if "tokens" in sample) == 60_000


def test_hostile_strings_are_text_everywhere(tmp_path):
    tame, wild = tmp_path / "tame", tmp_path / "wild"
    write_run(tame, config={"trainer": {"project_name": "p"}, "k": "v"}, sources={"k": "recipe"})
    RunFolder(tame, resume=True).append_generations([{"prompt": "a", "response": "b", "score": 1, "c": "d"}], 41)
    config = {"trainer": {"project_name": HOSTILE}, HOSTILE: HOSTILE}
    run = write_run(wild, config=config, sources={HOSTILE: HOSTILE}, names=(HOSTILE.replace("\n", ""),))
    run.append_generations([{"prompt": HOSTILE, "response": HOSTILE, "score": HOSTILE, HOSTILE: HOSTILE}], 41)
    pages = [Page(html_of(tame)), Page(write_report(wild).read_text(encoding="utf-8"))]
    # The same elements as with harmless text: nothing of the hostile text became markup.
    assert pages[1].tags == pages[0].tags
    assert not [item for item in pages[1].attributes if item[1].startswith("on")]
    assert pages[1].text.count("{{ 7*7 }}") >= 5
    sample = data_of((wild / "report.html").read_text())["samples"][0]
    assert sample["prompt"].startswith(HOSTILE[:40])
    assert not re.search("[\x00\x1b\u202e\x85]", pages[1].text)
    assert "\\u202e" in pages[1].text
    assert (wild / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_in_the_picture_lies_over_its_neighbour_or_the_edge(count):
    """The margins are fixed: the widest ticks must find room in them."""
    widest = [[0.0, 1.23e-6, 2.5e-6], [123_456.0, 123_500.0, 130_000.0], [-0.00125, 0.0, 0.0075], [1e-9, 1.0, 1e9]]
    panels = [
        Panel("A title", "norm before clipping", [Series("a", [1, 2, 3], widest[i % 4])], log_scale=i == 3, note="why")
        for i in range(count)
    ]
    figure = curves_figure(panels, "a run")
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes[:count]]
    edge = figure.bbox
    for box in boxes:
        assert edge.x0 <= box.x0 < box.x1 <= edge.x1
        assert edge.y0 <= box.y0 < box.y1 <= edge.y1
    everything = [*boxes, figure._suptitle.get_window_extent()]
    for i, one in enumerate(everything):
        assert not any(one.overlaps(other) for other in everything[i + 1 :])


def test_panels_share_their_steps_and_zeros_stand_at_the_bottom():
    curves = [Series("a", [0, 5, 10], [0.0, 0.0, 0.0]), Series("b", [4], [3.0]), Series("c", [1, 10], [-1.0, 1.0])]
    figure = curves_figure([Panel("A title", "unit", [curve]) for curve in curves], "a run")
    assert [axes.get_xlim() for axes in figure.axes[:3]] == [(-0.2, 10.2)] * 3
    assert figure.axes[0].get_ylim() == (0, 1)
    assert figure.axes[2].get_ylim()[0] < -1


def test_a_page_that_did_not_escape_would_be_caught():
    assert Page(f"<pre>{HOSTILE}</pre>").tags != Page("<pre>a</pre>").tags


def test_missing_series_leave_their_panels_out(tmp_path):
    run = RunFolder(tmp_path)
    run.append_metrics({"critic/score/mean": 0.5, "actor/entropy": math.nan}, 3)
    html = html_of(tmp_path)
    assert Page(html).tags.count("figure") == 1
    assert "Entropy</h3>" not in html


def test_a_run_without_a_step_says_so(tmp_path, caplog):
    RunFolder(tmp_path).write_config({"trainer": {"experiment_name": "young"}})
    html = write_report(tmp_path).read_text()
    assert "has not logged a step yet" in html
    assert "young" in html
    assert "no step in metrics.jsonl" in caplog.text
    assert not (tmp_path / "curves.png").exists()


def test_folders_that_are_no_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no run folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="neither metrics"):
        write_report(tmp_path)


def test_distributions_become_pictures(tmp_path):
    run = write_run(tmp_path, steps=5)
    before = Page(html_of(tmp_path)).tags.count("figure")
    for step in range(1, 6):
        lengths = {"low": 1.0, "high": 40.0, "counts": [step] * 24}
        spread = {"score": {"values": [0.0, 1.0], "counts": [9, step]}, "response_length": lengths}
        run.append_distributions({**spread, "finish": {"stop": 8, "length": 1 + step}}, step)
    page = Page(html_of(tmp_path))
    assert page.tags.count("figure") == before + 3
    for words in ("Reward, every sample", "Response length, every sample", "How answers end"):
        assert words in page.text


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["step", "time", "critic/score/mean", "timing_s/gen", "ledger_s/a/b", "global_seqlen/max", "global_seqlen/mean"]
HISTOGRAM = st.fixed_dictionaries(
    {"counts": st.lists(st.integers(-3, 9), max_size=3)},
    optional={"values": st.lists(st.floats(), max_size=3), "low": st.floats(), "high": st.floats()},
)
TOKENS = st.fixed_dictionaries(
    {"text": st.lists(ANYTHING, max_size=2)}, optional={"log_prob": ANYTHING, "of": ANYTHING}
)
SAMPLES = st.fixed_dictionaries(
    {"step": ANYTHING | st.integers(0, 9)},
    optional={"score": HISTOGRAM | ANYTHING, "finish": ANYTHING, "tokens": TOKENS | ANYTHING, "prompt": ANYTHING},
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(NAMES), ANYTHING | st.integers(0, 9), max_size=5), max_size=4),
    st.lists(SAMPLES, max_size=4),
)
def test_whatever_stands_in_the_files_there_is_a_page(records, rows):
    run = RunData(Path("run"), merge_steps(records), latest_by_step(rows), rows)
    assert "Is it learning?" in run_page(run)


def test_counted_problems_are_named_at_the_top(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2):
        run.append_metrics({"training/nonfinite_metrics": 2.0, "response_length/clip_ratio": 0.6}, step)
    text = Page(html_of(tmp_path)).text
    assert "NaN or infinite: 4" in text
    assert "training/nonfinite_metrics" in text
    assert "60% of the answers are cut" in text


def test_steps_are_merged_and_a_resumed_run_overwrites():
    records = [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0},
        {"step": 2, "val": 0.5},
        {"step": 3, "a": 9.0},
        {"step": 3, "a": 3.0},
        {"step": 0, "val": 0.1},
    ]
    merged = merge_steps(records)
    assert [record["step"] for record in merged] == [0, 1, 2, 3]
    assert merged[2] == {"step": 2, "a": 2.0, "val": 0.5}
    assert merged[3]["a"] == 3.0


def test_only_positive_values_far_apart_have_a_scale_by_powers_of_ten():
    name = "training/rollout_log_prob_diff_mean"
    for values, log in (([1e-7, 1e-2], True), ([1e-7, 2e-7], False), ([-1e-7, 1e-2], False), ([0.0, 1e-2], False)):
        (panel,) = build_panels([{"step": i, name: value} for i, value in enumerate(values)])
        assert panel.log_scale == log
        ElementTree.fromstring(draw_panel(panel))


def test_one_large_value_does_not_take_the_others_with_it():
    values = [1e20 if step == 20 else 0.7 for step in range(60)]
    assert smooth(values, 5)[30:] == pytest.approx([0.7] * 30)
    alike_in_the_mean = [0.0078125, 1.9921875] * 600
    for row in (values, alike_in_the_mean):
        (panel,) = build_panels([{"step": i, "actor/grad_norm": value} for i, value in enumerate(row)])
        assert panel.log_scale
        ElementTree.fromstring(draw_panel(panel))


def test_smoothing_and_thinning_against_plain_loops():
    values = [random.Random(1).random() for _ in range(101)]
    expected = [sum(values[max(0, i - 3) : i + 4]) / len(values[max(0, i - 3) : i + 4]) for i in range(101)]
    assert smooth(values, 7) == pytest.approx(expected)
    steps, thinned = thin(range(1000), [float(i % 2) for i in range(1000)], 100)
    assert len(steps) == len(thinned) == 100
    assert thinned == [0.5] * 100
    assert steps == [4.5 + 10 * i for i in range(100)]
    # An uneven division keeps every point once.
    _, uneven = thin(range(301), [1.0] * 301, 300)
    assert uneven == [1.0] * 300


numbers = st.floats(min_value=-1e99, max_value=1e99, allow_nan=False)


@settings(max_examples=80, deadline=None)
@example(rows=[[0.0, 5e-324]], stacked=False, sparse=False)
@given(st.lists(st.lists(numbers, min_size=1, max_size=40), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_drawings_are_well_formed_and_stay_inside(rows, stacked, sparse):
    if stacked:
        rows = [[abs(value) for value in rows[0]] for _ in rows]
    series = [Series(f"<{i}>", [float(s) for s in range(len(row))], row, sparse, i) for i, row in enumerate(rows)]
    root = ElementTree.fromstring(draw_panel(Panel("t", "u & v", series, stacked=stacked)))
    for element in root.iter():
        for pair in element.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert -1 <= x <= WIDTH + 1
            assert -1 <= y <= HEIGHT + 1
    for row in rows:
        if spark := sparkline(row):
            ElementTree.fromstring(spark)


@settings(max_examples=200, deadline=None)
@given(numbers, numbers)
def test_ticks_cover_the_span_and_are_few(a, b):
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 9
    assert ticks == sorted(set(ticks))


def test_text_helpers():
    assert visible("abc" * 10, 5) == "abcab… (25 more characters)"
    assert visible("a\tb\n\x07\x7f\u200f\ud83d") == "a\tb\n\u2407\u2421\\u200f\\ud83d"
    assert visible("漢字 é 👩\u200d💻") == "漢字 é 👩\u200d💻"
    assert [number(v) for v in (0, 0.25, 3.0, 1234.56, 1e-7, math.nan, 2e9)] == [
        "0",
        "0.250",
        "3",
        "1,234.6",
        "1.00e-07",
        "nan",
        "2.00e+09",
    ]
    assert [duration(s) for s in (3.21, 42.4, 200, 7500)] == ["3.2 s", "42 s", "3 min 20 s", "2 h 05 min"]


def test_a_long_run_is_reported_quickly(tmp_path):
    write_run(tmp_path / "short", steps=3)
    write_report(tmp_path / "short")  # imports matplotlib and finds its fonts
    write_run(tmp_path, steps=3000)
    started = time.process_time()
    html = write_report(tmp_path).read_text()
    assert time.process_time() - started < 3
    assert len(html) < 1_500_000


def test_importing_telemetry_loads_neither_torch_nor_matplotlib():
    script = (
        "import sys\n"
        "from meshrl.telemetry import report, console, metrics, report_command\n"
        "from meshrl.telemetry import run_folder, time_ledger, trackers, live_report\n"
        "heavy = {'torch', 'matplotlib', 'jinja2', 'wandb', 'mlflow', 'tensorboard', 'trackio'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
