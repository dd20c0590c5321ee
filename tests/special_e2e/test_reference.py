"""References: a snapshot that is refreshed, weights of their own, and the policy without its adapters."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_algorithms_by_hand import TWO_MICRO_BATCHES
from test_layouts import SHORT, UNEVEN

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
KL = (
    *TWO_MICRO_BATCHES,
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_type=kl",
    "algorithm.rollout_correction.bypass_mode=false",
    "trainer.total_training_steps=4",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    f"{ACTOR}.optim.lr_warmup_steps=0",
    # One optimizer step a batch: the KL that is reported is that of the policy before the step.
    f"{ACTOR}.ppo_mini_batch_size=12",
)


def kls(run):
    return [row["actor/kl_loss"] for row in run.metrics]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_refreshed_reference_is_the_policy(task, tmp_path, processes):
    ranks = f"trainer.n_gpus_per_node={processes}"
    found = kls(task.train(tmp_path / "fresh", *UNEVEN, *KL, ranks, f"{REF}.update_every=2"))
    # Steps 1 and 3 begin with policy and reference alike; at 2 and 4 they are one step apart.
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[2] == pytest.approx(0, abs=1e-6)
    assert abs(found[1]) > 1e-5
    assert abs(found[3]) > 1e-5


def test_without_refreshing_it_stays(task, tmp_path):
    found = kls(task.train(tmp_path / "frozen", *UNEVEN, *KL, "trainer.total_training_steps=3"))
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert all(abs(value) > 1e-5 for value in found[1:])


def test_a_reference_from_other_weights(task, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in task.model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {n: w + 0.02 * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    one_step = (*SHORT, *KL, "trainer.total_training_steps=1")
    far = kls(task.train(tmp_path / "far", *one_step, f"{REF}.model.path={other}"))
    near = kls(task.train(tmp_path / "near", *one_step, f"{REF}.model.path={task.model}"))
    assert abs(far[0]) > 1e-3
    assert near[0] == pytest.approx(0, abs=1e-6)
    adapters = ("actor_rollout_ref.model.lora_rank=4", f"{REF}.model.path={other}")
    assert abs(kls(task.train(tmp_path / "lora", *one_step, *adapters))[0]) > 1e-3
