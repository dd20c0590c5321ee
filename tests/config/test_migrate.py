"""`meshrl migrate`: what only a whole command shows, what is said of it, and how it is printed."""

import shlex
from pathlib import Path

import pytest
import yaml

from meshrl.cli import main
from meshrl.config.keys import ACTOR, MODEL, ROLLOUT
from meshrl.config.load import load_config
from meshrl.tools.migrate.migrate import Migration, migrate, script_text, yaml_text

PPO, SFT_FSDP, SFT_ENGINE = "verl.trainer.main_ppo", "verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer"
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
SAVED = f"{ACTOR}.checkpoint.save_contents"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ACTOR}.use_dynamic_bsz=True", f"{MODEL}.path=M"]
ASYNC = [
    *GRPO, "data.train_batch_size=0", "data.gen_batch_size=1", f"{ROLLOUT}.name=vllm", "rollout.nnodes=1",
    "rollout.n_gpus_per_node=8", "trainer.n_gpus_per_node=8", "rollout.total_rollout_steps=51200",
    f"{ACTOR}.ppo_mini_batch_size=32", "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=4", "async_training.staleness_threshold=0.5", "rollout.test_freq=10",
]  # fmt: skip


def ours(program: str, *words: str, **launcher: str) -> Migration:
    return migrate(program, launcher, words)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["trainer.nnodes=2"], "trainer.backend", "ray"),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean"),
        ([f"{ACTOR}.policy_loss.loss_mode=vanilla"], f"{ACTOR}.loss_agg_mode", None),
        ([f"{ACTOR}.optim.lr=1e-6", f"{ACTOR}.optim.min_lr=1e-7"], f"{ACTOR}.optim.min_lr_ratio", 0.1),
        ([f"{ACTOR}.clip_ratio=0.5"], f"{ACTOR}.clip_ratio_low", 0.2),
        ([f"{ACTOR}.clip_ratio=0.5", f"{ACTOR}.clip_ratio_low=0.4"], f"{ACTOR}.clip_ratio_low", 0.4),
        ([f"{ROLLOUT}.val_kwargs.temperature=0.6"], f"{ROLLOUT}.val_kwargs.do_sample", True),
        ([f"{ROLLOUT}.val_kwargs.temperature=0"], f"{ROLLOUT}.val_kwargs.do_sample", None),
        ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.multi_turn.enable=True"],
         f"{ROLLOUT}.as_server", True),
        ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.multi_turn.enable=True"], f"{ROLLOUT}.as_server", None),
        ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.expert_parallel_size=4"], f"{ROLLOUT}.tensor_model_parallel_size", 4),
        (["--config-name=ppo_megatron_trainer.yaml"], f"{ACTOR}.strategy", "megatron"),
        (["--config-path=config", "--config-name", "ppo_megatron_trainer"], "critic.strategy", None),
        (["--config-name=ppo_megatron_trainer", "algorithm.adv_estimator=gae"], "critic.strategy", "megatron"),
        ([f"{SAVED}=['hf_model']"], SAVED, ["model", "hf_model"]),
        (["trainer.resume_from_path=x"], "trainer.resume_from_path", None),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=x"], "trainer.resume_from_path", "x"),
        (["global_profiler.tool=torch_memory"], "global_profiler.tool", None),
        (["global_profiler.tool=torch", "global_profiler.steps=[3]"], "global_profiler.tool", "torch"),
        (["trainer.seed=2", "trainer.seed=3"], "trainer.seed", 3),
        (["trainer.seed=2", "~trainer.seed"], "trainer.seed", None),
    ],
)  # fmt: skip
def test_what_follows_from_several_keys(words: list[str], name: str, value: object) -> None:
    migration = ours(PPO, *GRPO, *words)
    assert migration.settings.get(name) == value
    assert migration.losses == []


def test_weights_of_megatron_are_converted_first() -> None:
    where = f"{ACTOR}.megatron.use_dist_checkpointing=True", f"{ACTOR}.megatron.dist_checkpointing_path=/ckpt/M"
    ref = [word.replace(".actor.megatron", ".ref.megatron") for word in where]
    migration = ours(PPO, "--config-name=ppo_megatron_trainer", *GRPO, *where, *ref)
    assert migration.to_do[0] == "meshrl convert /ckpt/M /ckpt/M-hf --like M"
    assert migration.settings[f"{MODEL}.path"] == "/ckpt/M-hf"
    assert migration.settings[f"{MODEL}.tokenizer_path"] == "M"
    assert not any("dist_checkpointing" in name for name in migration.settings)
    assert migration.loads


