"""Runs of a policy whose layers carry a state: on every layout the same, and rollout and trainer agree."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

RUN = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "data.val_max_samples=9",
    # Nothing that it says is right, so the entropy alone moves its weights.
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "algorithm.rollout_correction.bypass_mode=false",
    "actor_rollout_ref.rollout.max_num_seqs=10",
)
DIFFERENCE = "training/rollout_log_prob_diff_max"


@pytest.fixture(scope="module")
def stateful(task, tmp_path_factory):
    """The override that names a Qwen3.5 with random weights, whose states last."""
    folder = tmp_path_factory.mktemp("stateful") / "model"
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for layer in (module for module in model.modules() if hasattr(module, "A_log")):
            torch.nn.init.uniform_(layer.A_log, -3, 0)
            torch.nn.init.normal_(layer.dt_bias)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


def steps(run):
    return [row for row in run.metrics if "actor/lr" in row]


def largest_difference(ours, theirs):
    return max(float((ours.weights[name] - weight).abs().max()) for name, weight in theirs.weights.items())


def test_rollout_and_trainer_agree_and_two_processes_equal_one(task, stateful, tmp_path):
    one = task.train(tmp_path / "one", *RUN, stateful)
    assert [row[DIFFERENCE] < 1e-5 for row in steps(one)] == [True, True]  # also with the second step's weights
    assert any(name.endswith("linear_attn.A_log") for name in one.weights)
    two = task.train(
        tmp_path / "two", *RUN, stateful, "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    )  # fmt: skip
    assert largest_difference(two, one) < 1e-5
    padded = ("actor_rollout_ref.model.use_remove_padding=false", "actor_rollout_ref.rollout.name=hf")
    theirs = task.train(tmp_path / "padded", *RUN, stateful, *padded)
    # Another rollout draws other samples; on its own, each agrees with the trainer.
    assert all(row[DIFFERENCE] < 1e-5 for row in steps(theirs))
    other = task.train(tmp_path / "other", *RUN, stateful, "actor_rollout_ref.actor.optim.lr=3e-3")
    assert largest_difference(other, one) > 1e-5  # the control


def test_it_goes_on_to_the_bit(task, stateful, tmp_path):
    whole = task.train(tmp_path / "whole", *RUN, stateful)
    half = (*RUN, "trainer.save_freq=1", "trainer.total_training_steps=1", stateful)
    task.train(tmp_path / "half", *half)
    gone_on = task.train(tmp_path / "half", *RUN, "trainer.save_freq=1", stateful)
    assert largest_difference(gone_on, whole) == 0
