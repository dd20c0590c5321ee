"""Which mesh axes a config asks for, and whether the number of processes allows them."""

from meshrl.config.engine import EngineConfig, MegatronConfig
from meshrl.config.megatron_fields import has_megatron, override_problems
from meshrl.config.names import count
from meshrl.config.rollout import RolloutConfig


def model_ranks(engine: EngineConfig) -> int:
    """Ranks that work on one data shard together: sp for fsdp, tp * pp * cp for megatron."""
    if engine.strategy == "megatron":
        megatron = engine.megatron
        return (
            megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
        )
    return engine.ulysses_sequence_parallel_size * engine.context_parallel_size


def sequence_ranks(engine: EngineConfig) -> int:
    """Ranks that share one sequence: a micro-batch may hold this many times the token budget of one rank."""
    if engine.strategy == "megatron":
        return engine.megatron.context_parallel_size
    return engine.ulysses_sequence_parallel_size * engine.context_parallel_size


def dp_size(engine: EngineConfig, world_size: int) -> int:
    """Data-parallel size: how many ranks get different samples."""
    return world_size // model_ranks(engine)


def mesh_axes(engine: EngineConfig, world_size: int) -> dict[str, int]:
    """The named axes along which ranks share the samples, with their sizes; their product is the world size."""
    if engine.strategy == "megatron":
        megatron = engine.megatron
        return {
            "pp": megatron.pipeline_model_parallel_size,
            "dp": dp_size(engine, world_size),
            "cp": megatron.context_parallel_size,
            "tp": megatron.tensor_model_parallel_size,
        }
    return {
        "dp": dp_size(engine, world_size),
        "cp": engine.context_parallel_size,
        "sp": engine.ulysses_sequence_parallel_size,
    }


