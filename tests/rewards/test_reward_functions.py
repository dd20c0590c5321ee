"""The built-in reward functions, and how the configured one is found."""

import pytest

from meshrl.config.reward import BUILT_IN_REWARDS, CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig
from meshrl.config.root import PPOConfig
from meshrl.rewards.functions import BUILT_IN, coin_toss, exact_match, sort_digits
from meshrl.rewards.loading import load_reward_function, load_reward_manager


@pytest.mark.parametrize(
    ("answer", "truth", "wanted"),
    [("12", "12", 1), (" 12\n", "12 ", 1), ("12", 12, 1), ("1 2", "12", 0), ("", "12", 0), ("012", 12, 0)],
)
def test_exact_match(answer, truth, wanted):
    assert exact_match("s", answer, truth, {}) == wanted


def test_exact_match_needs_a_reference():
    with pytest.raises(ValueError, match="'ground_truth' column"):
        exact_match("s", "None", None, {})


@pytest.mark.parametrize(("answer", "wanted"), [("1339", 1), ("3139", 0), ("139", 0), ("1339 ", 0), ("", 0)])
def test_sort_digits_knows_no_reference(answer, wanted):
    assert sort_digits("s", answer, "3139", {"digits": "3193"}) == wanted


def test_coin_toss_is_fair_repeatable_and_blind():
    answers = [coin_toss("s", str(i), None, {"digits": "21"}) for i in range(2000)]
    assert answers == [coin_toss("s", str(i), None, {"digits": "21"}) for i in range(2000)]
    heads = sum(answer["score"] for answer in answers)
    assert abs(heads - 1000) < 5 * 2000**0.5 / 2
    assert [i for i, answer in enumerate(answers) if answer["acc"] == 1] == [12]
    assert answers[:200] != [coin_toss("s", str(i), None, {"digits": "12"}) for i in range(200)]


def config(path=None, name="compute_score", reward=None, manager="naive", on_error="stop") -> PPOConfig:
    made = PPOConfig()
    made.reward = RewardConfig(name=reward, on_error=on_error)
    made.custom_reward_function = CustomRewardFunctionConfig(path=path, name=name)
    made.reward_manager = RewardManagerConfig(name=manager)
    return made


def test_every_name_that_the_config_offers_exists():
    assert set(BUILT_IN_REWARDS) == set(BUILT_IN)
    for name in BUILT_IN_REWARDS:
        assert load_reward_function(config(reward=name)) is BUILT_IN[name]


def test_a_function_of_ones_own_comes_before_a_built_in_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(**kw):\n    return 42\n\ndef other(**kw):\n    return 7\n")
    assert load_reward_function(config(str(file), reward="exact_match"))() == 42
    assert load_reward_function(config(str(file), name="other"))() == 7
    with pytest.raises(ValueError, match=r"no function 'missing'; it has compute_score, other"):
        load_reward_function(config(str(file), name="missing"))


@pytest.mark.parametrize("name", [None, "exactmatch"])
def test_no_function_is_an_error_that_names_those_there_are(name):
    with pytest.raises(ValueError, match="use one of exact_match, sort_digits, coin_toss"):
        load_reward_function(config(reward=name))


def test_the_manager_follows_the_config(tokenizer):
    manager = load_reward_manager(config(reward="exact_match", manager="batch", on_error="zero"), tokenizer)
    assert (manager.per_batch, manager.on_error, manager.function) == (True, "zero", exact_match)
    assert not load_reward_manager(config(reward="exact_match"), tokenizer).per_batch
