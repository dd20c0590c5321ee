"""Keys that nothing reads, by what other keys say: refused, or noted where scripts often carry them."""

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshrl.algorithms import COVARIANCE_LOSSES, POLICY_LOSSES, estimator_takes
from meshrl.config import ConfigError, PPOConfig, SFTConfig, check_config, load_config
from meshrl.config import validate_algorithm as checks
from meshrl.config.keys import Leaf, get_value, leaves, set_value
from meshrl.config.load import ROOTS, value_problems
from meshrl.config.rl import ESTIMATORS
from meshrl.config.validate import check_notes
from meshrl.trainer.rl_trainer import needs_old_log_probs

MakePPO = Callable[..., PPOConfig]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TURNS, GATES = f"{ROLLOUT}.multi_turn", "trainer.gates"
BLIND = [f"{ROLLOUT}.calculate_log_probs=false"]
# One process whose rollout generates with the trainer's own module.
SHARED = ["trainer.n_gpus_per_node=1"]
GAME = [f"{TURNS}.enable=true", f"{TURNS}.environment=meshrl.agents.environments:ScriptedUser"]

REFUSED = [
    ([*BLIND, f"{GATES}.log_prob_diff=stop"], f"{GATES}.log_prob_diff", "calculate_log_probs=true"),
    ([*BLIND, f"{GATES}.first_step=stop"], f"{GATES}.first_step=stop cannot see", "set that to true"),
    ([*BLIND, f"{GATES}.log_prob_diff_mean=0.2"], f"{GATES}.log_prob_diff_mean", "calculate_log_probs=true"),
    ([f"{ACTOR}.ppo_mini_batch_size=1024", f"{GATES}.on_policy_kl=0.1"], f"{GATES}.on_policy_kl", "one optimizer step"),
    (
        ["algorithm.rollout_correction.bypass_mode=true", f"{GATES}.on_policy_kl=0.1"],
        f"{GATES}.on_policy_kl",
        "bypass_mode=true",
    ),
    ([f"{GATES}.first_step=off", f"{GATES}.on_policy_kl=0.1"], f"{GATES}.on_policy_kl", "other than off"),
    ([f"{GATES}.entropy_collapse=off", f"{GATES}.entropy_share=0.1"], f"{GATES}.entropy_share", "entropy_collapse=off"),
    (
        [f"{GATES}.entropy_collapse=off", f"{GATES}.equal_rewards=off", f"{GATES}.patience=5"],
        f"{GATES}.patience",
        f"{GATES}.equal_rewards other than off",
    ),
    (["trainer.restart_wait=9"], "trainer.restart_wait", "trainer.max_restarts > 0"),
    ([f"{ROLLOUT}.update_weights_adapters=merged"], f"{ROLLOUT}.update_weights_adapters", "lora_rank=0"),
    ([*SHARED, f"{ROLLOUT}.update_weights_verify=false"], f"{ROLLOUT}.update_weights_verify", "n_gpus_per_node=1"),
    (
        [*SHARED, f"{ROLLOUT}.free_cache_engine=false", f"{ROLLOUT}.update_weights_delta=true"],
        f"{ROLLOUT}.update_weights_delta",
        "n_gpus_per_node=1",
    ),
    *(
        ([*GAME, f"{TURNS}.{key}={value}"], f"{TURNS}.{key}", f"{TURNS}.tools or {TURNS}.tool_config_path")
        for key, value in {
            "format": "llama3_json",
            "max_parallel_calls": 2,
            "max_concurrent_calls": 2,
            "max_tool_response_length": 99,
            "tool_response_truncate_side": "left",
        }.items()
    ),
    (
        ["trainer.device=cpu", "actor_rollout_ref.expandable_segments=true"],
        "actor_rollout_ref.expandable_segments",
        "trainer.device other than cpu",
    ),
    (
        ["trainer.device=cpu", "actor_rollout_ref.model.enable_activation_offload=true"],
        "model.enable_activation_offload",
        "trainer.device other than cpu",
    ),
    (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm.speculative_config={{num_speculative_tokens: 2}}"],
        "engine_kwargs.vllm.speculative_config",
        "logits processor",
    ),
    (["custom_reward_function.name=score"], "custom_reward_function.name", "custom_reward_function.path"),
    (["trainer.resume_mode=disable", f"{ACTOR}.checkpoint.load_contents=[model]"], "load_contents", "resume_mode"),
    (["trainer.validation_data_dir=there"], "trainer.validation_data_dir", "data.val_files"),
    (
        ["reward_model.enable=true", "reward_model.model.path={model}", "reward_model.grad_clip=2"],
        "reward_model.grad_clip",
        "not trained",
    ),
    (["algorithm.adv_estimator=gae", "critic.keep_logits_megabytes=9"], "critic.keep_logits_megabytes", "no logits"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "name", "why"), REFUSED, ids=lambda part: str(part)[-70:])
