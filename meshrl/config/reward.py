"""The sources of rewards: `reward.*`, `custom_reward_function.*` and `reward_manager.*`, with checks of these keys."""

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.engine import OwnDevices
from meshrl.config.keys import LONGEST_WAIT, MOST_AT_ONCE, MOST_TOKENS, equals, is_set, key, section
from meshrl.config.rollout import ROLLOUTS
from meshrl.config.user_code import argument_problem, is_async, load_function, reward_call_problem
from meshrl.registry import REWARD_MANAGERS

# Arguments of a judge that is reached by a URL. A judge on the workers has keys in `reward.judge` instead.
JUDGE_URL_OPTIONS = (
    "url", "model", "max_tokens", "temperature", "timeout", "retries", "backoff", "concurrency", "api_key_env",
)  # fmt: skip
# The built-in function for a run in which only a reward model scores responses.
NOTHING = "nothing"
# The arguments of built-in functions. `NEEDED_OPTIONS` has the required ones (for a judge, see `judge_problems`).
REWARD_OPTIONS: dict[str, tuple[str, ...]] = {
    "exact_match": ("extract", "ignore_case"),
    "sort_digits": (),
    "coin_toss": (),
    "format_match": ("pattern", "whole"),
    "math_verify": ("timeout",),
    "code": ("partial", "interpreter", "strict", "sandbox", "limits"),
    "judge": (*JUDGE_URL_OPTIONS, "template", "pattern", "low", "high"),
    NOTHING: (),
}
# The numbers that built-in functions return in addition to the score.
REWARD_NUMBERS: dict[str, tuple[str, ...]] = {"coin_toss": ("acc",), "math_verify": ("acc", "parsed"), "code": ("acc",)}
NEEDED_OPTIONS = {"format_match": ("pattern",)}
# Arguments that are bools, and arguments that are regular expressions.
SWITCHES, PATTERNS = ("ignore_case", "whole", "partial", "strict"), ("extract", "pattern")
BUILT_IN_REWARDS = tuple(REWARD_OPTIONS)
MANAGERS = ("naive", "batch", "dapo", "prime")


@dataclass
class JudgeConfig(OwnDevices):
    path: str | None = key(None, "Folder of a language model that grades, on the workers; null: reward.kwargs.url.")
    engine: str = key("embedded", "Engine that it runs in.", choices=ROLLOUTS)
    dtype: str = key("auto", "Its dtype; auto: float32 on a CPU, the model's own on a GPU.")
    max_tokens: int = key(512, "Longest judgement, in tokens.", low=1, high=MOST_TOKENS)
    temperature: float = key(0.0, "Sampling temperature of judgements.", low=0, high=100)
    max_num_seqs: int = key(256, "Most judgements at once on one rank.", low=1, high=MOST_AT_ONCE)
    max_model_len: int | None = key(
        None, "Longest question plus judgement; null: the model's own.", low=1, high=MOST_TOKENS
    )
    gpu_memory_utilization: float = key(0.2, "Share of the GPU's memory that it takes.", low=0, high=1)
    trust_remote_code: bool = key(False, "Run model or tokenizer code found in the folder.")
    engine_kwargs: dict[str, Any] = key(
        {}, "Further arguments of vLLM or SGLang.", only_if=equals(".engine", "vllm", "sglang")
    )


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
    judge: JudgeConfig = section(JudgeConfig, "The model behind the reward function judge.")
    on_error: str = key(
        "stop",
        "When a reward function raises, hangs or returns no finite number: stop, give zero, or drop the sample.",
        choices=("stop", "zero", "drop"),
    )


@dataclass
class CustomRewardFunctionConfig:
    path: str | None = key(None, "Python file (or importable module) with a reward function of your own.")
    name: str = key("compute_score", "Name of the function in it.", only_if=is_set(".path"))
    reward_kwargs: dict[str, Any] = key({}, "Keyword arguments of that function.")


@dataclass
class OverlongBufferConfig:
    enable: bool = key(
        True,
        "Punish answers that come close to data.max_response_length (with the manager dapo).",
        only_if=equals("reward_manager.name", "dapo"),
        no_request=(False,),
        noted=True,
    )
    len: int | None = key(
        None,
        "Over how many last tokens the penalty grows.",
        low=1,
        high=MOST_TOKENS,
        only_if=equals(".enable", True),
        noted=True,
    )
    penalty_factor: float = key(
        1.0, "The penalty of an answer of full length.", low=0, high=1e6, only_if=equals(".enable", True), noted=True
    )
    log: bool = key(
        False, "Add the penalty of each sample to what is logged of it.", only_if=equals(".enable", True), noted=True
    )


