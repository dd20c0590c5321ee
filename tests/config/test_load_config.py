"""Recipes and overrides become a typed config, or one error that says all that is wrong and where."""

from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from meshrl.config import ConfigError, PPOConfig, SFTConfig, check_config, load_config
from meshrl.config.keys import changed_keys, get_value, leaves, nearest, sections
from meshrl.config.load import ROOTS, _idle_trees, _lent_tree
from meshrl.config.validate import check_notes
from meshrl.config.verl_names import ALIASES, canonical, has_alias

ACTOR = "actor_rollout_ref.actor"


# What YAML takes for numbers, times, truth values, comments and marks of its own.
ODD_WORDS = ["007", "1e5", "12:30", "0x10", "on", "run #3", "@x", "*x", "%x"]


def problems_of(*overrides: str, recipe: Path | str | None = None, root: type = PPOConfig) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(recipe, overrides, root)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_nothing_asked_gives_the_defaults() -> None:
    loaded = load_config()
    assert loaded.config.trainer == PPOConfig().trainer
    assert set(loaded.sources) == set(leaves(PPOConfig))
    assert {source for source in loaded.sources.values() if not source.startswith("follows")} == {"default"}
    assert loaded.notes == []


@pytest.mark.parametrize("root", ROOTS.values())
def test_defaults_have_the_types_that_the_same_values_have_when_they_are_set(root: type) -> None:
    """A load sets nothing but what somebody asks for, so an `int` in the place of a `float` would stay one."""
    config, converted = root(), OmegaConf.to_object(OmegaConf.structured(root))
    for name in leaves(root):
        default, same = get_value(config, name), get_value(converted, name)
        assert (default, type(default)) == (same, type(same)), name


def test_a_load_leaves_nothing_behind_for_the_next() -> None:
    """Whatever keys were set to, added below a dict, interpolated or refused."""
    names = leaves(PPOConfig)
    for value in ("null", "{a: 1}", "${trainer.project_name}"):
        with suppress(ConfigError):
            load_config(None, [f"{name}={value}" for name in names])
    dicts = [name for name, leaf in names.items() if leaf.base_type is dict]
    assert dicts
    config = load_config(None, [f"{name}.b=1" for name in dicts]).config
    assert all(get_value(config, name) == {"b": 1} for name in dicts)
    assert changed_keys(load_config().config) == []
    assert OmegaConf.to_container(_idle_trees[PPOConfig]) == OmegaConf.to_container(OmegaConf.structured(PPOConfig))


def test_a_load_inside_of_another_does_not_see_its_settings() -> None:
    with _lent_tree(PPOConfig) as outer:
        outer.touched.add("trainer.seed")
        OmegaConf.update(outer.tree, "trainer.seed", 7)
        assert load_config().config.trainer.seed == PPOConfig().trainer.seed
    assert load_config().config.trainer.seed == PPOConfig().trainer.seed


def test_values_and_sources_of_recipe_and_command_line(tmp_path: Path) -> None:
    recipe = write(
        tmp_path / "mine.yaml",
        "# a comment\ntrainer:\n  seed: 5\n  logger: [console, wandb]\n\n"
        "actor_rollout_ref:\n  actor:\n    optim: {lr: 1e-5}\n",
    )
    loaded = load_config(recipe, ["trainer.seed=6", f"{ACTOR}.clip_ratio=0.3"])
    config, sources = loaded.config, loaded.sources
    assert (config.trainer.seed, config.trainer.logger) == (6, ["console", "wandb"])
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert isinstance(config.actor_rollout_ref.actor.optim.lr, float)
    assert config.data.seed == 6
    assert sources["trainer.seed"] == "command line"
    assert sources["trainer.logger"] == "mine.yaml:4"
    assert sources[f"{ACTOR}.optim.lr"] == "mine.yaml:8"
    assert sources[f"{ACTOR}.clip_ratio_low"] == f"follows {ACTOR}.clip_ratio"
    assert sources["data.max_prompt_length"] == "default"


