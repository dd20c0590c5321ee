"""The pages for those who come from verl and TRL name keys that exist on both sides, with the defaults they have."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from trl_keys import INHERITED, OWN
from verl_keys import GROUPS, VERL_KEYS

from meshrl.algorithms import compute_advantage
from meshrl.algorithms.rollout_correction import compute_rollout_correction_weights
from meshrl.config import check_config, load_config
from meshrl.config.keys import get_value, leaves, sections, set_value
from meshrl.config.rl import PPOConfig
from meshrl.config.supervised import SFTConfig
from meshrl.config.validate import check_notes
from meshrl.config.verl_names import ALIASES, canonical, read_setting
from meshrl.tools.migrate.migrate import PROGRAMS

DOCS = Path(__file__).parents[2] / "docs"
KEYS = leaves(PPOConfig)
TRL_KEYS = {*OWN, *INHERITED}


def shown(value):
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def rows_of(page):
    """(heading, cells) of every row of the tables under a heading, the marks of code taken off."""
    heading = ""
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            heading = line.strip("#` ")
        elif line.startswith("| `"):
            yield heading, [cell.strip().strip("`") for cell in line.strip("|").split("|")]


VERL_ROWS = [(group, cells) for group, cells in rows_of(DOCS / "migrate_verl.md") if group in GROUPS]


@pytest.mark.parametrize(("group", "cells"), VERL_ROWS, ids=lambda value: value if isinstance(value, str) else value[0])
def test_verl_rows(group, cells):
    name, ours, default, own_default, remark = cells
    theirs = f"{group}.{name}"
    assert default == VERL_KEYS[theirs]
    if ours == "not needed":
        assert read_setting(theirs, default).name is None
        assert (own_default, bool(remark)) == ("", True)
        return
    assert (theirs if ours == "same" else ours) == canonical(theirs)
    assert own_default == shown(KEYS[canonical(theirs)].default)
    assert ("refused" in remark) == bool(KEYS[canonical(theirs)].pending)


def test_every_verl_key_has_its_row():
    assert [f"{group}.{cells[0]}" for group, cells in VERL_ROWS] == list(VERL_KEYS)


TRL_PAGE = (DOCS / "migrate_trl.md").read_text()


def trl_rows():
    return [cells for heading, cells in rows_of(DOCS / "migrate_trl.md") if heading == "Key by key" and len(cells) == 3]


def test_trl_rows():
    rows = [cells for cells in trl_rows() if not cells[0].partition("`")[0].startswith(("sequence_", "token_"))]
    assert len(rows) > 40
    for theirs, ours, _ in rows:
        assert theirs in TRL_KEYS, theirs
        assert ours in KEYS, ours


def test_every_field_of_trls_config_is_on_the_page():
    """In the table with our key, or under what is not here; in no third place."""
    named = {cells[0] for cells in trl_rows()}
    absent = TRL_PAGE.partition("## Not here")[2].partition("## ")[0]
    missing = {name for name in OWN if name not in named and f"`{name}`" not in absent}
    assert missing == set()
    assert {name for name in OWN if name in named and f"`{name}`" in absent} <= {"vllm_importance_sampling_clip_max"}


def test_the_list_is_that_of_the_real_package():
    """Where TRL is installed (the extra `trl`)."""
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments

    fields = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    factory = dataclasses.MISSING
    defaults = {
        name: field.default if field.default is not factory else field.default_factory()
        for name, field in fields.items()
        if name not in inherited
    }
    assert defaults == OWN
    assert set(INHERITED) <= set(fields)


def test_trls_defaults_are_said():
    rows = TRL_PAGE.partition("## Defaults that change the numbers")[2].partition("## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows if line.startswith("| `")]
    recipe = load_config("grpo").config
    assert len(cells) == 8
    for name, default, ours, own_default in cells:
        assert default.partition("`")[2].partition("`")[0] == str(OWN[name.strip("`")]), name
        if key := re.match(r"`([a-z_.]+)=", ours):
            assert own_default.strip("`") == shown(get_value(recipe, key[1])) or (
                own_default == "`null`" and get_value(recipe, key[1]) is None
            )


IS_ROWS = re.findall(r"^\| `((?:sequence|token)_\w+)`[^|]*\| `(\w+)` \| `([\w.-]+)` \|$", TRL_PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("mode", "level", "threshold"), IS_ROWS, ids=lambda value: value)
def test_trls_importance_sampling_is_what_the_page_says(mode, level, threshold):
    """TRL's ratio, of the sum over a sequence or of each token, cut or masked at clip_max, against our weights."""
    config = load_config("grpo", [f"algorithm.rollout_correction.rollout_is={level}",
                                  f"algorithm.rollout_correction.rollout_is_threshold={threshold}"]).config  # fmt: skip
    assert check_config(config, check_files=False) == []
    correction = config.algorithm.rollout_correction
    draws = np.random.default_rng(0)
    log_ratio, mask = draws.normal(0, 0.7, (40, 12)), draws.random((40, 12)) < 0.8
    mask[:, 0] = True
    masked = log_ratio * mask
    ratio = np.exp(masked.sum(1, keepdims=True) if mode.startswith("sequence") else masked) * np.ones_like(masked)
    most = OWN["vllm_importance_sampling_clip_max"]
    wanted = np.minimum(ratio, most) if mode.endswith("truncate") else np.where(ratio > most, 0.0, ratio)
    assert (ratio > most).any()
    weights, _ = compute_rollout_correction_weights(
        torch.from_numpy(log_ratio), torch.from_numpy(mask), level, correction.rollout_is_threshold
    )
    torch.testing.assert_close(weights, torch.from_numpy(wanted * mask))


