"""`data.*`: the sources of the prompts, their lengths, and how prompts are ordered and batched."""

from dataclasses import dataclass
from typing import Any

from meshrl.config.keys import LARGEST_SEED, MOST_ROWS, MOST_TOKENS, any_of, equals, is_set, key, section

# Keys of validation have an effect only if there are validation files.
VALIDATES = is_set("data.val_files")
TRUNCATIONS = ("error", "left", "right", "middle")


@dataclass
class CustomDatasetConfig:
    path: str | None = key(None, "Python file (or importable module) with a class that gives the rows.")
    name: str | None = key(None, "Name of the class in it; made of (files, tokenizer, config), with a length and rows.")


@dataclass
class SamplerConfig:
    class_path: str | None = key(None, "Python file (or importable module) with a sampler class: a curriculum.")
    class_name: str | None = key(None, "Name of the class in it; it yields row numbers and may have update(batch).")


@dataclass
class DataConfig:
    train_files: list[str] = key([], "Training prompts: parquet or jsonl files, or folders of saved HF datasets.")
    train_weights: list[float] = key(
        [], "Share of each training file in the prompts; empty: each prompt comes once an epoch.", low=0, high=1e9
    )
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
    streaming: bool = key(False, "Read and tokenize training prompts as they are needed, not all at the start.")
    shuffle_buffer: int = key(10000, "Rows that streaming draws from to shuffle.", low=1, high=MOST_ROWS)
    val_files: list[str] = key([], "Validation prompts, in the same formats; without them there is no validation.")
    prompt_key: str = key("prompt", "Column with the prompt: a string, or a list of chat messages.")
    image_key: str | None = key(
        "images", "Column with a prompt's images, in their order: bytes or paths; null: there are none."
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "Variables for the tokenizer's chat template, such as {enable_thinking: false}."
    )
    reward_fn_key: str = key("data_source", "Column with the name of the data source, handed to the reward function.")
    max_prompt_length: int = key(512, "Longest prompt, in tokens.", low=1, high=MOST_TOKENS)
    max_response_length: int = key(512, "Longest response, in tokens.", low=1, high=MOST_TOKENS)
    train_batch_size: int = key(
        1024, "Prompts per step, over all ranks; samples are this times rollout.n.", low=1, high=MOST_ROWS
    )
    gen_batch_size: int | None = key(
        None,
        "Prompts per round of generation, with algorithm.filter_groups; null: train_batch_size.",
        low=1,
        high=MOST_ROWS,
    )
    val_batch_size: int | None = key(
        None,
        "Prompts per validation batch, over all ranks; null: all at once.",
        low=1,
        high=MOST_ROWS,
        only_if=VALIDATES,
        noted=True,
    )
    shuffle: bool = key(True, "Shuffle the training prompts in every epoch.")
    seed: int | None = key(
        None,
        "Seed of the shuffling.",
        follows="trainer.seed",
        low=0,
        high=LARGEST_SEED,
        only_if=any_of(equals(".shuffle", True), is_set(".train_weights"), is_set(".sampler.class_path")),
        noted=True,
    )
    filter_overlong_prompts: bool = key(False, "Drop prompts over max_prompt_length, and count them.")
    filter_overlong_prompts_workers: int = key(1, "Processes that tokenize the prompts at the start.", low=1, high=1024)
    sampler: SamplerConfig = section(SamplerConfig, "An order of the training prompts of your own.")
    truncation: str = key(
        "error",
        "What to do with a prompt over max_prompt_length; left keeps its end.",
        choices=TRUNCATIONS,
        only_if=equals(".filter_overlong_prompts", False),
        noted=True,
    )
    custom_cls: CustomDatasetConfig = section(CustomDatasetConfig, "Rows from a class of your own.")
