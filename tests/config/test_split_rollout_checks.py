"""What is checked of a rollout over several ranks before anything starts."""

import pytest

from meshrl.config import ConfigError, check_config, ensure_runnable, unsupported

ROLLOUT = "actor_rollout_ref.rollout"
SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
SPREAD = f"{ROLLOUT}.expert_parallel_size"
APART = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1")
SHAPE = {"model_type": "qwen3", "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 41}

MOE = {"model_type": "qwen3_moe", "num_experts": 4}

BROKEN = [
    ([f"{SIZE}=3"], {"num_key_value_heads": 3}, "n_gpus (8 = ", "_parallel_size (3)"),
    ([f"{SIZE}=8"], {"vocab_size": 64}, "num_attention_heads (12)", "(8)"),
    ([f"{SIZE}=4"], {"intermediate_size": 98}, "intermediate_size (98)", "(4)"),
    ([f"{SIZE}=4"], {"num_key_value_heads": 6}, "num_key_value_heads (6)", "(4)"),
    ([f"{SIZE}=4"], {"vocab_size": 9}, "vocab_size (9)", "4 ranks"),
    ([f"{SIZE}=2"], {"model_type": "qwen3_moe"}, "a qwen3_moe model cannot be cut", "set it to 1"),
    ([f"{SIZE}=8", f"{ROLLOUT}.name=vllm"], {"vocab_size": 64}, "num_attention_heads (12)", "(8)"),
    ([f"{SIZE}=2", "actor_rollout_ref.model.lora_rank=4"], {}, "update_weights_adapters=merged", "not alone"),
    (
        [f"{SIZE}=2", f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.tools=[math:sqrt]"],
        {},
        "multi_turn.enable=true",
        "same requests",
    ),
    ([f"{SIZE}=2", *APART, f"{ROLLOUT}.n_gpus_per_node=3"], {}, "n_gpus_per_node (3)", "_parallel_size (2)"),
    (
        [f"{SPREAD}=3"],
        MOE | {"num_experts": 6},
        "divisible by actor_rollout_ref.rollout.expert_parallel",
        "_parallel_size (3)",
    ),
    ([f"{SPREAD}=2"], {}, f"{SPREAD}=2", "(qwen3) has no experts"),
    ([f"{SPREAD}=4"], MOE | {"num_experts": 6}, "num_experts (6)", "(4)"),
    ([f"{SPREAD}=2", f"{SIZE}=2"], MOE | {"model_type": "qwen3"}, "leaves all else whole", f"{SIZE}=1, not 2"),
    ([f"{SPREAD}=2", f"{ROLLOUT}.name=vllm"], MOE, f"{SPREAD}=2", f"needs {SIZE}=2, not 1"),
    ([f"{SPREAD}=2", "actor_rollout_ref.model.lora_rank=4"], MOE, f"{SPREAD}=2", "update_weights_adapters=merged"),
    (
        [f"{SPREAD}=2", *APART, f"{ROLLOUT}.n_gpus_per_node=2", "async_training.max_staleness=1"],
        MOE,
        f"{SPREAD}=2",
        "async_training",
    ),
    (
        [f"{SIZE}=2", *APART, f"{ROLLOUT}.n_gpus_per_node=2", "async_training.max_staleness=1"],
        {},
        "async_training",
        "batches_ahead",
    ),
]


@pytest.mark.parametrize(("overrides", "fields", "first", "second"), BROKEN, ids=lambda part: str(part)[:50])
def test_one_thing_wrong_gives_one_line(fine, make_model, overrides, fields, first, second):
    config = fine(*overrides)
    make_model(**(SHAPE | fields))
    problems = check_config(config)
    assert len(problems) == 1, problems
    assert first in problems[0]
    assert second in problems[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{SIZE}=2"],
        [f"{SIZE}=4"],
        [f"{SIZE}=4", f"{ROLLOUT}.update_weights_adapters=merged", "actor_rollout_ref.model.lora_rank=4"],
        [f"{SIZE}=2", *APART, f"{ROLLOUT}.n_gpus_per_node=4"],
        [f"{SIZE}=4", f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.lora_rank=4"],
        [f"{SIZE}=2", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.as_server=false"],
    ],
    ids=str,
)
def test_what_can_be_cut_is_fine(fine, make_model, overrides):
    config = fine(*overrides)
    make_model(**SHAPE)
    assert unsupported(config) + check_config(config) == []


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{SPREAD}=2"],
        [f"{SPREAD}=4", *APART, f"{ROLLOUT}.n_gpus_per_node=4"],
        [f"{SPREAD}=4", f"{SIZE}=4", f"{ROLLOUT}.name=vllm"],
    ],
    ids=str,
)
def test_experts_can_be_spread(fine, make_model, overrides):
    config = fine(*overrides)
    make_model(**(SHAPE | MOE))
    assert unsupported(config) + check_config(config) == []


@pytest.mark.parametrize(("key", "name"), [(SIZE, "hf"), (SPREAD, "sglang")])
def test_other_engines_over_ranks_are_refused(fine, key, name):
    config = fine(f"{key}=2", f"{ROLLOUT}.name={name}")
    (line,) = unsupported(config)
    assert line.startswith(f"not supported yet: {key}=2")
    assert name in line
    with pytest.raises(ConfigError):
        ensure_runnable(config)


SERVED = ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.as_server=true"], [f"{ROLLOUT}.name=sglang"])
TURNS = (f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.tools=[math:sqrt]")


@pytest.mark.parametrize("engine", SERVED, ids=str)
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        TURNS,
        ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", "trainer.backend=ray"],
        [*APART, f"{ROLLOUT}.n_gpus_per_node=4"],
    ],
    ids=str,
)
def test_an_engine_beside_its_ranks_may_be_cut_over_them(fine, make_model, engine, overrides):
    """Only one rank speaks with it, so that the others need not take the same steps."""
    config = fine(f"{SIZE}=2", *engine, *overrides)
    make_model(**SHAPE)
    assert unsupported(config) + check_config(config) == []


