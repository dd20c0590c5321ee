"""Every run of verl's own scripts, migrated; `python tests/config/verl_scripts.py` writes the table of the docs.

The runs are recorded in `verl_scripts.json` by `extract_verl_scripts.py`.
"""

import json
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from meshrl.tools.migrate.migrate import Migration, migrate

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("verl_scripts.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "verl_scripts.md"
URL = "https://github.com/volcengine/verl/blob"
GROUPS = {
    "PPO, GRPO and their kin": ("verl.trainer.main_ppo", ("examples/", "tests/special_e2e/")),
    "Supervised fine-tuning": ("sft_trainer", ("examples/", "tests/")),
    "Asynchronous": ("verl.experimental.", ("tests/", "verl/")),
    "For NPUs, and of experiments": ("verl.trainer.main_ppo", ("tests/special_npu/", "verl/")),
}
# Scripts that verl refuses as well, and why.
REFUSED_THERE = {
    "examples/cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k.sh": "verl's model config has no torch_dtype either",
    "examples/rollout_correction/run_with_rollout_corr.sh": "verl refuses micro-batches above the mini-batch too",
    "examples/rollout_correction/run_with_rollout_corr_multi_rs.sh": "verl refuses these micro-batches too",
    "tests/special_e2e/run_gsm8k_fsdp_sgl_multiturn_sf_tool.sh": "its config file is not in verl's repository",
    "verl/experimental/fully_async_policy/shell/dapo_30b_a3b_base_math_fsdp.sh": "its config file is not in verl's "
    "repository",
}
HEAD = """# verl's own scripts

Made by `python tests/config/verl_scripts.py`: each script of verl's repository ([commit]({url})) is run by bash with
its variables at their defaults and programs that only write down their arguments; `meshrl migrate` makes our command of
what verl would have been called with, and `meshrl train --dry-run --skip-files` (or `sft`) says whether it loads. A
script loads if no key of it is lost and nothing is refused. What is changed on the way stands on
[the page for verl](migrate_verl.md#meshrl-migrate).

| scripts | runs | load | |
|---|---|---|---|
"""


class Run(NamedTuple):
    """One command of one script, and what became of it."""

    script: str
    program: str
    words: list[str]
    migration: Migration


def words_of(run: dict[str, Any]) -> list[str]:
    """The arguments of a recorded run."""
    return [RECORDED["words"][at] for at in run["words"]]


@cache
def runs() -> tuple[Run, ...]:
    """All recorded runs, migrated."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in RECORDED["yamls"].items():
            (Path(folder) / f"{name}.yaml").write_text(text)
        for run in RECORDED["runs"]:
            words = words_of(run)
            here = ["--config-path=." if word.startswith("--config-path") else word for word in words]
            migration = migrate(run["module"], run["launcher"], here, Path(folder))
            made.append(Run(run["script"], run["module"], words, migration))
    return tuple(made)


def groups() -> dict[str, list[Run]]:
    """The runs by the tables of the page."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs():
        for name, (program, folders) in GROUPS.items():
            if program in run.program and run.script.startswith(folders):
                found[name].append(run)
                break
        else:
            raise AssertionError(f"{run.script} is in no group")
    return found


def share(found: list[Run]) -> float:
    """The share of runs that load."""
    return sum(run.migration.loads for run in found) / len(found)


def page() -> str:
    """The page of the docs."""
    commit = RECORDED["commit"]
    text = HEAD.format(url=f"https://github.com/volcengine/verl/tree/{commit}")
    for name, found in groups().items():
        text += f"| {name} | {len(found)} | {sum(run.migration.loads for run in found)} | {share(found):.0%} |\n"
    for name, found in groups().items():
        text += f"\n## {name}\n\n| refused | because |\n|---|---|\n"
        for run in found:
            if not run.migration.loads:
                reasons = "; ".join(_cell(line) for line in [*run.migration.losses, *run.migration.problems])
                there = REFUSED_THERE.get(run.script)
                reasons = f"{there}. {reasons}" if there else reasons
                text += f"| [{run.script}]({URL}/{commit}/{run.script}) | {reasons} |\n"
        text += "\nThese load:\n\n"
        for script in dict.fromkeys(run.script for run in found if run.migration.loads):
            text += f"- {script}\n"
    return text


def _cell(line: str) -> str:
    line = line.replace(" (command line)", "").replace("|", "\\|").replace("\n", " ")
    return line if len(line) < 400 else f"{line[:400]} ..."


if __name__ == "__main__":
    PAGE.write_text(page())
    for name, found in groups().items():
        print(f"{name}: {sum(run.migration.loads for run in found)} of {len(found)} ({share(found):.1%})")
