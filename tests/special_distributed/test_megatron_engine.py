"""The Megatron engine on every axis of the layouts against one process running Hugging Face's own model."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_trials import MODELS, megatron_trial, run_megatron, write_small_model

from meshrl.trainer.verify import TOLERANCE
from meshrl.workers.verification import differences, run_reference

# The batches say to which experts most of their tokens go, and are to find out where they would go by themselves.
ROUTED = {"routed": True}
UNEVEN = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 5}
LAYOUTS = {
    "one": (1, "qwen2", {}),
    "recompute": (1, "qwen3", {"recompute": True}),
    "tp2": (2, "llama", {"tp": 2, "sp": False}),
    "tp2-sp": (2, "qwen2", {"tp": 2}),
    "tp4-kv2": (4, "qwen3", {"tp": 4}),
    "pp2": (2, "llama", {"pp": 2}),
    "pp4": (4, "qwen3", {"pp": 4}),
    "pp2-vpp2": (2, "qwen3", {"pp": 2, "vpp": 2}),
    "pp4-vpp2": (4, "qwen3_deep", {"pp": 4, "vpp": 2}),
    "pp2-uneven": (2, "qwen3_deep", {"pp": 2, "override_transformer_config": UNEVEN}),
    "pp2-layout": (2, "qwen2", {"pp": 2, "override_transformer_config": {"pipeline_model_parallel_layout": "Et|t*3L"}}),
    "cp2": (2, "qwen3", {"cp": 2}),
    "cp2-window": (2, "mistral", {"cp": 2}),
    "tp2-pp2": (4, "qwen2", {"tp": 2, "pp": 2}),
    "tp2-pp2-vpp2": (4, "qwen3", {"tp": 2, "pp": 2, "vpp": 2}),
    "tp2-cp2": (4, "qwen3", {"tp": 2, "cp": 2}),
    "dp2": (2, "qwen3", {"distopt": False}),
    "dp2-distopt": (2, "llama", {}),
    "dp2-overlap": (2, "qwen2", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "pp2-vpp2-overlap": (4, "qwen3", {"pp": 2, "vpp": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2-pp2-dp2": (8, "qwen3", {"tp": 2, "pp": 2}),
    "moe": (1, "qwen3_moe", {}),
    "mixtral": (1, "mixtral", {}),
    "llama3-rope": (1, "llama3_rope", {}),
    "yarn-rope": (2, "yarn_rope", {"cp": 2}),
    "ep2": (2, "qwen3_moe", {"ep": 2}),
    "ep4": (4, "qwen3_moe", {"ep": 4, **ROUTED}),
    "ep2-etp2": (4, "qwen3_moe", {"tp": 2, "ep": 2, "etp": 2}),
    "etp2": (2, "qwen3_moe", {"etp": 2}),
    "tp2-etp1": (2, "qwen3_moe", {"tp": 2, "etp": 1}),
    "tp2-pp2-ep2": (4, "mixtral", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    "tp2-pp2-cp2-ep4": (8, "qwen3_moe", {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1, "vpp": 2, **ROUTED}),
    "latent": (1, "deepseek_v3", {}),
    "latent-yarn": (1, "deepseek_yarn", {"recompute": True, **ROUTED}),
    "latent-tp2": (2, "deepseek_v3", {"tp": 2, **ROUTED}),
    "latent-pp2": (2, "deepseek_v3", {"pp": 2, "recompute": True, **ROUTED}),
    "latent-cp2": (2, "deepseek_yarn", {"cp": 2}),
    "latent-ep2": (2, "deepseek_v3", {"ep": 2}),
    "latent-tp2-pp2-ep2": (
        4,
        "deepseek_v3",
        {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1, "recompute": True, **ROUTED},
    ),
    "latent-tp2-cp2": (4, "deepseek_yarn", {"tp": 2, "cp": 2, "ep": 4, "etp": 1}),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("megatron-models")
    return {name: write_small_model(name, root / name) for name in MODELS}


@pytest.fixture(scope="session")
def references():
    return {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_numbers_as_one_process(megatron_ranks, folders, references, layout):
    world, family, axes = LAYOUTS[layout]
    axes = dict(axes)
    recompute, routed = axes.pop("recompute", False), axes.pop("routed", False)
    trial = megatron_trial(folders[family], axes, enable_gradient_checkpointing=recompute)
    trial = replace(trial, with_routes=routed)
    if (family, routed) not in references:
        references[family, routed] = run_reference(trial), run_reference(trial, perturb=1e-3)
    expected, perturbed = references[family, routed]
    outcomes = megatron_ranks(world).run(run_megatron, trial, timeout=120)
    found = differences(outcomes, expected)
    assert max(found.values()) <= TOLERANCE, found
    control = differences(outcomes, perturbed)
    assert min(value for name, value in control.items() if found[name] > 0) > TOLERANCE, control


def gather_two_bytes():
    from meshrl.engines.megatron.routes import gathered

    rank = dist.get_rank()
    routes = torch.arange(6, dtype=torch.int16).view(3, 1, 2) + 1000 * rank
    return gathered(routes, dist.group.WORLD).tolist()


def test_routes_of_two_bytes_are_gathered(megatron_ranks):
    """Those of 256 experts and more; collectives know no such numbers."""
    first = [[[0, 1]], [[2, 3]], [[4, 5]]]
    expected = first + [[[value + 1000 for value in chosen] for chosen in token] for token in first]
    assert megatron_ranks(2).run(gather_two_bytes) == [expected, expected]
