"""Where rewards come from: `reward.*`, `custom_reward_function.*`, `reward_manager.*`."""

from dataclasses import dataclass

from meshrl.config.key import key

BUILT_IN_REWARDS = ("exact_match", "sort_digits", "coin_toss")


@dataclass
class RewardConfig:
    name: str | None = key(
        None, "Built-in reward function, unless custom_reward_function.path is set.", choices=BUILT_IN_REWARDS
    )
    on_error: str = key(
        "stop",
        "When a reward function raises or returns NaN: stop, or give zero and count it.",
        choices=("stop", "zero"),
    )


@dataclass
class CustomRewardFunctionConfig:
    path: str | None = key(None, "Python file (or importable module) with a reward function of your own.")
    name: str = key("compute_score", "Name of the function in it.")


@dataclass
class RewardManagerConfig:
    name: str = key(
        "naive",
        "How the function is called: per sample (naive) or once for a batch.",
        choices=("naive", "batch", "dapo", "prime"),
        pending={"dapo": "overlong reward shaping", "prime": "parallel verification"},
    )
