"""Batch sizes and parallel layouts that follow from a config, and the checks that they divide.

* `BatchUnits` and `SupervisedBatchUnits`: batch sizes in every unit (prompts or samples, on all ranks or on one).
* `mesh_axes`, `shard_axes`, `dp_size`, ...: how an engine lays its ranks out.
* `batch_problems`, `engine_problems`, `rollout_problems`, `reference_layout_problems`: sizes that do not fit.
"""

from dataclasses import dataclass

from meshrl.config.actor_critic import OWN_LAYOUT, ActorConfig, CriticConfig, uses_critic
from meshrl.config.engine import EngineConfig, MegatronConfig, has_megatron, override_problems
from meshrl.config.keys import ACTOR, REF, ConfigError, count, get_value
from meshrl.config.rl import PPOConfig, ranks_of, uses_reference, whose
from meshrl.config.rollout import RolloutConfig
from meshrl.config.supervised import SupervisedConfig


@dataclass(frozen=True)
class BatchUnits:
    """The batch sizes of one step of `meshrl train`, from the whole step down to a micro-batch on one rank."""

    prompts_per_step: int
    samples_per_prompt: int
    samples_per_step: int
    dp_size: int
    samples_per_rank: int
    epochs_per_step: int
    mini_batches_per_epoch: int
    prompts_per_mini_batch: int
    samples_per_mini_batch: int
    samples_per_mini_batch_per_rank: int
    optimizer_steps_per_step: int
    samples_per_micro_batch: int | None  # None: micro-batches are cut by tokens
    tokens_per_micro_batch: int | None  # None: micro-batches are cut by samples
    critic_dp_size: int = 1
    critic_mini_batches_per_epoch: int = 1
    critic_steps_per_step: int = 1
    ref_dp_size: int = 1
    reward_model_dp_size: int = 1

    @classmethod
    def from_config(cls, config: PPOConfig) -> "BatchUnits":
        """Derive all batch sizes from the config. Raise `ConfigError` if sizes do not divide."""
        problems = batch_problems(config)
        if problems:
            raise ConfigError(problems)
        actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
        ranks = dp_size(actor, config.trainer.world_size)
        if ranks == 0:
            raise ConfigError(
                [
                    f"the {model_ranks(actor)} ranks that share a model of {ACTOR} (tensor, pipeline and sequence "
                    f"ranks) are more than trainer.nnodes * trainer.n_gpus_per_node "
                    f"({config.trainer.world_size})"
                ]
            )
        prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
        critic, ref = config.critic, config.actor_rollout_ref.ref
        critic_mini_batches = prompts // (critic.ppo_mini_batch_size or mini)
        return cls(
            prompts_per_step=prompts,
            samples_per_prompt=n,
            samples_per_step=prompts * n,
            dp_size=ranks,
            samples_per_rank=prompts * n // ranks,
            epochs_per_step=actor.ppo_epochs,
            mini_batches_per_epoch=prompts // mini,
            prompts_per_mini_batch=mini,
            samples_per_mini_batch=mini * n,
            samples_per_mini_batch_per_rank=mini * n // ranks,
            optimizer_steps_per_step=prompts // mini * actor.ppo_epochs,
            samples_per_micro_batch=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
            tokens_per_micro_batch=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
            critic_dp_size=dp_size(critic, ranks_of(config, critic)),
            critic_mini_batches_per_epoch=critic_mini_batches,
            critic_steps_per_step=critic_mini_batches * (critic.ppo_epochs or actor.ppo_epochs),
            ref_dp_size=dp_size(ref.engine(actor), ranks_of(config, ref)),
            reward_model_dp_size=dp_size(config.reward_model, ranks_of(config, config.reward_model)),
        )

    def lines(self) -> list[str]:
        """Describe the batch sizes in three lines of text, which a run prints once."""
        micro = _micro_batch_words(self.samples_per_micro_batch, "sample", self.tokens_per_micro_batch)
        return [
            f"step: {count(self.prompts_per_step, 'prompt')} * {count(self.samples_per_prompt, 'response')} "
            f"= {count(self.samples_per_step, 'sample')}, {self.samples_per_rank} on each of "
            f"{count(self.dp_size, 'data-parallel rank')}",
            f"mini-batch: {count(self.prompts_per_mini_batch, 'prompt')} "
            f"= {count(self.samples_per_mini_batch, 'sample')}, {self.samples_per_mini_batch_per_rank} on each rank, "
            f"in micro-batches of {micro}",
            f"optimizer steps per step: {count(self.mini_batches_per_epoch, 'mini-batch')} "
            f"* {count(self.epochs_per_step, 'epoch')} = {self.optimizer_steps_per_step}",
        ]


