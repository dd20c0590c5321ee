"""Plans of models that see: the weights of what looks at images are counted wherever they lie."""

import json

import pytest
import torch
from test_plan_steps import BASE, phase
from transformers import AutoModelForImageTextToText

from meshrl.config.engine import ModelConfig
from meshrl.config.load import load_config
from meshrl.models.loading import load_model_config
from meshrl.models.tiny import make_tiny_seeing_model
from meshrl.telemetry.hardware import parse_cluster
from meshrl.tools.plan.models import drawn_lengths, find_model
from meshrl.tools.plan.step_plan import make_plan

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_seeing_model(tmp_path_factory.mktemp("seeing"), "abcdefgh", family="qwen2_5_vl")


def planned(folder, gpus, *overrides):
    cluster = parse_cluster(gpus)
    words = [
        *BASE,
        "data.max_prompt_length=24",
        "data.max_response_length=24",
        f"actor_rollout_ref.model.path={folder}",
        f"trainer.n_gpus_per_node={cluster.per_node}",
    ]
    config = load_config("grpo", [*words, *overrides]).config
    lengths = drawn_lengths(64 * config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.rollout.n, 24, 24, 12)
    model = find_model(config.actor_rollout_ref.model)
    return model, make_plan(config, model, cluster, lengths, quick=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_parameters_are_counted(tmp_path, family):
    folder = make_tiny_seeing_model(tmp_path, "abcdefgh", family=family)
    model = find_model(ModelConfig(path=str(folder)))
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(load_model_config(folder))
    assert model.num_params == sum(p.numel() for p in whole.parameters())
    assert model.tower_params == sum(p.numel() for p in whole.model.visual.parameters())
    assert 0 < model.tower_params < model.num_params
    assert "with the weights of what looks at images" in model.source


def test_a_tower_is_whole_on_every_rank_of_a_rollout(folder):
    model, one = planned(folder, "2xH100")
    _, two = planned(folder, "2xH100", f"{ROLLOUT}.tensor_model_parallel_size=2")
    held = [phase(plan, "generate").memory["rollout weights"] for plan in (one, two)]
    text = model.num_params - model.tower_params
    assert held[0] == 2 * model.num_params
    # Norms, which are whole as well, are small beside the matrices.
    assert 2 * model.tower_params + text <= held[1] < 2 * model.tower_params + 1.05 * text


def test_frozen_towers_have_no_moments_and_copies_in_8_bits_none_of_them(folder):
    model, plain = planned(folder, "1xH100")
    _, frozen = planned(folder, "1xH100", "actor_rollout_ref.actor.freeze_vision_tower=true")
    moments = [phase(plan, "update_actor").memory["optimizer"] for plan in (plain, frozen)]
    assert moments[0] - moments[1] == pytest.approx(10 * model.tower_params, rel=0.05)  # small ones are padded
    _, eight = planned(folder, "1xH100", f"{ROLLOUT}.quantization=fp8")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    dim = text["hidden_size"] // heads
    of_layer = text["hidden_size"] * (2 * heads * dim + 2 * kv_heads * dim + 3 * text["intermediate_size"])
    copy = phase(eight, "generate").memory["weights in 8 bits"]
    assert copy == text["num_hidden_layers"] * of_layer
