"""The policy's worker, alone: what the first step promises, and what happens to gradients that are not numbers."""

import numpy as np
import pytest
import torch

from meshrl.config.rollout import shares_weights
from meshrl.controller import ClassWithInitArgs, ResourcePool, WorkerError, create_worker_group
from meshrl.data.batch import DataProto
from meshrl.data.prompts import PromptDataset
from meshrl.models.loading import load_model, load_tokenizer
from meshrl.telemetry.device_stats import ProcessMeter
from meshrl.weights.colocated import over_ranks
from meshrl.workers.actor import ActorRolloutRefWorker
from meshrl.workers.setup import WorkerSettings

NAMES = ("input_ids", "attention_mask", "response_mask")


@pytest.fixture
def start(task, tmp_path):
    def make(mini_batches=1, *overrides):
        config = task.config(tmp_path, *overrides).actor_rollout_ref
        settings = WorkerSettings("cpu", 60.0, mini_batches, 10, True)
        group = create_worker_group(
            ResourcePool([1], use_gpu=False), ClassWithInitArgs(ActorRolloutRefWorker, config, settings)
        )
        group.init_model()
        group.sync_weights(0)
        return group

    return make


@pytest.fixture
def prompts(task, tmp_path):
    config = task.config(tmp_path)
    data = PromptDataset(config.data.train_files, load_tokenizer(task.model), config.data)
    prompts = data.batch(np.arange(13)).repeat(3)
    prompts.batch["seeds"] = torch.arange(len(prompts)) * 977
    return prompts


@pytest.fixture
def answers(prompts, start):
    group = start()
    return group, group.generate_sequences(prompts)


def with_advantages(data, old_log_probs=None):
    tensors = {name: data.batch[name] for name in NAMES}
    generator = torch.Generator().manual_seed(0)
    tensors["advantages"] = torch.randn(len(data), 1, generator=generator) * tensors["response_mask"]
    if old_log_probs is not None:
        tensors["old_log_probs"] = old_log_probs
    return DataProto.from_dict(tensors, meta_info={"measure_entropy": False})


def test_the_first_step_is_on_policy(answers):
    group, data = answers
    log_probs = group.compute_log_prob(data).batch["old_log_probs"]
    mask = data.batch["response_mask"]
    assert ((log_probs - data.batch["rollout_log_probs"]).abs() * mask).max() < 1e-5
    # the reference is the same model, so it must agree to the bit
    assert torch.equal(group.compute_ref_log_prob(data).batch["ref_log_prob"], log_probs)
    (metrics,) = group.update_actor(with_advantages(data, log_probs))
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/grad_norm"] > 0
    # the control: after that step the policy has moved
    (metrics,) = group.update_actor(with_advantages(data, log_probs))
    assert metrics["actor/ppo_kl"] != 0.0


def test_an_update_without_old_log_probs_is_the_on_policy_one(start, answers):
    group, data = answers
    other = start()
    given = group.update_actor(with_advantages(data, group.compute_log_prob(data).batch["old_log_probs"]))
    found = other.update_actor(with_advantages(data))
    assert given[0]["actor/grad_norm"] == found[0]["actor/grad_norm"]
    after = [g.compute_log_prob(data).batch["old_log_probs"] for g in (group, other)]
    assert torch.equal(*after)


def test_a_gradient_of_nan_is_skipped_and_counted(answers):
    group, data = answers
    before = group.compute_log_prob(data).batch["old_log_probs"]
    bad = with_advantages(data)
    bad.batch["advantages"][0] = float("nan")
    (metrics,) = group.update_actor(bad)
    assert metrics["actor/skipped_steps"] == 1
    assert torch.equal(group.compute_log_prob(data).batch["old_log_probs"], before)
    (metrics,) = group.update_actor(with_advantages(data))
    assert metrics["actor/skipped_steps"] == 0
    assert not torch.equal(group.compute_log_prob(data).batch["old_log_probs"], before)


