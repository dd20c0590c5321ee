"""Prompts with images in vLLM's words: one token for each image, which it makes room for itself, and the image."""

from __future__ import annotations

import base64
from hashlib import sha256
from typing import Any

import numpy as np

from meshrl.data.image_reader import KEPT_BYTES, Newest, open_image, upright
from meshrl.data.images import encoded
from meshrl.data.seen import Images
from meshrl.models.sight import Sight
from meshrl.rollout.requests import Request

ORIENTATION = 0x0112  # the camera's note of how an image was held
# Kinds of files in which any reader sees the same, if their pixels are plain.
PLAIN = ("PNG", "JPEG", "WEBP")
# The answers to a prompt come as requests of their own.
_pictures: Newest[Any] = Newest(KEPT_BYTES)


def token_prompt(request: Request, sight: Sight | None) -> dict[str, Any]:
    """The fields of vLLM's `TokensPrompt`; a `ValueError` where an image cannot be decoded."""
    if sight is None or not request.images:
        return {"prompt_token_ids": list(request.prompt_token_ids)}
    return {
        "prompt_token_ids": with_one_each(request, sight),
        "multi_modal_data": {"image": [_picture(image) for image in request.images]},
        "multi_modal_uuids": {"image": _names(request.images)},
    }


def content_parts(images: Images) -> list[dict[str, str]]:
    """The images of a request as parts of a message to vLLM's server."""
    kinds = zip(map(_plain_file, images), _names(images), strict=True)
    return [{"type": "image_url", "url": url, "uuid": name} for url, name in kinds]


def with_one_each(request: Request, sight: Sight) -> list[int]:
    """The tokens of a prompt with a single one for each image."""
    ids = np.array(request.prompt_token_ids)
    times = np.array([sight.reader.num_tokens(image) for image in request.images])
    places = (ids == sight.image_token).nonzero()[0][: times.sum()]
    return np.delete(ids, np.delete(places, times.cumsum() - times)).tolist()


def _names(images: Images) -> list[str]:
    """By which vLLM knows images again; it would hash their pixels."""
    return [sha256(image).hexdigest() for image in images]


def _picture(image: bytes) -> Any:
    if (found := _pictures.get(image)) is not None:
        return found
    made = upright(image)
    return _pictures.keep(image, made, 3 * made.width * made.height)


def _plain_file(image: bytes) -> str:
    """A data URL in which vLLM sees what our reader sees: it has ways of its own with turned or transparent images."""
    opened = open_image(image)
    is_plain = opened.format in PLAIN and opened.mode == "RGB" and opened.getexif().get(ORIENTATION, 1) == 1
    kind, shown = (opened.format.lower(), image) if is_plain else ("png", encoded(upright(image)))
    return f"data:image/{kind};base64,{base64.b64encode(shown).decode()}"
