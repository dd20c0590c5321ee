"""The Megatron engine on every axis of the layouts against one process running Hugging Face's own model."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from megatron_trials import MODELS, layers_for, megatron_trial, run_megatron, write_small_model

from meshrl.tools.verify import TOLERANCE, differences, run_reference

# The batches say to which experts most of their tokens go, and are to find out where they would go by themselves.
ROUTED = {"routed": True}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# A covering set: what it covers is asserted in test_every_axis_and_pair_is_in_the_grid.
LAYOUTS = {
    "one": (1, "qwen2", {}),
    "recompute": (1, "qwen3", {"recompute": True}),
    "llama3-rope": (1, "llama3_rope", {}),
    "tp2": (2, "llama", {"tp": 2, "sp": False}),
    "tp4-kv2": (4, "qwen3", {"tp": 4}),
    "pp4": (4, "qwen3", {"pp": 4}),
    "pp4-vpp2": (4, "qwen3", {"pp": 4, "vpp": 2}),
    "pp2-uneven": (2, "llama", {"pp": 2, "layers": 4, "override_transformer_config": UNEVEN}),
    "pp2-layout": (
        2,
        "qwen2",
        {"pp": 2, "layers": 4, "override_transformer_config": {"pipeline_model_parallel_layout": "Et|t*3L"}},
    ),
    "cp2-window": (2, "mistral", {"cp": 2}),
    "dp2": (2, "qwen3", {"distopt": False}),
    "dp2-overlap": (2, "qwen2", OVERLAP),
    "tp2-pp2": (4, "qwen2", {"tp": 2, "pp": 2}),
    "tp2-cp2": (4, "qwen3", {"tp": 2, "cp": 2}),
    "tp2-dp2": (4, "llama", {"tp": 2}),
    "pp2-vpp2-dp2-overlap": (4, "qwen3", {"pp": 2, "vpp": 2, **OVERLAP}),
    "yarn-rope-cp2-dp2": (4, "yarn_rope", {"cp": 2}),
    "ep4": (4, "qwen3_moe", {"ep": 4, **ROUTED}),
    "etp2": (2, "qwen3_moe", {"etp": 2}),
    "tp2-etp1": (2, "qwen3_moe", {"tp": 2, "etp": 1}),
    "ep2-etp2": (4, "qwen3_moe", {"tp": 2, "ep": 2, "etp": 2}),
    "tp2-pp2-ep2": (4, "mixtral", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    "all": (8, "qwen3_moe", {"tp": 2, "pp": 2, "vpp": 2, "cp": 2, "ep": 2, "etp": 2, **ROUTED}),
    "latent-pp2": (2, "deepseek_v3", {"pp": 2, "recompute": True, **ROUTED}),
    "latent-ep2": (2, "deepseek_v3", {"ep": 2}),
    "latent-tp2-pp2-ep2": (
        4,
        "deepseek_v3",
        {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1, "recompute": True, **ROUTED},
    ),
    "latent-tp2-cp2": (4, "deepseek_yarn", {"tp": 2, "cp": 2, "ep": 4, "etp": 1}),
}


def sizes_of(layout):
    """By axis; `dp` are ranks with samples of their own."""
    world, _, axes = LAYOUTS[layout]
    sizes = {name: axes.get(name, 1) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    return sizes | {"dp": world // (sizes["tp"] * sizes["pp"] * sizes["cp"])}


def test_every_axis_and_pair_is_in_the_grid():
    together = set()
    for layout in LAYOUTS:
        together |= set(combinations([name for name, size in sizes_of(layout).items() if size > 1], 2))
    assert together == set(combinations(["tp", "pp", "vpp", "cp", "ep", "etp", "dp"], 2))
    assert {family for _, family, _ in LAYOUTS.values()} == set(MODELS)
    latent = [layout for layout, (_, family, _) in LAYOUTS.items() if family.startswith("deepseek")]
    routed = [layout for layout, (*_, axes) in LAYOUTS.items() if axes.get("routed")]
    for layouts in (latent, routed):
        assert {name for layout in layouts for name, size in sizes_of(layout).items() if size > 1} >= {
            "tp", "pp", "vpp", "cp", "ep", "dp",
        }  # fmt: skip


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    root, known = tmp_path_factory.mktemp("megatron-models"), {}

    def find(family, layers):
        if (family, layers) not in known:
            known[family, layers] = write_small_model(family, root / f"{family}-{layers}", layers)
        return known[family, layers]

    return find


@pytest.fixture(scope="session")
def references():
    return {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_numbers_as_one_process(megatron_ranks, folder_of, references, layout):
    world, family, axes = LAYOUTS[layout]
    axes = dict(axes)
    recompute, routed = axes.pop("recompute", False), axes.pop("routed", False)
    layers = axes.pop("layers", layers_for(axes))
    trial = megatron_trial(folder_of(family, layers), axes, enable_gradient_checkpointing=recompute)
    # Two micro-batches at least: where all samples are on one rank, of twice the tokens; a pipeline has more.
    is_cut = any(sizes_of(layout)[axis] > 1 for axis in ("pp", "cp", "dp"))
    trial = replace(trial, with_routes=routed, tokens_per_micro_batch=30 if is_cut else 60)
    key = family, layers, routed
    if key not in references:
        references[key] = run_reference(trial), run_reference(trial, perturb=1e-3)
    expected, perturbed = references[key]
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