@dataclass
class RewardManagerConfig:
    name: str = key(
        "naive",
        "How functions are called: for each sample (dapo: with overlong_buffer), for a batch, or in processes (prime).",
        choices=MANAGERS,
        registry=REWARD_MANAGERS,
    )
    timeout: float | None = key(
        None,
        "Seconds for one call; null: 300 with prime, whose hung processes are replaced, else no limit.",
        low=0.001,
        high=LONGEST_WAIT,
    )
    num_processes: int = key(8, "Processes of prime's pool.", low=1, high=10_000)
    max_concurrent_calls: int = key(
        64, "Most calls at once of a function that is a coroutine (async def).", low=1, high=MOST_AT_ONCE
    )
    overlap: bool = key(False, "Score samples while others are still generated, not when all have ended.")
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, "Overlong reward shaping, with dapo.")


def reward_problems(
    reward: RewardConfig, custom: CustomRewardFunctionConfig, manager: RewardManagerConfig, max_response_length: int
) -> list[str]:
    """Return one message for each contradiction between the reward's keys, and for each key without effect."""
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
    problems += option_problems(reward)
    problems += judge_problems(reward, manager)
    buffer = manager.overlong_buffer
    if manager.name != "dapo" and buffer.enable and buffer != OverlongBufferConfig():
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


def option_problems(reward: RewardConfig) -> list[str]:
    """Return one message for each unknown, missing or invalid argument of a built-in reward function."""
    asked = [("reward.kwargs", reward.name, reward.kwargs)] if reward.name else []
    for label, entry in reward.functions.items():
        fields = entry if isinstance(entry, dict) else {}
        kwargs = fields.get("kwargs") or {}
        if not fields.get("path") and isinstance(kwargs, dict):
            asked.append((f"reward.functions.{label}.kwargs", fields.get("name") or str(label), kwargs))
    problems = []
    for where, name, kwargs in asked:
        options = REWARD_OPTIONS.get(name)
        if options is None:
            continue
        if unknown := sorted(set(kwargs) - set(options)):
            has = ", ".join(options) or "none"
            problems.append(f"{where}: reward function '{name}' takes no argument {', '.join(unknown)}: it has {has}")
        if missing := [option for option in NEEDED_OPTIONS.get(name, ()) if option not in kwargs]:
            problems.append(f"{where}: reward function '{name}' needs {', '.join(missing)}: set {where}.{missing[0]}")
        problems += [f"{where}.{problem}" for problem in _value_problems(kwargs)]
    return problems