def test_all_four_modes_are_on_the_page_and_trls_default_is_first():
    assert [mode for mode, _, _ in IS_ROWS] == ["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"]
    assert IS_ROWS[0][0] == OWN["vllm_importance_sampling_mode"]


def test_a_balancing_loss_under_fsdp_is_refused():
    """TRL adds the model config's own; what would ask for it here does nothing with FSDP, and is refused by name."""
    field = "actor_rollout_ref.model.override_config"
    for value in ("{router_aux_loss_coef: 0.001}", "{output_router_logits: true}"):
        (problem,) = check_config(load_config("grpo", [f"{field}={value}"]).config, check_files=False)
        assert "megatron.override_transformer_config.moe_aux_loss_coeff" in problem
    off = load_config("grpo", [f"{field}={{router_aux_loss_coef: 0.0}}"]).config
    assert check_config(off, check_files=False) == []
    there = "actor_rollout_ref.actor.megatron.override_transformer_config={moe_aux_loss_coeff: 0.001}"
    config = load_config("grpo", [there, "actor_rollout_ref.actor.strategy=megatron"]).config
    assert check_config(config, check_files=False) == []
    assert len(check_config(load_config("grpo", [there]).config, check_files=False)) == 1


@pytest.mark.parametrize(("asks", "noted"), [(True, True), (False, False)])
def test_a_balancing_loss_that_the_model_asks_for_is_noted(tmp_path, asks, noted):
    """TRL and Transformers add it where config.json says output_router_logits; nobody wrote that into our config."""
    shape = {"model_type": "qwen3_moe", "router_aux_loss_coef": 0.001, "output_router_logits": asks}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for root, name, role in ((PPOConfig, "actor_rollout_ref.model.path", "actor_rollout_ref.actor"),
                             (SFTConfig, "model.path", "engine")):  # fmt: skip
        loaded = load_config(None, [f"{name}={tmp_path}"], root)
        notes = [note for note in check_notes(loaded.config, loaded.sources) if "balanced experts" in note]
        assert len(notes) == noted
        assert all("router_aux_loss_coef=0.001" in note and note.startswith(f"{name}: ") for note in notes)
        coefficient = f"{role}.megatron.override_transformer_config={{moe_aux_loss_coeff: 0.001}}"
        loaded = load_config(None, [f"{name}={tmp_path}", coefficient, f"{role}.strategy=megatron"], root)
        assert not [note for note in check_notes(loaded.config, loaded.sources) if "balanced experts" in note]


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ("group", ["algorithm.norm_adv_by_std_in_grpo=true"]),
        ("none", ["algorithm.norm_adv_by_std_in_grpo=false"]),
        ("batch", ["algorithm.norm_adv_by_std_in_grpo=true", "algorithm.norm_adv_std_over=batch"]),
    ],
)
def test_trls_scaling_of_rewards(scale, words):
    """The formula of TRL's trainer, but for its epsilon of 1e-4."""
    config = load_config("grpo", words).config
    assert check_config(config, check_files=False) == []
    rewards = np.random.default_rng(1).random((3, 4))
    std = {"group": rewards.std(1, ddof=1, keepdims=True), "batch": rewards.std(ddof=1), "none": 1.0}[scale]
    wanted = (rewards - rewards.mean(1, keepdims=True)) / std
    found, _ = compute_advantage(
        "grpo", token_level_rewards=torch.from_numpy(rewards.reshape(-1, 1)), response_mask=torch.ones(12, 1),
        index=[n // 4 for n in range(12)], config=config.algorithm,
    )  # fmt: skip
    torch.testing.assert_close(found.double(), torch.from_numpy(wanted.reshape(-1, 1)), rtol=1e-4, atol=1e-5)


SFT_ROWS = [cells for heading, cells in rows_of(DOCS / "migrate_sft.md") if heading == "Key by key"]
KEYS_OF_SFT = leaves(SFTConfig)
SFT_KEYS = {**KEYS_OF_SFT, **sections(SFTConfig)}


@pytest.mark.parametrize("cells", SFT_ROWS, ids=lambda cells: cells[0])
def test_rows_of_the_supervised_page(cells):
    theirs, ours, remark = cells
    name, _, value = theirs.partition("=")
    reading = read_setting(name, True if name == "data.multiturn.enable" else value or "x")
    if ours == "not needed":
        assert reading.name is None or read_setting(name, True).name is None
        assert remark
        return
    wanted = name if ours == "same" else ours.partition("=")[0]
    assert reading.name == wanted
    assert wanted in SFT_KEYS


def sample(leaf):
    """A value of a key's type that is not its default."""
    if leaf.info.choices:
        choice = next(choice for choice in leaf.info.choices if choice != leaf.default)
        return [choice] if leaf.base_type is list else choice
    samples = {bool: not leaf.default, int: 2, float: 0.5, str: "some", list: ["some"]}
    return samples[leaf.base_type]


@pytest.mark.parametrize("cells", SFT_ROWS, ids=lambda cells: cells[0])
def test_rows_of_the_supervised_page_load(cells):
    """Each key with a value, as a user gives it: ours has that value afterwards, and the rest is as it was."""
    (theirs, _, said), (ours, _, _) = cells[0].partition("="), cells[1].partition("=")
    name = theirs if ours == "same" else ours
    default = load_config(None, [], SFTConfig).config
    if ours == "not needed":
        loaded = load_config(None, [f"{theirs}={said or 'true'}"], SFTConfig)
        assert loaded.config == default
        assert loaded.notes
    elif name in KEYS_OF_SFT:
        leaf = KEYS_OF_SFT[name]
        value = cells[1].partition("=")[2] or ("messages" if theirs == "data.multiturn.enable" else sample(leaf))
        given = said or (True if theirs == "data.multiturn.enable" else value)
        config = load_config(None, [f"{theirs}={json.dumps(given)}"], SFTConfig).config
        assert get_value(config, name) == value != leaf.default
        set_value(config, name, leaf.default)
        assert config == default
    else:
        below = [key for key in KEYS_OF_SFT if key.startswith(f"{name}.")]
        assert len(below) > 3
        for key in below:
            word = f"{theirs}{key.removeprefix(name)}={json.dumps(get_value(default, key))}"
            assert load_config(None, [word], SFTConfig).config == default


def plain(text):
    """A value as OmegaConf reads it; YAML alone takes 1e-5 for a text."""
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]


