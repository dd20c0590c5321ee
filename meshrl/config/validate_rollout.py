"""Checks of the rollout: replicas of several ranks, sampling, arguments of vLLM and SGLang, tools and turns.

`engine_gpus`, `server_words` and `read_tool_config` are also called by the code that starts engines and loads tools.
"""

import inspect
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from meshrl.config.families import CUT_FAMILIES
from meshrl.config.keys import ROLLOUT, Note, changed_keys, get_value
from meshrl.config.model_folder import EXPERT_COUNTS, read_model_config
from meshrl.config.rl import PPOConfig
from meshrl.config.rollout import READERS, SPEED_KEYS, UNNEEDED, RolloutConfig, ValKwargs
from meshrl.config.user_code import function_schema, load_by_path

SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
SPREAD = f"{ROLLOUT}.expert_parallel_size"
# Rollouts with tensor or expert parallelism over the trainer's ranks.
SPLIT = ("embedded", "vllm", "sglang")


def split_engine_problems(config: PPOConfig) -> list[str]:
    """Return a message if the rollout engine does not support replicas of several ranks."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.replica_size == 1:
        return []
    if rollout.name not in SPLIT:
        can = f"{', '.join(SPLIT[:-1])} and {SPLIT[-1]} can"
        return [f"not supported yet: {_named(rollout)}: {ROLLOUT}.name={rollout.name} over several ranks; {can}"]
    if rollout.name == "sglang" and rollout.expert_parallel_size > 1:
        return [
            f"not supported yet: {SPREAD}={rollout.expert_parallel_size} with {ROLLOUT}.name=sglang, whose ranks cut "
            f"the experts ({SIZE}); embedded and vllm spread them"
        ]
    return []


def split_problems(config: PPOConfig) -> list[str]:
    """Check that a replica of several ranks is compatible with the other settings.

    Ranks inside the workers' processes must get the same requests and weights in every step. That excludes turns,
    asynchronous training, and (embedded) adapters alone. An engine with its own processes has its GPUs on one machine.
    """
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    name, problems = _named(rollout), _spread_problems(rollout)
    if rollout.replica_size == 1 or rollout.name not in SPLIT:
        return problems
    if rollout.is_elsewhere:
        return problems + _node_problems(config)
    server = (
        f"set {ROLLOUT}.as_server=true" if rollout.name == "vllm" else f"use {ROLLOUT}.name=vllm and as_server=true"
    )
    if rollout.multi_turn.enable:
        problems.append(
            f"{name} does not go with {ROLLOUT}.multi_turn.enable=true inside the workers' processes: turns arrive at "
            "their own time on every rank, and the ranks of one rollout must get the same requests; "
            f"{server}, or {name.partition('=')[0]}=1"
        )
    if policy.model.has_adapters and rollout.name == "embedded" and rollout.update_weights_adapters != "merged":
        problems.append(
            f"{name} takes no adapters alone: set {ROLLOUT}.update_weights_adapters=merged, not "
            f"{rollout.update_weights_adapters}"
        )
    how = config.async_training
    if how.max_staleness or how.batches_ahead:
        problems.append(
            f"{name} does not go with async_training (max_staleness {how.max_staleness}, batches_ahead "
            f"{how.batches_ahead}) inside the workers' processes: weights would change at another step on each rank "
            f"of a rollout; {server}, or {name.partition('=')[0]}=1"
        )
    return problems


def _node_problems(config: PPOConfig) -> list[str]:
    """Check that the ranks of a replica are on one machine, for an engine with processes of its own."""
    policy, size = config.actor_rollout_ref, config.actor_rollout_ref.rollout.replica_size
    where = (config.trainer, "trainer") if policy.hybrid_engine else (policy.rollout, ROLLOUT)
    nodes, ranks, key = where[0].nnodes, where[0].n_gpus_per_node, f"{where[1]}.n_gpus_per_node"
    if nodes == 1 or ranks % size == 0:
        return []  # for one machine, `rollout_problems` checks the number of ranks
    return [
        f"{key} ({ranks}) must be divisible by {_named(policy.rollout)}: an engine in processes of its own "
        f"({ROLLOUT}.name={policy.rollout.name}) has all of its GPUs on one machine"
    ]


def _spread_problems(rollout: RolloutConfig) -> list[str]:
    """Check the combination of tensor and expert parallelism.

    The embedded engine shards experts only with tensor parallelism 1. vLLM needs the same size for both.
    """
    cut, spread = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    if spread == 1 or rollout.name not in SPLIT:
        return []
    if rollout.name == "embedded" and cut > 1:
        return [f"{SPREAD}={spread} with {ROLLOUT}.name=embedded leaves all else whole: set {SIZE}=1, not {cut}"]
    if rollout.name == "vllm" and cut != spread:
        return [f"{SPREAD}={spread} with {ROLLOUT}.name=vllm needs {SIZE}={spread}, not {cut}"]
    return []


def split_file_problems(config: PPOConfig) -> list[str]:
    """Check that the model's heads, inner width, vocabulary and experts divide over the ranks of a replica."""
    policy = config.actor_rollout_ref
    if policy.rollout.replica_size == 1 or policy.rollout.name not in SPLIT:
        return []
    try:
        shape = read_model_config(policy.model)
    except ValueError:
        return []  # `model_problems` reports it
    return [*_expert_problems(policy.rollout, shape), *_cut_problems(policy.rollout, shape)]