def test_clip_ratio_alone_moves_both_sides() -> None:
    actor = load_config(
        None, [f"{ACTOR}.clip_ratio=0.5", f"{ACTOR}.clip_ratio_high=0.6"]
    ).config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.5, 0.6)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("data.train_files=a.parquet", "data.train_files", ["a.parquet"]),
        ("data.train_files=[a.parquet,b c.jsonl]", "data.train_files", ["a.parquet", "b c.jsonl"]),
        ("trainer.logger=['console','wandb']", "trainer.logger", ["console", "wandb"]),
        ("trainer.total_training_steps=null", "trainer.total_training_steps", None),
        ("trainer.experiment_name=a=b", "trainer.experiment_name", "a=b"),
        *((f"trainer.experiment_name={word}", "trainer.experiment_name", word) for word in ODD_WORDS),
        ("trainer.experiment_name='5'", "trainer.experiment_name", "5"),
        ("data.train_files=[007, on, 1_0]", "data.train_files", ["007", "on", "1_0"]),
        ("trainer.default_local_dir=~/runs", "trainer.default_local_dir", str(Path.home() / "runs")),
        ("data.train_files=[~/a.jsonl]", "data.train_files", [str(Path.home() / "a.jsonl")]),
        ("trainer.val_before_train=False", "trainer.val_before_train", False),
        ("trainer.gates.non_finite=off", "trainer.gates.non_finite", "off"),
        ("algorithm.rollout_correction.rollout_is=off", "algorithm.rollout_correction.rollout_is", "off"),
        (f"{ACTOR}.optim.lr=3e-4", f"{ACTOR}.optim.lr", 3e-4),
        (f"{ACTOR}.optim.betas=[0.9,0.99]", f"{ACTOR}.optim.betas", [0.9, 0.99]),
        ("+actor_rollout_ref.model.override_config.a.b=2", "actor_rollout_ref.model.override_config", {"a": {"b": 2}}),
        ("actor_rollout_ref.model.override_config={a: 1e-3}", "actor_rollout_ref.model.override_config", {"a": 1e-3}),
        ("trainer.deadlines={start: 5, call: 6}", "trainer.deadlines.call", 6.0),
        ("trainer.experiment_name=${trainer.project_name}-2", "trainer.experiment_name", "meshrl-2"),
        ("data.max_response_length=${data.max_prompt_length}", "data.max_response_length", 512),
    ],
)
def test_override_values(override: str, name: str, value: object) -> None:
    loaded = load_config(None, [override])
    assert get_value(loaded.config, name) == value
    assert type(get_value(loaded.config, name)) is type(value)
    assert loaded.sources[name] == "command line"


def test_texts_of_a_recipe_are_taken_as_they_are_written(tmp_path: Path) -> None:
    """YAML would make 7, True, 45000 seconds and 10.0 of them; keys that hold no texts are typed as ever."""
    recipe = write(
        tmp_path / "words.yaml",
        "trainer: {experiment_name: 007, project_name: on, default_local_dir: 12:30:00, total_training_steps: 010}\n"
        "data: {train_files: [2024-01-01, 010.0, no], prompt_key: 1e5, reward_fn_key: 'a b'}\n"
        "data.val_files: 1_000\nactor_rollout_ref.ref.model.path: ~\n"
        "algorithm: {rollout_correction: {rollout_is: off}}\n",
    )
    config = load_config(recipe).config
    trainer, data = config.trainer, config.data
    assert [trainer.experiment_name, trainer.project_name, trainer.default_local_dir] == ["007", "on", "12:30:00"]
    assert [*data.train_files, *data.val_files] == ["2024-01-01", "010.0", "no", "1_000"]
    assert (data.prompt_key, data.reward_fn_key) == ("1e5", "a b")
    assert trainer.total_training_steps == 8
    assert config.actor_rollout_ref.ref.model.path is None
    assert config.algorithm.rollout_correction.rollout_is == "off"


