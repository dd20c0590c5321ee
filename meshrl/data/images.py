"""Prompts with images: `<image>` in a text, or a part of a chat message, for each image of the row, in that order."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.model_folder import read_json
from meshrl.config.names import count
from meshrl.data.encoding import RowError, is_chat, shown
from meshrl.data.files import Row
from meshrl.models.image_reader import ImageReader
from meshrl.models.sight import Images

PLACE = "<image>"


class PromptImages:
    """Finds the images of rows and makes room for their tokens in the prompts, for the model in a folder."""

    def __init__(self, folder: str | Path, tokenizer: Tokenizer, key: str | None, trust_remote_code: bool = False):
        config = read_json(Path(folder) / "config.json")
        self.key, self.reader = key, ImageReader(folder, trust_remote_code)
        self.image_token = int(config["image_token_id"])
        around = [config["vision_start_token_id"], self.image_token, config["vision_end_token_id"]]
        self.place = "".join(tokenizer.convert_ids_to_tokens(around))

    def of(self, row: Row, number: int) -> Images:
        """The encoded images of a row."""
        found = None if self.key is None else row.get(self.key)
        several = found if isinstance(found, Sequence) and not isinstance(found, str | bytes) else [found]
        try:
            return () if found is None else tuple(encoded(image) for image in several)
        except (ValueError, OSError) as error:
            raise RowError(number, f"'{self.key}': {error}") from error

    def with_places(self, prompt: Any) -> Any:
        """A prompt whose places for images a tokenizer, or its chat template, knows."""
        if isinstance(prompt, str):
            return prompt.replace(PLACE, self.place)
        return [_in_parts(message) for message in prompt] if is_chat(prompt) else prompt

    def expanded(self, ids: np.ndarray, images: Images, number: int) -> np.ndarray:
        """A tokenized prompt with as many tokens for each image as the model takes for it."""
        places = (ids == self.image_token).nonzero()[0]
        if len(places) != len(images):
            raise RowError(
                number,
                f"the prompt has places for {count(len(places), 'image')} ({PLACE}), but the row has {len(images)} in "
                f"'{self.key}' (data.image_key)",
            )
        times = np.ones(len(ids), np.int64)
        try:
            times[places] = [self.reader.num_tokens(image) for image in images]
        except ValueError as error:
            raise RowError(number, f"'{self.key}': {error}") from error
        return np.repeat(ids, times)


def encoded(image: Any) -> bytes:
    """An image as the bytes of a file: given so, by path, as {bytes, path} of a data set, or as a PIL image."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    if hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()
    raise ValueError(f"an image must be bytes, a path, or a mapping with one of them, got {shown(image)}")


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str) or PLACE not in content:
        return message
    parts: list[dict[str, str]] = []
    for at, text in enumerate(content.split(PLACE)):
        parts += [{"type": "image"}] if at else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}