def test_a_reward_function_is_asked_for() -> None:
    assert "set reward.name=math_verify" in ours(PPO, *GRPO).to_do[0]
    assert ours(PPO, *GRPO, "custom_reward_function.path=f.py").to_do == []
    assert ours(PPO, *GRPO, "reward_model.enable=True").to_do == []


def test_steps_of_a_fully_asynchronous_run() -> None:
    migration = ours(FULLY, *ASYNC)
    wanted = {
        "actor_rollout_ref.hybrid_engine": False, "data.train_batch_size": 32 * 4 * 4,
        "trainer.total_training_steps": 51200 // 512, "trainer.test_freq": 10, "async_training.max_staleness": 1,
        "algorithm.rollout_correction.bypass_mode": True, f"{ROLLOUT}.n_gpus_per_node": 8,
    }  # fmt: skip
    assert {name: migration.settings.get(name) for name in wanted} == wanted
    assert migration.loads, [*migration.losses, *migration.problems]
    decoupled = ours(FULLY, *ASYNC, "async_training.compute_prox_log_prob=True", "trainer.save_freq=8")
    assert decoupled.settings["algorithm.rollout_correction.bypass_mode"] is False
    assert decoupled.settings["trainer.save_freq"] == 2  # updates there, syncs here


def test_one_step_off_is_a_staleness_of_one() -> None:
    sizes = [
        "data.train_batch_size=64",
        f"{ACTOR}.ppo_mini_batch_size=64",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=2",
    ]
    migration = ours(ONE_STEP, *GRPO, *sizes, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2")
    wanted = {
        "actor_rollout_ref.hybrid_engine": False, "async_training.max_staleness": 1, f"{ROLLOUT}.as_server": True,
        "algorithm.rollout_correction.bypass_mode": True, f"{ROLLOUT}.free_cache_engine": False,
    }  # fmt: skip
    assert {name: migration.settings.get(name) for name in wanted} == wanted
    assert migration.loads, [*migration.losses, *migration.problems]


def test_defaults_of_supervised_trainers() -> None:
    old = ours(SFT_FSDP, "model.partial_pretrain=M", nproc_per_node="4").settings
    assert (old["data.prompt_key"], old["data.response_key"]) == ("question", "answer")
    assert old["data.prompt_as_message"] is True
    assert (old["optim.lr_scheduler_type"], old["trainer.n_gpus_per_node"]) == ("cosine", 4)
    chats = ours(SFT_FSDP, "data.multiturn.enable=true", "data.multiturn.messages_key=chat").settings
    assert chats["data.messages_key"] == "chat"
    assert not {"data.prompt_key", "data.response_key", "data.prompt_as_message"} & set(chats)
    off = ours(SFT_FSDP, "data.multiturn.messages_key=chat", "data.multiturn.enable=false").settings
    assert "data.messages_key" not in off
    new = ours(SFT_ENGINE, nproc_per_node="2", nnodes="2").settings
    assert new["data.messages_key"] == "messages"
    assert [new[f"trainer.{name}"] for name in ("n_gpus_per_node", "nnodes", "backend")] == [2, 2, "ray"]


def test_with_megatrons_engine_the_keys_are_megatrons() -> None:
    migration = ours(SFT_ENGINE, "engine=megatron", "engine.context_parallel_size=2", "engine.param_offload=True")
    assert migration.settings["engine.megatron.context_parallel_size"] == 2
    assert migration.settings["engine.megatron.param_offload"] is True
    assert not any(name.startswith("engine.fsdp") for name in migration.settings)


def test_what_is_lost_is_said_and_left_out() -> None:
    migration = ours(PPO, *GRPO, f"{ROLLOUT}.trace.backend=mlflow", "+data.my_own=1", "hello")
    assert len(migration.losses) == 3
    assert not migration.loads
    assert not any("trace" in name or "my_own" in name for name in migration.settings)
    text = script_text(migration)
    for line in migration.losses:
        assert f"# lost: {line}" in text


def test_the_printed_command_is_read_back_by_the_shell() -> None:
    words = ["trainer.project_name=it's", "trainer.logger=['console','wandb']", "trainer.experiment_name=a b"]
    migration = ours(PPO, *GRPO, *words, "trainer.default_local_dir=$HOME/x y")
    command = script_text(migration).partition("\nmeshrl train")[2].replace("\\\n", " ")
    assert shlex.split(command) == migration.words
    assert '"trainer.default_local_dir=$HOME/x y"' in command  # the shell fills it in
    loaded = load_config(None, migration.words)
    assert loaded.config.trainer.project_name == "it's"
    assert loaded.config.trainer.logger == ["console", "wandb"]


def test_the_printed_recipe_is_the_same_config(tmp_path: Path) -> None:
    migration = ours(
        PPO, *GRPO, f"{ACTOR}.optim.lr=1e-6", "trainer.logger=['console','file']", "trainer.save_freq=null"
    )
    (tmp_path / "mine.yaml").write_text(yaml_text(migration))
    by_file, by_words = load_config(tmp_path / "mine.yaml"), load_config(None, migration.words)
    assert by_file.config == by_words.config


SCRIPT = """#!/bin/bash
n=${N:-4}
ARGS=(algorithm.adv_estimator=grpo "data.train_files=['a.parquet', 'b.parquet']")
python3 -m verl.trainer.main_ppo \\
    "${ARGS[@]}" \\
    actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.rollout.mode=async \\
    trainer.nnodes=$NODES trainer.experiment_name="run-$(date +%d)" $@
"""


def test_the_command_reads_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    assert main(["migrate", str(script), "N=8", "NODES=1", "trainer.seed=7"]) == 0
    told = capsys.readouterr().out
    assert "# not known: line 9: $(date +%d) was left as it is" in told
    assert "# changed: actor_rollout_ref.rollout.mode=async is left out: turns and servers work without it" in told
    assert "# to do: set reward.name=math_verify" in told
    words = shlex.split(told.partition("\nmeshrl train")[2].replace("\\\n", " "))
    assert {"actor_rollout_ref.rollout.n=8", "trainer.seed=7", "trainer.nnodes=1"} <= set(words)
    assert 'data.train_files=["a.parquet", "b.parquet"]' in words
    assert not list(tmp_path.glob("*.yaml"))


def test_a_variable_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    assert main(["migrate", str(script)]) == 0
    told = capsys.readouterr().out
    assert "# not known: line 9: $NODES is not set by the script: give NODES=VALUE" in told
    assert '"trainer.nnodes=$NODES"' in told


def test_the_command_writes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\ndefaults: [ppo_megatron_trainer, _self_]\n"
        "algorithm: {adv_estimator: grpo}\n"
        "actor_rollout_ref:\n  rollout: {n: 4, name: sglang}\n  actor: {use_dynamic_bsz: True, tau_pos: 1.0}\n"
        "trainer: {project_name: p, experiment_name: e, default_local_dir: 'out/${trainer.project_name}'}\n"
    )
    assert main(["migrate", str(config), "--yaml"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["actor_rollout_ref"]["actor"]["strategy"] == "megatron"
    assert printed["actor_rollout_ref"]["actor"]["policy_loss"] == {"tau_pos": 1.0}
    assert printed["trainer"]["default_local_dir"] == "out/p"
    assert "critic" not in printed


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("python3 -m verl.trainer.main_ppo trainer.nobody=1", 2, "# lost: unknown key trainer.nobody"),
        (
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo",
            2,
            "# still refused: algorithm.adv_estimator",
        ),
        ("echo hello", 2, "starts none of verl's programs"),
    ],
)
def test_the_exit_code_says_whether_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, words: str
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert main(["migrate", str(script)]) == code
    printed = capsys.readouterr()
    assert words in printed.out + printed.err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "nowhere.sh"]) == 2
    assert "nowhere.sh" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "seed"), [(["--config-path", "{folder}", "--config-name=mine"], 4),
                                               (["--config-name={folder}/mine.yaml"], 4)])  # fmt: skip
def test_hydras_options_name_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], seed: int
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ntrainer: {seed: 4}\nactor_rollout_ref: {actor: {use_dynamic_bsz: true}}\n"
    )
    words = [word.format(folder=tmp_path) for word in options]
    assert main(["train", *words, "--dry-run", "--skip-files"]) == 0
    assert "the config is fine" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", "grpo", *words, "--dry-run", "--skip-files"])
    assert "name one of them" in capsys.readouterr().err
    assert main(["train", "--config-name=nowhere", "--dry-run"]) == 2
    assert "no recipe 'nowhere'" in capsys.readouterr().err
