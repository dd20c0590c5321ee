"""Plans of fine-tuning and of preferences: no rollout, the keys of `meshrl sft` and `meshrl prefer`."""

import json
import re

import numpy as np
import pytest

from meshrl.cli import main
from meshrl.config import PPOConfig, PreferenceConfig, SFTConfig, load_config
from meshrl.config.validate import check_config
from meshrl.telemetry.hardware import parse_cluster
from meshrl.tools.plan.models import Lengths, drawn_lengths, find_model
from meshrl.tools.plan.search import nearest_fit, search
from meshrl.tools.plan.step_plan import make_plan, make_supervised_plan


def load(gpus, *overrides, model="Qwen3-1.7B"):
    cluster = parse_cluster(gpus)
    words = [f"model.path={model}", *overrides, f"trainer.n_gpus_per_node={cluster.devices}"]
    config = load_config(None, words, SFTConfig).config
    lengths = drawn_lengths(config.data.train_batch_size, 1, 256, 768, 384)
    found = find_model(config.model)

    def make(config):
        return make_supervised_plan(config, found, cluster, lengths)

    return config, make


@pytest.mark.parametrize(
    "engine",
    [
        [],
        ["engine.ulysses_sequence_parallel_size=2"],
        ["engine.strategy=megatron", "engine.megatron.pipeline_model_parallel_size=2"],
    ],
    ids=["fsdp2", "ulysses", "megatron"],
)
def test_the_one_phase_is_that_of_an_actor_with_the_same_samples(engine):
    config, make = load("4xH200", "data.train_batch_size=64", *engine)
    plan = make(config)
    assert [phase.name for phase in plan.phases] == ["train"]
    assert plan.rollout is None
    same = [word.replace("engine.", "actor_rollout_ref.actor.", 1) for word in engine]
    actor = load_config(
        None,
        [
            "actor_rollout_ref.model.path=Qwen3-1.7B", "data.train_batch_size=64", "actor_rollout_ref.rollout.n=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
            f"actor_rollout_ref.model.enable_gradient_checkpointing={config.model.enable_gradient_checkpointing}",
            "actor_rollout_ref.actor.use_dynamic_bsz=true", "algorithm.adv_estimator=rloo", "trainer.n_gpus_per_node=4",
            *same,
        ],
        PPOConfig,
    ).config  # fmt: skip
    whole = make_plan(actor, plan.model, plan.cluster, plan.lengths, quick=True)
    update = next(phase for phase in whole.phases if phase.name == "update_actor")
    assert plan.fullest.memory == update.memory
    assert plan.seconds == pytest.approx(update.seconds)
    assert plan.fullest.traffic == update.traffic
    assert plan.bubble == whole.bubble
    # A control: half the tokens in a micro-batch is another plan.
    config.data.max_token_len_per_gpu //= 2
    assert make(config).fullest.memory != update.memory


def preferences(recipe, *overrides):
    cluster = parse_cluster("2xH200")
    words = ["model.path=Qwen3-1.7B", *overrides, "trainer.n_gpus_per_node=2"]
    config = load_config(recipe, words, PreferenceConfig).config
    samples = config.data.train_batch_size * config.sequences_per_row
    lengths = drawn_lengths(samples, config.sequences_per_row, 512, 1536, 768)
    return make_supervised_plan(config, find_model(config.model), cluster, lengths)


def test_pairs_have_a_reference_and_two_sequences_each():
    plan = preferences("dpo")
    assert [phase.name for phase in plan.phases] == ["reference", "train"]
    assert len(plan.lengths.totals) == 128
    reference, train = plan.phases
    held = train.memory["reference parameters"]
    assert held == reference.memory["reference parameters"] > 0
    # Its update is that of as many demonstrations, less what the reference keeps.
    alone = preferences("dpo", "loss.name=simpo")
    assert [phase.name for phase in alone.phases] == ["train"]
    assert alone.fullest.total == train.total - held
    assert alone.seconds == pytest.approx(plan.seconds - reference.seconds)
    # Adapters need no second model, and one in host memory is not there while the policy learns.
    assert not any("reference parameters" in phase.memory for phase in preferences("dpo", "model.lora_rank=8").phases)
    rested = preferences("dpo", "reference.param_offload=true").phases
    assert ["reference parameters" in phase.memory for phase in rested] == [True, False]


