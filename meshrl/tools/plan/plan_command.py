"""`meshrl plan`: predict the memory and time of a recipe on some devices, without needing the devices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshrl.files import write_whole

if TYPE_CHECKING:
    from meshrl.config import Loaded
    from meshrl.config.rl import PPOConfig
    from meshrl.config.supervised import PreferenceConfig, SFTConfig, SupervisedConfig
    from meshrl.telemetry.hardware import Cluster
    from meshrl.tools.plan.models import Lengths, PlannedModel
    from meshrl.tools.plan.step_plan import Plan

BEST = 10
Config = TypeVar("Config", "PPOConfig", "SFTConfig", "PreferenceConfig")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `meshrl plan` to an argument parser."""
    parser.add_argument("words", nargs="*", metavar="RECIPE key=value", help="a recipe, then overrides")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sft", dest="kind", action="store_const", const="sft", help="a recipe of meshrl sft")
    kind.add_argument("--prefer", dest="kind", action="store_const", const="prefer", help="a recipe of meshrl prefer")
    parser.add_argument("--gpus", required=True, metavar="8xH200", help="so many devices of a kind")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="devices in a machine (default: up to 8)")
    parser.add_argument("--hardware", metavar="FILE", help="YAML with devices of your own, or measured ones")
    parser.add_argument("--model-config", metavar="FILE", help="a config.json, where the model's folder is not here")
    parser.add_argument("--lengths", metavar="FILE", help="lines of two numbers: tokens of prompt and response")
    parser.add_argument("--mean-response", type=int, metavar="N", help="mean tokens of a response (default: half)")
    parser.add_argument("--search", action="store_true", help="rank other layouts for the same devices")
    parser.add_argument("--out", metavar="FILE", help="with --search: write the best one's overrides here")
    parser.add_argument("--json", action="store_true", help="print numbers instead of text")


def planned(arguments: argparse.Namespace, say: Callable[[str], None] = lambda line: None) -> str:
    """Return the text or JSON that the command prints. `say` is called with a message before a long search."""
    from meshrl.tools.plan.search import candidate_json, change_lines, plan_json, plan_lines, search_lines

    if arguments.out and not arguments.search:
        raise ValueError(f"--out {arguments.out} is for what --search finds: add --search")
    if arguments.out and not Path(arguments.out).resolve().parent.is_dir():
        raise ValueError(f"--out: there is no folder to write {arguments.out} into")  # fail before a long search
    plan, again, remarks = read_and_plan(arguments)
    nearest, found = None, None
    if not plan.fits:
        from meshrl.tools.plan.search import nearest_fit

        say("it does not fit: looking for the nearest change that does")
        nearest = nearest_fit(plan, again)
    if arguments.search:
        from meshrl.tools.plan.search import search

        say("looking through other layouts")
        found = search(plan, again, BEST)
        if arguments.out and found.best:
            write_whole(arguments.out, "".join(f"{word}\n" for word in found.best[0].overrides))
    if arguments.json:
        answer: dict[str, Any] = plan_json(plan) | {"remarks": remarks}
        answer |= {} if plan.fits else {"nearest": candidate_json(nearest)}
        answer |= {"search": [candidate_json(candidate) for candidate in found.best]} if found else {}
        return json.dumps(answer, indent=1)
    lines = [*plan_lines(plan), *(f"note: {remark}" for remark in remarks)]
    if not plan.fits:
        lines += ["", *change_lines(nearest)]
    if found is not None:
        lines += ["", *search_lines(found)]
        if found.best:
            lines += ["", *_written(arguments.out, found.best[0].overrides)]
    return "\n".join(lines)


def _written(out: str | None, overrides: list[str]) -> list[str]:
    if not overrides:
        return ["the best one is the recipe as it is" + (f"; {out} is empty" if out else "")]
    if out:
        return [f"the best one's overrides are in {out}"]
    return ["the best one as overrides:", " ".join(f"'{word}'" if "|" in word else word for word in overrides)]


def read_and_plan(arguments: argparse.Namespace) -> tuple[Plan, Callable[[Any], Plan], list[str]]:
    """Return the plan, a function that plans another config of the same run quickly, and the config checks' remarks."""
    from meshrl.config import PPOConfig, PreferenceConfig, SFTConfig, load_config
    from meshrl.config.engine import ModelConfig
    from meshrl.config.recipe import is_recipe
    from meshrl.telemetry.hardware import hardware_table, parse_cluster
    from meshrl.tools.plan.models import find_model
    from meshrl.tools.plan.search import problems_of
    from meshrl.tools.plan.step_plan import make_plan, make_supervised_plan

    cluster = parse_cluster(arguments.gpus, arguments.gpus_per_node, hardware_table(arguments.hardware))
    words = list(arguments.words)
    recipe = words.pop(0) if words and is_recipe(words[0]) else None
    words += [f"trainer.nnodes={cluster.nodes}", f"trainer.n_gpus_per_node={cluster.per_node}"]
    if cluster.nodes > 1:
        words.append("trainer.backend=ray")
    if arguments.kind is not None:
        rows: SFTConfig | PreferenceConfig
        if arguments.kind == "sft":
            rows, ref_model = _with_folders(load_config(recipe, words, SFTConfig)), None
        else:
            rows = _with_folders(load_config(recipe, words, PreferenceConfig))
            own = rows.reference.path
            ref_model = None if own is None else find_model(ModelConfig(path=own), key="reference.path")
        model = find_model(rows.model, arguments.model_config, "model.path")
        make_one = partial(
            make_supervised_plan,
            model=model,
            cluster=cluster,
            lengths=_row_lengths(rows, arguments),
            ref_model=ref_model,
        )
        remarks = problems_of(rows, model) + _eight_bit_remarks(cluster, rows)
        return make_one(rows), make_one, remarks
    config = _with_folders(load_config(recipe, words, PPOConfig))
    model = find_model(config.actor_rollout_ref.model, arguments.model_config)
    remarks = problems_of(config, model) + _eight_bit_remarks(cluster, config)
    make = partial(
        make_plan,
        model=model,
        cluster=cluster,
        lengths=_lengths(config, arguments),
        critic_model=_critic_model(config, arguments),
        reward_model=_reward_model(config, remarks),
        ref_model=_ref_model(config),
    )
    return make(config), partial(make, quick=True), remarks


