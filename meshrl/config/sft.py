"""`SFTConfig`: the whole config of `meshrl sft`, and what it shares with `meshrl prefer`."""

from dataclasses import dataclass
from typing import Any

from meshrl.config.checkpoint import CheckpointConfig
from meshrl.config.conditions import equals, fact
from meshrl.config.data import TRUNCATIONS, VALIDATES
from meshrl.config.engine import EngineConfig
from meshrl.config.key import LARGEST_SEED, MOST_ROWS, MOST_TOKENS, key, section
from meshrl.config.model import ModelConfig
from meshrl.config.optim import OptimConfig
from meshrl.config.trainer import RayInitConfig, RunConfig

# Whole conversations hold their prompts.
HAS_PROMPTS = fact(
    "prompts in a column of their own, without `data.messages_key`",
    ("data.messages_key",),
    lambda config: not isinstance(config.data, SFTDataConfig) or config.data.messages_key is None,
)


@dataclass
class SequenceDataConfig:
    """What demonstrations and answers that were compared or judged have in common."""

    train_files: list[str] = key([], "What to learn: parquet or jsonl files, or folders of saved HF datasets.")
    val_files: list[str] = key([], "Held-out rows; without them there is no validation.")
    train_max_samples: int = key(
        -1, "Train on so many rows: drawn by the seed with shuffle, else the first; -1: all.", low=-1, high=MOST_ROWS
    )
    val_max_samples: int = key(
        -1,
        "Validate on so many rows, chosen in the same way; -1: all.",
        low=-1,
        high=MOST_ROWS,
        only_if=VALIDATES,
        noted=True,
    )
    prompt_key: str = key("prompt", "Column with the prompt.", only_if=HAS_PROMPTS)
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "Variables for the tokenizer's chat template, such as {enable_thinking: false}."
    )
    max_length: int = key(1024, "Longest prompt plus response, in tokens.", low=1, high=MOST_TOKENS)
    truncation: str = key("error", "What to do with a longer one; left keeps its end.", choices=TRUNCATIONS[:3])
    train_batch_size: int = key(256, "Rows of the data per optimizer step, over all ranks.", low=1, high=MOST_ROWS)
    micro_batch_size_per_gpu: int | None = key(
        None, "Rows per forward/backward on one rank; null: by max_token_len_per_gpu.", low=1, high=MOST_ROWS
    )
    max_token_len_per_gpu: int = key(
        8192,
        "Most tokens of a micro-batch on one rank.",
        low=1,
        high=MOST_TOKENS,
        only_if=equals(".micro_batch_size_per_gpu", None),
        noted=True,
    )
    shuffle: bool = key(True, "Shuffle the training data in every epoch.")
    seed: int | None = key(
        None,
        "Seed of the shuffling.",
        follows="trainer.seed",
        low=0,
        high=LARGEST_SEED,
        only_if=equals(".shuffle", True),
        noted=True,
    )


@dataclass
class SFTDataConfig(SequenceDataConfig):
    prompt_dict_keys: list[str] = key(
        [], "Where the prompt is inside its column: keys, one below the other.", only_if=equals(".messages_key", None)
    )
    prompt_as_message: bool = key(
        False,
        "Put a prompt that is a text into the chat template, as the user's message.",
        only_if=equals(".messages_key", None),
    )
    response_key: str = key("response", "Column with the response to learn.", only_if=equals(".messages_key", None))
    response_dict_keys: list[str] = key(
        [], "Where the response is inside its column, in the same way.", only_if=equals(".messages_key", None)
    )
    messages_key: str | None = key(None, "Column with whole conversations, instead of prompt and response.")
    tools_key: str | None = key(
        "tools", "Column with the schemas of a conversation's tools, told to the chat template, if a row has it."
    )
    enable_thinking_key: str | None = key(
        "enable_thinking", "Column with the chat template's variable of this name, if a row has it."
    )
    image_key: str | None = key(
        "images", "Column with a demonstration's images, in their order: bytes or paths; null: there are none."
    )


@dataclass
class SupervisedRunConfig(RunConfig):
    test_after_epoch: bool = key(False, "Validate after every pass over the data, instead of test_freq.")
    save_after_epoch: bool = key(False, "Save a checkpoint after every pass over the data, instead of save_freq.")


@dataclass
class SupervisedConfig:
    """A run that learns from a file instead of its own answers."""

    data: SequenceDataConfig = section(SequenceDataConfig, "What to learn from.")
    model: ModelConfig = section(ModelConfig, "The model.")
    optim: OptimConfig = section(OptimConfig, "The optimizer.", lr=1e-5)
    engine: EngineConfig = section(EngineConfig, "How the model is sharded.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "What checkpoints hold.")
    trainer: SupervisedRunConfig = section(
        SupervisedRunConfig, "Processes, lengths of the run, logging.", total_epochs=4
    )
    ray_init: RayInitConfig = section(RayInitConfig, "How Ray is started, with trainer.backend=ray.")

    @property
    def noun(self) -> str:
        """What a row of the data is."""
        return "sequence"

    @property
    def sequences_per_row(self) -> int:
        """How many sequences a row of the data becomes, which stay together."""
        return 1

    @property
    def trains_scores(self) -> bool:
        """Whether the model becomes a reward model."""
        return False

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a sequence that the model reads: a score is that of one token more."""
        return self.data.max_length + int(self.trains_scores)


@dataclass
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig = section(SFTDataConfig, "The demonstrations.")
