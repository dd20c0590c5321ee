"""What an algorithm asks of the rest of the config, each with a setting that is fine."""

import pytest
import torch

from meshrl.algorithms import ROLLOUT_RS_MODES, compute_advantage, get_policy_loss_fn, get_preset
from meshrl.config import check_config, load_config, unsupported
from meshrl.config import validate_algorithm as checks
from meshrl.config.actor_critic import POLICY_LOSSES
from meshrl.config.keys import get_value
from meshrl.config.rl import GROUP_ESTIMATORS
from meshrl.config.validate_algorithm import bypass_loss

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"
GDPO = "algorithm.adv_estimator=gdpo"


TAUGHT = ("algorithm.adv_estimator=distillation", f"{REF}.model.path=x")


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
        (
            [GDPO, "algorithm.gdpo_reward_keys=[acc,style]", "reward.name=math_verify"],
            "names style, which the reward function does not return: it returns acc, parsed",
        ),
        (["algorithm.adv_estimator=optimal_token_baseline", BYPASS], "bypass_mode must be false"),
        (
            ["algorithm.adv_estimator=tir_optimal_token_baseline", f"{ACTOR}.strategy=megatron"],
            "is not there for actor_rollout_ref.actor.strategy=megatron",
        ),
        (["algorithm.adv_estimator=remax", f"{ROLLOUT}.n=1", f"{ROLLOUT}.temperature=0"], "must sample"),
        (["algorithm.adv_estimator=distillation"], "needs a teacher: set actor_rollout_ref.ref.model.path"),
        (["algorithm.distillation_coef=0.5"], "distillation_coef=0.5 needs a teacher"),
        (["algorithm.distillation_coef=0.5", f"{REF}.model.path=x", f"{REF}.update_every=3"], "in its teacher's place"),
        ([*TAUGHT, "algorithm.distillation_coef=0.5"], "distillation has none"),
        ([*TAUGHT, "algorithm.use_kl_in_reward=true"], "has no rewards"),
        (["algorithm.filter_groups.max_num_gen_batches=3"], "filter_groups.enable=true"),
        (["data.gen_batch_size=3"], "filter_groups.enable=true"),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=akk", "reward.name=math_verify"],
            "filter_groups.metric=akk: the reward function does not return it: use seq_reward or acc or parsed",
        ),
        (
            [
                "algorithm.filter_groups.enable=true",
                "algorithm.filter_groups.metric=acc",
                "reward.functions={exact_match: 1, form: {name: format_match, kwargs: {pattern: a}}}",
            ],
            "use seq_reward or exact_match/score or form/score",
        ),
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
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=inf"], "finite number"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold='nan'"], "finite number"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_inf"], "finite number"),
        ([f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold='nan'"], "finite number"),
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


# Other values than the defaults, or than those of BEFORE, which every loss that reads the key must notice.
BEFORE = {"clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1}
AFTER = {
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_cov_lb", "dro_beta"), 0.03),
    **dict.fromkeys(("tau_pos", "tau_neg", "clip_cov_ub", "icepop_high", "behaviour_weight_cap", "ppo_kl_coef"), 1.7),
    "clip_ratio_c": 1.5,
    "clip_cov_ratio": 0.4,
    "kl_cov_ratio": 0.4,
    "icepop_low": 0.9,
    "m2_threshold": 9.0,
}


def loss_of(name, settings):
    """Loss and metrics of a policy that has moved, with advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(64, 16, generator=generator) * 3
    log_prob = (old + torch.randn(64, 16, generator=generator)).clamp(max=0)
    advantages = torch.randn(64, 16, generator=generator) * 3
    weights = torch.linspace(0.2, 8, 64)[:, None].expand(64, 16)
    loss = get_policy_loss_fn(name)
    value, metrics = loss(old, log_prob, advantages, old < 1, config=settings, rollout_is_weights=weights)
    return [float(value), *map(float, metrics.values())]


@pytest.mark.parametrize("name", [loss for loss in POLICY_LOSSES if loss != "bypass_mode"])
def test_the_keys_of_a_loss_are_those_that_change_it(name):
    before = loss_of(name, BEFORE)
    for key, readers in checks.LOSS_KEYS.items():
        part = key.rpartition(".")[2]
        assert (loss_of(name, BEFORE | {part: AFTER[part]}) != before) == (name in readers), key


@pytest.mark.parametrize("name", ["gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "remax", "distillation"])
def test_the_keys_of_an_estimator_are_those_that_change_it(name):
    rewards = torch.tensor([[0.0, 0.3, 1.0], [0.2, 0.0, 0.5], [0.1, 0.0, 2.0], [0.0, 0.7, 0.3]])
    given = {"values": rewards.flip(1), "reward_baselines": rewards[:, 0], "old_log_probs": -rewards}
    given |= {
        "ref_log_prob": -2 * rewards,
        "sum_pi_squared": rewards / 2,
        "token_level_rewards": rewards,
        "response_mask": torch.ones(4, 3),
    }

    def advantages(**settings):
        return compute_advantage(name, **given, index=list("aabb"), **settings)[0].tolist()

    changes = {"gamma": 0.9, "lam": 0.7, "norm_adv_by_std_in_grpo": False, "norm_adv_std_over": "batch"}
    for key, value in changes.items():
        reads = name in checks.ESTIMATOR_KEYS[f"algorithm.{key}"]
        # Two components, or their whitening would hide what scales the only one.
        more = {"reward_components": {"a": rewards[:, 1], "b": rewards[:, 2]}} if name == "gdpo" else {}
        assert (advantages(**more) != advantages(**more, **{key: value})) == reads, key


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.gamma=0.9"], "algorithm.gamma has no effect with algorithm.adv_estimator=grpo: it is for gae"),
        (["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"], "it is for grpo, grpo_vec"),
        ([f"{ACTOR}.kl_loss_coef=0.5"], f"without {ACTOR}.use_kl_loss=true"),
        ([f"{ACTOR}.policy_loss.tau_pos=3"], "policy_loss.loss_mode=vanilla: it is for sapo"),
        ([f"{ACTOR}.policy_loss.loss_mode=gpg", f"{ACTOR}.clip_ratio=0.1"], "loss_mode=gpg: it is for vanilla"),
        ([BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.clip_ratio=0.1"], "with algorithm.rollout_correction"),
    ],
)
def test_keys_that_nobody_reads_are_refused(overrides, words):
    (problem,) = problems(*overrides)
    assert words in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"],
        [GDPO, "algorithm.norm_adv_by_std_in_grpo=false"],
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.5", f"{ACTOR}.kl_loss_type=k1"],
        [f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_high=0.4"],
        [f"{ACTOR}.policy_loss.loss_mode=dppo_tv", f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_c=5"],
        [BYPASS, f"{ACTOR}.policy_loss.loss_mode=bypass_mode", f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_c=5"],
    ],
)
def test_keys_that_are_read_are_not(overrides):
    assert problems(*overrides) == []


def test_the_modes_are_those_of_the_algorithm():
    assert sorted(checks.ROLLOUT_RS_MODES) == sorted(ROLLOUT_RS_MODES)


@pytest.mark.parametrize("name", ["dapo", "dr_grpo"])
def test_recipes_are_their_presets(name):
    config = load_config(name).config
    assert check_config(config, check_files=False) == []
    for key, value in get_preset(name).items():
        assert get_value(config, key) == value, key