def shard_axes(engine: EngineConfig, world_size: int) -> dict[str, int]:
    """The axes along which FSDP lays the weights, over the same ranks: copies × shards."""
    shards = world_size if engine.fsdp_config.fsdp_size == -1 else engine.fsdp_config.fsdp_size
    return {"ddp": max(1, world_size // max(1, shards)), "fsdp": shards}


def engine_problems(engine: EngineConfig, prefix: str, world_size: int, owner: str = "trainer") -> list[str]:
    """Sizes that do not divide, with the numbers and the keys; the ranks are `owner.nnodes * n_gpus_per_node`."""
    if engine.strategy == "megatron":
        key = f"{prefix}.megatron"
        if not has_megatron():
            return [f"{prefix}.strategy=megatron needs Megatron-Core: pip install 'meshrl[megatron]'"]
        override = override_problems(engine.megatron.override_transformer_config, key)
        return _megatron_problems(engine, key, world_size, owner) + override
    problems = []
    ulysses, ring = engine.ulysses_sequence_parallel_size, engine.context_parallel_size
    fsdp_size = engine.fsdp_config.fsdp_size
    if world_size % (ulysses * ring):
        if ring == 1:
            return [_indivisible(world_size, f"{prefix}.ulysses_sequence_parallel_size", ulysses, owner)]
        names = f"{prefix}.ulysses_sequence_parallel_size * context_parallel_size"
        return [_indivisible(world_size, names, f"{ulysses} * {ring} = {ulysses * ring}", owner)]
    if fsdp_size == 0:
        problems.append(f"{prefix}.fsdp_config.fsdp_size=0 must be -1 (all ranks) or a number of ranks")
    elif fsdp_size > 0 and world_size % fsdp_size:
        problems.append(_indivisible(world_size, f"{prefix}.fsdp_config.fsdp_size", fsdp_size, owner))
    return problems


def _megatron_problems(engine: EngineConfig, prefix: str, world_size: int, owner: str) -> list[str]:
    megatron = engine.megatron
    tp, pp, cp = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
    problems = []
    if world_size % (tp * pp * cp):
        names = "tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size"
        problems.append(_indivisible(world_size, f"{prefix}.{names}", f"{tp} * {pp} * {cp} = {tp * pp * cp}", owner))
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size or tp
    if ep > 1 and world_size % (etp * ep * pp):
        names = "expert_tensor_parallel_size * expert_model_parallel_size * pipeline_model_parallel_size"
        problems.append(_indivisible(world_size, f"{prefix}.{names}", f"{etp} * {ep} * {pp} = {etp * ep * pp}", owner))
    vpp = megatron.virtual_pipeline_model_parallel_size or 1
    if vpp > 1 and pp == 1:
        problems.append(
            f"{prefix}.virtual_pipeline_model_parallel_size={vpp} needs pipeline_model_parallel_size > 1, not {pp}"
        )
    return problems + _schedule_problems(megatron, prefix, pp, vpp) + _overlap_problems(megatron, prefix)


def _schedule_problems(megatron: MegatronConfig, prefix: str, pp: int, vpp: int) -> list[str]:
    """Whether the pipeline's schedule, and how its stages talk, fit its size."""
    problems = []
    fitting = "no-pipelining" if pp == 1 else "interleaved" if vpp > 1 else "1f1b"
    if megatron.schedule_type not in ("auto", fitting):
        problems.append(
            f"{prefix}.schedule_type={megatron.schedule_type} does not fit pipeline_model_parallel_size={pp} with "
            f"virtual_pipeline_model_parallel_size={vpp}: that is {fitting}; set auto"
        )
    override = megatron.override_transformer_config
    if vpp > 1 and override.get("batch_p2p_comm"):
        problems.append(
            f"{prefix}.override_transformer_config.batch_p2p_comm=true gives wrong numbers with "
            f"virtual_pipeline_model_parallel_size={vpp}: leave it out"
        )
    group = override.get("microbatch_group_size_per_vp_stage")
    if vpp > 1 and group is not None and group < pp:
        problems.append(
            f"{prefix}.override_transformer_config.microbatch_group_size_per_vp_stage={group} must be at least "
            f"pipeline_model_parallel_size ({pp})"
        )
    return problems


def _overlap_problems(megatron: MegatronConfig, prefix: str) -> list[str]:
    if not megatron.overlap_param_gather:
        return []
    needed = [name for name in ("use_distributed_optimizer", "overlap_grad_reduce") if not getattr(megatron, name)]
    return [f"{prefix}.overlap_param_gather=true needs {prefix}.{name}=true" for name in needed]


def rollout_problems(rollout: RolloutConfig, prefix: str, world_size: int, is_apart: bool = False) -> list[str]:
    """Whether rollouts of tp (or ep) ranks fill the processes: those of the trainer, or `is_apart` their own."""
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    name = f"{prefix}.{'tensor_model' if tp >= ep else 'expert'}_parallel_size"
    own = rollout.nnodes * rollout.n_gpus_per_node
    if is_apart and own % rollout.replica_size:
        return [f"{prefix}.nnodes * n_gpus_per_node ({own}) must be divisible by {name} ({rollout.replica_size})"]
    if not is_apart and world_size % rollout.replica_size:
        return [_indivisible(world_size, name, rollout.replica_size)]
    return []


def _indivisible(world_size: int, names: str, number: int | str, owner: str = "trainer") -> str:
    return f"n_gpus ({world_size} = {owner}.nnodes * n_gpus_per_node) must be divisible by {names} ({number})"


def layout_lines(name: str, engine: EngineConfig, world_size: int) -> list[str]:
    """The engine's layout in words, for printing once."""
    axes = " * ".join(f"{axis} {size}" for axis, size in mesh_axes(engine, world_size).items())
    line = f"{name}: {engine.strategy} on {count(world_size, 'rank')} = {axes}"
    if engine.strategy != "megatron":
        shards = shard_axes(engine, world_size)
        line += f"; weights sharded over {shards['fsdp']}"
        if shards["ddp"] > 1:
            line += f", {shards['ddp']} copies"
    elif engine.megatron.virtual_pipeline_model_parallel_size:
        line += f"; {engine.megatron.virtual_pipeline_model_parallel_size} model chunks per stage"
    return [line]
