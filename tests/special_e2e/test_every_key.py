"""Every key of every command does something or is refused, as seen from what it builds and what a run does.

For each key there is a config in which another value changes what is built or run. And in the plain run of its command
a key that changes nothing is refused or noted when somebody sets it. Both are looked up in one walk over all keys, made
once by a process of its own (`key_walk.py`, with the configs of `key_rows.py`).
"""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from key_rows import FIXED, STARTS_PROCESSES, all_keys, row_of

from meshrl.config.keys import leaves
from meshrl.config.load import ROOTS
from meshrl.config.show import yaml_value

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "meshrl"
# In a plain run these change nothing that could be seen, and may well be said all the same.
PLAIN_REASONS = {
    "one process has nothing to share or to balance": (
        r".*\.(strategy|fsdp_config\.(fsdp_size|reshard_after_forward|forward_prefetch|wrap_policy\.[a-z_]+))",
        r"trainer\.balance_batch",
    ),
    "the rows are short, and none of them has what it is about": (
        r"data\.(max_prompt_length|max_length|truncation|filter_overlong_prompts)",
        r".*\.skip_zero_advantage",
    ),
    "nothing happens that a gate or a limit would speak of": (r"trainer\.gates\.[a-z_]+",),
    "there is no checkpoint to go on from": (r"trainer\.(resume_mode|remote_dir)", r".*checkpoint\.load_contents"),
    "they name the report, which the walk does not draw": (r"trainer\.(project|experiment)_name",),
    "so few optimizer steps do not show it": (r".*optim\.lr_warmup_steps(_ratio)?",),
}
# Attributes that tests, templates of Jinja or users read, those that Megatron-Core's own classes do, and those that the
# request handler of Python's http.server does.
READ_ELSEWHERE = {
    "cache_mla_latents", "close_connection", "qkv_up_checkpoint", "recompute_up_proj", "replaced",
    "request_version", "requestline", "serial", "spark", "waited",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the walk has found."""
    folder = tmp_path_factory.mktemp("keys")
    command = [sys.executable, str(HERE / "key_walk.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return answers


def names_it(lines: list[str], name: str) -> bool:
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", line) for line in lines)


@pytest.mark.timeout(1800)
def test_each_key_changes_what_is_built_or_run(found: dict[str, Any]) -> None:
    wrong = {}
    for root, name in all_keys():
        answer, row = found["by_row"][f"{root}:{name}"], row_of(root, name)
        if FIXED.fullmatch(f"{root}:{name}"):
            if not names_it([*answer["refused"], *answer["noted"]], name):
                wrong[f"{root}:{name}"] = "any other value must be refused or noted", answer
        elif not answer["places"] or answer["refused"] or (answer["error"] and not row.fails):
            wrong[f"{root}:{name}"] = "it must change what is built or run", answer
    assert not wrong, json.dumps(wrong, indent=1)


def test_in_a_plain_run_no_key_is_idle_without_a_word(found: dict[str, Any]) -> None:
    wrong = {}
    reasons = [pattern for patterns in PLAIN_REASONS.values() for pattern in patterns]
    for root, name in all_keys():
        if STARTS_PROCESSES.fullmatch(name):
            continue
        answer = found["in_plain"].get(f"{root}:{name}") or found["by_row"][f"{root}:{name}"]
        nothing = leaves(ROOTS[root])[name].info.no_request
        told = answer["refused"] or answer["noted"] or answer["value"] in [yaml_value(value) for value in nothing]
        if not told and not answer["places"] and not any(re.fullmatch(pattern, name) for pattern in reasons):
            wrong[f"{root}:{name}"] = answer
    assert not wrong, json.dumps(wrong, indent=1)


def test_the_walk_would_see_nothing_where_there_is_nothing(found: dict[str, Any]) -> None:
    """Equal configs look equal, and a key whose reader does not listen changes nothing."""
    assert found["controls"] == {"train": [], "sft": [], "prefer": []}
    assert found["by_row"]["sft:trainer.stall_timeout"]["places"] > 0
    assert found["deafened"]["places"] == 0


def test_what_is_kept_in_an_object_is_read_from_it() -> None:
    """A value that is only copied would look as if it were built in: no attribute of ours is written and never read.

    Keys that may keep their default only (`pending`: Liger kernels, distributed checkpoints) have nobody to read them:
    any other value is refused, by a walk over the tree of keys.
    """
    written: dict[str, list[str]] = defaultdict(list)
    read: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                written[node.attr].append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)  # by getattr
            elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.dump(mark) for mark in node.decorator_list):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        written[field.target.id].append(f"{file.relative_to(PACKAGE)}:{field.lineno}")
    marks: dict[str, set[bool]] = defaultdict(set)
    for leaf in (leaf for root in ROOTS.values() for leaf in leaves(root).values()):
        marks[leaf.name.rpartition(".")[2]].add(leaf.pending is not None)
    refused = {name for name, pending in marks.items() if pending == {True}}
    never = {name: places for name, places in written.items() if name not in read}
    assert never.keys() == READ_ELSEWHERE | refused, never