def test_what_nothing_reads_is_refused(
    fine: MakePPO, make_model: Callable[..., Path], overrides: list[str], name: str, why: str
) -> None:
    problems = check_config(fine(*(one.replace("{model}", str(make_model())) for one in overrides)))
    assert len(problems) == 1, problems
    assert name in problems[0]
    assert why in problems[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{GATES}.log_prob_diff=stop"],
        [f"{GATES}.first_step=stop"],
        [*BLIND, f"{GATES}.log_prob_diff=off", f"{GATES}.first_step=off"],
        [f"{GATES}.on_policy_kl=0.1"],
        ["trainer.restart_wait=9", "trainer.max_restarts=1"],
        [f"{ROLLOUT}.update_weights_adapters=merged", "actor_rollout_ref.model.lora_rank=8"],
        [f"{ROLLOUT}.update_weights_verify=false"],
        [*SHARED, f"{ROLLOUT}.update_weights_verify=false", f"{ROLLOUT}.dtype=float16"],
        [*GAME, f"{TURNS}.tool_timeout=3"],
        [*GAME, f"{TURNS}.tools=[meshrl.agents.calculator:calculator]", f"{TURNS}.max_parallel_calls=2"],
        ["actor_rollout_ref.expandable_segments=true"],
    ],
    ids=lambda part: str(part)[-70:],
)
def test_what_is_read_is_not_refused(fine: MakePPO, overrides: list[str]) -> None:
    assert check_config(fine(*overrides), check_files=False) == []


