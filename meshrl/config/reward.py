"""Where rewards come from: `reward.*`, `custom_reward_function.*`, `reward_manager.*`."""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

from meshrl.config.functions import load_function
from meshrl.config.key import key, section

BUILT_IN_REWARDS = ("exact_match", "sort_digits", "coin_toss", "format_match", "math_verify", "code", "judge")


@dataclass
class RewardConfig:
    name: str | None = key(
        None, "Built-in reward function, unless custom_reward_function.path is set.", choices=BUILT_IN_REWARDS
    )
    kwargs: dict[str, Any] = key({}, "Keyword arguments of that function.")
    functions: dict[str, Any] = key(
        {},
        "Several functions instead, by a label of your choice: its weight, or weight, name, path and kwargs.",
    )
    on_error: str = key(
        "stop",
        "When a reward function raises, hangs or returns no finite number: stop, give zero, or drop the sample.",
        choices=("stop", "zero", "drop"),
    )


@dataclass
class CustomRewardFunctionConfig:
    path: str | None = key(None, "Python file (or importable module) with a reward function of your own.")
    name: str = key("compute_score", "Name of the function in it.")
    reward_kwargs: dict[str, Any] = key({}, "Keyword arguments of that function.")


@dataclass
class OverlongBufferConfig:
    enable: bool = key(True, "Punish answers that come close to data.max_response_length (with the manager dapo).")
    len: int | None = key(None, "Over how many last tokens the penalty grows.", low=1)
    penalty_factor: float = key(1.0, "The penalty of an answer of full length.", low=0)
    log: bool = key(False, "Add the penalty of each sample to what is logged of it.")


@dataclass
class RewardManagerConfig:
    name: str = key(
        "naive",
        "How functions are called: for each sample (dapo: with overlong_buffer), for a batch, or in processes (prime).",
        choices=("naive", "batch", "dapo", "prime"),
    )
    timeout: float | None = key(
        None, "Seconds for one call; null: 300 with prime, whose hung processes are replaced, else no limit.", low=0.001
    )
    num_processes: int = key(8, "Processes of prime's pool.", low=1)
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, "Overlong reward shaping, with dapo.")


def reward_problems(
    reward: RewardConfig, custom: CustomRewardFunctionConfig, manager: RewardManagerConfig, max_response_length: int
) -> list[str]:
    """What does not fit together, and what would silently do nothing."""
    chosen = {
        f"reward.name={reward.name}": reward.name,
        f"custom_reward_function.path={custom.path}": custom.path,
        "reward.functions": reward.functions,
    }
    given = [name for name, value in chosen.items() if value]
    problems = [f"{' and '.join(given)}: choose one"] if len(given) > 1 else []
    if reward.kwargs and not reward.name:
        problems.append("reward.kwargs has no effect without reward.name; functions have kwargs of their own")
    if custom.reward_kwargs and not custom.path:
        problems.append("custom_reward_function.reward_kwargs has no effect without custom_reward_function.path")
    problems += [problem for label, entry in reward.functions.items() if (problem := entry_problem(str(label), entry))]
    buffer = manager.overlong_buffer
    if manager.name != "dapo" and buffer != OverlongBufferConfig():
        problems.append(
            f"reward_manager.overlong_buffer has no effect with reward_manager.name={manager.name}: use dapo"
        )
    if manager.name == "dapo" and buffer.enable and not 1 <= (buffer.len or 0) <= max_response_length:
        problems.append(
            f"reward_manager.overlong_buffer.len ({buffer.len}) must be between 1 and data.max_response_length "
            f"({max_response_length}) with reward_manager.name=dapo"
        )
    if manager.name != "prime" and manager.num_processes != RewardManagerConfig().num_processes:
        problems.append(
            f"reward_manager.num_processes has no effect with reward_manager.name={manager.name}: use prime"
        )
    return problems


def reward_file_problems(reward: RewardConfig, custom: CustomRewardFunctionConfig) -> list[str]:
    """Functions that are not there, or whose packages are not."""
    named = {reward.name} if reward.name else set()
    files = {"custom_reward_function": (custom.path, custom.name)} if custom.path else {}
    for label, entry in reward.functions.items():
        entry = entry if isinstance(entry, dict) else {}
        if entry.get("path"):
            files[f"reward.functions.{label}"] = (entry["path"], entry.get("name") or label)
        else:
            named.add(entry.get("name") or label)
    problems = [] if named or files else ["set reward.name, reward.functions or custom_reward_function.path"]
    for where, (path, name) in files.items():
        try:
            load_function(path, name)
        except ValueError as error:
            problems.append(f"{where}: {error}")
    for name, package, extra in (("math_verify", "math_verify", "meshrl[math]"), ("judge", "httpx", "httpx")):
        if name in named and importlib.util.find_spec(package) is None:
            problems.append(f"the reward function {name} needs a package: pip install '{extra}'")
    return problems


def entry_problem(label: str, entry: Any) -> str | None:
    """What is wrong with an entry of `reward.functions`: a weight, or a dict of weight, name, path and kwargs."""
    fields = entry if isinstance(entry, dict) else {"weight": entry}
    where = f"reward.functions.{label}"
    if unknown := sorted(set(fields) - {"weight", "name", "path", "kwargs"}):
        return f"{where} has no {', '.join(unknown)}: it has weight, name, path, kwargs"
    weight = fields.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        return f"{where}: its weight must be a finite number, not {weight!r}"
    if not isinstance(fields.get("kwargs") or {}, dict):
        return f"{where}.kwargs must be a dict, not {fields['kwargs']!r}"
    name = fields.get("name") or label
    if not fields.get("path") and name not in BUILT_IN_REWARDS:
        return (
            f"{where}: there is no built-in reward function {name}; set its path, or its name to one of "
            + ", ".join(BUILT_IN_REWARDS)
        )
    return None