@dataclass(frozen=True)
class SupervisedBatchUnits:
    """The batch sizes of one step of `meshrl sft` or `meshrl prefer`. A step is one optimizer step."""

    rows_per_step: int
    dp_size: int
    rows_per_rank: int
    rows_per_micro_batch: int | None
    tokens_per_micro_batch: int | None
    noun: str = "sequence"  # the noun for a row in messages: sequence, pair or answer

    @classmethod
    def from_config(cls, config: SupervisedConfig) -> "SupervisedBatchUnits":
        """Derive all batch sizes from the config. Raise `ConfigError` if sizes do not divide."""
        problems = batch_problems(config)
        if problems:
            raise ConfigError(problems)
        data, ranks = config.data, dp_size(config.engine, config.trainer.world_size)
        by_tokens = data.micro_batch_size_per_gpu is None
        return cls(
            rows_per_step=data.train_batch_size,
            dp_size=ranks,
            rows_per_rank=data.train_batch_size // ranks,
            rows_per_micro_batch=data.micro_batch_size_per_gpu,
            tokens_per_micro_batch=data.max_token_len_per_gpu if by_tokens else None,
            noun=config.noun,
        )

    def lines(self) -> list[str]:
        """Describe the batch sizes in one line of text, which a run prints once."""
        micro = _micro_batch_words(self.rows_per_micro_batch, self.noun, self.tokens_per_micro_batch)
        return [
            f"step: {count(self.rows_per_step, self.noun)}, {self.rows_per_rank} on each of "
            f"{count(self.dp_size, 'data-parallel rank')}, in micro-batches of {micro}"
        ]


def _micro_batch_words(number: int | None, noun: str, tokens: int | None) -> str:
    return f"up to {tokens} tokens a rank" if tokens is not None else count(number or 0, noun)


def batch_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return one message for each batch size that does not divide. A message names the keys and their numbers."""
    return _supervised_problems(config) if isinstance(config, SupervisedConfig) else _ppo_problems(config)


def _ppo_problems(config: PPOConfig) -> list[str]:
    problems = _update_problems(config, config.actor_rollout_ref.actor, ACTOR)
    if uses_critic(config.critic, config.algorithm.adv_estimator):
        problems += _update_problems(config, config.critic, "critic")
    return problems


def _update_problems(config: PPOConfig, role: ActorConfig | CriticConfig, prefix: str) -> list[str]:
    """Check that the samples of a step divide into a trained role's mini-batches, ranks and micro-batches."""
    n, prompts = config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    actor = config.actor_rollout_ref.actor
    mini = role.ppo_mini_batch_size or actor.ppo_mini_batch_size
    world_size, owner = config.trainer.world_size, "trainer"
    if isinstance(role, CriticConfig):
        world_size, owner = ranks_of(config, role), whose(role, prefix)
    ranks = max(1, dp_size(role, world_size))
    problems = []
    if prompts % mini:
        problems.append(
            f"data.train_batch_size ({count(prompts, 'prompt')}) must be divisible by {prefix}.ppo_mini_batch_size "
            f"({count(mini, 'prompt')})"
        )
    if mini * n % ranks:
        problems.append(
            f"{prefix}.ppo_mini_batch_size * rollout.n ({mini} * {n} = {count(mini * n, 'sample')}) must be divisible "
            f"by the data-parallel size ({_ranks_words(role, world_size, owner)})"
        )
    by_tokens = actor.use_dynamic_bsz if role.use_dynamic_bsz is None else role.use_dynamic_bsz
    micro = role.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    if by_tokens:
        return problems
    if micro is None:
        problems.append(f"set {prefix}.ppo_micro_batch_size_per_gpu, or {prefix}.use_dynamic_bsz=true")
    elif mini * n % ranks == 0 and mini * n // ranks % micro:
        problems.append(
            f"samples of a mini-batch on one rank ({mini} * {n} / {ranks} = {mini * n // ranks}) must be divisible by "
            f"{prefix}.ppo_micro_batch_size_per_gpu ({micro})"
        )
    return problems


def _ranks_words(engine: EngineConfig, world_size: int, owner: str = "trainer") -> str:
    """Describe the data-parallel size, and the keys that it comes from, for an error message."""
    ranks = max(1, dp_size(engine, world_size))
    told = f"{world_size} = {owner}.nnodes * n_gpus_per_node"
    return told if ranks == world_size else f"{ranks}: {told}, less what shares a sample"


def _supervised_problems(config: SupervisedConfig) -> list[str]:
    data, ranks = config.data, max(1, dp_size(config.engine, config.trainer.world_size))
    micro, own = data.micro_batch_size_per_gpu, data.train_batch_size // ranks
    if data.train_batch_size % ranks:
        return [
            f"data.train_batch_size ({data.train_batch_size} {config.noun}s) must be divisible by the data-parallel "
            f"size ({_ranks_words(config.engine, config.trainer.world_size)})"
        ]
    if micro is not None and own % micro:
        return [
            f"{config.noun}s of a step on one rank ({data.train_batch_size} / {ranks} = {own}) "
            f"must be divisible by data.micro_batch_size_per_gpu ({micro})"
        ]
    return []


