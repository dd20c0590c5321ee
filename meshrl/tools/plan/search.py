"""The search for other layouts of a recipe, and the rendering of plans.

- `nearest_fit`: the mildest change of the recipe that fits. `search`: the fastest layouts that fit.
- `plan_lines`, `plan_json` and others: a plan, a change or a search as text or JSON.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from meshrl.config.batch_sizes import layout_lines, sequence_ranks
from meshrl.config.engine import EngineConfig, has_megatron
from meshrl.config.families import MEGATRON_FAMILIES
from meshrl.config.keys import REF, ROLLOUT, count, get_value, leaves, set_value
from meshrl.config.model_folder import fit_problems
from meshrl.config.rl import PPOConfig
from meshrl.config.supervised import SupervisedConfig
from meshrl.config.validate import check_config, unsupported
from meshrl.models.loading import torch_dtype
from meshrl.models.names import expert_count
from meshrl.telemetry.hardware import Cluster
from meshrl.tools.plan.models import PlannedModel
from meshrl.tools.plan.step_plan import Plan, RolloutPlan
from meshrl.tools.plan.timing import EFFICIENCY
from meshrl.weights.planner import as_bytes

POWERS = (1, 2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (32768, 16384, 8192, 4096, 2048)
MEGATRON_KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
LAYOUT = "pipeline_model_parallel_layout"
# A search ends after this many seconds, with the layouts found so far.
SEARCH_SECONDS = 60.0
Settings = dict[str, Any]
Config = PPOConfig | SupervisedConfig
MakePlan = Callable[[Any], Plan]


@dataclass(frozen=True)
class Names:
    """The names of the keys that a search changes, for one kind of config."""

    engine: str
    checkpointing: str
    tokens: str

    @property
    def megatron(self) -> str:
        return f"{self.engine}.megatron"

    @property
    def fsdp(self) -> str:
        return f"{self.engine}.fsdp_config"


RL = Names(
    "actor_rollout_ref.actor",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
)
SUPERVISED = Names("engine", "model.enable_gradient_checkpointing", "data.max_token_len_per_gpu")


def names_of(config: Config) -> Names:
    """Return the key names for this kind of config."""
    return SUPERVISED if isinstance(config, SupervisedConfig) else RL


def engine_of(config: Config) -> EngineConfig:
    """Return the engine config of the model that learns."""
    return config.engine if isinstance(config, SupervisedConfig) else config.actor_rollout_ref.actor


def cuts_by_tokens(config: Config) -> bool:
    """Return whether training's micro-batches are limited by a number of tokens."""
    if isinstance(config, SupervisedConfig):
        return config.data.micro_batch_size_per_gpu is None
    return config.actor_rollout_ref.actor.use_dynamic_bsz


def longest_sample(config: Config) -> int:
    """Return the most tokens that a micro-batch must hold: one sample, or the sequences that stay together."""
    if isinstance(config, SupervisedConfig):
        return config.longest_sequence * config.sequences_per_row
    return config.data.max_prompt_length + config.data.max_response_length


