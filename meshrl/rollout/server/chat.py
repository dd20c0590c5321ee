"""Chat messages, images and tools through the model's own chat template, to token ids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.chat_template import reserved_name
from meshrl.data.encoding import RowError
from meshrl.data.images import PromptImages, from_data_url, is_data_url
from meshrl.data.seen import Images
from meshrl.rollout.server.errors import ApiError
from meshrl.rollout.server.protocol import ChatBody, Message


def chat_prompt(tokenizer: Tokenizer, body: ChatBody, sight: PromptImages | None) -> tuple[list[int], Images]:
    """The prompt that asks the model for its next message, and the images in it; none without `sight`."""
    template = tokenizer.chat_template
    if template is None:
        raise ApiError(400, "this model has no chat template: use /v1/completions")
    tools = body.tools if body.tool_choice == "auto" else []
    if tools and "tools" not in str(template):
        raise ApiError(400, "this model's chat template has no place for tools: leave them out", "tools")
    wrong = reserved_name(body.chat_template_kwargs)
    if wrong is not None:
        raise ApiError(400, f"chat_template_kwargs: '{wrong}' cannot be set", "chat_template_kwargs")
    images: list[bytes] = []
    messages = [_as_dict(number, message, images) for number, message in enumerate(body.messages)]
    if images and sight is None:
        raise ApiError(400, "this model does not see images: send text only", "messages")
    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **body.chat_template_kwargs,  # type: ignore[arg-type]
        )
    except Exception as error:  # templates raise anything for messages that they were not written for
        raise ApiError(400, f"the chat template refused the messages: {error}", "messages") from error
    if sight is None:
        return list(rendered), ()
    try:
        prompt = sight.expanded(np.asarray(rendered), tuple(images), 0).tolist()
        for image in images:
            sight.reader.pixels(image)  # here, and not where everyone's tokens are sampled; they are kept
    except ValueError as error:
        words = error.words if isinstance(error, RowError) else error
        raise ApiError(400, f"messages: {words}", "messages") from error
    return prompt, tuple(images)


def _as_dict(number: int, message: Message, images: list[bytes]) -> dict[str, Any]:
    """A message as templates take it; the images in it go to `images`, in their order."""
    role = "system" if message.role == "developer" else message.role
    given: dict[str, Any] = {"role": role, "content": _content(number, message, images)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            given[name] = value
    if message.tool_calls:
        given["tool_calls"] = [_with_parsed_arguments(number, call) for call in message.tool_calls]
    return given


def _content(number: int, message: Message, images: list[bytes]) -> str | list[dict[str, str]]:
    """A text, or parts where there is an image among them."""
    if isinstance(message.content, str):
        return message.content
    parts = []
    for part in message.content:
        kind, url = part.get("type"), part.get("image_url")
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url" and isinstance(url, dict) and isinstance(url.get("url"), str):
            images.append(_image(number, url["url"]))
            parts.append({"type": "image"})
        else:
            raise ApiError(400, f"messages.{number}: only parts of text and image_url are served here", "messages")
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def _image(number: int, url: str) -> bytes:
    # Nothing is fetched or read for a caller: an address could be one that only this machine reaches.
    if not is_data_url(url):
        raise ApiError(
            400, f"messages.{number}: an image must come as a data URL (data:image/...;base64,...)", "messages"
        )
    try:
        return from_data_url(url)
    except ValueError as error:
        raise ApiError(400, f"messages.{number}: {error}", "messages") from error


def _with_parsed_arguments(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI sends a call's arguments as a JSON text; templates write them as JSON themselves."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"messages.{number}: a tool call needs a function with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ApiError(
                400, f"messages.{number}: the arguments of '{function['name']}' are not JSON", "messages"
            ) from error
    return call | {"function": function | {"arguments": arguments}}