@pytest.mark.parametrize("engine", SERVED, ids=str)
def test_an_engine_beside_its_ranks_has_them_on_one_machine(fine, make_model, engine):
    nodes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=3", "trainer.backend=ray", "data.train_batch_size=48"]
    config = fine(f"{SIZE}=2", *engine, *nodes, "actor_rollout_ref.actor.ppo_mini_batch_size=48")
    make_model(**SHAPE)
    (problem,) = check_config(config)
    assert f"trainer.n_gpus_per_node (3) must be divisible by {SIZE}=2" in problem
    apart = fine(f"{SIZE}=2", *engine, "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=2",
                 f"{ROLLOUT}.n_gpus_per_node=3", "trainer.backend=ray")  # fmt: skip
    make_model(**SHAPE)
    (problem,) = check_config(apart)
    assert f"{ROLLOUT}.n_gpus_per_node (3) must be divisible by {SIZE}=2" in problem


def test_only_external_engines_can_be_servers(fine):
    problems = check_config(fine(f"{ROLLOUT}.as_server=true"))
    assert any("as_server" in line and "vllm" in line for line in problems), problems


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm", f"set {ROLLOUT}.as_server=true, or {SIZE}=1"),
        ("embedded", f"use {ROLLOUT}.name=vllm and as_server=true, or {SIZE}=1"),
    ],
)
def test_turns_on_a_cut_rollout_name_the_way_out(fine, name, words):
    """What the message says then loads."""
    cut = [f"{ROLLOUT}.name={name}", f"{SIZE}=2", *TURNS]
    (problem,) = check_config(fine(*cut), check_files=False)
    assert problem.endswith(words)
    assert check_config(fine(*cut, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.as_server=true"), check_files=False) == []
    assert check_config(fine(*cut, f"{SIZE}=1"), check_files=False) == []
