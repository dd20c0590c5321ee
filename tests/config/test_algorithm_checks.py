"""What an algorithm asks of the rest of the config, each with a setting that is fine."""

import pytest

from meshrl.algorithms import ROLLOUT_RS_MODES, get_preset
from meshrl.config import algorithm_checks as checks
from meshrl.config import check_config, load_config, unsupported
from meshrl.config.algorithm_checks import bypass_loss
from meshrl.config.tree import get_value

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"
GDPO = "algorithm.adv_estimator=gdpo"


def problems(*overrides):
    config = load_config("grpo", overrides).config
    assert unsupported(config) == []
    return check_config(config, check_files=False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([GDPO, "algorithm.gdpo_reward_keys=[a]", "algorithm.gdpo_reward_weights=[1,2]"], "2 entries for 1"),
        ([GDPO, "algorithm.use_kl_in_reward=true"], "use_kl_loss"),
        ([GDPO, "reward_manager.name=dapo", "reward_manager.overlong_buffer.len=9"], "overlong_reward"),
        (["algorithm.gdpo_reward_keys=[a]"], "it is for gdpo"),
        (["algorithm.adv_estimator=optimal_token_baseline", BYPASS], "bypass_mode must be false"),
        (
            ["algorithm.adv_estimator=tir_optimal_token_baseline", f"{ACTOR}.strategy=megatron"],
            "is not there for actor_rollout_ref.actor.strategy=megatron",
        ),
        (["algorithm.adv_estimator=remax", f"{ROLLOUT}.n=1", f"{ROLLOUT}.temperature=0"], "must sample"),
        (["algorithm.filter_groups.max_num_gen_batches=3"], "filter_groups.enable=true"),
        (["data.gen_batch_size=3"], "filter_groups.enable=true"),
        (["algorithm.filter_groups.enable=true", f"{ROLLOUT}.calculate_log_probs=false"], "must be true"),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1"],
            "must be > 1",
        ),
        ([f"{REF}.update_every=3"], "has no effect without a reference"),
        ([f"{REF}.model.path=x"], "has no effect without a reference"),
        (
            [f"{REF}.update_every=3", f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=4"],
            "without its adapters",
        ),
        ([f"{CORRECTION}.loss_type=reinforce"], "needs algorithm.rollout_correction.bypass_mode=true"),
        ([f"{ACTOR}.policy_loss.loss_mode=bypass_mode"], "needs algorithm.rollout_correction.bypass_mode=true"),
        ([BYPASS, f"{CORRECTION}.rollout_is=token"], "loss_type=reinforce, or bypass_mode=false"),
        ([BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.policy_loss.loss_mode=cispo"], "leave"),
        ([f"{CORRECTION}.rollout_is_threshold=5.0_0.5"], "above 0, or lower_upper"),
        ([f"{CORRECTION}.rollout_is_threshold=much"], "above 0, or lower_upper"),
        ([f"{CORRECTION}.rollout_rs=seq_k9", f"{CORRECTION}.rollout_rs_threshold=1"], "no mode 'seq_k9'"),
        ([f"{CORRECTION}.rollout_rs=seq_max_k3", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"], "upper bound only"),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold='1.5,2.5'"], "2 bounds for 1"),
        (
            [BYPASS, f"{CORRECTION}.rollout_is_batch_normalize=true"],
            "rollout_is_batch_normalize needs the whole batch",
        ),
        ([f"{CORRECTION}.rollout_is_batch_normalize=true"], "has no effect without weights"),
        ([f"{CORRECTION}.rollout_is=off", f"{CORRECTION}.rollout_is_threshold=3.0"], "has no effect without weights"),
    ],
)
def test_what_does_not_go_together_is_said(overrides, words):
    (problem,) = problems(*overrides)
    assert words in problem


@pytest.mark.parametrize(
    "overrides",
    [
        [GDPO, "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1,2]"],
        ["algorithm.adv_estimator=remax"],
        ["algorithm.adv_estimator=optimal_token_baseline"],
        ["algorithm.filter_groups.enable=true", "data.gen_batch_size=3", "algorithm.filter_groups.metric=acc"],
        [f"{REF}.update_every=3", f"{ACTOR}.use_kl_loss=true"],
        [f"{REF}.model.path=x", f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=4"],
        [BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=sequence"],
        [BYPASS, f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold=0.1"],
        [BYPASS, f"{ACTOR}.policy_loss.loss_mode=bypass_mode"],
        [BYPASS, f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"],
        [f"{CORRECTION}.rollout_rs='token_k1,seq_max_k3'", f"{CORRECTION}.rollout_rs_threshold='0.5_2.0,0.1'"],
    ],
)
def test_what_goes_together_is_not(overrides):
    assert problems(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "own"),
    [
        ([], False),
        ([BYPASS], False),
        ([BYPASS, f"{CORRECTION}.loss_type=reinforce"], True),
        ([BYPASS, f"{CORRECTION}.rollout_rs=seq_mean_k3"], True),
        ([f"{CORRECTION}.rollout_rs=seq_mean_k3"], False),
        ([BYPASS, f"{ACTOR}.policy_loss.loss_mode=bypass_mode"], True),
    ],
)
def test_when_the_loss_compares_with_the_rollout_itself(overrides, own):
    assert bypass_loss(load_config("grpo", overrides).config) is own


def test_the_modes_are_those_of_the_algorithm():
    assert sorted(checks.ROLLOUT_RS_MODES) == sorted(ROLLOUT_RS_MODES)


@pytest.mark.parametrize("name", ["dapo", "dr_grpo"])
def test_recipes_are_their_presets(name):
    config = load_config(name).config
    assert check_config(config, check_files=False) == []
    for key, value in get_preset(name).items():
        assert get_value(config, key) == value, key