# The mesh axes that a config requests, and checks that the number of processes is divisible by them.


def model_ranks(engine: EngineConfig) -> int:
    """Return the number of ranks that share one data shard: sp * cp for FSDP, tp * pp * cp for Megatron."""
    if engine.strategy == "megatron":
        megatron = engine.megatron
        return (
            megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
        )
    return engine.ulysses_sequence_parallel_size * engine.context_parallel_size


def sequence_ranks(engine: EngineConfig) -> int:
    """Return the number of ranks that share one sequence: sp * cp for FSDP, cp for Megatron.

    A micro-batch may hold this number times the token budget of one rank.
    """
    if engine.strategy == "megatron":
        return engine.megatron.context_parallel_size
    return engine.ulysses_sequence_parallel_size * engine.context_parallel_size


def dp_size(engine: EngineConfig, world_size: int) -> int:
    """Return the data-parallel size: the number of groups of ranks that get different samples."""
    return world_size // model_ranks(engine)


def mesh_axes(engine: EngineConfig, world_size: int) -> dict[str, int]:
    """Return the engine's device mesh as axis name -> size. The product of the sizes is the world size."""
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
    """Return FSDP's axes for the weights over the same ranks: `ddp` copies of the weights × `fsdp` shards of each."""
    shards = world_size if engine.fsdp_config.fsdp_size == -1 else engine.fsdp_config.fsdp_size
    return {"ddp": max(1, world_size // max(1, shards)), "fsdp": shards}


def engine_problems(engine: EngineConfig, prefix: str, world_size: int, owner: str = "trainer") -> list[str]:
    """Return one message for each parallel size that does not fit the engine's ranks, or for a missing Megatron-Core.

    `owner` is the section whose `nnodes * n_gpus_per_node` is `world_size`. `prefix` is the engine's own section.
    """
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
    """Check that the pipeline's schedule and its point-to-point options fit the numbers of stages and chunks."""
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
    """Check that the number of processes is divisible by the ranks of a rollout replica (tp or ep).

    The processes are the trainer's. With `is_apart` they are the rollout's own.
    """
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
    """Describe an engine's parallel layout in a line of text, which a run prints once."""
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


# The training engines of a run, by the names of their sections.


def used_engines(config: PPOConfig | SupervisedConfig) -> dict[str, EngineConfig]:
    """Return the training engines of a run, by the names of their sections.

    The engines are those of the policy, the critic and the reward model, if the run has these roles. The reference
    has no entry: it uses the policy's engine, or a copy of it with another layout.
    """
    if isinstance(config, SupervisedConfig):
        return {"engine": config.engine}
    found: dict[str, EngineConfig] = {ACTOR: config.actor_rollout_ref.actor}
    if uses_critic(config.critic, config.algorithm.adv_estimator):
        found["critic"] = config.critic
    if config.reward_model.enable:
        found["reward_model"] = config.reward_model
    return found


# Checks of the layout of the reference model (or teacher).


def reference_layout_problems(config: PPOConfig) -> list[str]:
    """Check the layout keys of the reference model.

    A reference with its own devices may override the actor's layout, and its sizes must divide its own ranks.
    On the policy's devices its layout keys may only repeat the actor's values.
    """
    ref, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor
    engine, problems = ref.engine(actor), []
    if ref.has_own_devices:
        problems = engine_problems(engine, REF, ranks_of(config, ref), REF)
    for below in OWN_LAYOUT:
        own, theirs = get_value(ref, below), get_value(actor, below)
        if own in (None, theirs):
            continue
        if not ref.has_own_devices:
            problems.append(
                f"{REF}.{below}={own} must say what {ACTOR}.{below} says ({theirs}): on the policy's devices a "
                f"reference runs in the actor's engine. Leave it out, or give the reference devices ({REF}.nnodes)"
            )
        elif below != "strategy" and below.startswith("megatron.") != (engine.strategy == "megatron"):
            problems.append(f"{REF}.{below}={own} has no effect with {REF}.strategy={engine.strategy}")
    return problems


def reads_the_other_engine(config: PPOConfig) -> bool:
    """Return whether the reference runs in another engine than the actor: one in Megatron, the other in FSDP.

    Such a reference reads the settings that the actor's section holds for that other engine.
    """
    policy = config.actor_rollout_ref
    found = {engine.strategy == "megatron" for engine in (policy.actor, policy.ref.engine(policy.actor))}
    return uses_reference(config) and len(found) == 2
