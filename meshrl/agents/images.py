"""Images that tools and environments show the model beside what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshrl.agents.messages import Message
from meshrl.config.names import count
from meshrl.data.images import PLACE, PromptImages, encoded, in_parts
from meshrl.data.seen import Images


def shows(images: Any) -> bool:
    """Whether there is anything among what may be one image, several or none."""
    return images is not None and not (isinstance(images, list | tuple) and not images)


def taken(images: Any, sight: PromptImages | None) -> Images:
    """One image or several, in any form that rows may have them in, as the bytes of files that the model can see."""
    several = images if isinstance(images, list | tuple) else [images]
    if several and sight is None:
        raise ValueError(f"the model sees no images, but was given {count(len(several), 'image')}")
    found = tuple(encoded(image) for image in several)
    for image in found:
        assert sight is not None
        sight.reader.pixels(image)  # they are kept for the rollout
    return found


def content(text: str, images: Images) -> str | list[dict[str, str]]:
    """What somebody says, as chat templates take it: images stand where `<image>` is in the text, or before it."""
    if not images:
        return text
    if text.count(PLACE) == len(images):
        return in_parts(text)
    return [{"type": "image"}] * len(images) + ([{"type": "text", "text": text}] if text else [])


def image_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The parts of messages that are images."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]


def opening_images(messages: Sequence[Message], own: Images, sight: PromptImages | None) -> Images:
    """The images in messages to begin with; a part that does not hold its image stands for the next of `own`."""
    parts, left = image_parts(messages), iter(own)
    images = [part["image"] if "image" in part else next(left, None) for part in parts]
    if any(image is None for image in images):
        raise ValueError(f"the prompt has {count(len(parts), 'image')}, but its row has only {len(own)}")
    return taken(images, sight)
