"""`critic.*` and `reward_model.*`: the value model of PPO and models that score."""

from dataclasses import dataclass

from meshrl.config.actor import LOSS_AGG_MODES
from meshrl.config.checkpoint import CheckpointConfig
from meshrl.config.engine import BY_SAMPLES, BY_TOKENS, EngineConfig
from meshrl.config.key import MOST_ROWS, MOST_TOKENS, key, section
from meshrl.config.model import ModelConfig
from meshrl.config.names import ACTOR
from meshrl.config.optim import OptimConfig
from meshrl.config.pools import OwnDevices


@dataclass
class CriticConfig(OwnDevices, EngineConfig):
    enable: bool | None = key(None, "Train a critic; null: if the estimator needs one.")
    model: ModelConfig = section(ModelConfig, "Model the critic starts from; without a path: the policy's.")
    optim: OptimConfig = section(OptimConfig, "Optimizer of the critic.", lr=1e-5)
    ppo_mini_batch_size: int | None = key(
        None,
        "Prompts per optimizer step, over all ranks.",
        low=1,
        follows=f"{ACTOR}.ppo_mini_batch_size",
        high=MOST_ROWS,
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward/backward on one rank.",
        low=1,
        follows=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        high=MOST_ROWS,
        only_if=BY_SAMPLES,
        noted=True,
    )
    use_dynamic_bsz: bool | None = key(None, "Cut micro-batches by tokens.", follows=f"{ACTOR}.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int = key(
        32768, "Most tokens of a micro-batch on one rank.", low=1, high=MOST_TOKENS, only_if=BY_TOKENS, noted=True
    )
    ppo_epochs: int | None = key(
        None, "Passes over one batch of samples.", low=1, follows=f"{ACTOR}.ppo_epochs", high=10_000
    )
    shuffle: bool | None = key(None, "Shuffle before cutting mini-batches.", follows=f"{ACTOR}.shuffle")
    cliprange_value: float = key(0.5, "Clip range of the value loss.", low=0, high=1e6)
    loss_agg_mode: str | None = key(
        None, "How token losses become one number.", choices=LOSS_AGG_MODES, follows=f"{ACTOR}.loss_agg_mode"
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig, "What checkpoints hold of the critic.")


def uses_critic(critic: CriticConfig, adv_estimator: str) -> bool:
    """Whether a run trains a critic."""
    return adv_estimator == "gae" if critic.enable is None else critic.enable


@dataclass
class RewardModelConfig(OwnDevices, EngineConfig):
    enable: bool = key(False, "Score responses with a model (a token or sequence classifier of one label).")
    model: ModelConfig = section(ModelConfig, "The scoring model; it must have the policy's tokenizer.")
    weight: float = key(1.0, "Weight of its score beside that of reward functions.", low=-1e6, high=1e6)
    use_dynamic_bsz: bool | None = key(None, "Cut micro-batches by tokens.", follows=f"{ACTOR}.use_dynamic_bsz")
    forward_max_token_len_per_gpu: int = key(
        32768, "Most tokens of a micro-batch on one rank.", low=1, high=MOST_TOKENS, only_if=BY_TOKENS, noted=True
    )
    micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward on one rank.",
        low=1,
        follows=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        high=MOST_ROWS,
        only_if=BY_SAMPLES,
        noted=True,
    )
