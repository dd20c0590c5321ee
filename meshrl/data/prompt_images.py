"""Prompts with images: `<image>` in a text, or a part of a chat message, for each image of the row, in that order."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.keys import count
from meshrl.data.batch import object_array
from meshrl.data.images import IMAGES, Images, reader_of
from meshrl.data.row_files import Row
from meshrl.data.tokenize import RowError, is_chat, shown
from meshrl.files import read_json

PLACE = "<image>"
DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(;[\w.=+-]+)*;base64,")


class PromptImages:
    """Finds the images of rows and makes room for their tokens in the prompts, for the model in a folder."""

    def __init__(self, folder: str | Path, tokenizer: Tokenizer, key: str | None, trust_remote_code: bool = False):
        config = read_json(Path(folder) / "config.json")
        self.key, self.reader = key, reader_of(str(folder), trust_remote_code)
        self.image_token = int(config["image_token_id"])
        around = [config["vision_start_token_id"], self.image_token, config["vision_end_token_id"]]
        self.place = "".join(tokenizer.convert_ids_to_tokens(around))

    def of(self, row: Row, number: int) -> Images:
        """The encoded images of a row."""
        found = None if self.key is None else _plain(row.get(self.key))
        several = found if isinstance(found, Sequence) and not isinstance(found, str | bytes) else [found]
        try:
            return () if found is None else tuple(encoded(image) for image in several)
        except ValueError as error:
            raise RowError(number, f"'{self.key}': {error}") from error

    def column(self, rows: Iterable[tuple[Row, int]]) -> dict[str, np.ndarray]:
        """The column of a batch with the images of some rows, which come with their numbers."""
        return {IMAGES: object_array([self.of(row, number) for row, number in rows])}

    def with_places(self, prompt: Any) -> Any:
        """A prompt whose places for images a tokenizer, or its chat template, knows."""
        if isinstance(prompt, str):
            return prompt.replace(PLACE, self.place)
        return [_in_parts(message) for message in prompt] if is_chat(prompt) else prompt

    def expanded(self, ids: np.ndarray, images: Images, number: int) -> np.ndarray:
        """A tokenized prompt with as many tokens for each image as the model takes for it."""
        return np.repeat(ids, self.times(ids, images, number))

    def times(self, ids: np.ndarray, images: Images, number: int) -> np.ndarray:
        """How often each token has to stand there: 1, or for the place of an image as often as the model takes."""
        places = (ids == self.image_token).nonzero()[0]
        if len(places) != len(images):
            column = f"'{self.key}'" if self.key else "the row, since no column of images is named (image_key)"
            raise RowError(
                number,
                f"the prompt has {count(len(places), 'place')} for images ({PLACE}), but there are {len(images)} in "
                f"{column}",
            )
        times = np.ones(len(ids), np.int64)
        try:
            times[places] = [self.reader.num_tokens(image) for image in images]
        except ValueError as error:
            raise RowError(number, f"'{self.key}': {error}") from error
        return times


def check_no_images(rows: Sequence[Row], key: str, first: int = 0) -> None:
    """A row with images is an error where the model does not see: it would answer without having looked."""
    for number, row in enumerate(rows, first):
        if _plain(row.get(key)):
            raise RowError(
                number,
                f"it has images ('{key}', data.image_key), but the model does not see any: take one that does, or set "
                "data.image_key=null",
            )


def encoded(image: Any) -> bytes:
    """An image as the bytes of a file: given so, by path, as a data URL, as {bytes, path} of a data set, or by PIL."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if isinstance(image, str) and is_data_url(image):
        return from_data_url(image)
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"there is no image to read at {shown(str(image))}: {reason}") from error
    if hasattr(image, "save"):
        from PIL import ImageOps

        file = io.BytesIO()
        ImageOps.exif_transpose(image).convert("RGB").save(file, "PNG")
        return file.getvalue()
    raise ValueError(f"an image must be bytes, a path, a data URL, or a mapping with one of them, got {shown(image)}")


def is_data_url(text: str) -> bool:
    """Whether a text holds what it names."""
    return DATA_URL.match(text) is not None


def from_data_url(url: str) -> bytes:
    """What a data URL holds; a `ValueError` if it cannot be read."""
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except binascii.Error as error:
        raise ValueError(f"a data URL of {len(url)} characters is not base64 ({error})") from error


def _plain(value: Any) -> Any:
    """A column's value; tables give lists as arrays."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = _plain(message["content"])
    if isinstance(content, str):
        return {**message, "content": in_parts(content)} if PLACE in content else message
    if not isinstance(content, list):
        return message
    # Tables give every part the keys of all, and templates ask which of them are there.
    parts = [{k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in content]
    return {**message, "content": parts}


def in_parts(text: str) -> list[dict[str, str]]:
    """A text with places for images as the parts of a chat message."""
    parts: list[dict[str, str]] = []
    for at, words in enumerate(text.split(PLACE)):
        parts += [{"type": "image"}] if at else []
        parts += [{"type": "text", "text": words}] if words else []
    return parts