def test_judged_answers_have_a_baseline_and_scores_a_head_of_their_own():
    plan = preferences("kto")
    assert [phase.name for phase in plan.phases] == ["baseline", "reference", "train"]
    assert len(plan.lengths.totals) == 64
    assert plan.phases[0].seconds == pytest.approx(2 * plan.phases[1].seconds)
    scorer = preferences("reward_model")
    assert [phase.name for phase in scorer.phases] == ["train"]
    # Without the products of a vocabulary it takes less of both.
    policy = preferences("dpo", "loss.name=simpo")
    assert scorer.seconds < policy.seconds


def test_what_does_not_fit_says_what_would_in_its_own_keys():
    config, make = load("2xL40S", "model.enable_gradient_checkpointing=false", model="Qwen3-4B")
    plan = make(config)
    assert not plan.fits
    nearest = nearest_fit(plan, make)
    assert nearest is not None
    assert nearest.plan.fits
    again, make_again = load(
        "2xL40S", "model.enable_gradient_checkpointing=false", *nearest.overrides, model="Qwen3-4B"
    )
    assert make_again(again).fullest.total == nearest.plan.fullest.total


def test_search_ranks_what_the_config_allows():
    config, make = load("2xH100", "data.train_batch_size=32", model="Qwen3-4B")
    found = search(make(config), make)
    assert found.best
    seconds = [candidate.plan.seconds for candidate in found.best]
    assert seconds == sorted(seconds)
    known = set(check_config(config, check_files=False))
    for candidate in found.best:
        assert set(check_config(candidate.plan.config, check_files=False)) <= known
        load("2xH100", "data.train_batch_size=32", *candidate.overrides, model="Qwen3-4B")


def test_the_command(capsys, tmp_path):
    words = ["plan", "--sft", "model.path=Qwen3-0.6B", "data.train_batch_size=8", "--gpus", "1xH200"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "engine: fsdp2 on 1 rank" in text
    assert "fits: train is fullest" in text
    assert "KV cache" not in text
    assert "sync" not in text
    file = tmp_path / "lengths"
    file.write_text("1000 500\n10 20\n")
    assert main([*words, "--json", "--lengths", str(file)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens"] == 4 * 1024 + 4 * 30  # cut at data.max_length
    assert [phase["name"] for phase in plan["phases"]] == ["train"]
    assert main([*words, "--mean-response", "900"]) == 2
    assert "between 1 and three quarters of data.max_length (768)" in capsys.readouterr().err


def test_the_command_for_pairs(capsys):
    words = ["plan", "--prefer", "dpo", "model.path=Qwen3-0.6B", "reference.path=Qwen3-1.7B", "--gpus", "1xH200"]
    assert main([*words, "data.train_batch_size=8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [phase["name"] for phase in plan["phases"]] == ["reference", "train"]
    with pytest.raises(SystemExit):
        main([*words, "--sft"])
    assert "not allowed with" in capsys.readouterr().err


def test_lengths_are_cut():
    lengths = Lengths(np.array([5, 30, 1]), np.array([10, 4, 99]), "a test").cut(12)
    assert lengths.prompts.tolist() == [5, 11, 1]
    assert lengths.responses.tolist() == [7, 1, 11]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.fsdp_config.param_offload=true"], "engine.fsdp_config.param_offload has no effect here.*offload_p"),
        (
            ["engine.strategy=megatron", "engine.megatron.optimizer_offload=true"],
            "engine.megatron.optimizer_offload has no effect here, where there are no phases$",
        ),
    ],
)
def test_offload_between_phases_is_refused(words, message):
    config = load_config(None, ["model.path=none", *words], SFTConfig).config
    problems = check_config(config, check_files=False)
    assert sum(bool(re.search(message, problem)) for problem in problems) == 1