def _with_folders(loaded: Loaded[Config]) -> Config:
    """Return the config, with models of the hub replaced by their cached folders if they are in the cache."""
    from meshrl.models.hub import resolve_models

    resolve_models(loaded.config, loaded.sources, lambda line: None, may_download=False)
    return loaded.config


def _eight_bit_remarks(cluster: Cluster, config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return remarks on FP8 settings that a run would refuse on these devices."""
    from meshrl.config.batch_sizes import used_engines
    from meshrl.config.keys import ROLLOUT
    from meshrl.config.rl import PPOConfig
    from meshrl.config.validate_model import gpu_problems
    from meshrl.telemetry.hardware import WITHOUT_8_BITS

    hardware = cluster.hardware.name
    if hardware == "CPU":
        return []
    engines = used_engines(config).items()
    given = [f"{prefix}.fsdp_config.mixed_precision.product_dtype" for prefix, engine in engines if engine.rounds]
    if isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.rounds:
        given.append(f"{ROLLOUT}.quantization or kv_cache_dtype")
    lacking = f"will be refused: {hardware} has no products of 8-bit floats"
    return [f"{key} {lacking}" for key in given if hardware in WITHOUT_8_BITS] + gpu_problems(config)


def _critic_model(config: PPOConfig, arguments: argparse.Namespace) -> PlannedModel | None:
    """Return the critic's model, or None without a critic.

    A critic without its own path has the policy's weights, but not the policy's adapters.
    """
    from meshrl.config.actor_critic import uses_critic
    from meshrl.tools.plan.models import find_model

    own, policy = config.critic.model, config.actor_rollout_ref.model
    if not uses_critic(config.critic, config.algorithm.adv_estimator):
        return None
    if own.path is not None:
        return find_model(own, key="critic.model.path")
    return find_model(replace(own, path=policy.path), arguments.model_config)


def _ref_model(config: PPOConfig) -> PlannedModel | None:
    """Return the reference's model if it has weights of its own, such as a teacher, else None."""
    from meshrl.config.engine import ModelConfig
    from meshrl.config.rl import uses_reference
    from meshrl.tools.plan.models import find_model

    path = config.actor_rollout_ref.ref.model.path
    if path is None or not uses_reference(config):
        return None
    return find_model(ModelConfig(path=path), key="actor_rollout_ref.ref.model.path")


def _reward_model(config: PPOConfig, remarks: list[str]) -> PlannedModel | None:
    """Return the reward model, or None if there is none or its shape is not known.

    Costs of scoring that the plan does not count are added to `remarks`.
    """
    from meshrl.tools.plan.models import find_model, is_found
    from meshrl.tools.plan.rollout_plan import EXTERNAL

    judge, scores = config.reward.judge, config.reward_model
    if judge.path is not None:
        left_out = "time is" if judge.engine in EXTERNAL else "memory and time are"
        remarks.append(f"the {left_out} not counted of the judge, {judge.path} (reward.judge)")
    if not scores.enable:
        return None
    if is_found(scores.model):
        return find_model(scores.model)
    remarks.append(
        f"the memory and time are not counted of the reward model: there is no folder '{scores.model.path}' "
        "(reward_model.model.path), and no built-in shape of that name"
    )
    return None


def _lengths(config: PPOConfig, arguments: argparse.Namespace) -> Lengths:
    from meshrl.tools.plan.models import drawn_lengths, read_lengths

    data, n = config.data, config.actor_rollout_ref.rollout.n
    samples = data.train_batch_size * n
    if arguments.lengths:
        return read_lengths(arguments.lengths, samples, data.max_prompt_length, data.max_response_length)
    mean = _mean(arguments, data.max_response_length, "data.max_response_length")
    return drawn_lengths(samples, n, data.max_prompt_length, data.max_response_length, mean)


def _row_lengths(config: SupervisedConfig, arguments: argparse.Namespace) -> Lengths:
    """Return the sequence lengths of a supervised step, read from `--lengths` or drawn.

    If they are drawn, a quarter of the longest sequence is left to the prompt.
    """
    from meshrl.tools.plan.models import drawn_lengths, read_lengths

    data, together = config.data, config.sequences_per_row
    sequences = data.train_batch_size * together
    if arguments.lengths:
        return read_lengths(arguments.lengths, sequences, data.max_length, data.max_length).cut(data.max_length)
    prompt = data.max_length // 4
    response = data.max_length - prompt
    mean = _mean(arguments, response, "three quarters of data.max_length")
    return drawn_lengths(sequences, together, max(prompt, 1), response, mean).cut(data.max_length)


def _mean(arguments: argparse.Namespace, longest: int, name: str) -> int:
    from meshrl.tools.plan.models import MEAN_SHARE

    mean = arguments.mean_response
    if mean is None:
        mean = max(1, int(longest * MEAN_SHARE))
    if not 1 <= mean <= longest:
        raise ValueError(f"--mean-response ({mean}) must lie between 1 and {name} ({longest})")
    return mean