def test_the_last_override_wins() -> None:
    assert load_config(None, ["trainer.seed=2", "trainer.seed=3"]).config.trainer.seed == 3


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("actor_rollout_ref.rollout.temprature=2", "actor_rollout_ref.rollout.temperature"),
        ("actor.clip_ratio=0.5", f"{ACTOR}.clip_ratio"),
        ("trainer.nnode=2", "trainer.nnodes"),
        ("algorithm.adv_estimater=grpo", "algorithm.adv_estimator"),
        ("critic.actor.ppo_mini_batch_size=3", "critic.ppo_mini_batch_size"),
        ("rollout.tensor_model_parallel_size=2", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("actor_rollout_ref.actor.fsdp_conf.fsdp_size=2", f"{ACTOR}.fsdp_config.fsdp_size"),
    ],
)
def test_unknown_key_names_the_nearest(override: str, suggestion: str) -> None:
    (problem,) = problems_of(override)
    assert problem == f"unknown key {override.partition('=')[0]}: did you mean {suggestion}? (command line)"


def test_nothing_is_suggested_for_nonsense() -> None:
    assert problems_of("zzz=1") == ["unknown key zzz (command line)"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.train_batch_size=many", "data.train_batch_size must be int, not 'many'"),
        ("data.train_batch_size=1.5", "data.train_batch_size must be int, not 1.5"),
        ("data.train_batch_size=null", "data.train_batch_size must be int, not null"),
        ("data.val_batch_size=x", "data.val_batch_size must be int or null, not 'x'"),
        ("data.shuffle=perhaps", "data.shuffle must be bool, not 'perhaps'"),
        (f"{ACTOR}.optim.betas=[a,b]", f"{ACTOR}.optim.betas must be list of float, not ['a', 'b']"),
        ("data.train_files={a: 1}", "data.train_files must be list of str, not {'a': '1'}"),
        (f"{ACTOR}.optim.lr=[1]", f"{ACTOR}.optim.lr must be float, not [1]"),
        ("trainer=3", "trainer is a section: set the keys below it"),
        ("trainer.seed.x=3", "unknown key trainer.seed.x: trainer.seed holds one value (int), no keys"),
    ],
)
def test_wrong_type_names_key_value_and_type(override: str, problem: str) -> None:
    assert problems_of(override) == [f"{problem} (command line)"]


@pytest.mark.parametrize("text", ["trainer.seed", "=3", "--seed=1"])
def test_unreadable_override(text: str) -> None:
    assert problems_of(text) == [f"cannot read the override {text!r}: write it as a.b.c=value"]


def test_value_that_is_not_yaml() -> None:
    (problem,) = problems_of("trainer.logger=[console")
    assert problem.startswith("cannot read the value of 'trainer.logger=[console'")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.max_prompt_length=0", "data.max_prompt_length=0 must be at least 1"),
        ("algorithm.gamma=1.1", "algorithm.gamma=1.1 must be at most 1"),
        (f"{ACTOR}.optim.lr=nan", f"{ACTOR}.optim.lr=nan must be a finite number"),
        (f"{ACTOR}.optim.betas=[0.9,-1]", f"{ACTOR}.optim.betas=-1.0 must be at least 0"),
        ("trainer.backend=rya", "trainer.backend=rya: did you mean ray? choices are local, ray"),
    ],
)
def test_value_out_of_range_or_choices(override: str, problem: str) -> None:
    assert problems_of(override) == [f"{problem} (command line)"]


def test_all_problems_come_together_with_their_places(tmp_path: Path) -> None:
    recipe = write(tmp_path / "bad.yaml", "data:\n  train_batch_size: x\ntrainer:\n  sed: 3\n")
    assert problems_of("nonsense", "data.shuffle=5x", recipe=recipe) == [
        "cannot read the override 'nonsense': write it as a.b.c=value",
        "data.train_batch_size must be int, not 'x' (bad.yaml:2)",
        "unknown key trainer.sed: did you mean trainer.seed? (bad.yaml:4)",
        "data.shuffle must be bool, not '5x' (command line)",
    ]


