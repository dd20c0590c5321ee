"""Chat messages and tools through the model's own chat template, to token ids."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.chat_template import reserved_name
from meshrl.rollout.server.errors import ApiError
from meshrl.rollout.server.protocol import ChatBody, Message


def chat_token_ids(tokenizer: Tokenizer, body: ChatBody) -> list[int]:
    """The prompt that asks the model for its next message."""
    template = tokenizer.chat_template
    if template is None:
        raise ApiError(400, "this model has no chat template: use /v1/completions")
    tools = body.tools if body.tool_choice == "auto" else []
    if tools and "tools" not in str(template):
        raise ApiError(400, "this model's chat template has no place for tools: leave them out", "tools")
    wrong = reserved_name(body.chat_template_kwargs)
    if wrong is not None:
        raise ApiError(400, f"chat_template_kwargs: '{wrong}' cannot be set", "chat_template_kwargs")
    messages = [_as_dict(number, message) for number, message in enumerate(body.messages)]
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
    return list(rendered)


def _as_dict(number: int, message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    given: dict[str, Any] = {"role": role, "content": _text(number, message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            given[name] = value
    if message.tool_calls:
        given["tool_calls"] = [_with_parsed_arguments(number, call) for call in message.tool_calls]
    return given


def _text(number: int, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, f"messages.{number}: only text parts are served here", "messages")
        texts.append(part["text"])
    return "".join(texts)


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
