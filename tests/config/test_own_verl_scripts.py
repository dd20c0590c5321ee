"""verl's own scripts, as bash runs them, load as commands of this package; the docs' table is made here."""

import os
import re
from pathlib import Path

import pytest
from extract_verl_scripts import FROM_THE_USER, training_command
from verl_scripts import GROUPS, PAGE, RECORDED, groups, page, runs, share

from meshrl.config import ConfigError, check_config, load_config, unsupported
from meshrl.config.load import ROOTS
from meshrl.tools.migrate.migrate import PROGRAMS, migrate, script_text
from meshrl.tools.migrate.shell_script import read_script

pytestmark = pytest.mark.slow  # not part of `make test-quick`

MAIN, SFT, ASYNC = list(GROUPS)[:3]
CHECKOUT = os.environ.get("MESHRL_VERL_CHECKOUT")  # where the scripts themselves are at hand


@pytest.mark.parametrize(("group", "runs_of_verl", "least"), [(MAIN, 130, 0.85), (SFT, 19, 0.85), (ASYNC, 24, 0.85)])
def test_most_scripts_load(group: str, runs_of_verl: int, least: float) -> None:
    found = groups()[group]
    assert len(found) >= runs_of_verl
    assert share(found) >= least, [run.script for run in found if not run.migration.loads]


def test_the_page_is_what_the_scripts_give() -> None:
    assert PAGE.read_text() == page(), "run: python tests/config/verl_scripts.py"


def test_the_shares_on_the_pages_are_those_of_the_scripts() -> None:
    shares = [f"{share(found):.0%}".replace("%", " %") for found in groups().values()]
    text = " ".join((PAGE.parent / "migrate_verl.md").read_text().split())
    assert f"{shares[0]} of its PPO and GRPO runs, {shares[1]} of its supervised ones" in text
    assert f"and {shares[2]} of its asynchronous ones load" in text
    supervised = list(groups().values())[1]
    loading = sum(run.migration.loads for run in supervised)
    assert f"{loading} of verl's own {len(supervised)}" in (PAGE.parent / "migrate_sft.md").read_text()


SCRIPTS = [run["script"] for run in RECORDED["runs"]]  # not the runs: who collects the tests need not migrate them


@pytest.mark.parametrize("at", range(len(SCRIPTS)), ids=SCRIPTS)
def test_the_printed_words_are_the_command(at: int) -> None:
    """What is said to load does so through the same door as every command; what does not says why where it prints."""
    migration = runs()[at].migration
    if migration.loads:
        loaded = load_config(None, migration.words, ROOTS[migration.command])
        assert [*unsupported(loaded.config), *check_config(loaded.config, check_files=False)] == []
    text = script_text(migration)
    said = [("changed", migration.changes), ("to do", migration.to_do)]
    said += [("lost", migration.losses), ("still refused", migration.problems)]
    for title, lines in said:
        for line in lines:
            assert f"# {title}: {line}" in text


@pytest.mark.parametrize("name", ["+data.nobody_knows=1", "actor_rollout_ref.rollout.temprature=0.5"])
def test_a_key_that_nobody_knows_is_a_loss_in_every_script(name: str) -> None:
    """The control: what the table counts would not be seen otherwise."""
    for run in groups()[MAIN][:20]:
        words = [word for word in run.words if not word.startswith("--config")]
        lost = migrate(run.program, {}, [*words, name]).losses
        assert any(name.lstrip("+").partition("=")[0] in line for line in lost)


def test_every_word_of_a_script_is_said_to_be_something() -> None:
    """A word is taken over under its own name, or a line names it: nothing goes without a word."""
    for run in runs():
        told = "\n".join([*run.migration.changes, *run.migration.losses, *run.migration.problems])
        given = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in run.words if word[:2] != "--"}
        silent = [name for name in given if name not in run.migration.settings and name not in told]
        assert [name for name in silent if given[name].strip() not in ("null", "None", "")] == [], run.script


@pytest.mark.parametrize("config", RECORDED["defaults"])
def test_every_key_of_verls_configs_is_known_at_its_default(config: str) -> None:
    root = ROOTS["sft" if config.startswith("sft") else "train"]
    unknown = []
    for word in RECORDED["defaults"][config]:
        try:
            load_config(None, [word], root)
        except ConfigError as error:
            unknown += error.problems
    assert unknown == []
    assert len(RECORDED["defaults"][config]) > 60


@pytest.mark.skipif(CHECKOUT is None, reason="MESHRL_VERL_CHECKOUT names no checkout of verl")
def test_reading_a_script_gives_what_bash_gives() -> None:
    """All scripts, read without being run, against the record of bash; nine in ten agree to the letter."""
    assert CHECKOUT is not None
    agreeing, differing = 0, []
    for script in dict.fromkeys(run["script"] for run in RECORDED["runs"]):
        text = re.sub(r'^(\w+)=""$', "", (Path(CHECKOUT) / script).read_text(), flags=re.MULTILINE)
        given = {k: v for k, v in FROM_THE_USER.items() if not re.search(rf"\$\{{{k}:?[-=]", text)}
        arguments = ["8", "checkpoints"] if "$#" in text else []
        reader = read_script(text, given | {"HOME": "/home/user", "PWD": "/verl"}, arguments)
        read = [found[2] for call in reader.commands if (found := training_command(call)) is not None]
        bash = [run.words for run in runs() if run.script == script]
        same = list(dict.fromkeys(map(tuple, read))) == list(map(tuple, bash))
        agreeing += same
        if not same and not reader.remarks:
            differing.append(script)
    assert agreeing > 0.85 * len({run.script for run in runs()})
    # Of the others all but these say what they do not know: they write ~ or run other scripts.
    assert len(differing) <= 3, differing


def test_the_programs_are_those_that_were_recorded() -> None:
    assert {run.program for run in runs()} <= set(PROGRAMS)
