"""The report and the live view in a real browser: drawn, filtered, coloured, by keyboard, and growing by itself."""

import shutil

import pytest
from headless_browser import EXECUTABLE, Browser
from test_report import HOSTILE, write_run
from test_watch import log, serving

from meshrl.telemetry.report import read_run, run_page
from meshrl.telemetry.run_folder import RunFolder

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="needs chromium")
CARDS = "document.querySelectorAll('.sample').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def saved(run):
    run.report.write_text(run_page(read_run(run.path)), encoding="utf-8")
    return run.report.as_uri()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report with samples whose tokens are known."""
    run = write_run(tmp_path_factory.mktemp("run"), steps=12)
    for step in range(1, 13):
        tokens = {
            "text": ["So", " ", "<b>", "42"],
            "log_prob": [-0.001, -0.5, -9.0, -0.1],
            "advantage": -1.5 if step % 2 else 1.5,
            "version": [3, 3, 4, 4],
            "told": [0, 1, 0, 0],
        }
        row = {"prompt": f"question {step}", "response": "So 42", "score": step / 10, "tokens": tokens}
        run.append_generations([{**row, "split": "train", "finish": "length" if step > 9 else "stop"}], step)
        spread = {"score": {"values": [0.0, 1.0], "counts": [12 - step, step]}, "finish": {"stop": 12}}
        run.append_distributions(spread, step)
    return saved(run)


@pytest.fixture
def page(browser, report):
    """It, open in the browser."""
    browser.errors.clear()
    browser.look(1300, 900)
    browser.open(report)
    yield browser
    assert browser.errors == []


def set_filter(page, name, value):
    page.run(f"(() => {{ const i = view.inputs.{name}; i.value = {value!r}; i.dispatchEvent(new Event('input')); }})()")


@pytest.mark.parametrize("width", [390, 800, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows_and_both_schemes_have_their_colours(page, width, dark):
    page.look(width, 900, dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("[...document.querySelectorAll('figure')].every(f => f.getBoundingClientRect().width > 300)")
    back, ink = page.run("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    light = [sum(map(int, color.removeprefix("rgb(").rstrip(")").split(","))) for color in (back, ink)]
    assert (light[0] < light[1]) == dark


def test_the_button_changes_the_scheme(page):
    before = page.run("getComputedStyle(document.body).backgroundColor")
    page.run("document.getElementById('theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") != before
    page.run("document.getElementById('theme').click(); localStorage.clear()")
    assert page.run("getComputedStyle(document.body).backgroundColor") == before


def test_filters_leave_what_they_say(page):
    assert page.run(CARDS) == 20  # of 24, the rest behind a button
    page.run("[...document.querySelectorAll('#samples button')].at(-1).click()")
    assert page.run(CARDS) == 24
    set_filter(page, "split", "train")
    assert page.run(CARDS) == 12
    set_filter(page, "from", "3")
    set_filter(page, "to", "11")
    assert page.run(CARDS) == 9
    set_filter(page, "low", "0.5")
    assert page.run(CARDS) == 7
    set_filter(page, "finish", "length")
    assert page.run(CARDS) == 2
    set_filter(page, "text", "QUESTION 11")
    assert page.run("document.querySelector('.sample header').textContent").startswith("step 11")
    set_filter(page, "text", "nowhere")
    assert page.run(CARDS) == 0
    assert "0 of 24 samples" in page.run("document.querySelector('.found').textContent")


def backgrounds(page):
    return page.run("[...document.querySelector('.sample .answer').children].map(token => token.style.background)")


def test_tokens_are_coloured_by_what_is_chosen(page):
    set_filter(page, "split", "train")
    certain, told, unlikely, usual = backgrounds(page)
    assert certain == told == ""
    assert "75%" in unlikely
    assert usual not in ("", unlikely)
    set_filter(page, "color", "advantage")
    good = backgrounds(page)
    assert good[0] == good[2] == good[3] != ""
    assert "--c2" in good[0]
    assert page.run("document.querySelectorAll('.sample .answer')[1].children[0].style.background").count("--c5") == 1
    set_filter(page, "color", "version")
    versions = backgrounds(page)
    assert versions[0] != versions[2] == versions[3]
    set_filter(page, "color", "text")
    assert page.run("document.querySelector('.sample .answer').textContent") == "So 42"
    assert page.run("document.querySelector('.sample .answer').children.length") == 0


def test_it_can_be_used_without_a_mouse(page):
    page.press("/", "/")
    assert page.run("document.activeElement.name") == "text"
    page.run("document.activeElement.blur()")
    page.press("j", "j")
    page.press("j", "j")
    assert page.run("[...document.querySelectorAll('.sample')].indexOf(document.activeElement)") == 1
    page.press("c", "c")
    assert page.run("view.inputs.color.value") == "advantage"
    page.run("document.querySelector('figure svg').focus()")
    page.press("End")
    assert "step 12" in page.run("document.getElementById('tip').textContent")
    page.press("ArrowLeft")
    assert "step 11" in page.run("document.getElementById('tip').textContent")
    assert page.run("document.getElementById('tip').hidden") is False
    page.press("Escape")
    assert page.run("document.getElementById('tip').hidden") is True


def test_hostile_text_runs_nothing(browser, tmp_path):
    text = HOSTILE + "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"
    run = write_run(tmp_path, config={"trainer": {"project_name": text}}, names=(text.replace("\n", ""),))
    tokens = {"text": [text, text], "log_prob": [-1, -2]}
    run.append_generations([{"prompt": text, "response": text, "score": 1.0, "finish": text, "tokens": tokens}], 99)
    browser.errors.clear()
    browser.open(saved(run))
    assert browser.run("window.hit") is None
    assert browser.run("document.querySelectorAll('#samples img, #samples script').length") == 0
    assert "onerror" in browser.run("document.querySelector('.sample .answer').textContent")
    assert browser.errors == []


def test_a_live_page_grows_without_being_loaded_again(browser, tmp_path):
    folder = tmp_path / "run"
    steps = "document.querySelector('.tile b')?.textContent"
    with serving(folder) as port:
        browser.errors.clear()
        browser.look(1000, 800)
        browser.open(f"http://127.0.0.1:{port}/")
        browser.run("window.mine = 1; data.every_ms = 50; poll()")
        browser.until("document.getElementById('status').textContent === 'waiting for the first step'")
        run = RunFolder(folder)
        for step in (1, 2):
            log(run, step)
        browser.until(f"{steps} === '2'")
        browser.run("document.querySelector('#verdicts details').open = true")
        assert browser.run(CARDS) == 2
        # Half a line changes nothing, the other half brings the step.
        with open(run.metrics, "a") as out:
            out.write('{"step": 3, "critic/score')
            out.flush()
            browser.run("poll()")
            assert browser.run(steps) == "2"
            out.write('/mean": 0.9}\n')
        browser.until(f"{steps} === '3'")
        assert browser.run("document.querySelector('#verdicts details').open") is True
        shutil.rmtree(folder)
        browser.until("document.getElementById('status').textContent.includes('gone')")
        assert browser.run(steps) == "3"
        assert browser.run("window.mine") == 1
        assert browser.errors == []
    browser.until("document.getElementById('status').textContent.includes('no answer')")
    browser.open("about:blank#end")