def test_interpolation_of_nothing_is_reported() -> None:
    (problem,) = problems_of("trainer.seed=${trainer.nothing}")
    assert problem.startswith("trainer.seed: ")
    assert "nothing" in problem


# Recipes


def test_recipe_stands_on_another(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml", "trainer: {seed: 1, nnodes: 2}\nactor_rollout_ref: {model: {override_config: {a: 1}}}\n"
    )
    child = write(
        tmp_path / "child.yaml",
        "defaults: base.yaml\ntrainer:\n  seed: 8\nactor_rollout_ref: {model: {override_config: {b: 2}}}\n",
    )
    loaded = load_config(child)
    assert (loaded.config.trainer.seed, loaded.config.trainer.nnodes) == (8, 2)
    assert loaded.config.actor_rollout_ref.model.override_config == {"a": 1, "b": 2}
    assert (loaded.sources["trainer.seed"], loaded.sources["trainer.nnodes"]) == ("child.yaml:3", "base.yaml:1")


def test_recipe_stands_on_a_shipped_one(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path / "mine.yaml", "defaults: grpo\n"))
    assert loaded.config.algorithm.adv_estimator == "grpo"
    assert loaded.sources["algorithm.adv_estimator"].startswith("grpo.yaml:")


def test_circle_of_recipes(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "defaults: b.yaml\n")
    write(tmp_path / "b.yaml", "defaults: a.yaml\n")
    (problem,) = problems_of(recipe=tmp_path / "a.yaml")
    assert "circle: a.yaml -> b.yaml -> a.yaml" in problem


def test_missing_recipe_lists_what_there_is() -> None:
    (problem,) = problems_of(recipe="gppo")
    assert problem.startswith("no recipe 'gppo': neither a file nor one of ")
    assert "grpo" in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: [1, 2\n", "not valid YAML"),
        ("trainer: {seed: 1}\ntrainer: {seed: 2}\n", "not valid YAML"),
        ("- a\n- b\n", "must hold keys and values, not a list"),
        ("defaults: [{a: 1, b: 2}]\n", "defaults must be the name or path of one other recipe"),
        ("defaults: [grpo, dapo]\n", "defaults names grpo and dapo: a recipe stands on one other"),
        ("defaults: [_self_, grpo]\n", "defaults has _self_ before others"),
        ("defaults: [{data@data: my_data}]\n", "defaults names my_data, which is none of verl's"),
        ("defaults: nowhere\n", "no recipe 'nowhere'"),
        ("trainer: 3\n", "trainer is a section: set the keys below it (r.yaml:1)"),
    ],
)
def test_recipes_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    (problem,) = problems_of(recipe=write(tmp_path / "r.yaml", text))
    assert words in problem


def test_hydras_list_of_defaults(tmp_path: Path) -> None:
    """verl's own files stand for what they choose beyond the defaults here, and one file may be stood on."""
    text = "hydra: {searchpath: [x]}\ndefaults: [ppo_megatron_trainer, _self_]\ntrainer: {seed: 4}\n"
    loaded = load_config(write(tmp_path / "r.yaml", text))
    assert (loaded.config.critic.strategy, loaded.config.trainer.seed) == ("megatron", 4)
    assert loaded.sources["critic.strategy"] == "ppo_megatron_trainer"
    over = "defaults: [r, _self_]\nactor_rollout_ref.actor.strategy: fsdp\n"
    loaded = load_config(write(tmp_path / "over.yaml", over))
    assert (loaded.config.actor_rollout_ref.actor.strategy, loaded.config.trainer.seed) == ("fsdp", 4)
    listed = "defaults: [{actor@actor_rollout_ref.actor: megatron_actor}, {data@data: legacy_data}, _self_]\n"
    loaded = load_config(write(tmp_path / "list.yaml", listed))
    assert loaded.config.actor_rollout_ref.actor.strategy == "megatron"
    assert load_config("ppo_trainer").config == load_config().config


