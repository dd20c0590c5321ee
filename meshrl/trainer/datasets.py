"""Datasets of a run: prompts, demonstrations or preferences, and the order of their rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.engine import ModelConfig
from meshrl.config.keys import told_without_traceback
from meshrl.config.rl import PPOConfig
from meshrl.config.supervised import PreferenceConfig, SFTDataConfig, SupervisedConfig
from meshrl.data.curriculum import SamplerOrder
from meshrl.data.prompt_images import PromptImages
from meshrl.data.prompts import PromptDataset, PromptStream
from meshrl.data.sampling import BatchOrder, MixedOrder, RowOrder
from meshrl.data.supervised_data import DemonstrationDataset, JudgedDataset, PairDataset
from meshrl.models.loading import load_model_config
from meshrl.models.vision import sees
from meshrl.telemetry.console import counting_bar
from meshrl.trainer.supervised_trainers import Rows

Tools = list[dict[str, Any]] | None


def run_prompts(
    config: PPOConfig, tokenizer: Tokenizer, tools: Tools, console: Console | None
) -> tuple[PromptDataset | PromptStream, RowOrder, PromptDataset | None]:
    """Return the training prompts, their order, and the validation prompts or None."""
    data = config.data
    with told_without_traceback():
        images = _prompt_images(config.actor_rollout_ref.model, data.image_key, tokenizer)
    train_data, order = _training_prompts(config, tokenizer, tools, images, console)
    if not data.val_files:
        return train_data, order, None
    with told_without_traceback("data.val_files"):
        most = data.val_max_samples
        return train_data, order, PromptDataset(data.val_files, tokenizer, data, tools, None, most, images)


def run_rows(config: SupervisedConfig, tokenizer: Tokenizer) -> tuple[Rows, BatchOrder, Rows | None]:
    """Return the training data, its order, and the held-out data; the order needs at least one batch of rows."""
    data, seed = config.data, config.trainer.seed if config.data.seed is None else config.data.seed
    with told_without_traceback():
        if isinstance(data, SFTDataConfig):
            images = _prompt_images(config.model, data.image_key, tokenizer)
            read: Callable[..., Rows] = partial(DemonstrationDataset, images=images)
        else:
            judged = isinstance(config, PreferenceConfig) and config.is_judged
            read = JudgedDataset if judged else PairDataset
        train_data = read(data.train_files, tokenizer, data, data.train_max_samples)
        val_data = read(data.val_files, tokenizer, data, data.val_max_samples) if data.val_files else None
        return train_data, BatchOrder(len(train_data), data.train_batch_size, data.shuffle, seed), val_data


def _prompt_images(model: ModelConfig, key: str | None, tokenizer: Tokenizer) -> PromptImages | None:
    """Return the reader of images in prompts if the model is a VLM, or None."""
    if not sees(load_model_config(model.path or "", trust_remote_code=model.trust_remote_code)):
        return None
    return PromptImages(model.path or "", tokenizer, key, model.trust_remote_code)


def _training_prompts(
    config: PPOConfig,
    tokenizer: Tokenizer,
    tools: Tools,
    images: PromptImages | None,
    console: Console | None,
) -> tuple[PromptDataset | PromptStream, RowOrder]:
    """Return the training prompts and their order: streamed, mixed by weight, shuffled, or by a user's sampler."""
    data = config.data
    seed, size = data.seed if data.seed is not None else config.trainer.seed, data.gen_batch_size
    size = size or data.train_batch_size
    with told_without_traceback():
        if data.streaming:
            stream = PromptStream(data.train_files, tokenizer, data, size, seed, tools, images)
            return stream, stream
        with counting_bar("tokenizing prompts", console) as on_progress:
            most = data.train_max_samples
            prompts = PromptDataset(data.train_files, tokenizer, data, tools, on_progress, most, images)
        if data.train_weights and data.sampler.class_path is None:
            return prompts, MixedOrder(prompts.source_of_row, data.train_weights, size, data.shuffle, seed)
        if data.sampler.class_path is None:
            return prompts, BatchOrder(len(prompts), size, data.shuffle, seed)
    # A sampler is user code, so its errors keep their traceback.
    return prompts, SamplerOrder(prompts, data, size)
