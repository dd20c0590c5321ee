"""A checkpoint of the Megatron engine goes on where it stopped, on the layout that wrote it and on others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_trials import megatron_trial, write_small_model

from meshrl.algorithms import BatchStats
from meshrl.tools.verify import TEMPERATURE, _loss_function, relative_difference

STEPS, SAVED_AT = 3, 2
DEPTH = {"qwen3": 4, "qwen3_moe": 2, "deepseek_v3": 4}  # four chunks of a pipeline; biases in both stages
LAYOUTS = {
    "tp2": (2, "qwen3", {"tp": 2}),
    "pp2-vpp2": (2, "qwen3", {"pp": 2, "vpp": 2}),
    "dp2-overlap": (2, "qwen3", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "dp2-plain": (2, "qwen3", {"distopt": False}),
    "one": (1, "qwen3", {}),
    "moe-ep2": (2, "qwen3_moe", {"ep": 2}),
    "moe-pp2": (2, "qwen3_moe", {"pp": 2}),
    "latent-tp2": (2, "deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}),
    "latent-pp2": (2, "deepseek_v3", {"pp": 2}),
}
PAIRS = [
    ("tp2", "tp2"),
    ("tp2", "pp2-vpp2"),
    ("pp2-vpp2", "dp2-overlap"),
    ("dp2-overlap", "one"),
    ("dp2-plain", "tp2"),
    ("moe-ep2", "moe-pp2"),
    ("latent-tp2", "latent-pp2"),
]


def steps(trial, start, stop, load, save, save_at=0, wreck=False):
    """Runs steps [start, stop), and saves before the one at `save_at`; returns losses and weights."""
    from meshrl.engines.megatron.megatron_engine import MegatronEngine
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    engine = MegatronEngine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"), total_steps=STEPS + 1)
    engine.initialize()
    if load:
        engine.load_checkpoint(Path(load), ("model", "extra") if wreck else ("model", "optimizer", "extra"))
    losses = []
    if save and save_at == start:
        engine.save_checkpoint(Path(save))
    for number, batch in list(enumerate(trial.batches(61) * 2))[start:stop]:
        mine = batch.chunk(engine.dp_size)[engine.dp_rank]
        mine.meta_info = {
            "temperature": TEMPERATURE,
            "use_dynamic_bsz": True,
            "max_token_len": trial.tokens_per_micro_batch,
            "calculate_entropy": True,
        }
        mask = batch.batch["response_mask"]
        stats = BatchStats(engine.gradient_ranks, int(mask.sum()), len(mask))
        engine.optimizer_zero_grad()
        losses.append(engine.forward_backward_batch(mine, _loss_function(stats)).metrics["loss"])
        engine.optimizer_step()
        engine.lr_scheduler_step()
        if save and save_at == number + 1:
            engine.save_checkpoint(Path(save))
    weights = {name: value.clone() for name, value in engine.per_tensor_params()}
    leave_parallel_state()
    return losses, weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("megatron-checkpoint-models")
    return {name: write_small_model(name, root / name, layers) for name, layers in DEPTH.items()}


def cosine_trial(folders, layout):
    world, family, axes = LAYOUTS[layout]
    trial = megatron_trial(folders[family], axes)
    return world, replace(trial, optim=replace(trial.optim, lr_scheduler_type="cosine"), samples=4)


@pytest.fixture(scope="module")
def written(megatron_ranks, folders, tmp_path_factory):
    """All steps on a layout, and the checkpoint saved on the way, made once."""
    known = {}

    def find(layout):
        if layout not in known:
            world, trial = cosine_trial(folders, layout)
            path = str(tmp_path_factory.mktemp("checkpoint") / "saved")
            known[layout] = megatron_ranks(world).run(steps, trial, 0, STEPS, None, path, SAVED_AT)[0], path
        return known[layout]

    return find


@pytest.mark.parametrize(("written_by", "read_by"), PAIRS)
def test_goes_on_where_it_stopped(megatron_ranks, folders, written, written_by, read_by):
    whole, folder = written(written_by)
    other_world, other = cosine_trial(folders, read_by)
    for losses, weights in megatron_ranks(other_world).run(steps, other, SAVED_AT, STEPS, folder, None):
        # The loss is a difference of terms of order one.
        assert losses == pytest.approx(whole[0][SAVED_AT:], rel=1e-5, abs=1e-6)
        assert max(relative_difference(weights[n], whole[1][n]) for n in weights) <= 1e-5
    # Control: without the optimizer's states the same steps end elsewhere.
    wrecked = megatron_ranks(other_world).run(steps, other, SAVED_AT, STEPS, folder, None, wreck=True)[0]
    assert max(relative_difference(wrecked[1][n], whole[1][n]) for n in wrecked[1]) > 1e-3


def told(trial, load):
    """What loading a checkpoint says, on this rank."""
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    try:
        steps(trial, 0, 0, load, None)
    except ValueError as error:
        leave_parallel_state()
        return str(error)
    return "loaded"


@pytest.mark.parametrize(("layout", "world"), [({"tp": 2}, 2), ({"pp": 2}, 2)])
def test_a_checkpoint_of_a_deeper_model_is_refused(megatron_ranks, folders, tmp_path, layout, world):
    """Every rank says so, also the one whose own layers are all there."""
    megatron_ranks(2).run(steps, cosine_trial(folders, "tp2")[1], 0, 0, None, str(tmp_path / "at0"))
    depth = json.loads((folders["qwen3"] / "config.json").read_text())["num_hidden_layers"]
    fewer = {"override_config": {"num_hidden_layers": depth // 2}, "random_init": True}
    answers = megatron_ranks(world).run(told, megatron_trial(folders["qwen3"], layout, **fewer), str(tmp_path / "at0"))
    assert all("is of another model: it holds" in answer for answer in answers)
    same = megatron_trial(folders["qwen3"], layout, random_init=True)
    assert megatron_ranks(world).run(told, same, str(tmp_path / "at0")) == ["loaded"] * world