def test_a_mini_batch_that_has_lost_all_its_samples_moves_nothing(answers):
    group, data = answers
    before = group.compute_log_prob(data).batch["old_log_probs"]
    empty = with_advantages(data)
    for name in ("response_mask", "advantages"):
        empty.batch[name] = torch.zeros_like(empty.batch[name])
    (metrics,) = group.update_actor(empty)
    assert metrics["actor/pg_loss"] == 0
    assert metrics["actor/grad_norm"] == 0
    # What was computed for no token is not measured as 0.
    assert not metrics.keys() & {"actor/entropy", "actor/ppo_kl", "actor/ppo_kl_before", "actor/pg_clipfrac"}
    assert torch.equal(group.compute_log_prob(data).batch["old_log_probs"], before)


def test_weights_reach_the_rollout_with_a_newer_version_only(answers):
    group, data = answers
    assert set(data.batch["versions"].unique().tolist()) == {-1, 0}
    group.update_actor(with_advantages(data))
    group.sync_weights(1)
    prompts = DataProto.from_dict(
        {
            "input_ids": data.batch["prompts"],
            "attention_mask": data.batch["attention_mask"][:, : data.batch["prompts"].shape[1]],
        }
    )
    prompts.batch["seeds"] = torch.arange(len(prompts)) * 977
    fresh = group.generate_sequences(prompts)
    assert fresh.batch["versions"].max() == 1
    found = group.compute_log_prob(fresh).batch["old_log_probs"]
    assert ((found - fresh.batch["rollout_log_probs"]).abs() * fresh.batch["response_mask"]).max() < 1e-5
    with pytest.raises((WorkerError, ValueError), match="not newer"):
        group.sync_weights(1)


def policy(task, tmp_path, world, *overrides):
    config = task.config(tmp_path, f"trainer.n_gpus_per_node={world}", *overrides).actor_rollout_ref
    settings = WorkerSettings("cpu", 60.0, 1, 10, True)
    group = create_worker_group(
        ResourcePool([world], use_gpu=False), ClassWithInitArgs(ActorRolloutRefWorker, config, settings)
    )
    group.init_model()
    return group


def some_prompts(task, tmp_path):
    config = task.config(tmp_path)
    prompts = PromptDataset(config.data.train_files, load_tokenizer(task.model), config.data).batch(np.arange(6))
    prompts.batch["seeds"] = torch.arange(len(prompts)) * 31
    return DataProto(prompts.batch.select("input_ids", "attention_mask", "seeds"), {}, {})


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, ()),
        (1, (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.update_weights_verify=false")),
        (2, (f"{ROLLOUT}.free_cache_engine=false", f"{ROLLOUT}.update_weights_delta=true")),
    ],
)
def test_training_and_generating_take_turns(task, tmp_path, world, overrides):
    group, prompts = policy(task, tmp_path, world, *overrides), some_prompts(task, tmp_path)
    frees = "free_cache_engine=false" not in "".join(overrides)
    bytes_of_weights = sum(p.numel() * 4 for p in load_model(task.model, "eager").parameters())

    def answer():
        data = group.generate_sequences(prompts)
        found = group.compute_log_prob(data).batch["old_log_probs"]
        mask = data.batch["response_mask"]
        assert ((found - data.batch["rollout_log_probs"]).abs() * mask).max() < 1e-5
        return data

    try:
        first = group.sync_weights(0)
        for metrics in first:
            copied, received = metrics["weight_sync/copied_bytes"], metrics["weight_sync/received_bytes"]
            assert copied + received == bytes_of_weights
            assert (received == 0) == (world == 1)
        data = answer()
        # That took the rollout's memory; it comes back to the same version.
        again = answer()
        assert torch.equal(again.batch["responses"], data.batch["responses"])
        assert again.batch["versions"].max() == 0
        group.update_actor(with_advantages(data))
        if frees:
            with pytest.raises((WorkerError, RuntimeError), match="gave version 0 up for an update"):
                group.generate_sequences(prompts)
        else:
            old = group.generate_sequences(prompts)
            assert torch.equal(old.batch["rollout_log_probs"], data.batch["rollout_log_probs"])
        metrics = over_ranks(group.sync_weights(1))
        assert metrics["weight_sync/version"] == 1
        if world == 2:
            # What the ranks lack of each other's halves. A step changes most numbers, but not all of their bits.
            whole = sum(m["weight_sync/received_bytes"] for m in first)
            assert (metrics["weight_sync/received_bytes"] == whole) == frees
            assert metrics["weight_sync/received_bytes"] <= whole
        new = answer()
        assert new.batch["versions"].max() == 1
        assert not torch.equal(new.batch["rollout_log_probs"], data.batch["rollout_log_probs"])
    finally:
        group.shutdown()


