"""`actor.router_replay`: what a config with it must have, said before anything starts."""

import json

import pytest

from meshrl.config.load import load_config
from meshrl.config.validate import check_config
from meshrl.config.validate_model import MODE, replay_file_problems, replay_problems


def config_of(*overrides):
    return load_config("grpo", list(overrides)).config


def test_a_pass_that_is_left_out_records_nothing():
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    (problem,) = replay_problems(config_of(f"{MODE}=R2", bypass))
    assert "set R3" in problem
    assert replay_problems(config_of(f"{MODE}=R3", bypass)) == []
    assert replay_problems(config_of(f"{MODE}=R2")) == []
    assert problem in check_config(config_of(f"{MODE}=R2", bypass), check_files=False)


@pytest.mark.parametrize(
    ("fields", "has_experts"), [({"num_experts": 4}, True), ({}, False), ({"num_experts": 0}, False)]
)
def test_only_mixtures_of_experts_have_routes(tmp_path, fields, has_experts):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some", **fields}))
    path = f"actor_rollout_ref.model.path={tmp_path}"
    found = replay_file_problems(config_of(f"{MODE}=R3", path))
    assert (found == []) == has_experts
    assert all("(some) has no experts: set disabled" in problem for problem in found)
    assert replay_file_problems(config_of(path)) == []


def test_a_damaged_config_file_is_reported_beside_the_other_problems(tmp_path):
    (tmp_path / "config.json").write_text("{")
    path = f"actor_rollout_ref.model.path={tmp_path}"
    for setting in (f"{MODE}=R3", "actor_rollout_ref.rollout.quantization=fp8"):
        found = check_config(config_of(setting, path, "data.train_batch_size=7"))
        assert any("config.json" in problem for problem in found)
        assert any("data.train_batch_size" in problem for problem in found)
