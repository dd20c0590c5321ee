"""Prompts with images: finding the images of a row, and expanding their places to image tokens.

A prompt has `<image>` in a text, or an image part of a chat message, for each image of the row, in that order.
"""

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
    """The image preprocessing of prompts for one vision-language model.

    It finds the images of rows, and repeats the image token in the prompts as often as the model needs.
    """

    def __init__(self, folder: str | Path, tokenizer: Tokenizer, key: str | None, trust_remote_code: bool = False):
        config = read_json(Path(folder) / "config.json")
        self.key, self.reader = key, reader_of(str(folder), trust_remote_code)
        self.image_token = int(config["image_token_id"])
        around = [config["vision_start_token_id"], self.image_token, config["vision_end_token_id"]]
        self.place = "".join(tokenizer.convert_ids_to_tokens(around))

    def of(self, row: Row, number: int) -> Images:
        """Return the encoded images of a row from the column `key`. Raise `RowError` if one cannot be read."""
        found = None if self.key is None else _plain(row.get(self.key))
        several = found if isinstance(found, Sequence) and not isinstance(found, str | bytes) else [found]
        try:
            return () if found is None else tuple(encoded(image) for image in several)
        except ValueError as error:
            raise RowError(number, f"'{self.key}': {error}") from error

    def column(self, rows: Iterable[tuple[Row, int]]) -> dict[str, np.ndarray]:
        """Return the images of some rows as a column of a batch. The rows come as pairs of row and row number."""
        return {IMAGES: object_array([self.of(row, number) for row, number in rows])}

    def with_places(self, prompt: Any) -> Any:
        """Replace `<image>` in a prompt by the model's tokens for an image, or by an image part of a chat message."""
        if isinstance(prompt, str):
            return prompt.replace(PLACE, self.place)
        return [_in_parts(message) for message in prompt] if is_chat(prompt) else prompt

    def expanded(self, ids: np.ndarray, images: Images, number: int) -> np.ndarray:
        """Return a tokenized prompt in which each image token is repeated to the image's number of tokens."""
        return np.repeat(ids, self.times(ids, images, number))

    def times(self, ids: np.ndarray, images: Images, number: int) -> np.ndarray:
        """Return how often each token must be repeated: 1, or the image's number of tokens for an image token.

        Raise `RowError` if the prompt has not one place for each image.
        """
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
    """Raise `RowError` for a row with images, for a model that takes none and would ignore the images.

    `first` is the number of the first row.
    """
    for number, row in enumerate(rows, first):
        if _plain(row.get(key)):
            raise RowError(
                number,
                f"it has images ('{key}', data.image_key), but the model does not see any: take one that does, or set "
                "data.image_key=null",
            )


def encoded(image: Any) -> bytes:
    """Return an image as the bytes of an image file. Raise `ValueError` if that fails.

    The image is given as bytes, a path, a data URL, a dict with `bytes` or `path` (from a dataset), or a PIL image.
    """
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
    """Return whether a text is a base64 data URL, which contains the data itself."""
    return DATA_URL.match(text) is not None


def from_data_url(url: str) -> bytes:
    """Decode the bytes in a base64 data URL. Raise `ValueError` if it is not base64."""
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except binascii.Error as error:
        raise ValueError(f"a data URL of {len(url)} characters is not base64 ({error})") from error


def _plain(value: Any) -> Any:
    """Convert a column's value to plain Python, because tables return lists as arrays."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = _plain(message["content"])
    if isinstance(content, str):
        return {**message, "content": in_parts(content)} if PLACE in content else message
    if not isinstance(content, list):
        return message
    # In tables every part has the keys of all parts, with null values. Templates test which keys exist.
    parts = [{k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in content]
    return {**message, "content": parts}


def in_parts(text: str) -> list[dict[str, str]]:
    """Split a text with `<image>` into the text and image parts of a chat message."""
    parts: list[dict[str, str]] = []
    for at, words in enumerate(text.split(PLACE)):
        parts += [{"type": "image"}] if at else []
        parts += [{"type": "text", "text": words}] if words else []
    return parts
