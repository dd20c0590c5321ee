"""The pages for those who come from verl and TRL name keys that exist on both sides, with the defaults they have."""

import re
from pathlib import Path

import pytest
from verl_keys import GROUPS, VERL_KEYS

from meshrl.config.aliases import ALIASES, canonical, read_setting
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SFTConfig
from meshrl.config.tree import leaves

DOCS = Path(__file__).parents[2] / "docs"
KEYS = leaves(PPOConfig)
# The fields of TRL 1.16's GRPOConfig, and those it inherits from transformers' TrainingArguments that the page names.
TRL_NAMES = """
    learning_rate trust_remote_code num_generations num_generations_eval max_completion_length shuffle_dataset
    chat_template_kwargs generation_batch_size steps_per_generation temperature top_p top_k min_p
    repetition_penalty generation_kwargs use_vllm vllm_mode vllm_enable_sleep_mode vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta
    epsilon_high sapo_temperature_neg sapo_temperature_pos importance_sampling_level reward_weights
    multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy max_tool_calling_iterations
    vllm_importance_sampling_correction vllm_importance_sampling_clip_max log_completions gradient_checkpointing bf16
    max_steps num_train_epochs seed output_dir report_to save_steps save_total_limit eval_steps max_grad_norm
    weight_decay warmup_steps lr_scheduler_type per_device_train_batch_size gradient_accumulation_steps"""
TRL_KEYS = set(TRL_NAMES.split())


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


def test_trl_rows():
    rows = [cells for heading, cells in rows_of(DOCS / "migrate_trl.md") if heading == "Key by key" and len(cells) == 3]
    assert len(rows) > 40
    for theirs, ours, _ in rows:
        assert theirs in TRL_KEYS, theirs
        assert ours in KEYS, ours


@pytest.mark.parametrize("page", ["migrate_verl", "migrate_trl", "troubleshooting", "tuning", "concepts"])
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