def _value_problems(kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message for each switch that is not a bool and each pattern that is not a regular expression."""
    for option, value in kwargs.items():
        if option in SWITCHES and not isinstance(value, bool):
            yield f"{option} must be true or false, not {value!r}"
        if option in PATTERNS and value is not None:
            try:
                re.compile(value)
            except (re.error, TypeError) as error:
                yield f"{option}={value!r} is no regular expression: {error}"


def reward_numbers(
    reward: RewardConfig, custom: CustomRewardFunctionConfig, has_model: bool = False
) -> list[str] | None:
    """Return the names of the numbers that the reward functions return for a sample in addition to its score.

    The result is None if the names are unknown, because a function of the user may return anything.
    """
    entries = {str(label): entry if isinstance(entry, dict) else {} for label, entry in reward.functions.items()}
    named = {label: str(entry.get("name") or label) for label, entry in entries.items()}
    named |= {reward.name: reward.name} if reward.name else {}
    if not named and not custom.path and has_model:
        return []
    if not named or custom.path or any(entry.get("path") for entry in entries.values()):
        return None
    if len(named) == 1:
        return list(REWARD_NUMBERS.get(next(iter(named.values())), ()))
    said = [(label, number) for label, name in named.items() for number in REWARD_NUMBERS.get(name, ())]
    shared = ["acc"] if any(number == "acc" for _, number in said) else []
    return [*shared, *(f"{label}/{number}" for label, number in said), *(f"{label}/score" for label in named)]


def judge_functions(reward: RewardConfig) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of every use of the built-in judge, by the key that sets them."""
    return built_in_arguments(reward, "judge")


def built_in_arguments(reward: RewardConfig, name: str) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of every use of one built-in function, by the key that sets them."""
    found = {"reward.kwargs": reward.kwargs} if reward.name == name else {}
    for label, entry in reward.functions.items():
        fields = entry if isinstance(entry, dict) else {}
        if not fields.get("path") and (fields.get("name") or label) == name:
            found[f"reward.functions.{label}.kwargs"] = fields.get("kwargs") or {}
    return found


def judge_problems(reward: RewardConfig, manager: RewardManagerConfig) -> list[str]:
    """Check that a judge is either reached by a URL or runs on the workers (`reward.judge.path`), and not both."""
    judges = judge_functions(reward)
    if reward.judge.path is None:
        problems = ["reward.judge has no effect without reward.judge.path"] if reward.judge != JudgeConfig() else []
        missing = [
            f"{where}.{name}" for where, kwargs in judges.items() for name in ("url", "model") if name not in kwargs
        ]
        return [*problems, f"set {', '.join(missing)}, or reward.judge.path"] if missing else problems
    if not judges:
        return ["reward.judge.path has no effect without the reward function judge: set reward.name=judge"]
    elsewhere = [f"{where}.{name}" for where, kwargs in judges.items() for name in JUDGE_URL_OPTIONS if name in kwargs]
    problems = [f"{name} is for a judge behind a URL, not for reward.judge.path" for name in elsewhere]
    if manager.overlap and not reward.judge.has_own_devices:
        problems.append(
            "reward_manager.overlap=true: a judge on the policy's devices waits until they have generated; give it "
            "some of its own (reward.judge.nnodes and n_gpus_per_node)"
        )
    return problems


def reward_file_problems(
    reward: RewardConfig, custom: CustomRewardFunctionConfig, manager: RewardManagerConfig, has_model: bool
) -> list[str]:
    """Return one message for each reward function that cannot be imported or called, or whose package is missing.

    A run without any function is a problem as well, unless it has a reward model.
    """
    named = {reward.name} if reward.name else set()
    files: dict[str, tuple[str, str, Any]] = {}
    if custom.path:
        files["custom_reward_function"] = (custom.path, custom.name, custom.reward_kwargs)
    for label, entry in reward.functions.items():
        entry = entry if isinstance(entry, dict) else {}
        if entry.get("path"):
            files[f"reward.functions.{label}"] = (entry["path"], entry.get("name") or label, entry.get("kwargs"))
        else:
            named.add(entry.get("name") or label)
    problems = []
    if not (named or files or has_model):
        problems.append("set reward.name, reward.functions or custom_reward_function.path, or reward_model.enable=true")
    if NOTHING in named and not has_model:
        problems.append(f"the reward function {NOTHING} leaves nothing to learn without reward_model.enable=true")
    awaited = False
    for where, (path, name, kwargs) in files.items():
        try:
            function = load_function(path, name)
            kwargs = kwargs if isinstance(kwargs, dict) else {}
            problem = argument_problem(function, kwargs, name)
            if problem is None and manager.name in MANAGERS:  # a manager of the user may call functions in any way
                problem = reward_call_problem(function, kwargs, name, manager.name)
            awaited |= is_async(function)
            if is_async(function) and manager.name == "prime":
                problem = f"{name} is a coroutine (async def), which reward_manager.name=prime cannot call: use naive"
        except ValueError as error:
            problem = str(error)
        problems += [f"{where}: {problem}"] if problem else []
    if not problems and not awaited and manager.max_concurrent_calls != RewardManagerConfig().max_concurrent_calls:
        problems.append(
            f"reward_manager.max_concurrent_calls={manager.max_concurrent_calls} has no effect: no reward function is "
            "a coroutine (async def)"
        )
    if reward.judge.path is not None and not Path(reward.judge.path).is_dir():
        problems.append(f"reward.judge.path: there is no folder {reward.judge.path}")
    for name, package, extra in (("math_verify", "math_verify", "meshrl[math]"), ("judge", "httpx", "httpx")):
        if name == "judge" and reward.judge.path is not None:
            continue
        if name in named and importlib.util.find_spec(package) is None:
            problems.append(f"the reward function {name} needs a package: pip install '{extra}'")
    return problems


def manager_problems(manager: RewardManagerConfig) -> list[str]:
    """Check that a reward manager of the user can be imported and is a subclass of `RewardManager`."""
    if manager.name in MANAGERS:
        return []
    try:
        found = REWARD_MANAGERS.get(manager.name)
    except ValueError as error:
        return [f"reward_manager.name: {error}"]
    # The class is compared by name, because the config must not import the rewards package.
    bases = [f"{base.__module__}.{base.__qualname__}" for base in getattr(found, "__mro__", ())]
    if "meshrl.rewards.manager.RewardManager" in bases:
        return []
    return [f"reward_manager.name={manager.name} must be a subclass of meshrl.rewards.manager.RewardManager"]


def entry_problem(label: str, entry: Any) -> str | None:
    """Return the problem with one entry of `reward.functions`, or None.

    An entry is a weight, or a dict of weight, name, path and kwargs.
    """
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
