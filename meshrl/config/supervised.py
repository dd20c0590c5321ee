"""The whole configs of `meshrl sft` (`SFTConfig`) and `meshrl prefer` (`PreferenceConfig`), and their shared parts."""

from dataclasses import dataclass
from typing import Any

from meshrl.config.data import TRUNCATIONS, VALIDATES
from meshrl.config.engine import CheckpointConfig, EngineConfig, ModelConfig, OptimConfig
from meshrl.config.keys import LARGEST_SEED, MOST_ROWS, MOST_TOKENS, changed_keys, equals, fact, key, section
from meshrl.config.trainer import RayInitConfig, RunConfig

# With `data.messages_key`, the prompts are inside whole conversations.
HAS_PROMPTS = fact(
    "prompts in a column of their own, without `data.messages_key`",
    ("data.messages_key",),
    lambda config: not isinstance(config.data, SFTDataConfig) or config.data.messages_key is None,
)


@dataclass
class SequenceDataConfig:
    """The `data` keys that supervised fine-tuning and preference learning (pairs or KTO) share."""

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
    """The shared config of runs that learn from files instead of generated responses: `meshrl sft` and `prefer`."""

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
        """The noun for a row of the data in messages, in the singular."""
        return "sequence"

    @property
    def sequences_per_row(self) -> int:
        """The number of sequences of one row of the data. They stay in one micro-batch."""
        return 1

    @property
    def trains_scores(self) -> bool:
        """True if the run trains a reward model."""
        return False

    @property
    def longest_sequence(self) -> int:
        """The largest number of tokens of a sequence that the model reads. A reward model reads one token more."""
        return self.data.max_length + int(self.trains_scores)


@dataclass
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig = section(SFTDataConfig, "The demonstrations.")


# `PreferenceConfig`: the whole config of `meshrl prefer`.

# Names of losses in `meshrl.algorithms`: the loss of answers with single labels (KTO), the loss of a reward model, the
# losses that compare a policy with a reference, and all losses.
JUDGED, REWARD = "kto", "reward"
WITH_REFERENCE = ("dpo", "ipo", "hinge", JUDGED)
PREFERENCE_LOSSES = (*WITH_REFERENCE, "simpo", "orpo", REWARD)


@dataclass
class PreferenceDataConfig(SequenceDataConfig):
    chosen_key: str = key("chosen", "Column with the better answer: a text, or a list of messages.")
    rejected_key: str = key("rejected", "Column with the worse answer.")
    response_key: str = key("response", "kto: column with the answer: a text, or a list of messages.")
    label_key: str = key("label", "kto: column that says whether the answer is good: true or false, 1 or 0.")


@dataclass
class PreferenceLossConfig:
    name: str = key(
        "dpo",
        "dpo, ipo, hinge, simpo, orpo: a policy, of pairs; kto: of judged answers; reward: a reward model.",
        choices=PREFERENCE_LOSSES,
    )
    beta: float = key(
        0.1,
        "How much log-ratios (simpo: mean log-probs) count; ipo aims at 1/(2 beta); orpo: the weight of pairs.",
        low=1e-9,
        high=1e6,
    )
    label_smoothing: float = key(
        0.0, "dpo, simpo, reward: the share of pairs that are taken to be the wrong way round.", low=0, high=0.5
    )
    simpo_gamma: float = key(
        0.5, "simpo: the margin (beta times the difference) that the chosen answer should have.", low=0, high=1e6
    )
    sft_weight: float = key(
        0.0, "Weight of the chosen answers' negative log-likelihood a token, beside it.", low=0, high=1e6
    )
    desirable_weight: float = key(1.0, "kto: weight of good answers.", low=0, high=1e6)
    undesirable_weight: float = key(1.0, "kto: weight of bad answers.", low=0, high=1e6)

    @property
    def options(self) -> dict[str, float]:
        """The parameters of the loss, as keyword arguments: of a KTO loss, or of a loss of pairs."""
        if self.name == JUDGED:
            names = ("beta", "desirable_weight", "undesirable_weight")
        else:
            names = ("beta", "label_smoothing", "simpo_gamma")
        return {name: getattr(self, name) for name in names}

    @property
    def likelihood_weight(self) -> float:
        """The weight of the chosen answers' log-likelihood. It is 1 for ORPO, whose loss contains it."""
        return 1.0 if self.name == "orpo" else self.sft_weight


@dataclass
class PreferenceReferenceConfig:
    path: str | None = key(None, "Its folder; null: the model as it begins, with adapters that model without them.")
    param_offload: bool = key(False, "Its weights wait in host memory while the policy learns.")


@dataclass
class PreferenceConfig(SupervisedConfig):
    data: PreferenceDataConfig = section(PreferenceDataConfig, "The answers.", train_batch_size=64)
    optim: OptimConfig = section(OptimConfig, "The optimizer.", lr=1e-6)
    loss: PreferenceLossConfig = section(PreferenceLossConfig, "What the answers teach.")
    reference: PreferenceReferenceConfig = section(
        PreferenceReferenceConfig, "What dpo, ipo, hinge and kto compare the policy with."
    )
    trainer: SupervisedRunConfig = section(
        SupervisedRunConfig, "Processes, lengths of the run, logging.", total_epochs=1
    )

    @property
    def noun(self) -> str:
        """The noun for a row of the data in messages, in the singular."""
        return "answer" if self.is_judged else "pair"

    @property
    def sequences_per_row(self) -> int:
        """The number of sequences of one row of the data. They stay in one micro-batch."""
        return 1 if self.is_judged else 2

    @property
    def is_judged(self) -> bool:
        """True if each row is an answer with a label (KTO), and false if each row is a pair."""
        return self.loss.name == JUDGED

    @property
    def has_reference(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return self.loss.name in WITH_REFERENCE

    @property
    def has_second_model(self) -> bool:
        """True if the reference is a second model in memory.

        A policy with adapters needs none unless a path is given: the policy without its adapters is the reference.
        """
        return self.has_reference and not (self.model.has_adapters and self.reference.path is None)

    @property
    def trains_scores(self) -> bool:
        """True if the run trains a reward model."""
        return self.loss.name == REWARD


def preference_problems(config: PreferenceConfig) -> list[str]:
    """Return one message for each set key that has no effect with the chosen loss or reference."""
    loss, has_reference = config.loss.name, config.has_reference
    unused = {
        "loss.beta": loss == REWARD,
        "loss.label_smoothing": loss not in ("dpo", "simpo", REWARD),
        "loss.simpo_gamma": loss != "simpo",
        "loss.sft_weight": loss in ("orpo", JUDGED, REWARD),
        "loss.desirable_weight": loss != JUDGED,
        "loss.undesirable_weight": loss != JUDGED,
        "reference": not has_reference,
        **dict.fromkeys(("data.chosen_key", "data.rejected_key"), loss == JUDGED),
        **dict.fromkeys(("data.response_key", "data.label_key"), loss != JUDGED),
    }
    problems = [
        f"{name} has no effect with loss.name={loss}"
        for prefix, is_idle in unused.items()
        for name in (changed_keys(config, prefix) if is_idle else ())
    ]
    if has_reference and not config.has_second_model:
        given = changed_keys(config, "reference.param_offload")
        problems += [f"{name} has no effect with adapters, whose base is the reference" for name in given]
    if config.has_second_model and config.model.random_init and config.reference.path is None:
        problems.append(
            f"model.random_init=true: loss.name={loss} needs a reference with the same weights: give a folder"
        )
    return problems
