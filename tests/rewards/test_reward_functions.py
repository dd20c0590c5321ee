"""The built-in reward functions, and how the configured one is found."""

import re

import pytest

from meshrl.config.load import load_config
from meshrl.config.reward import (
    BUILT_IN_REWARDS,
    CustomRewardFunctionConfig,
    RewardConfig,
    RewardManagerConfig,
    reward_file_problems,
    reward_problems,
)
from meshrl.config.rl import PPOConfig
from meshrl.config.user_code import load_function
from meshrl.rewards.from_config import load_reward_function, load_reward_manager, reward_function_specs
from meshrl.rewards.functions import BUILT_IN, coin_toss, exact_match, format_match, sort_digits


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
    for name in set(BUILT_IN_REWARDS) - {"format_match", "judge"}:
        assert load_reward_function(config(reward=name)) is BUILT_IN[name]


def test_arguments_are_given_missed_and_refused():
    made = config(reward="format_match")
    with pytest.raises(ValueError, match="'format_match' needs pattern"):
        load_reward_function(made)
    made.reward.kwargs = {"pattern": r"a+", "hole": True}
    with pytest.raises(ValueError, match="takes no argument hole: it has pattern, whole"):
        load_reward_function(made)
    made.reward.kwargs = {"pattern": r"a+"}
    found = load_reward_function(made)
    assert [found(data_source="", solution_str=t, ground_truth=None, extra_info={}) for t in ("aa", "ab")] == [1, 0]
    with pytest.raises(ValueError, match="'judge' needs url, model"):
        load_reward_function(config(reward="judge"))


@pytest.mark.parametrize(
    ("answer", "whole", "wanted"),
    [
        ("<think>a\nb</think><answer>1</answer>", True, 1),
        (" <think></think>\n<answer>2</answer>\n", True, 1),
        ("x<think></think><answer>2</answer>", True, 0),
        ("x<think></think><answer>2</answer>", False, 1),
        ("<answer>2</answer>", False, 0),
    ],
)
def test_format_match(answer, whole, wanted):
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert format_match("s", answer, None, {}, pattern=pattern, whole=whole) == wanted


@pytest.mark.parametrize(
    ("answer", "extract", "wanted"),
    [
        ("first #### 11, then #### 12", r"#### (\d+)", 1),
        ("first #### 12, then #### 11", r"#### (\d+)", 0),
        ("no mark 12", r"#### (\d+)", 0),
        ("so 12", r"\d+", 1),
        ("ab", r"(x)?ab", 0),
    ],
)
def test_exact_match_of_what_is_extracted(answer, extract, wanted):
    assert exact_match("s", answer, "12", {}, extract=extract) == wanted


def test_exact_match_ignores_case_where_asked():
    assert exact_match("s", "ParIS", "paris", {}, ignore_case=True) == 1
    assert exact_match("s", "ParIS", "paris", {}) == 0


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
    assert (manager.name, manager.on_error, manager.specs[0].load()) == ("batch", "zero", exact_match)
    made = config(reward="exact_match", manager="dapo")
    with pytest.raises(ValueError, match=r"dapo needs reward_manager\.overlong_buffer\.len"):
        load_reward_manager(made, tokenizer)
    made.data.max_response_length, made.reward_manager.overlong_buffer.len = 100, 101
    with pytest.raises(ValueError, match=r"len \(101\) must be between 1 and data.max_response_length \(100\)"):
        load_reward_manager(made, tokenizer)
    made.reward_manager.overlong_buffer.len = 40
    overlong = load_reward_manager(made, tokenizer).overlong
    assert (overlong.max_length, overlong.length, overlong.penalty_factor) == (100, 40, 1.0)
    made.reward_manager.overlong_buffer.enable = False
    assert load_reward_manager(made, tokenizer).overlong is None


