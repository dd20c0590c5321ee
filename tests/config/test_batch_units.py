"""Batch units against a plain count of samples dealt out one by one."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.config import BatchUnits, ConfigError, PPOConfig, SFTConfig, SupervisedBatchUnits, load_config
from meshrl.config.batch_sizes import batch_problems, dp_size, layout_lines, mesh_axes
from meshrl.config.keys import count
from meshrl.config.show import summary_lines

small = st.integers(1, 6)


def config_of(prompts: int, mini: int, n: int, world: int, ulysses: int = 1, epochs: int = 1) -> PPOConfig:
    config = PPOConfig()
    config.algorithm.adv_estimator = "grpo"
    config.data.train_batch_size = prompts
    config.actor_rollout_ref.actor.ppo_mini_batch_size = mini
    config.actor_rollout_ref.actor.ppo_epochs = epochs
    config.actor_rollout_ref.actor.use_dynamic_bsz = True
    config.actor_rollout_ref.actor.ulysses_sequence_parallel_size = ulysses
    config.actor_rollout_ref.rollout.n = n
    config.trainer.n_gpus_per_node = world
    return config


def deal(prompts: int, mini: int, n: int, ranks: int, epochs: int) -> list[list[list[int]]]:
    """Samples by optimizer step and rank, dealt out one by one."""
    steps = []
    for _ in range(epochs):
        for start in range(0, prompts, mini):
            shares: list[list[int]] = [[] for _ in range(ranks)]
            for i, sample in enumerate(range(start * n, min(start + mini, prompts) * n)):
                shares[i % ranks].append(sample)
            steps.append(shares)
    return steps


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.integers(1, 24), mini=small, n=small, ranks=small, ulysses=st.integers(1, 3), epochs=st.integers(1, 3)
)
def test_units_equal_a_plain_count(prompts: int, mini: int, n: int, ranks: int, ulysses: int, epochs: int) -> None:
    config = config_of(prompts, mini, n, ranks * ulysses, ulysses, epochs)
    steps = deal(prompts, mini, n, ranks, epochs)
    counts = {len(share) for shares in steps for share in shares}
    if len(counts) > 1 or prompts % mini:
        assert batch_problems(config)
        with pytest.raises(ConfigError):
            BatchUnits.from_config(config)
        return
    units = BatchUnits.from_config(config)
    assert units.dp_size == ranks
    assert units.optimizer_steps_per_step == len(steps)
    assert {units.samples_per_mini_batch_per_rank} == counts
    assert units.samples_per_mini_batch == sum(len(share) for share in steps[0])
    assert units.samples_per_step == units.samples_per_rank * ranks == prompts * n
    assert units.samples_per_rank * epochs == sum(len(shares[0]) for shares in steps)


def test_micro_batches_are_counted_by_samples_or_by_tokens() -> None:
    config = config_of(8, 4, 2, 2)
    by_tokens = BatchUnits.from_config(config)
    assert (by_tokens.samples_per_micro_batch, by_tokens.tokens_per_micro_batch) == (None, 16384)
    config.actor_rollout_ref.actor.use_dynamic_bsz = False
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 2
    by_samples = BatchUnits.from_config(config)
    assert (by_samples.samples_per_micro_batch, by_samples.tokens_per_micro_batch) == (2, None)
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 3
    with pytest.raises(ConfigError, match=r"\(4 \* 2 / 2 = 4\).*ppo_micro_batch_size_per_gpu \(3\)"):
        BatchUnits.from_config(config)


def test_units_never_change() -> None:
    units = BatchUnits.from_config(config_of(8, 4, 2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        units.dp_size = 3  # type: ignore[misc]


def test_units_in_words() -> None:
    assert BatchUnits.from_config(config_of(8, 4, 2, 2)).lines() == [
        "step: 8 prompts * 2 responses = 16 samples, 8 on each of 2 data-parallel ranks",
        "mini-batch: 4 prompts = 8 samples, 4 on each rank, in micro-batches of up to 16384 tokens a rank",
        "optimizer steps per step: 2 mini-batches * 1 epoch = 2",
    ]


def test_megatron_layout() -> None:
    config = config_of(8, 4, 2, 64)
    actor = config.actor_rollout_ref.actor
    actor.strategy = "megatron"
    actor.megatron.tensor_model_parallel_size = 4
    actor.megatron.pipeline_model_parallel_size = 2
    actor.megatron.context_parallel_size = 2
    assert dp_size(actor, 64) == 4
    assert mesh_axes(actor, 64) == {"pp": 2, "dp": 4, "cp": 2, "tp": 4}
    assert BatchUnits.from_config(config).samples_per_mini_batch_per_rank == 2


def test_sft_units() -> None:
    config = load_config(None, ["data.train_batch_size=24", "trainer.n_gpus_per_node=3"], SFTConfig).config
    units = SupervisedBatchUnits.from_config(config)
    assert (units.rows_per_rank, units.dp_size, units.tokens_per_micro_batch) == (8, 3, 8192)
    assert units.lines() == [
        "step: 24 sequences, 8 on each of 3 data-parallel ranks, in micro-batches of up to 8192 tokens a rank"
    ]
    config.data.micro_batch_size_per_gpu = 4
    assert SupervisedBatchUnits.from_config(config).rows_per_micro_batch == 4
    config.data.train_batch_size = 25
    with pytest.raises(ConfigError, match=r"25 sequences.*\(3 = trainer.nnodes \* n_gpus_per_node\)"):
        SupervisedBatchUnits.from_config(config)


def test_summary_names_layout_units_and_folder() -> None:
    lines = summary_lines(load_config("grpo", ["actor_rollout_ref.actor.fsdp_config.fsdp_size=4"]).config)
    text = "\n".join(lines)
    assert "processes: 1 node * 8 = 8" in text
    assert "weights sharded over 4, 2 copies" in text
    assert "1024 prompts * 8 responses = 8192 samples" in text
    assert "run folder: outputs/meshrl/run" in text
    assert "24 sequences" not in text


def test_one_is_told_in_the_singular() -> None:
    assert [count(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [count(2, noun) for noun in ("batch", "process")] == ["2 batches", "2 processes"]
    config = load_config("grpo", ["trainer.n_gpus_per_node=1", "data.train_batch_size=1"]).config
    assert "actor: fsdp2 on 1 rank = " in "\n".join(layout_lines("actor", config.actor_rollout_ref.actor, 1))
    assert any("data.train_batch_size (1 prompt) must be" in problem for problem in batch_problems(config))