def test_what_nobody_wrote_is_not_noted() -> None:
    overrides = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", f"{ACTOR}.use_dynamic_bsz=true"]
    loaded = load_config("ppo_megatron_trainer", overrides)
    assert check_config(loaded.config, check_files=False) == []
    assert check_notes(loaded.config, loaded.sources) == []
    loaded = load_config("ppo_megatron_trainer", [*overrides, "critic.strategy=megatron"])
    assert len(check_notes(loaded.config, loaded.sources)) == 1


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["trainer.seed=3", "~trainer.seed"], 1),
        (["trainer.seed=3", "~trainer.seed=3"], 1),
        (["~trainer.seed", "trainer.seed=3"], 3),
        (["trainer.seed=3", "trainer.nnodes=2", "~trainer"], 1),
        (["trainer.seed=3", "~trainer.see"], "did you mean trainer.seed?"),
        (["trainer.seed=3", "~data.seed"], 3),
        (["+trainer.seed=3"], 3),
        (["++trainer.seed=3"], 3),
    ],
)
def test_hydras_signs(words: list[str], left: int | str) -> None:
    if isinstance(left, str):
        assert left in problems_of(*words)[0]
    else:
        assert load_config(None, words).config.trainer.seed == left


def test_a_key_taken_away_by_another_name() -> None:
    words = [f"{ACTOR}.optim.warmup_style=cosine", f"~{ACTOR}.optim.lr_scheduler_type"]
    assert load_config(None, words).config == load_config().config


def test_hydras_groups() -> None:
    loaded = load_config(None, ["actor@actor_rollout_ref.actor=megatron_actor"])
    assert loaded.config.actor_rollout_ref.actor.strategy == "megatron"
    assert load_config(None, ["ref@actor_rollout_ref.ref=dp_ref"]).config == load_config().config
    assert "no file of verl's" in problems_of("model@actor_rollout_ref.model=mine")[0]


def test_empty_headings_and_dotted_keys_in_recipes(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path / "r.yaml", "data:\ntrainer.seed: 4\n"))
    assert loaded.config.trainer.seed == 4
    assert loaded.config.data.train_files == []
    assert load_config(write(tmp_path / "empty.yaml", "")).config.trainer.seed == 1


# Other spellings


def test_every_alias_leads_to_a_key() -> None:
    targets = {**leaves(PPOConfig), **sections(PPOConfig), **leaves(SFTConfig), **sections(SFTConfig)}
    for alias in ALIASES:
        if alias.new is None:
            # The name of a section by itself, or null alone, sets nothing.
            assert alias.itself or alias.only == (None,) or alias.old not in targets, alias.old
            assert alias.why or alias.instead, alias.old
            continue
        some = alias.only or (alias.new == alias.old and alias.values)
        assert alias.old not in leaves(PPOConfig) or some, alias.old
        if alias.agrees and alias.new == f"{ACTOR}.fsdp_config.{alias.new.rpartition('.')[2]}":
            continue  # some of those stand elsewhere, or are not needed, for the actor too
        name = canonical(alias.old)
        assert name in targets or ".engine_kwargs." in name or has_alias(name), alias.old
        assert canonical(alias.new) == alias.new, alias.new