def test_several_functions_from_the_config(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def short(*, by=1, **kw):\n    return by\n")
    overrides = [
        "reward.functions.exact_match=1",
        "reward.functions.form.weight=0.5",
        "reward.functions.form.name=format_match",
        "reward.functions.form.kwargs.pattern=a+",
        f"reward.functions.short.path={file}",
        "reward.functions.short.kwargs.by=3",
    ]
    specs = reward_function_specs(load_config("grpo", overrides).config)
    assert [(spec.label, spec.weight) for spec in specs] == [("exact_match", 1.0), ("form", 0.5), ("short", 1.0)]
    assert specs[0].load() is exact_match
    assert specs[1].load()(data_source="", solution_str="aa", ground_truth=None, extra_info={}) == 1
    assert specs[2].load()() == 3


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"wieght": 1}, "functions.exact_match has no wieght"),
        ("much", "weight must be a finite number, not 'much'"),
        (True, "weight must be a finite number"),
        ({"name": "exactmatch"}, "no built-in reward function exactmatch"),
        ({"kwargs": 3}, "kwargs must be a dict, not 3"),
    ],
)
def test_entries_that_are_wrong(entry, said):
    made = config()
    made.reward.functions = {"exact_match": entry}
    with pytest.raises(ValueError, match=said):
        reward_function_specs(made)


def problems(*overrides):
    made = load_config("grpo", overrides).config
    return reward_problems(made.reward, made.custom_reward_function, made.reward_manager, 100)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["reward.name=exact_match", "reward.functions.code=1"],
            "reward.name=exact_match and reward.functions: choose",
        ),
        (["reward.kwargs.extract=x"], "reward.kwargs has no effect"),
        (["custom_reward_function.reward_kwargs.x=1"], "reward_kwargs has no effect"),
        (["reward.functions.mine=1"], "no built-in reward function mine; set its path"),
        (["reward_manager.overlong_buffer.len=8"], "no effect with reward_manager.name=naive: use dapo"),
        (["reward_manager.name=dapo"], r"len \(None\) must be between 1 and data.max_response_length \(100\)"),
        (["reward_manager.name=dapo", "reward_manager.overlong_buffer.len=101"], r"len \(101\) must be between"),
        (["reward_manager.num_processes=2"], "num_processes has no effect with reward_manager.name=naive"),
    ],
)
def test_what_does_not_fit_together(overrides, said):
    (problem,) = problems(*overrides)
    assert re.search(said, problem)


def test_what_fits_together():
    assert problems("reward.name=exact_match", "reward.kwargs.extract=x", "reward_manager.name=batch") == []
    assert (
        problems("reward_manager.name=dapo", "reward_manager.overlong_buffer.len=100", "reward.functions.code=1") == []
    )
    assert problems("reward_manager.name=dapo", "reward_manager.overlong_buffer.enable=false") == []
    assert problems("reward_manager.name=prime", "reward_manager.num_processes=2", "reward_manager.timeout=5") == []


def test_functions_are_looked_for_before_anything_starts(tmp_path):
    (tmp_path / "mine.py").write_text("def f(**kw):\n    return 1\n")

    def found(*overrides):
        made = load_config("grpo", overrides).config
        has_model = made.reward_model.enable
        return reward_file_problems(made.reward, made.custom_reward_function, made.reward_manager, has_model)

    choose = "set reward.name, reward.functions or custom_reward_function.path, or reward_model.enable=true"
    assert found() == [choose]
    assert found("reward_model.enable=true") == found("reward_model.enable=true", "reward.name=nothing") == []
    assert "the reward function nothing leaves nothing to learn without reward_model" in found("reward.name=nothing")[0]
    assert found("reward.name=code") == []
    assert found(f"reward.functions.f.path={tmp_path}/mine.py") == []
    assert "no function 'g'" in found(f"reward.functions.g.path={tmp_path}/mine.py")[0]
    assert (
        "no function 'g'"
        in found(f"custom_reward_function.path={tmp_path}/mine.py", "custom_reward_function.name=g")[0]
    )


def test_a_package_is_found_also_from_the_folder_that_holds_it(tmp_path, monkeypatch):
    (tmp_path / "scores_in_a_package").mkdir()
    (tmp_path / "scores_in_a_package" / "__init__.py").write_text("def compute_score(**_):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_function("scores_in_a_package", "compute_score")() == 1.0
    with pytest.raises(ValueError, match="cannot import nothing_here"):
        load_function("nothing_here", "compute_score")