NOTED = [
    ([], "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"),
    ([], "actor_rollout_ref.ref.fsdp_config.param_offload=true"),
    ([f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=8"],
     "actor_rollout_ref.ref.fsdp_config.param_offload=true"),
    ([f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"],
     f"{ACTOR}.ppo_max_token_len_per_gpu=9000"),
    (["trainer.total_training_steps=9"], "trainer.total_epochs=3"),
    ([], f"{ROLLOUT}.val_kwargs.n=1"),
    ([], "data.val_batch_size=8"),
    (["data.filter_overlong_prompts=true"], "data.truncation=left"),
    (["trainer.device=cpu"], f"{ROLLOUT}.gpu_memory_utilization=0.3"),
    (SHARED, f"{ROLLOUT}.update_weights_bucket_megabytes=64"),
    (["algorithm.adv_estimator=gae", "critic.model.path={model}"], "critic.model.tokenizer_path={model}"),
    ([*BLIND], f"{GATES}.log_prob_diff=warn"),
]  # fmt: skip


@pytest.mark.parametrize(("beside", "override"), NOTED, ids=lambda part: str(part)[-70:])
def test_what_scripts_carry_is_noted(make_model: Callable[..., Path], beside: list[str], override: str) -> None:
    settings = [one.replace("{model}", str(make_model())) for one in [*beside, override]]
    loaded = load_config("grpo", settings)
    name = override.partition("=")[0]
    assert [note for note in check_notes(loaded.config, loaded.sources) if note.startswith(f"{name} has no effect")]
    assert not [problem for problem in check_config(loaded.config, check_files=False) if name in problem]


def test_a_switch_that_is_written_off_asks_for_nothing() -> None:
    loaded = load_config("grpo", ["reward_model.enable=false", f"{TURNS}.enable=false"])
    assert check_notes(loaded.config, loaded.sources) == []


def test_columns_of_images_are_for_models_that_see(
    fine: MakePPO, fine_sft: Callable[..., SFTConfig], make_model: Callable[..., Path]
) -> None:
    for make in (fine, fine_sft):
        config = make("data.image_key=photos")
        make_model(model_type="qwen3")
        (problem,) = check_config(config)
        assert problem.startswith("data.image_key=photos has no effect")
        config.data.image_key = None
        assert check_config(config) == []


def test_linear_attention_keeps_no_prefixes(make_model: Callable[..., Path]) -> None:
    folder = make_model(model_type="qwen3_next")
    asked = [f"actor_rollout_ref.model.path={folder}", f"{ROLLOUT}.enable_prefix_caching=true"]
    loaded = load_config("grpo", asked)
    (note,) = check_notes(loaded.config, loaded.sources)
    assert note.startswith(f"{ROLLOUT}.enable_prefix_caching=true has no effect with a model of type qwen3_next")
    make_model(model_type="qwen3")
    assert check_notes(loaded.config, loaded.sources) == []


def test_every_condition_is_told_of_its_key_and_names_keys_that_exist() -> None:
    for root in ROOTS.values():
        config, known = root(), leaves(root)
        for leaf in known.values():
            condition, section = leaf.info.only_if, leaf.name[: leaf.name.rfind(".") + 1]
            if condition is None:
                continue
            if not condition.holds(config, section):
                assert "=" in condition.present(config, section)
            for key in re.findall(r"`([\w.]+)`?", condition.words):
                assert (section + key[1:] if key.startswith(".") else key) in known or root is not PPOConfig, leaf.name


def test_who_computes_old_log_probs_is_known_without_torch(fine: MakePPO) -> None:
    """The check and the trainer agree for all estimators and losses, whether there are one or two optimizer steps."""
    assert checks.COVARIANCE_LOSSES == COVARIANCE_LOSSES
    config = fine()
    for estimator, loss, mini, bypass in product(ESTIMATORS, sorted(POLICY_LOSSES), (512, 1024), (False, True)):
        config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode = estimator, loss
        config.actor_rollout_ref.actor.ppo_mini_batch_size = mini
        config.algorithm.rollout_correction.bypass_mode = bypass
        assert checks.has_old_log_prob_pass(config) == needs_old_log_probs(config, 1024 // mini), (estimator, loss)
    assert estimator_takes("distillation", "old_log_probs")


ALL = [(root, leaf) for root in ROOTS.values() for leaf in leaves(root).values()]


@pytest.mark.parametrize(("root", "leaf"), ALL, ids=lambda part: getattr(part, "name", None) or part.__name__)
def test_every_number_has_ends_and_every_text_something_in_it(root: type, leaf: Leaf) -> None:
    config: Any = root()
    numbers = leaf.base_type in (int, float) or leaf.item_type in (int, float)
    if numbers and not leaf.info.choices:
        assert leaf.info.low is not None
        assert leaf.info.high is not None
        for wrong in (leaf.info.low - 1, leaf.info.high * 2 + 1):
            set_value(config, leaf.name, [wrong] if leaf.base_type is list else wrong)
            assert [name for name, _ in value_problems(config)] == [leaf.name]
    elif leaf.holds_text:
        set_value(config, leaf.name, [" "] if leaf.base_type is list else " ")
        found = [name for name, _ in value_problems(config)]
        assert found == ([] if leaf.info.takes_blank else [leaf.name])
    elif leaf.base_type is bool:
        set_value(config, leaf.name, -3)
        assert [name for name, _ in value_problems(config)] == [leaf.name]


@pytest.mark.parametrize("value", ["-3", "1", "0", "'1'", "1.0", "y", "perhaps", "[true]"])
def test_truth_values_are_no_numbers(value: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("grpo", [f"actor_rollout_ref.model.trust_remote_code={value}"])
    assert "actor_rollout_ref.model.trust_remote_code must be bool" in str(error.value)


@pytest.mark.parametrize(("value", "meant"), [("true", True), ("True", True), ("yes", True), ("ON", True), ("off", False), ("no", False), ("'false'", False)])  # fmt: skip  # noqa: E501
def test_words_for_truth_values(value: str, meant: bool) -> None:
    name = "actor_rollout_ref.model.trust_remote_code"
    assert get_value(load_config("grpo", [f"{name}={value}"]).config, name) is meant


def test_truth_values_of_recipes_are_no_numbers(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"actor_rollout_ref": {"model": {"trust_remote_code": 1}}}))
    with pytest.raises(ConfigError, match=r"must be bool, not 1 \(recipe.yaml"):
        load_config(recipe)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (f"{ACTOR}.clip_ratio=99999999", "must be at most 100"),
        (f"{ACTOR}.optim.eps=2147483648", "must be at most 1"),
        ("trainer.rollout_data_dir=' '", "is blank"),
        ("trainer.rollout_data_dir= ", "has no value: is a variable of the shell empty"),
        ("data.train_files=['a.jsonl', ' ']", "is blank"),
        ("trainer.deadlines.call=1e12", "must be at most 31536000"),
        ("data.seed=-1", "must be at least 0"),
    ],
)
def test_slips_of_the_keyboard(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config("grpo", [override])


def test_texts_of_white_space_may_end_an_answer() -> None:
    assert load_config("grpo", [f"{ROLLOUT}.stop=['\\n\\n']"]).config.actor_rollout_ref.rollout.stop
