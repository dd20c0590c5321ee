"""A checkpoint of the FSDP engine goes on where it stopped, on the layout that wrote it and on others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_fsdp_engine import make_trial

from meshrl.algorithms import BatchStats
from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.tools.verify import TEMPERATURE, Trial, _loss_function, relative_difference, small_config, write_model

STEPS, SAVED_AT = 3, 2


def steps(trial: Trial, start: int, stop: int, load: str | None, save: str | None, save_at: int = 0, wreck=False):
    """Runs steps [start, stop), and saves before the one at `save_at`.

    Returns losses, weights and one random number drawn afterwards.
    """
    total = STEPS + 1
    engine = FSDPEngine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"), total_steps=total, seed=5)
    engine.initialize()
    if load:
        engine.load_checkpoint(Path(load), ("model", "extra") if wreck else ("model", "optimizer", "extra"))
    losses = []
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
        engine.optimizer_zero_grad()
        if save and save_at == number + 1:
            torch.manual_seed(save_at)
            engine.save_checkpoint(Path(save))
    return losses, {name: value.clone() for name, value in engine.per_tensor_params()}, float(torch.rand(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(small_config("qwen3"), tmp_path_factory.mktemp("model") / "qwen3")


PAIRS = [
    ("one", "one", "plain"), ("fsdp2", "fsdp2", "plain"), ("fsdp1", "fsdp1", "plain"), ("fsdp2", "fsdp2", "lora"),
    ("one", "fsdp2", "plain"), ("fsdp4", "one", "plain"), ("fsdp2", "ddp2-fsdp2", "plain"), ("sp2", "fsdp2", "plain"),
    ("fsdp1", "fsdp4", "plain"), ("fsdp2", "one", "lora"),
    # Ranks of a sequence once held the same shard, as two copies do.
    ("ddp2-sp2", "fsdp2-sp2", "plain"), ("sp2-cp2", "fsdp1-sp2", "plain"), ("fsdp1-ddp2-sp2", "one", "plain"),
    ("fsdp2-sp2", "ddp2-sp4", "lora"),
]  # fmt: skip


def cosine_trial(folder, layout, extra):
    world, trial = make_trial(folder, layout, extra)
    return world, replace(trial, optim=replace(trial.optim, lr_scheduler_type="cosine"), samples=4)


@pytest.fixture(scope="module")
def written(ranks, folder, tmp_path_factory):
    """All steps on a layout, and the checkpoint saved on the way, made once."""
    known = {}

    def find(layout, extra):
        if (layout, extra) not in known:
            world, trial = cosine_trial(folder, layout, extra)
            path = str(tmp_path_factory.mktemp("checkpoint") / "saved")
            known[layout, extra] = ranks(world).run(steps, trial, 0, STEPS, None, path, SAVED_AT)[0], path
        return known[layout, extra]

    return find


@pytest.mark.parametrize(("written_by", "read_by", "extra"), PAIRS)
def test_goes_on_where_it_stopped(ranks, folder, written, written_by, read_by, extra):
    whole, path = written(written_by, extra)
    other_world, other = cosine_trial(folder, read_by, extra)
    for losses, weights, _ in ranks(other_world).run(steps, other, SAVED_AT, STEPS, path, None):
        if written_by == read_by:
            assert losses == whole[0][SAVED_AT:]
            assert all(torch.equal(weights[name], whole[1][name]) for name in weights)
        else:
            # The loss is a difference of terms of order one.
            assert losses == pytest.approx(whole[0][SAVED_AT:], rel=1e-5, abs=1e-6)
            assert max(relative_difference(weights[n], whole[1][n]) for n in weights) <= 1e-5
    # Control: without the optimizer's states the same steps end elsewhere.
    wrecked = ranks(other_world).run(steps, other, SAVED_AT, STEPS, path, None, wreck=True)[0]
    assert max(relative_difference(wrecked[1][n], whole[1][n]) for n in wrecked[1]) > 1e-3


def test_random_states_come_back(ranks, folder, tmp_path):
    world, trial = make_trial(folder, "fsdp2", "plain")
    saved = ranks(world).run(steps, trial, 0, 1, None, str(tmp_path / "at1"), 1)
    loaded = ranks(world).run(steps, trial, 1, 1, str(tmp_path / "at1"), None)
    assert [random for *_, random in loaded] == [random for *_, random in saved]


def test_missing_folder_is_named(ranks, folder, tmp_path):
    _, trial = make_trial(folder, "one", "plain")
    with pytest.raises(AssertionError, match="no checkpoint at"):
        ranks(1).run(steps, trial, 0, 1, str(tmp_path / "nowhere"), None)