def _expert_problems(rollout: RolloutConfig, shape: Mapping[str, Any]) -> list[str]:
    spread = rollout.expert_parallel_size
    if spread == 1:
        return []
    field = next((field for field in EXPERT_COUNTS if shape.get(field)), None)
    if field is None:
        return [f"{SPREAD}={spread}: the model ({shape.get('model_type')}) has no experts to spread; set it to 1"]
    if shape[field] % spread:
        return [f"the model's {field} ({shape[field]}) must be divisible by {SPREAD} ({spread})"]
    return []


def _cut_problems(rollout: RolloutConfig, shape: Mapping[str, Any]) -> list[str]:
    size, kind, problems = rollout.tensor_model_parallel_size, shape.get("model_type"), []
    if size == 1:
        return []
    if rollout.name == "embedded" and kind is not None and kind not in CUT_FAMILIES:
        problems.append(f"{SIZE}={size}: a {kind} model cannot be cut, only {', '.join(CUT_FAMILIES)}; set it to 1")
    for name in ("num_attention_heads", "intermediate_size"):
        count = shape.get(name)
        if count is not None and count % size:
            problems.append(f"the model's {name} ({count}) must be divisible by {SIZE} ({size})")
    groups = shape.get("num_key_value_heads") or size
    if groups % size and size % groups:
        problems.append(
            f"the model's num_key_value_heads ({groups}) must be divisible by {SIZE} ({size}), or the other way round"
        )
    tokens = shape.get("vocab_size")
    if tokens is not None and (size - 1) * -(-tokens // size) >= tokens:
        problems.append(f"the model's vocab_size ({tokens}) leaves some of the {size} ranks of {SIZE} without a token")
    return problems


def _named(rollout: RolloutConfig) -> str:
    """Return `key=value` of the key that makes a rollout of several ranks: of tensor or of expert parallelism."""
    cut, spread = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    return f"{SIZE}={cut}" if cut >= spread else f"{SPREAD}={spread}"


# Checks of sampling and of the end of responses, in training and in validation.


def sampling_problems(config: PPOConfig) -> list[str]:
    """Return one message for each sampling key that leaves no token, prevents an end, or has no effect.

    The keys of `rollout` and of `rollout.val_kwargs` are checked.
    """
    rollout = config.actor_rollout_ref.rollout
    problems = []
    for prefix, settings in ((ROLLOUT, rollout), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        greedy = "do_sample=false" if not settings.do_sample else "temperature=0" if not settings.temperature else None
        if greedy and settings.n > 1:
            problems.append(f"{prefix}.{greedy} gives {prefix}.n={settings.n} equal responses: sample, or set n=1")
        if settings.top_k == 0:
            problems.append(f"{prefix}.top_k=0 leaves no token; -1 keeps all")
        if settings.top_p == 0:
            problems.append(f"{prefix}.top_p=0 leaves no token; 1.0 keeps all")
        if settings.repetition_penalty == 0:
            problems.append(f"{prefix}.repetition_penalty=0 must be above 0; 1.0 is none")
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        problems.append(f"{ROLLOUT}.val_kwargs.do_sample=true needs val_kwargs.temperature > 0")
    if not rollout.val_kwargs.do_sample:
        names = [f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_k", "top_p", "min_p")]
        problems += [
            Note(f"{name} has no effect with {ROLLOUT}.val_kwargs.do_sample=false, which takes the likeliest token")
            for name in names
            if name in changed_keys(config, name) and get_value(config, name)
        ]
    if rollout.multi_turn.enable and (rollout.ignore_eos or rollout.val_kwargs.ignore_eos):
        name = f"{ROLLOUT}.ignore_eos" if rollout.ignore_eos else f"{ROLLOUT}.val_kwargs.ignore_eos"
        problems.append(f"{name}=true leaves a turn without end: it does not go with {ROLLOUT}.multi_turn.enable")
    problems += _ending_problems(ROLLOUT, rollout, config.data.max_response_length)
    own = rollout.val_kwargs
    if (own.stop, own.min_tokens, own.ignore_eos) != (rollout.stop, rollout.min_tokens, rollout.ignore_eos):
        problems += _ending_problems(f"{ROLLOUT}.val_kwargs", own, config.data.max_response_length)
    if config.algorithm.mask_truncated_responses and rollout.ignore_eos and not rollout.stop:
        problems.append(
            f"algorithm.mask_truncated_responses=true with {ROLLOUT}.ignore_eos=true and no {ROLLOUT}.stop leaves no "
            "answer to learn from: all end at the length limit"
        )
    return problems


def _ending_problems(prefix: str, settings: RolloutConfig | ValKwargs, longest: int) -> list[str]:
    least, problems = settings.min_tokens or 0, []
    if any(not text for text in settings.stop or []):
        problems.append(f"{prefix}.stop={settings.stop} has an empty text, which every answer holds: leave it out")
    if least > longest:
        problems.append(f"{prefix}.min_tokens ({least}) must be at most data.max_response_length ({longest})")
    if settings.ignore_eos and least and not settings.stop:
        problems.append(f"{prefix}.min_tokens={least} has no effect with {prefix}.ignore_eos=true and no {prefix}.stop")
    return problems


# Checks of vLLM's and SGLang's own arguments (`engine_kwargs`): arguments that meshrl's keys set, or a run cannot take.

EXTERNAL = ("vllm", "sglang")
# Arguments that a key of the rollout sets.
OWN_KEYS = {
    "vllm": {"dtype": "dtype", "enable_sleep_mode": "free_cache_engine"},
    "sglang": {"dtype": "dtype", "enable_memory_saver": "free_cache_engine"},
}
# Arguments that make an engine keep its weights in another form than weight sync sends.
QUANTIZED = {"vllm": ("quantization",), "sglang": ("quantization", "torchao_config", "modelopt_quant")}
# The arguments whose product is the number of an engine's GPUs.
SIZES = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "sglang": ("tp_size", "pp_size", "dp_size"),
}


def engine_gpus(name: str, arguments: Mapping[str, Any]) -> int:
    """Return the number of GPUs of an engine with these arguments."""
    sizes = {field: int(arguments.get(field) or 1) for field in SIZES[name]}
    if arguments.get("enable_dp_attention"):
        sizes.pop("dp_size", None)  # attention is data-parallel over the tensor-parallel ranks
    return math.prod(sizes.values())


def server_words(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """Convert an engine's arguments to words of its server's command line.

    Raise `ValueError` for a value that has no form there. An argument that is None is left out. For a flag that is
    false, vLLM has `--no-x`; SGLang's flags are false if they are left out.
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
    """Convert a value that is not a bool to one word of a command line.

    If `is_apart`, the value is a separate word. Then a string that begins with `-` would be read as an option's name.
    """
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float | os.PathLike):
        raise ValueError(f"{field} holds {value!r}, which has no form on a server's command line")
    word = str(value)
    if is_apart and word.startswith("-") and isinstance(value, str):
        raise ValueError(f"{field} holds {value!r}, which a server takes for the name of another argument")
    return word


def quantization_problem(name: str, arguments: Mapping[str, Any], prefix: str) -> str | None:
    """Return the problem with arguments that make an engine quantize its weights, or None."""
    given = next((field for field in QUANTIZED.get(name, ()) if arguments.get(field)), None)
    if given is None:
        return None
    return (
        f"{prefix}{given}={arguments[given]}: weights are sent to the engine as they are, and it is not known to renew "
        "those that it keeps in another form: leave it out"
    )


def engine_argument_problems(config: PPOConfig) -> list[str]:
    """Return all problems of the engine arguments (`engine_kwargs`) of the rollout and of the judge."""
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
        # Only a server gets its arguments by a command line. An engine in a worker's process takes Python values.
        problems += [f"{prefix}{problem}" for problem in _word_problems(name, given)] if takes_words else []
    return problems


def _word_problems(name: str, given: Mapping[str, Any]) -> Iterator[str]:
    for field, value in given.items():
        try:
            server_words(name, {field: value})
        except ValueError as error:
            yield str(error)


def speculation_problem(name: str, arguments: Mapping[str, Any], prefix: str) -> str | None:
    """Return the problem with arguments that request speculative decoding, or None."""
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
    """Yield one message for each engine that would start ranks of its own on GPUs of other ranks.

    Such an engine takes the GPUs after that of its own rank.
    """
    policy, rollout, judge = config.actor_rollout_ref, config.actor_rollout_ref.rollout, config.reward.judge
    world, given = config.trainer.world_size, _given(rollout)
    ranks = world if policy.hybrid_engine else rollout.nnodes * rollout.n_gpus_per_node
    # A single rank in the controller's process has all GPUs of the machine. On CPUs there are no GPUs to share.
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


# Checks of `actor_rollout_ref.rollout.multi_turn.*`.

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
# The module of the tools' base class, which the config does not import.
TOOLS = "meshrl.agents.tools"
ENTRY_KEYS = ("path", "class_name", "config", "name", "timeout")


def multi_turn_problems(config: PPOConfig) -> list[str]:
    """Check the keys of tools and turns. There must be tools or an environment, and enough turns to use them."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not turns.enable:
        return [f"{name} has no effect without {MULTI_TURN}.enable=true" for name in changed_keys(config, MULTI_TURN)]
    problems = []
    has_tools = bool(turns.tools or turns.tool_config_path)
    if not has_tools and turns.environment is None:
        problems.append(
            f"{MULTI_TURN}.enable=true, but nobody answers the model: set {MULTI_TURN}.tools, tool_config_path or "
            "environment"
        )
    if turns.environment_kwargs and turns.environment is None:
        problems.append(f"{MULTI_TURN}.environment_kwargs has no effect without {MULTI_TURN}.environment")
    if turns.environment is not None and not has_tools and turns.max_assistant_turns == 1:
        problems.append(f"{MULTI_TURN}.max_assistant_turns=1 ends before the environment answers: it needs at least 2")
    return problems


def multi_turn_file_problems(config: PPOConfig) -> list[str]:
    """Check that tools and the environment can be imported, and that each tool has a valid schema for the model."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not turns.enable:
        return []
    problems = []
    paths = [("tools", path) for path in turns.tools]
    if turns.environment is not None:
        paths.append(("environment", turns.environment))
    if turns.tool_config_path is not None:
        try:
            entries = read_tool_config(turns.tool_config_path)
            paths += [("tool_config_path", str(entry.get("path") or entry["class_name"])) for entry in entries]
        except ValueError as error:
            problems.append(f"{MULTI_TURN}.tool_config_path: {error}")
    for name, path in paths:
        try:
            found = load_by_path(path)
        except ValueError as error:
            problems.append(f"{MULTI_TURN}.{name}: {error}")
            continue
        if name != "environment" and (problem := _schema_problem(found)):
            problems.append(f"{MULTI_TURN}.{name}: {problem}")
    return problems


def _schema_problem(found: Any) -> str | None:
    """Return the reason that a tool has no valid schema for the model, or None.

    The check is for plain functions, and for tool classes that do not define a constructor. The schema of a decorated
    function was checked when it was imported.
    """
    is_tool_class = inspect.isclass(found) and found.__init__.__module__ == TOOLS
    try:
        if inspect.isfunction(found):
            function_schema(found)
        elif is_tool_class and found.parameters is None:
            function_schema(found.execute, skip=("self", "state"))
    except ValueError as error:
        return str(error)
    return None


def read_tool_config(path: str) -> list[Mapping[str, Any]]:
    """Read the entries of a YAML tool file. Raise `ValueError` if it is invalid.

    The file has a list under `tools`: import paths, or mappings with `path` (or `class_name`) and further settings.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the tool file {path}: {' '.join(str(error).split())}") from error
    listed = read.get("tools") if isinstance(read, Mapping) else None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"the tool file {path} needs a list under 'tools'")
    entries: list[Mapping[str, Any]] = []
    for entry in listed:
        entry = {"path": entry} if isinstance(entry, str) else entry
        unknown = sorted(set(entry) - set(ENTRY_KEYS)) if isinstance(entry, Mapping) else [repr(entry)]
        if unknown:
            raise ValueError(f"the tool file {path}: unknown key {unknown[0]}; a tool has {', '.join(ENTRY_KEYS)}")
        if ("path" in entry) == ("class_name" in entry):
            raise ValueError(f"the tool file {path}: each tool needs a 'path' such as my_tools.py:search")
        entries.append(entry)
    return entries


def rollout_size_problems(config: PPOConfig) -> list[str]:
    """Check the rollout's lengths against those of the data, and delta weight sync against a freed cache."""
    rollout, problems = config.actor_rollout_ref.rollout, []
    if rollout.update_weights_delta and rollout.free_cache_engine and config.actor_rollout_ref.hybrid_engine:
        problems.append(
            f"{ROLLOUT}.update_weights_delta=true builds on weights that {ROLLOUT}.free_cache_engine=true gives up: "
            "set the latter to false"
        )
    for length, limit in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        ours, theirs = getattr(rollout, length), getattr(config.data, limit)
        if ours != theirs:
            problems.append(f"{ROLLOUT}.{length} ({ours}) must equal data.{limit} ({theirs}); leave it null")
    total = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < total:
        problems.append(
            f"{ROLLOUT}.max_model_len ({rollout.max_model_len}) must be at least data.max_prompt_length "
            f"+ max_response_length ({total})"
        )
    return problems


def reader_problems(config: PPOConfig) -> list[str]:
    """Return one message for each set key of the rollout or of the judge that its engine does not read."""
    name, judge, memory = config.actor_rollout_ref.rollout.name, config.reward.judge, "gpu_memory_utilization"
    # A script may carry arguments for both external engines. Unused arguments change no response: a note is enough.
    others = {"engine_kwargs.vllm": name == "sglang", "engine_kwargs.sglang": name == "vllm"}
    of_judge = [
        f"{changed} is only read by reward.judge.engine={' or '.join(READERS[memory])}, but it is {judge.engine}"
        for changed in changed_keys(config, f"reward.judge.{memory}")
        if judge.engine not in READERS[memory]
    ]
    return of_judge + [
        (Note if others.get(key, key in SPEED_KEYS) else str)(
            f"{changed} is only read by {ROLLOUT}.name={' or '.join(engines)}, but it is {name}"
        )
        for key, engines in READERS.items()
        if name not in engines and key not in UNNEEDED.get(name, {})
        for changed in changed_keys(config, f"{ROLLOUT}.{key}")
    ]


def budget_problems(config: PPOConfig) -> list[str]:
    """Check that the memory budget can be measured: memory of vLLM's sleep mode in a process counts as allocated."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    sleeps = rollout.name == "vllm" and not rollout.as_server and rollout.free_cache_engine and policy.hybrid_engine
    if policy.memory_budget_gigabytes is None or not sleeps or config.trainer.device == "cpu":
        return []
    return [
        "actor_rollout_ref.memory_budget_gigabytes cannot be held to while vLLM sleeps in the trainer's process: set "
        f"{ROLLOUT}.as_server=true or {ROLLOUT}.free_cache_engine=false"
    ]
