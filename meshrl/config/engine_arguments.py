"""Checks of vLLM's and SGLang's own arguments (`engine_kwargs`): what has a key of ours, and what a run cannot take."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from meshrl.config.names import ROLLOUT
from meshrl.config.rollout import RolloutConfig
from meshrl.config.root import PPOConfig

SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
EXTERNAL = ("vllm", "sglang")
# Arguments that a key of the rollout's sets.
OWN_KEYS = {
    "vllm": {"dtype": "dtype", "enable_sleep_mode": "free_cache_engine"},
    "sglang": {"dtype": "dtype", "enable_memory_saver": "free_cache_engine"},
}
# Weights in another form than they are sent in.
QUANTIZED = {"vllm": ("quantization",), "sglang": ("quantization", "torchao_config", "modelopt_quant")}
# GPUs of an engine are the product of these.
SIZES = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "sglang": ("tp_size", "pp_size", "dp_size"),
}


def engine_gpus(name: str, arguments: Mapping[str, Any]) -> int:
    """How many GPUs an engine with these arguments of its own takes."""
    sizes = {field: int(arguments.get(field) or 1) for field in SIZES[name]}
    if arguments.get("enable_dp_attention"):
        sizes.pop("dp_size", None)  # these are the ranks that cut the rest
    return math.prod(sizes.values())


def server_words(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """The words that give a server these arguments on its command line; a `ValueError` for what has no such form.

    None leaves the argument to the engine. vLLM has `--no-x` for a flag that is false; SGLang's flags are false if
    they are left out.
    """
    return [word for field, value in arguments.items() for word in _argument_words(name, field, value)]


def _argument_words(name: str, field: str, value: Any) -> list[str]:
    option = field.replace("_", "-")
    if value is None or (value is False and name == "sglang"):
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError(f"{field} is an empty list, which has no form on a server's command line: leave it out")
        return [f"--{option}", *(_one_word(field, item, is_apart=True) for item in value)]
    return [f"--{option}={_one_word(field, value, is_apart=False)}"]


def _one_word(field: str, value: Any, is_apart: bool) -> str:
    """A value that is no flag; `is_apart`: a word of its own, which must not be read as the name of an option."""
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float | os.PathLike):
        raise ValueError(f"{field} holds {value!r}, which has no form on a server's command line")
    word = str(value)
    if is_apart and word.startswith("-") and isinstance(value, str):
        raise ValueError(f"{field} holds {value!r}, which a server takes for the name of another argument")
    return word


def quantization_problem(name: str, arguments: Mapping[str, Any], prefix: str) -> str | None:
    """Why an engine that turns weights into another form is refused, or None."""
    given = next((field for field in QUANTIZED.get(name, ()) if arguments.get(field)), None)
    if given is None:
        return None
    return (
        f"{prefix}{given}={arguments[given]}: weights are sent to the engine as they are, and it is not known to renew "
        "those that it keeps in another form: leave it out"
    )


def engine_argument_problems(config: PPOConfig) -> list[str]:
    """What is wrong with the arguments of the rollout's engine, and with those of the judge's."""
    rollout, judge = config.actor_rollout_ref.rollout, config.reward.judge
    problems = [
        f"{ROLLOUT}.engine_kwargs.{name}.{field} cannot be set: set {ROLLOUT}.{key}, {_why(key)}"
        for name in EXTERNAL
        for field, key in OWN_KEYS[name].items()
        if field in getattr(rollout.engine_kwargs, name)
    ]
    problems += _size_problems(config)
    is_server = rollout.as_server is not False if rollout.name == "sglang" else bool(rollout.as_server)
    for name, given, prefix, takes_words in (
        (rollout.name, _given(rollout), f"{ROLLOUT}.engine_kwargs.{rollout.name}.", is_server),
        (judge.engine, judge.engine_kwargs, "reward.judge.engine_kwargs.", judge.engine == "sglang"),
    ):
        found = quantization_problem(name, given, prefix), speculation_problem(name, given, prefix)
        problems += [problem for problem in found if problem is not None]
        problems += [
            f"{prefix}{field}: write it with underscores, {field.replace('-', '_')}, as Python does"
            for field in given
            if "-" in field
        ]
        # An engine in a worker's process takes its arguments as they are.
        problems += [f"{prefix}{problem}" for problem in _word_problems(name, given)] if takes_words else []
    return problems


def _word_problems(name: str, given: Mapping[str, Any]) -> Iterator[str]:
    for field, value in given.items():
        try:
            server_words(name, {field: value})
        except ValueError as error:
            yield str(error)


def speculation_problem(name: str, arguments: Mapping[str, Any], prefix: str) -> str | None:
    """Why an engine that is to verify draft tokens is refused, or None."""
    if name != "vllm" or not arguments.get("speculative_config"):
        return None
    return (
        f"{prefix}speculative_config: vLLM takes no draft tokens beside a logits processor, and the log-probs of its "
        "answers come from one: leave it out"
    )


def _why(key: str) -> str:
    return "in which weights are sent as well" if key == "dtype" else "which the trainer goes by as well"


def _given(rollout: RolloutConfig) -> dict[str, Any]:
    return getattr(rollout.engine_kwargs, rollout.name) if rollout.name in EXTERNAL else {}


def _size_problems(config: PPOConfig) -> Iterator[str]:
    """Ranks that an engine starts for itself take the GPUs after its own rank's, which must be nobody's."""
    policy, rollout, judge = config.actor_rollout_ref, config.actor_rollout_ref.rollout, config.reward.judge
    world, given = config.trainer.world_size, _given(rollout)
    ranks = world if policy.hybrid_engine else rollout.nnodes * rollout.n_gpus_per_node
    # One rank in the controller's process sees all GPUs of the machine, and on CPUs there is nothing to share.
    has_room = config.trainer.device == "cpu" or (world == 1 and config.trainer.backend == "local")
    gpus = engine_gpus(rollout.name, given) if given else 1
    if gpus > 1:
        said = _said(rollout.name, given, f"{ROLLOUT}.engine_kwargs.{rollout.name}")
        if rollout.replica_size > 1:
            yield f"{said} does not go with {SIZE}={rollout.replica_size}, which cuts the engine: leave it out"
        elif not has_room or (not policy.hybrid_engine and config.trainer.device != "cpu"):
            yield (
                f"{said} is an engine of {gpus} GPUs, but each of the {ranks} ranks has one GPU and an engine of its "
                f"own: set {SIZE}={gpus} instead, which makes {gpus} neighbouring ranks one engine"
            )
    if judge.engine in EXTERNAL and engine_gpus(judge.engine, judge.engine_kwargs) > 1 and not has_room:
        said = _said(judge.engine, judge.engine_kwargs, "reward.judge.engine_kwargs")
        yield f"{said}: each of the {world} ranks has one GPU and a judge of its own: leave it out"


def _said(name: str, given: Mapping[str, Any], prefix: str) -> str:
    return " with ".join(f"{prefix}.{field}={given[field]}" for field in SIZES[name] if field in given)