def test_with_adapters_the_base_travels_once(task, tmp_path):
    pytest.importorskip("peft")
    group = policy(task, tmp_path, 2, "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.01")
    prompts = some_prompts(task, tmp_path)
    received, log_probs = [], []
    try:
        for version in range(3):
            metrics = over_ranks(group.sync_weights(version))
            received.append(metrics["weight_sync/received_bytes"])
            data = group.generate_sequences(prompts)
            own = group.compute_log_prob(data).batch["old_log_probs"]
            assert ((own - data.batch["rollout_log_probs"]).abs() * data.batch["response_mask"]).max() < 1e-5
            log_probs.append(own)
            group.update_actor(with_advantages(data))
    finally:
        group.shutdown()
    assert received[1] == received[2] < 0.25 * received[0]
    assert not torch.equal(log_probs[0], log_probs[2])


def test_a_phase_that_takes_more_than_the_budget_ends_the_call(start, prompts, answers, monkeypatch):
    """In whichever phase it is; the worker's memory is told by hand."""
    _, data = answers
    used = dict.fromkeys(("now", "peak"), 10 << 30)
    for name, key in (("used", "now"), ("peak", "peak")):
        monkeypatch.setattr(ProcessMeter, name, lambda self, key=key: used[key])
    group = start(1, "actor_rollout_ref.memory_budget_gigabytes=12")
    calls = {
        "gen": lambda: group.generate_sequences(prompts),
        "switch_release": lambda: group.compute_log_prob(data),
        "old_log_prob": lambda: group.compute_log_prob(data),
        "ref": lambda: group.compute_ref_log_prob(data),
        "update_actor": lambda: group.update_actor(with_advantages(data)),
        "switch_load": lambda: group.sync_weights(5),
    }
    for phase, call in calls.items():
        used["peak"] = 13 << 30
        with pytest.raises(WorkerError, match=rf"phase '{phase}' took 13\.00 GiB \(10\.00 before it\)"):
            call()
        used["peak"] = 11 << 30
        call()
    group.start_generation(prompts)
    used["peak"] = 13 << 30
    with pytest.raises(WorkerError, match="phase 'gen' took 13"):
        group.take_generated(5.0)


PRECISION = "actor_rollout_ref.actor.fsdp_config.mixed_precision"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor_rollout_ref.rollout.dtype=bfloat16"],
        [f"{PRECISION}.param_dtype=bf16"],
        [f"{PRECISION}.param_dtype=bf16", "actor_rollout_ref.rollout.dtype=bfloat16"],
        [f"{PRECISION}.reduce_dtype=bf16"],
        ["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"],
        ["actor_rollout_ref.actor.fsdp_config.param_offload=true"],
        ["actor_rollout_ref.actor.fsdp_config.offload_policy=true"],
        ["actor_rollout_ref.actor.strategy=fsdp"],
        ["actor_rollout_ref.model.lora_rank=2"],
        ["actor_rollout_ref.rollout.name=hf"],
    ],
    ids=lambda overrides: " ".join(one.rpartition(".")[2] for one in overrides) or "plain",
)
def test_whether_the_rollout_lends_the_trainers_weights_is_known_from_the_config(task, tmp_path, start, overrides):
    worker = start(1, *overrides)._backend._worker
    assert worker.phases.shares_weights == shares_weights(task.config(tmp_path, *overrides))