@pytest.mark.parametrize(
    ("written", "meant", "value"),
    [
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size", 4),
        ("actor_rollout_ref.rollout.tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size", 2),
        (f"{ACTOR}.megatron_config.tensor_parallel_size", f"{ACTOR}.megatron.tensor_model_parallel_size", 8),
        (f"{ACTOR}.megatron_config.pipeline_parallel_size", f"{ACTOR}.megatron.pipeline_model_parallel_size", 2),
        (f"{ACTOR}.megatron_config.expert_parallel_size", f"{ACTOR}.megatron.expert_model_parallel_size", 4),
        (f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", "bfloat16"),
        (
            f"{ACTOR}.model.enable_gradient_checkpointing",
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            False,
        ),
        ("actor_rollout_ref.nccl_timeout", "trainer.deadlines.collective", 1200.0),
        ("reward_model.reward_manager", "reward_manager.name", "batch"),
    ],
)
def test_other_spellings_are_read_and_noted(tmp_path: Path, written: str, meant: str, value: object) -> None:
    loaded = load_config(None, [f"{written}={value}"])
    assert get_value(loaded.config, meant) == value
    assert loaded.sources[meant] == "command line"
    assert loaded.notes == [f"{written} is read as {meant} (command line)"]
    nested: object = value
    for part in reversed(written.split(".")):
        nested = {part: nested}
    import yaml

    assert load_config(write(tmp_path / "r.yaml", yaml.safe_dump(nested))).config == loaded.config


def test_a_size_over_all_ranks_is_divided_by_them() -> None:
    loaded = load_config(None, [f"{ACTOR}.ppo_micro_batch_size=16", f"{ACTOR}.ulysses_sequence_parallel_size=2"])
    assert loaded.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4  # 8 processes, 2 share a sample
    assert loaded.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu == 4  # a follower
    assert loaded.sources[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == "command line"
    (problem,) = problems_of(f"{ACTOR}.ppo_micro_batch_size=4")
    assert "divisible by them (8)" in problem
    assert f"set {ACTOR}.ppo_micro_batch_size_per_gpu" in problem


def test_nearest_is_near() -> None:
    names = ["a.sizes", "some.other.place.size", "c.d.size_of"]
    assert nearest("a.size", names) == "a.sizes"
    assert nearest("c.d.sise_of", names) == "c.d.size_of"
    assert nearest("qqq", names) is None
    assert nearest("a.number", names) is None
    assert nearest("far.from.size", names) is None  # a last component alone says too little
    assert nearest("d.size_of", names) == "c.d.size_of"  # the end of a key, as plans print them


def test_sft_root() -> None:
    loaded = load_config(None, ["data.max_length=64", "optim.clip_grad=0.5"], SFTConfig)
    assert isinstance(loaded.config, SFTConfig)
    assert (loaded.config.data.max_length, loaded.config.engine.grad_clip, loaded.config.optim.lr) == (64, 0.5, 1e-5)
    assert problems_of("algorithm.gamma=1", root=SFTConfig)


def test_what_is_done_to_one_config_is_not_in_the_next() -> None:
    first = load_config(None, ["trainer.logger=[file]"]).config
    first.trainer.logger.append("wandb")
    first.data.train_files.append("mine.jsonl")
    first.actor_rollout_ref.actor.optim.lr = 3.0
    second = load_config(None, []).config
    assert second == load_config(None, []).config != first
    assert second.data.train_files == PPOConfig().data.train_files
    assert second.trainer.logger == PPOConfig().trainer.logger


def test_a_recipe_below_a_folder_with_an_equals_sign(tmp_path, capsys) -> None:
    from meshrl.cli import main

    (tmp_path / "lr=1").mkdir()
    recipe = write(tmp_path / "lr=1" / "mine.yaml", "trainer: {seed: 17}\n")
    assert main(["config", str(recipe), "--only", "trainer.seed"]) == 0
    assert "17" in capsys.readouterr().out


def test_a_module_that_exits_is_an_error(tmp_path) -> None:
    from meshrl.config.user_code import load_function

    with pytest.raises(ValueError, match=r"cannot import .*leaves.py: SystemExit: 0"):
        load_function(str(write(tmp_path / "leaves.py", "import sys\nsys.exit(0)\n")), "score")


def test_a_recipe_read_twice_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults: grpo\ntrainer: {logger: [file]}\n")
    first, second = (load_config(tmp_path / "own.yaml") for _ in range(2))
    assert first == second
    first.config.trainer.logger.append("console")
    assert load_config(tmp_path / "own.yaml") == second
