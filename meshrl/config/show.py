"""Printing of a config: the tree as YAML with the source of each value, and a short summary of a run's sizes."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from meshrl.config import quick_yaml
from meshrl.config.actor_critic import uses_critic
from meshrl.config.batch_sizes import BatchUnits, SupervisedBatchUnits, layout_lines
from meshrl.config.keys import ConfigError, Leaf, count, get_value, leaves, nearest, sections
from meshrl.config.rl import PPOConfig, num_devices, ranks_of
from meshrl.config.supervised import SupervisedConfig
from meshrl.config.verl_names import canonical

ONE_LINE = 1 << 30  # characters


class _Quick(quick_yaml.Dumper):
    """A libyaml dumper that also quotes strings such as `1e-3`.

    YAML 1.1 reads an unquoted `1e-3` as a string, but recipes would read it as a number.
    """


class _Slow(yaml.SafeDumper):
    """The Python dumper with the behaviour of `_Quick`, for values that libyaml refuses."""


for _dumper in (_Quick, _Slow):
    _dumper.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[\d_.]+[eE][-+]?\d+$"), list("-+.0123456789")
    )


def to_yaml(config: Any, sources: Mapping[str, str] | None = None, only: str = "", docs: bool = False) -> str:
    """Write a config as a YAML recipe, from which the same config can be loaded.

    `sources` (the source of each key) and `docs` (each key's documentation) become comments. `only` selects the keys
    under a dotted prefix; a `ConfigError` is raised if there are none.
    """
    prefix = canonical(only.rstrip("."))
    known = leaves(type(config))
    chosen = [leaf for leaf in known.values() if not prefix or f"{leaf.name}.".startswith(f"{prefix}.")]
    if not chosen:
        suggestion = nearest(prefix, [*known, *sections(type(config))])
        raise ConfigError([f"no key starts with {only}" + (f": did you mean {suggestion}?" if suggestion else "")])
    return "".join(f"{line}\n" for line in _lines(config, chosen, sources, docs))


def as_recipe(config: Any) -> dict[str, Any]:
    """Return the values of `to_yaml`'s whole recipe as nested dicts, without writing and parsing its text."""
    recipe: dict[str, Any] = {}
    for leaf in leaves(type(config)).values():
        *path, last = leaf.name.split(".")
        section = recipe
        for part in path:
            section = section.setdefault(part, {})
        section[last] = _escaped(_value_and_remark(config, leaf, None)[0])
    return recipe


def _lines(config: Any, chosen: list[Leaf], sources: Mapping[str, str] | None, docs: bool) -> Iterator[str]:
    opened: list[str] = []
    for leaf in chosen:
        *path, last = leaf.name.split(".")
        shared = 0
        while shared < min(len(opened), len(path)) and opened[shared] == path[shared]:
            shared += 1
        for depth in range(shared, len(path)):
            yield f"{'  ' * depth}{path[depth]}:"
        opened = path
        indent = "  " * len(path)
        if docs:
            yield f"{indent}# {leaf.info.doc}"
        value, remark = _value_and_remark(config, leaf, sources)
        yield f"{indent}{last}: {yaml_value(value)}" + (f"  # {remark}" if remark else "")


def _value_and_remark(config: Any, leaf: Leaf, sources: Mapping[str, str] | None) -> tuple[Any, str]:
    """Return the value of a key for the printed recipe, and a remark on its source.

    The value is null if the key follows another key. Then a change of that other key in the recipe changes both.
    """
    value, source = get_value(config, leaf.name), (sources or {}).get(leaf.name, "")
    follows = leaf.info.follows
    if (
        follows
        and value is not None
        and (source.startswith("follows") or (not sources and value == get_value(config, follows)))
    ):
        return None, f"{yaml_value(value)}, follows {follows}"
    return value, "default" if source == "default" else f"from {source}" if source else ""


def yaml_value(value: Any) -> str:
    """Write a value as YAML on a single line."""
    text = quick_yaml.as_text(_escaped(value), _Quick, _Slow, default_flow_style=True, width=ONE_LINE)
    return text.removesuffix("\n").removesuffix("\n...")


def _escaped(value: Any) -> Any:
    """Escape `${` in all strings of a value, so that a recipe does not read it as a reference to another key."""
    if isinstance(value, Mapping):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def summary_lines(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Describe a run's processes, layouts, batch sizes and folder, for printing once at its start."""
    trainer = config.trainer
    first = (
        f"processes: {count(trainer.nnodes, 'node')} * {trainer.n_gpus_per_node} = {trainer.world_size}, "
        f"backend {trainer.backend}, device {trainer.device}"
    )
    if isinstance(config, SupervisedConfig):
        engine = layout_lines("engine", config.engine, trainer.world_size)
        return [first, *engine, *SupervisedBatchUnits.from_config(config).lines(), f"run folder: {trainer.run_dir}"]
    if (devices := num_devices(config)) > trainer.world_size:
        first += f"; {devices} with those of roles on devices of their own"
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    ranks, spread = rollout.replica_size, rollout.expert_parallel_size
    is_apart = not config.actor_rollout_ref.hybrid_engine
    rollout_ranks = rollout.nnodes * rollout.n_gpus_per_node if is_apart else trainer.world_size
    return [
        first,
        *layout_lines("actor", actor, trainer.world_size),
        f"rollout: {rollout.name}, {count(rollout_ranks // ranks, 'replica')} of {count(ranks, 'rank')} "
        f"(tp {rollout.tensor_model_parallel_size}{f', ep {spread}' * (spread > 1)})",
        *_scoring_lines(config),
        *BatchUnits.from_config(config).lines(),
        f"run folder: {trainer.run_dir}",
    ]


def _scoring_lines(config: PPOConfig) -> list[str]:
    """Describe the layout and devices of the critic, the reward model, the reference and the judge.

    The reference and the judge are described only if they have devices of their own.
    """
    found = {"critic": config.critic} if uses_critic(config.critic, config.algorithm.adv_estimator) else {}
    scored = {"reward model": config.reward_model} if config.reward_model.enable else {}
    lines, ref = [], config.actor_rollout_ref.ref
    if ref.has_own_devices:
        layout = layout_lines("reference", ref.engine(config.actor_rollout_ref.actor), ranks_of(config, ref))
        lines += [f"{line}, on devices of its own" for line in layout]
    for name, place in (found | scored).items():
        where = "devices of its own" if place.has_own_devices else "the policy's devices"
        lines += [f"{line}, on {where}" for line in layout_lines(name, place, ranks_of(config, place))]
    judge = config.reward.judge
    if judge.path is not None and judge.has_own_devices:
        lines.append(f"judge: {judge.engine}, {count(ranks_of(config, judge), 'replica')} on devices of its own")
    return lines
