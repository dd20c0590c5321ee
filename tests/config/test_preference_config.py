"""What `meshrl prefer` refuses before anything starts, and how its units are told."""

import json
import shutil

import pytest

from meshrl.cli import main
from meshrl.config import ConfigError, PreferenceConfig, check_config, load_config
from meshrl.config.show import summary_lines


def problems(*overrides, recipe="dpo"):
    return check_config(load_config(recipe, overrides, PreferenceConfig).config, check_files=False)


@pytest.mark.parametrize("recipe", ["dpo", "reward_model"])
def test_recipes_are_fine_and_count_pairs(recipe):
    loaded = load_config(recipe, ["trainer.n_gpus_per_node=4"], PreferenceConfig)
    assert check_config(loaded.config, check_files=False) == []
    assert any("step: 64 pairs, 16 on each of 4 data-parallel ranks" in line for line in summary_lines(loaded.config))


def test_judged_answers_are_counted_one_by_one():
    loaded = load_config("kto", ["trainer.n_gpus_per_node=4"], PreferenceConfig)
    assert check_config(loaded.config, check_files=False) == []
    assert any("step: 64 answers, 16 on each of 4 data-parallel ranks" in line for line in summary_lines(loaded.config))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.max_token_len_per_gpu=4000"], "must hold the longest pair: 2 * (data.max_length) (4096)"),
        (
            ["loss.name=reward", "data.max_token_len_per_gpu=4096"],
            "must hold the longest pair: 2 * (data.max_length + 1) (4098)",
        ),
        (["model.random_init=true"], "loss.name=dpo needs a reference with the same weights"),
        (["loss.simpo_gamma=0.7"], "loss.simpo_gamma has no effect with loss.name=dpo"),
        (["loss.name=hinge", "loss.label_smoothing=0.1"], "loss.label_smoothing has no effect with loss.name=hinge"),
        (["loss.name=orpo", "loss.sft_weight=0.5"], "loss.sft_weight has no effect with loss.name=orpo"),
        (["loss.name=kto", "data.chosen_key=a"], "data.chosen_key has no effect with loss.name=kto"),
        (["data.label_key=a"], "data.label_key has no effect with loss.name=dpo"),
        (["loss.desirable_weight=2"], "loss.desirable_weight has no effect with loss.name=dpo"),
        (["loss.name=kto", "data.max_token_len_per_gpu=1000"], "must hold the longest answer: data.max_length (2048)"),
        (["loss.name=simpo", "reference.path=x"], "reference.path has no effect with loss.name=simpo"),
        (["loss.name=reward", "loss.beta=0.2"], "loss.beta has no effect with loss.name=reward"),
        (["loss.name=reward", "loss.sft_weight=1"], "loss.sft_weight has no effect with loss.name=reward"),
        (["model.lora_rank=4", "reference.param_offload=true"], "reference.param_offload has no effect with adapters"),
        (["data.train_batch_size=63", "trainer.n_gpus_per_node=2"], "data.train_batch_size (63 pairs) must be"),
        (["data.micro_batch_size_per_gpu=3", "trainer.n_gpus_per_node=1"], "pairs of a step on one rank (64 / 1 = 64)"),
        (["engine.fsdp_config.param_offload=true"], "has no effect here, where there are no phases"),
    ],
)
def test_what_does_not_fit_is_told(overrides, said):
    found = problems(*overrides)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize("overrides", [["loss.name=simpo", "loss.simpo_gamma=0.7"], ["loss.name=ipo", "loss.beta=0.5"]])
def test_what_fits_is_not(overrides):
    assert problems(*overrides) == []


def test_a_misspelt_loss_names_the_nearest():
    with pytest.raises(ConfigError, match="dpo"):
        load_config("dpo", ["loss.name=dppo"], PreferenceConfig)


@pytest.mark.parametrize(
    ("command", "recipe", "said"),
    [
        (["train"], "dpo", "dpo is a recipe of meshrl prefer: use that command (or meshrl config with --prefer)"),
        (["sft"], "reward_model", "reward_model is a recipe of meshrl prefer"),
        (["prefer"], "grpo", "grpo is a recipe of meshrl train: use that command (or meshrl config without --sft"),
        (["config", "--prefer"], "calculator_sft", "calculator_sft is a recipe of meshrl sft"),
    ],
)
def test_a_recipe_of_another_command_is_known(capsys, command, recipe, said):
    assert main([*command, recipe]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_finds_missing_columns(tmp_path, tiny_model_folder, capsys):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1", "chosen": "2", "worse": "3"}) + "\n" for _ in range(64)))
    words = [f"data.train_files=[{file}]", f"model.path={tiny_model_folder}", "data.max_length=64"]
    assert main(["prefer", "dpo", *words, "--dry-run"]) == 2
    assert "has no column 'rejected' (it has: prompt, chosen, worse)" in capsys.readouterr().err
    assert main(["prefer", "dpo", *words, "data.rejected_key=worse", "--dry-run"]) == 0
    assert "dry run: the config is fine" in capsys.readouterr().out
    assert main(["prefer", "dpo", *words, "data.rejected_key=worse", "data.prompt_key=ask", "--dry-run"]) == 2
    assert "has no column 'ask'" in capsys.readouterr().err
    chat = {"prompt": [{"role": "user", "content": "1"}], "chosen": "2", "worse": "3"}
    file.write_text((json.dumps(chat) + "\n") * 64)
    assert main(["prefer", "dpo", *words, "data.rejected_key=worse", "--dry-run"]) == 2
    assert "has chat messages in 'prompt' (data.prompt_key)" in capsys.readouterr().err


def test_a_classifier_starts_a_reward_model_and_no_policy(tmp_path, tiny_model_folder):
    scorer, file = tmp_path / "scorer", tmp_path / "pairs.jsonl"
    shutil.copytree(tiny_model_folder, scorer)
    values = json.loads((scorer / "config.json").read_text())
    (scorer / "config.json").write_text(json.dumps(values | {"architectures": ["Qwen3ForTokenClassification"]}))
    file.write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n' * 64)

    def found(recipe, *words):
        words = (f"data.train_files=[{file}]", "data.max_length=32", *words)
        return check_config(load_config(recipe, words, PreferenceConfig).config)

    assert found("reward_model", f"model.path={scorer}") == []
    (policy,) = found("dpo", f"model.path={scorer}")
    assert policy.startswith("model.path: ")
    (reference,) = found("dpo", f"model.path={tiny_model_folder}", f"reference.path={scorer}")
    assert reference.startswith("reference.path: ")
    assert "scores tokens" in policy
    assert "scores tokens" in reference
