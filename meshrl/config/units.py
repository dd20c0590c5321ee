"""Batch sizes in every unit (prompts or samples, all ranks or one), derived once from the config."""

from dataclasses import dataclass

from meshrl.config.actor import ActorConfig
from meshrl.config.critic import CriticConfig, uses_critic
from meshrl.config.engine import EngineConfig
from meshrl.config.errors import ConfigError
from meshrl.config.layout import dp_size, model_ranks
from meshrl.config.names import ACTOR, count
from meshrl.config.pools import ranks_of, whose
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig


@dataclass(frozen=True)
class BatchUnits:
    """How one step of `meshrl train` is cut up."""

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
    samples_per_micro_batch: int | None  # None: cut by tokens
    tokens_per_micro_batch: int | None  # None: cut by samples
    critic_dp_size: int = 1
    critic_mini_batches_per_epoch: int = 1
    critic_steps_per_step: int = 1
    ref_dp_size: int = 1
    reward_model_dp_size: int = 1

    @classmethod
    def from_config(cls, config: PPOConfig) -> "BatchUnits":
        """Derive all units; a `ConfigError` if sizes do not divide."""
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
        """The units in words, for printing once."""
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
    """How one step of `meshrl sft` or `meshrl prefer` is cut up; a step is one optimizer step."""

    rows_per_step: int
    dp_size: int
    rows_per_rank: int
    rows_per_micro_batch: int | None
    tokens_per_micro_batch: int | None
    noun: str = "sequence"  # or pair, or answer: what the numbers count

    @classmethod
    def from_config(cls, config: SupervisedConfig) -> "SupervisedBatchUnits":
        """Derive all units; a `ConfigError` if sizes do not divide."""
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
        """The units in words, for printing once."""
        micro = _micro_batch_words(self.rows_per_micro_batch, self.noun, self.tokens_per_micro_batch)
        return [
            f"step: {count(self.rows_per_step, self.noun)}, {self.rows_per_rank} on each of "
            f"{count(self.dp_size, 'data-parallel rank')}, in micro-batches of {micro}"
        ]


def _micro_batch_words(number: int | None, noun: str, tokens: int | None) -> str:
    return f"up to {tokens} tokens a rank" if tokens is not None else count(number or 0, noun)


def batch_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Batch sizes that do not divide, with the numbers and the keys."""
    return _supervised_problems(config) if isinstance(config, SupervisedConfig) else _ppo_problems(config)


def _ppo_problems(config: PPOConfig) -> list[str]:
    problems = _update_problems(config, config.actor_rollout_ref.actor, ACTOR)
    if uses_critic(config.critic, config.algorithm.adv_estimator):
        problems += _update_problems(config, config.critic, "critic")
    return problems


def _update_problems(config: PPOConfig, role: ActorConfig | CriticConfig, prefix: str) -> list[str]:
    """How the samples of a step divide into a trained role's mini-batches, ranks and micro-batches."""
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
    """The number of ranks that get samples of their own, and where it comes from."""
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