@dataclass(frozen=True)
class Candidate:
    """Changed settings, and the plan of the changed config."""

    settings: Settings
    plan: Plan

    @property
    def overrides(self) -> list[str]:
        """The settings as command-line overrides. A section is given as its keys."""
        words = []
        for name, value in self.settings.items():
            parts = (
                {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
            )
            words += [f"{key}={_word(inner)}" for key, inner in parts.items()]
        return words


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def changed(config: Config, settings: Settings) -> Config:
    """Return a copy of the config with other values. Keys that followed a changed key still follow it."""
    made = copy.deepcopy(config)
    for name, value in settings.items():
        before = get_value(config, name)
        set_value(made, name, value)
        for leaf in leaves(type(config)).values():
            if leaf.info.follows == name and leaf.name not in settings and get_value(config, leaf.name) == before:
                set_value(made, leaf.name, value)
    return made


def problems_of(config: Config, model: PlannedModel) -> list[str]:
    """Return the problems that the config's own checks find, with the model's shape in place of its folder."""
    fit = fit_problems(model.shape, engine_of(config), names_of(config).engine)
    return [*unsupported(config), *check_config(config, check_files=False), *fit]


def tried(config: Config, model: PlannedModel, settings: Settings, known: set[str], make: MakePlan) -> Plan | None:
    """Return the plan of a change, or None if the config's checks find problems that are not in `known`.

    None is also returned if the model cannot be sharded into the layout.
    """
    made = changed(config, settings)
    if any(problem not in known for problem in problems_of(made, model)):
        return None
    try:
        return make(made)
    except ValueError:
        return None  # the model cannot be sharded into this layout


def nearest_fit(plan: Plan, make: MakePlan) -> Candidate | None:
    """Return the first change that fits, or None.

    Single changes are tried first, the mildest first. Then follow pairs of changes, and all changes together.
    """
    config, model = plan.config, plan.model
    known = set(problems_of(config, model))
    changes = list(_mild_changes(config, plan))
    combined: list[Settings] = [*changes, *(first | second for first, second in product(changes, changes))]
    whole: Settings = {}
    for change in changes:
        whole = whole | change
    seen: list[Settings] = []
    for settings in (*combined, whole):
        if settings in seen:
            continue
        seen.append(settings)
        found = tried(config, model, settings, known, make)
        if found is not None and found.fits:
            return Candidate(settings, found)
    return None


def _mild_changes(config: Config, plan: Plan) -> Iterator[Settings]:
    """Yield changes from the cheapest to the costliest, without those that change nothing."""
    engine, names = engine_of(config), names_of(config)
    is_megatron = engine.strategy == "megatron"
    place, own = (names.megatron, engine.megatron) if is_megatron else (names.fsdp, engine.fsdp_config)
    if isinstance(config, PPOConfig):
        yield from _milder_rollout(config, plan)
    if not get_value(config, names.checkpointing):
        yield {names.checkpointing: True}
    tokens = get_value(config, names.tokens)
    while cuts_by_tokens(config) and tokens // 2 * sequence_ranks(engine) >= longest_sample(config):
        tokens //= 2
        yield {names.tokens: tokens}
    if any(name.startswith("ref ") for phase in plan.phases for name in phase.memory):
        yield {f"{REF}.fsdp_config.param_offload": True}
    # Supervised runs have no phase in which the optimizer could be offloaded.
    if isinstance(config, PPOConfig):
        if not own.optimizer_offload:
            yield {f"{place}.optimizer_offload": True} | ({f"{place}.grad_offload": True} if is_megatron else {})
        if not own.param_offload:
            yield {f"{place}.param_offload": True}
    if is_megatron:
        yield from _larger_megatron(engine, names, plan)
    else:
        for size in POWERS[1:4]:
            if size > engine.ulysses_sequence_parallel_size:
                yield {f"{names.engine}.ulysses_sequence_parallel_size": size}
        if engine.fsdp_config.fsdp_size != -1:
            yield {f"{names.fsdp}.fsdp_size": -1}
    if isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.name == "embedded":
        for size in POWERS[1:4]:
            if size > config.actor_rollout_ref.rollout.tensor_model_parallel_size:
                yield {f"{ROLLOUT}.tensor_model_parallel_size": size}
    if engine.strategy == "fsdp2" and not engine.fsdp_config.offload_policy:
        yield {f"{names.fsdp}.offload_policy": True}


def _milder_rollout(config: PPOConfig, plan: Plan) -> Iterator[Settings]:
    rollout, has_cache = config.actor_rollout_ref.rollout, plan.rollout is None or plan.rollout.has_cache
    for share in (0.4, 0.3, 0.2, 0.7, 0.85):
        if (share < rollout.gpu_memory_utilization) == has_cache:
            yield {f"{ROLLOUT}.gpu_memory_utilization": share}
    if not rollout.free_cache_engine:
        yield {f"{ROLLOUT}.free_cache_engine": True}


def _larger_megatron(engine: EngineConfig, names: Names, plan: Plan) -> Iterator[Settings]:
    experts = expert_count(plan.model.config)
    for size in POWERS:
        if experts and size > engine.megatron.expert_model_parallel_size:
            yield {
                f"{names.megatron}.expert_model_parallel_size": size,
                f"{names.megatron}.expert_tensor_parallel_size": 1,
            }
    for size in POWERS[1:4]:
        if size > engine.megatron.tensor_model_parallel_size:
            yield {f"{names.megatron}.tensor_model_parallel_size": size}


@dataclass(frozen=True)
class Found:
    """The result of a search: the best candidates, the number of layouts seen, and the number of all layouts."""

    best: list[Candidate]
    seen: int
    layouts: int


def search(plan: Plan, make: MakePlan, best: int = 10, seconds: float = SEARCH_SECONDS) -> Found:
    """Return the fastest layouts that fit and pass the config's checks, as far as the time limit allows.

    The unchanged recipe takes part. Layouts that split a sample's work least are tried first. `seconds` is the time
    limit.
    """
    config, model = plan.config, plan.model
    known = set(problems_of(config, model))
    found = [Candidate({}, make(config))] if plan.fits else []
    others = [layout for layout in layouts(config, model, plan.cluster) if least_bytes(layout, plan) <= plan.capacity]
    own = {name: get_value(config, name) for name in layout_keys(config)}
    todo = others if own in others else [own, *others]
    ends = time.monotonic() + seconds
    seen = 0
    for layout in sorted(todo, key=_splits):
        if time.monotonic() > ends:
            break
        seen += 1
        for checkpointing in (False, True):
            candidate = _first_fit(config, model, layout | {names_of(config).checkpointing: checkpointing}, known, make)
            if candidate is not None and all(candidate.settings != other.settings for other in found):
                found.append(candidate)
    return Found(sorted(found, key=lambda candidate: candidate.plan.seconds)[:best], seen, len(todo))


def _splits(layout: Settings) -> int:
    """Return a measure of how far a layout splits the work of one sample; layouts with less are mostly faster."""
    names = ("tensor_model", "pipeline_model", "context", "ulysses_sequence", "virtual_pipeline_model")
    return sum((value or 1) - 1 for key, value in layout.items() if any(f"{name}_parallel" in key for name in names))


def least_bytes(layout: Settings, plan: Plan) -> float:
    """Return a rough lower bound on a rank's bytes of weights and gradients, to skip layouts far beyond the memory."""
    model, world, names = plan.model, plan.cluster.devices, names_of(plan.config)
    if layout[f"{names.engine}.strategy"] != "megatron":
        fsdp = engine_of(plan.config).fsdp_config
        if fsdp.offload_policy:
            return 0.0
        size = torch_dtype(fsdp.model_dtype).itemsize
        trained = sum(p.numel() for p in model.modules.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in model.modules.parameters() if not p.requires_grad)
        # A single device keeps frozen weights in 16 bits, in whatever type they are loaded.
        return (3 * size * trained + min(size, 2) * frozen) / world
    sizes = {axis: layout[f"{names.megatron}.{key}"] or 1 for axis, key in MEGATRON_KEYS.items()}
    etp = sizes["etp"] if sizes["ep"] > 1 else sizes["tp"]
    dense = (model.num_params - model.expert_params) / (sizes["tp"] * sizes["pp"])
    sparse = model.expert_params / (sizes["ep"] * etp * sizes["pp"])
    return 6 * 0.9 * (dense + sparse)


def _first_fit(
    config: Config, model: PlannedModel, layout: Settings, known: set[str], make: MakePlan
) -> Candidate | None:
    """Return the candidate with the largest micro-batch that fits and the least offloading, or None."""
    names = names_of(config)
    own = get_value(config, names.tokens)
    sizes: Sequence[int | None] = sorted({own, *MICRO_BATCHES}, reverse=True) if cuts_by_tokens(config) else (None,)
    place = names.megatron if layout[f"{names.engine}.strategy"] == "megatron" else names.fsdp
    none = {f"{place}.optimizer_offload": False, f"{place}.param_offload": False}
    offloads = (none, none | {f"{place}.optimizer_offload": True}) if isinstance(config, PPOConfig) else ({},)
    for offload in offloads:
        for tokens in sizes:
            settings = layout | offload | ({} if tokens is None else {names.tokens: tokens})
            made = tried(config, model, settings, known, make)
            if made is None:
                if tokens == sizes[0]:
                    return None  # the config's checks refuse the layout itself
                break  # a smaller budget no longer holds the longest sample
            if made.fits:
                return Candidate(_differing(config, settings), made)
    return None


def _differing(config: Config, settings: Settings) -> Settings:
    """Return the settings whose values differ from the config's."""
    return {name: value for name, value in settings.items() if get_value(config, name) != value}


def layout_keys(config: Config) -> list[str]:
    """Return the keys that determine the layout of the model that learns."""
    names = names_of(config)
    axes = [f"{names.engine}.ulysses_sequence_parallel_size", f"{names.engine}.context_parallel_size"]
    megatron = [f"{names.megatron}.{name}" for name in MEGATRON_KEYS.values()]
    return [f"{names.engine}.strategy", f"{names.fsdp}.fsdp_size", *axes, *megatron]


def layouts(config: Config, model: PlannedModel, cluster: Cluster) -> Iterator[Settings]:
    """Yield every layout of the model that learns on the cluster's devices, as settings.

    Layouts whose sizes do not divide devices, heads, layers or experts are left out.
    """
    heads, _, _ = model.heads()
    world, node, names = cluster.devices, cluster.per_node, names_of(config)
    plain: Settings = {
        f"{names.megatron}.{name}": EngineConfig().megatron.__dict__[name] for name in MEGATRON_KEYS.values()
    }
    pages: Settings = {f"{names.engine}.ulysses_sequence_parallel_size": 1, f"{names.engine}.context_parallel_size": 1}
    for sp, cp in product(POWERS[:4], POWERS[:3]):
        if world % (sp * cp) or heads % sp or sp * cp > node:
            continue
        for shards in dict.fromkeys((-1, min(node, world))):
            if shards != -1 and (world % shards or shards in (world, 1)):
                continue
            yield plain | {
                f"{names.engine}.strategy": "fsdp2",
                f"{names.fsdp}.fsdp_size": shards,
                f"{names.engine}.ulysses_sequence_parallel_size": sp,
                f"{names.engine}.context_parallel_size": cp,
            }
    if model.lora is not None or model.config.model_type not in MEGATRON_FAMILIES or not has_megatron():
        return
    experts = expert_count(model.config)
    for tp, pp, cp in product(POWERS[:4], POWERS, POWERS[:2]):
        if world % (tp * pp * cp) or tp > node or heads % tp or pp > model.num_layers:
            continue
        for vpp, ep in product((1, 2, 4) if pp > 1 else (1,), POWERS if experts else (1,)):
            if pp * vpp > model.num_layers or (ep > 1 and (experts % ep or world % (ep * pp))):
                continue
            sizes = {
                "tp": tp,
                "pp": pp,
                "vpp": vpp if vpp > 1 else None,
                "cp": cp,
                "ep": ep,
                "etp": 1 if ep > 1 else None,
            }
            fsdp = {f"{names.fsdp}.fsdp_size": -1}
            named = {f"{names.megatron}.{MEGATRON_KEYS[axis]}": size for axis, size in sizes.items()}
            yield pages | fsdp | named | _written(config, model, pp, vpp) | {f"{names.engine}.strategy": "megatron"}


def _written(config: Config, model: PlannedModel, pp: int, vpp: int) -> Settings:
    """Return the setting with an explicit pipeline layout, or no setting.

    It is needed if layers do not divide evenly, or if the recipe has an explicit layout of its own.
    """
    given = engine_of(config).megatron.override_transformer_config
    if LAYOUT not in given and model.num_layers % (pp * vpp) == 0:
        return {}
    text = stages_in_letters(model.num_layers, pp * vpp) if pp > 1 else None
    return {f"{names_of(config).megatron}.override_transformer_config": {**given, LAYOUT: text}}


def stages_in_letters(layers: int, chunks: int) -> str:
    """Return a pipeline layout string that spreads layers over chunks as evenly as possible.

    If some chunks get one layer less, the first and the last are among them.
    """
    few, more = divmod(layers, chunks)
    order = sorted(range(chunks), key=lambda chunk: min(chunk, chunks - 1 - chunk), reverse=True)
    counts = [few + (chunk in order[:more]) for chunk in range(chunks)]
    return "E" + "|".join("t" * count for count in counts) + "L"


# ---- a plan as text and as JSON

GIB = 1 << 30
# The order of memory parts in the table. Other parts follow in alphabetical order.
ORDER = ("parameters", "gradients", "optimizer", "activations", "logits")


def plan_lines(plan: Plan) -> list[str]:
    """Return the whole plan as lines of text."""
    return [
        *_head(plan),
        "",
        *_memory(plan),
        "",
        *_time(plan),
        "",
        *_traffic(plan),
        "",
        *_verdict(plan),
    ]


def _head(plan: Plan) -> Iterator[str]:
    cluster, lengths, role, rollout = plan.cluster, plan.lengths, plan.role, plan.rollout
    rates = "measured" if cluster.hardware.measured else "data-sheet rates times calibrated efficiencies"
    yield f"model: {plan.model.num_params / 1e9:.2f}B parameters, from {plan.model.source}"
    yield (
        f"devices: {cluster.devices} x {cluster.hardware.name}, {cluster.per_node} in a machine, "
        f"{cluster.hardware.memory_gib:.1f} GiB each; {rates}"
    )
    yield from layout_lines(role.name, role.engine, role.world_size)
    if rollout is not None:
        yield (
            f"rollout: {rollout.name}, {count(rollout.replicas, 'replica')}, {count(rollout.at_once, 'sequence')} at "
            f"once in each; KV cache {as_bytes(rollout.cache_bytes)} a rank"
        )
    yield (
        f"a step: {count(len(lengths.prompts), 'sample')}, {int(lengths.totals.sum()):,} tokens ({lengths.source}; "
        f"{lengths.response_share:.0%} predicted)"
    )


def _memory(plan: Plan) -> Iterator[str]:
    names = {name for phase in plan.phases for name in phase.memory}
    rows = [name for name in ORDER if name in names] + sorted(names - set(ORDER))
    wide = max(22, *map(len, rows))
    yield "memory of the fullest rank, GiB"
    yield f"{'':>{wide}}" + "".join(f"{phase.name:>15}" for phase in plan.phases)
    for name in rows:
        cells = (phase.memory.get(name, 0) / GIB for phase in plan.phases)
        yield f"{name:>{wide}}" + "".join(f"{cell:>15.2f}" if cell else f"{'':>15}" for cell in cells)
    yield f"{'together':>{wide}}" + "".join(f"{phase.total / GIB:>15.2f}" for phase in plan.phases)
    if any(phase.stage for phase in plan.phases):
        yield f"{'on pipeline stage':>{wide}}" + "".join(f"{phase.stage:>15}" for phase in plan.phases)
    room = plan.capacity / GIB
    yield f"{'left':>{wide}}" + "".join(f"{room - phase.total / GIB:>15.2f}" for phase in plan.phases)
    reserved = plan.cluster.hardware.memory_gib - room
    yield f"of {plan.cluster.hardware.memory_gib:.1f} GiB, {reserved:.0f} are left to driver, links and fragmentation"


def _time(plan: Plan) -> Iterator[str]:
    yield f"{'phase':>22}{'seconds':>15}{'share':>15}"
    for phase in plan.phases:
        hidden = f"  {phase.beside:.2f} of it beside the policy's work" if phase.beside else ""
        yield f"{phase.name:>22}{phase.seconds:>15.2f}{phase.seconds / plan.seconds:>15.0%}{hidden}"
    yield f"{'step':>22}{plan.seconds:>15.2f}{plan.tokens_per_second:>15,.0f} tokens/s"
    if plan.bubble.formula:
        yield (
            f"pipeline bubble: {plan.bubble.formula:.1%} by the formula for equal micro-batches, "
            f"{plan.bubble.replayed:.1%} replayed with these lengths"
        )


def _traffic(plan: Plan) -> Iterator[str]:
    yield f"{'sent by one rank':>22}{'axis':>15}{'ranks':>15}{'a step':>15}{'calls':>15}"
    for phase in plan.phases:
        for traffic in phase.traffic:
            where = "between machines" if traffic.crosses_nodes else "inside a machine"
            yield (
                f"{phase.name:>22}{traffic.axis:>15}{traffic.ranks:>15}{as_bytes(traffic.sent):>15}"
                f"{traffic.calls:>15,}  {where}"
            )
    if plan.rollout is None:
        return
    sync = plan.rollout.sync
    yield (
        f"weight sync ({sync.way}): the busiest rank sends {as_bytes(sync.sent)}, receives {as_bytes(sync.received)}, "
        f"copies {as_bytes(sync.copied)}, in {sync.seconds:.2f} s; buffers {as_bytes(sync.buffers)}"
    )


def _verdict(plan: Plan) -> Iterator[str]:
    fullest, room = plan.fullest, plan.capacity
    if plan.fits:
        yield f"fits: {fullest.name} is fullest with {fullest.total / GIB:.1f} of {room / GIB:.1f} GiB"
        return
    for phase in plan.phases:
        if phase.total > room:
            most = max(phase.memory.items(), key=lambda part: part[1])
            yield (
                f"does not fit: {phase.name} needs {phase.total / GIB:.1f} GiB, {(phase.total - room) / GIB:.1f} more "
                f"than the {room / GIB:.1f} there are; the largest part is {most[0]} with {most[1] / GIB:.1f}"
            )
    if plan.rollout is not None and not plan.rollout.has_cache:
        yield (
            f"does not fit: the KV cache has {as_bytes(plan.rollout.cache_bytes)}, one sequence of full length needs "
            f"{as_bytes(plan.rollout.smallest_cache)}"
        )


def change_lines(candidate: Candidate | None) -> list[str]:
    """Return lines that show the nearest change that fits, or advice if there is none."""
    if candidate is None:
        return ["no single change, no pair of changes and not all of them together fit: use more devices, or --search"]
    plan = candidate.plan
    return [
        "the nearest change that fits:",
        *(f"  {word}" for word in candidate.overrides),
        f"then {plan.fullest.name} is fullest with {plan.fullest.total / GIB:.1f} of {plan.capacity / GIB:.1f} GiB, "
        f"and a step takes {plan.seconds:.2f} s",
    ]


def search_lines(found: Found) -> list[str]:
    """Return lines that list the best layouts, the fastest first."""
    seen = f"looked at {found.seen} of {found.layouts} layouts"
    if not found.best:
        return [f"{seen}: none fits"]
    lines = [f"{seen}; the best:", f"{'':>4}{'s a step':>10}{'fullest, GiB':>14}  overrides"]
    for number, candidate in enumerate(found.best, 1):
        plan = candidate.plan
        words = " ".join(word.removeprefix("actor_rollout_ref.") for word in candidate.overrides) or "(as it is)"
        lines.append(f"{number:>3}.{plan.seconds:>10.2f}{plan.fullest.total / GIB:>14.1f}  {words}")
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain numbers for JSON, in bytes and seconds."""
    return {
        "model": {"parameters": plan.model.num_params, "source": plan.model.source},
        "devices": {"count": plan.cluster.devices, "per_node": plan.cluster.per_node} | asdict(plan.cluster.hardware),
        "samples": len(plan.lengths.prompts),
        "tokens": int(plan.lengths.totals.sum()),
        "fits": plan.fits,
        "capacity_bytes": plan.capacity,
        "seconds": plan.seconds,
        "bubble": asdict(plan.bubble),
        **({} if plan.rollout is None else _rollout_json(plan.rollout)),
        "phases": [
            {
                "name": phase.name,
                "seconds": phase.seconds,
                "beside": phase.beside,
                "bytes": phase.total,
                "stage": phase.stage,
                "memory": phase.memory,
                "traffic": [asdict(traffic) for traffic in phase.traffic],
            }
            for phase in plan.phases
        ],
        "efficiencies": asdict(EFFICIENCY),
    }


def _rollout_json(rollout: RolloutPlan) -> dict[str, Any]:
    return {
        "kv_cache_bytes": rollout.cache_bytes,
        "sequences_at_once": rollout.at_once,
        "sync": asdict(rollout.sync),
    }


def candidate_json(candidate: Candidate | None) -> dict[str, Any] | None:
    """Return a candidate's overrides, seconds and bytes for JSON."""
    if candidate is None:
        return None
    plan = candidate.plan
    return {"overrides": candidate.overrides, "seconds": plan.seconds, "bytes": plan.fullest.total, "fits": plan.fits}