def test_defaults_of_the_supervised_page():
    page = (DOCS / "migrate_sft.md").read_text().partition("## Defaults that differ")[2].partition("## ")[0]
    lines = [line.strip("|") for line in page.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    ours, named = load_config(None, [], SFTConfig).config, set()
    for keys, *theirs, default in rows:
        for at, key in enumerate(re.findall(r"`([\w.]+)`", keys)):
            named.add(key)
            values = [re.findall(r"`([^`]+)`", cell) for cell in (*theirs, default)]
            assert plain(values[-1][at]) == get_value(ours, key), key
            for program, value in zip(("fsdp_sft_trainer", "sft_trainer"), values, strict=False):
                given = PROGRAMS[f"verl.trainer.{program}"].defaults.get(key)
                if given is not None and "as if" not in theirs[0]:
                    assert plain(value[at]) == given, (program, key)
    put_in = {key for name in ("fsdp_sft_trainer", "sft_trainer") for key in PROGRAMS[f"verl.trainer.{name}"].defaults}
    assert put_in <= named


@pytest.mark.parametrize(
    "page", ["migrate_verl", "migrate_sft", "migrate_trl", "troubleshooting", "tuning", "concepts"]
)
def test_keys_in_running_text_exist(page):
    """Whatever looks like a dotted key, in full or below its section, is one of ours or one that is understood."""
    known = [*KEYS, *leaves(SFTConfig), *(alias.old for alias in ALIASES)]
    ends = {name.split(".", at)[-1] for name in known for at in range(name.count(".") + 1)}
    sections = {end.rsplit(".", at)[0] for end in ends for at in range(end.count(".") + 1)}
    roots = {end.split(".")[0] for end in ends if "." in end}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`", (DOCS / f"{page}.md").read_text())
    wrong = [name for name in named if name.split(".")[0] in roots and canonical(name) not in ends | sections]
    assert not wrong
    assert named
