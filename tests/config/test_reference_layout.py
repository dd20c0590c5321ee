"""A reference's own layout: on devices of its own, in either engine, with sizes that divide."""

import pytest

from meshrl.config.batch_sizes import BatchUnits
from meshrl.config.load import load_config
from meshrl.config.validate import check_config

REF, ACTOR = "actor_rollout_ref.ref", "actor_rollout_ref.actor"
APART = (f"{REF}.nnodes=1", f"{REF}.n_gpus_per_node=8", f"{ACTOR}.use_kl_loss=true")


def config_of(*overrides):
    return load_config("grpo", ["trainer.n_gpus_per_node=4", *overrides]).config


def problems(*overrides):
    return check_config(config_of(*overrides), check_files=False)


def test_it_is_the_actors_unless_it_says_otherwise():
    config = config_of(*APART, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    policy = config.actor_rollout_ref
    assert policy.ref.engine(policy.actor) == policy.actor
    assert BatchUnits.from_config(config).ref_dp_size == 4
    config = config_of(*APART, f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{REF}.ulysses_sequence_parallel_size=8")
    policy = config.actor_rollout_ref
    assert policy.ref.engine(policy.actor).ulysses_sequence_parallel_size == 8
    assert policy.actor.ulysses_sequence_parallel_size == 2
    assert BatchUnits.from_config(config).ref_dp_size == 1
    assert BatchUnits.from_config(config).dp_size == 2


def test_a_teacher_in_the_other_engine_reads_the_actors_settings_of_it():
    pytest.importorskip("megatron.core")
    sizes = (f"{REF}.strategy=megatron", f"{REF}.megatron.tensor_model_parallel_size=4", f"{ACTOR}.megatron.dtype=fp32")
    assert problems(*APART, *sizes) == []
    config = config_of(*APART, *sizes)
    engine = config.actor_rollout_ref.ref.engine(config.actor_rollout_ref.actor)
    assert (engine.strategy, engine.megatron.tensor_model_parallel_size, engine.megatron.dtype) == (
        "megatron",
        4,
        "fp32",
    )
    assert BatchUnits.from_config(config).ref_dp_size == 2
    (problem,) = problems(*APART, f"{ACTOR}.megatron.dtype=fp32")
    assert "has no effect with actor_rollout_ref.actor.strategy=fsdp2" in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{REF}.ulysses_sequence_parallel_size=3"], f"{REF}.ulysses_sequence_parallel_size"),
        ([f"{REF}.fsdp_config.fsdp_size=3"], f"must be divisible by {REF}.fsdp_config.fsdp_size (3)"),
        ([f"{REF}.megatron.tensor_model_parallel_size=2"], f"has no effect with {REF}.strategy=fsdp2"),
    ],
)
def test_sizes_that_do_not_divide_or_are_not_read(overrides, words):
    (problem,) = problems(*APART, *overrides)
    assert words in problem


def test_on_the_policys_devices_it_has_the_actors():
    (problem,) = problems(f"{ACTOR}.use_kl_loss=true", f"{REF}.ulysses_sequence_parallel_size=2")
    assert f"must say what {ACTOR}.ulysses_sequence_parallel_size says (1)" in problem
    assert f"give the reference devices ({REF}.nnodes)" in problem
    same = (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{REF}.ulysses_sequence_parallel_size=2")
    assert problems(f"{ACTOR}.use_kl_loss=true", *same) == []
