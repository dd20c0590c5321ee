"""`PPOConfig`: the whole config of `meshrl train`."""

from dataclasses import dataclass

from meshrl.config.actor import ActorConfig, RefConfig
from meshrl.config.algorithm import AlgorithmConfig
from meshrl.config.asynchronous import AsyncTrainingConfig
from meshrl.config.conditions import differs
from meshrl.config.critic import CriticConfig, RewardModelConfig
from meshrl.config.data import DataConfig
from meshrl.config.key import key, section
from meshrl.config.model import ModelConfig
from meshrl.config.reward import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.trainer import ProfilerConfig, RayInitConfig, TrainerConfig


@dataclass
class ActorRolloutRefConfig:
    hybrid_engine: bool = key(True, "Actor and rollout share their devices; false: rollout.nnodes and n_gpus_per_node.")
    expandable_segments: bool = key(
        False,
        "On GPUs: segments of memory that grow in place while training (fewer gaps), and not while generating.",
        only_if=differs("trainer.device", "cpu"),
    )
    memory_budget_gigabytes: float | None = key(
        None,
        "Most GiB that torch may allocate on a rank's GPU (on CPUs: of its process) in any phase; more is an error.",
        low=0.001,
        high=100_000,
    )
    model: ModelConfig = section(ModelConfig, "The policy's model.")
    actor: ActorConfig = section(ActorConfig, "How the policy is updated.")
    ref: RefConfig = section(RefConfig, "The frozen reference of a KL.")
    rollout: RolloutConfig = section(RolloutConfig, "How responses are generated.")

    @property
    def records_routes(self) -> bool:
        """Whether the rollout says which experts its tokens went to."""
        return self.actor.router_replay.mode == "R3"

    @property
    def memory_budget_bytes(self) -> int | None:
        """Bytes that any phase of a rank may take."""
        return None if self.memory_budget_gigabytes is None else int(self.memory_budget_gigabytes * 2**30)


@dataclass
class PPOConfig:
    data: DataConfig = section(DataConfig, "The prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "The policy in its three roles.")
    critic: CriticConfig = section(CriticConfig, "The value model of PPO.")
    reward_model: RewardModelConfig = section(RewardModelConfig, "A model that scores.")
    reward: RewardConfig = section(RewardConfig, "Built-in rewards, and what to do when one fails.")
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig, "A reward of your own.")
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "How rewards are computed for a batch.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Advantages, KL and corrections.")
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig, "How far generation may run ahead of training.")
    trainer: TrainerConfig = section(TrainerConfig, "Processes, lengths of the run, logging.")
    ray_init: RayInitConfig = section(RayInitConfig, "How Ray is started, with trainer.backend=ray.")
    global_profiler: ProfilerConfig = section(ProfilerConfig, "Profiling of single steps.")
