"""Request bodies of the server: their fields and bounds, and their translation for a rollout.

Bodies:  pydantic models for completions, chat, weight updates and pauses; `parse` reads them
Chat:    `chat_prompt` renders messages, images and tools through the model's chat template to token ids
"""

from __future__ import annotations

import json
import random
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.validate_data import reserved_name
from meshrl.data.images import Images
from meshrl.data.prompt_images import PromptImages, from_data_url, is_data_url
from meshrl.data.tokenize import RowError
from meshrl.rollout.requests import SamplingParams
from meshrl.serving.service import ApiError

MOST_STOPS, LONGEST_STOP, MOST_BIASES, MOST_TOP_LOG_PROBS = 16, 256, 1024, 20
# Bounds of the temperature. Below `COLDEST`, a float32 softmax overflows for ordinary logits.
COLDEST, HOTTEST = 1e-3, 100.0
# OpenAI's fields that this server does not serve, with the neutral values that it accepts.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "store": (False,),
}
# Not strict, because keys in JSON are always strings.
TokenKey = Annotated[int, Field(strict=False)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Body = TypeVar("Body", bound="GenerationBody")


class Strict(BaseModel):
    """A request body without unknown fields, type coercion or NaN; a null counts as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name, neutral in UNSERVED.items():
            if name in given and name not in cls.model_fields and given.pop(name) not in neutral:
                raise ValueError(f"'{name}' is not served here: leave it out")
        return given


class StreamOptions(Strict):
    include_usage: bool = False


class GenerationBody(Strict):
    """Fields common to completions and chat: OpenAI's names first, then rollout options that OpenAI lacks."""

    model: str
    n: int = Field(1, ge=1, le=65_536)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=HOTTEST)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: list[StopString] = Field(default_factory=list, max_length=MOST_STOPS)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=MOST_BIASES
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    metadata: dict[str, str] = Field(default_factory=dict)

    top_k: int = Field(-1, ge=-1, le=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MOST_BIASES)
    ignore_eos: bool = False
    return_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def wants_log_probs(self) -> bool:
        """True if the response must contain the log-prob of each token."""
        raise AssertionError("a kind of request says it")

    @property
    def top_log_probs(self) -> int:
        """Number of likeliest tokens to return with each token."""
        raise AssertionError("a kind of request says it")

    def wanted_tokens(self) -> int | None:
        """Return the maximum tokens of a completion, or None for as many as fit into the context."""
        return self.max_tokens

    def sampling(self, prompt_tokens: int, context: int, end_tokens: tuple[int, ...]) -> SamplingParams:
        """Return the sampling parameters for a prompt of `prompt_tokens` tokens.

        `end_tokens` are the model's end tokens. Raise an `ApiError` if the completion does not fit into `context`
        tokens or a value is invalid.
        """
        if 0 < self.temperature < COLDEST:
            raise ApiError(400, f"temperature must be 0 or between {COLDEST} and {HOTTEST:g}", "temperature")
        room = context - prompt_tokens
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer in a context of {context}",
                "prompt",
            )
        wanted = self.wanted_tokens()
        if wanted is not None and wanted > room:
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens and max_tokens is {wanted}, but the context has {context}: "
                f"ask for at most {room}",
                "max_tokens",
            )
        ends = () if self.ignore_eos else end_tokens
        try:
            return SamplingParams(
                max_tokens=wanted or room,
                temperature=self.temperature,
                top_k=self.top_k or -1,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
                min_tokens=self.min_tokens,
                stop_token_ids=tuple(sorted({*ends, *self.stop_token_ids})),
                stop=tuple(self.stop),
                n=self.n,
                top_log_probs=self.top_log_probs,
            )
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def seeds(self, count: int) -> list[int]:
        """Return a different seed for each prompt, so that equal prompts get different completions.

        The first seed is the requested one, if the request has a seed.
        """
        first = random.getrandbits(62) if self.seed is None else self.seed
        return [first, *random.Random(first).choices(range(2**62), k=count - 1)]


class CompletionBody(GenerationBody):
    prompt: Any
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOG_PROBS)
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is not served here: ask for n={self.best_of} and choose among them")
        return self

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def top_log_probs(self) -> int:
        return self.logprobs or 0


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] = ""
    name: str | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP_LOG_PROBS)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _top_needs_log_probs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs

    @property
    def top_log_probs(self) -> int:
        return self.top_logprobs

    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class UpdateBody(Strict):
    path: str = Field(min_length=1)
    version: int | None = Field(None, ge=0, lt=2**31)


class PauseBody(Strict):
    mode: Literal["keep", "abort", "wait"] = "keep"


AnyBody = TypeVar("AnyBody", bound=Strict)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Parse a request body into `kind`; raise a 400 `ApiError` with the first problem found."""
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        text = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            text = "this server knows no such field"
        elif first["type"] == "missing":
            text = "this field is needed"
        raise ApiError(400, f"{where}: {text}" if where else text, where) from error


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts of a completion request as a list; each prompt is text or token ids."""
    prompt = body.prompt
    if isinstance(prompt, str) or _are_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _are_ids(one) for one in prompt):
        return prompt
    raise ApiError(400, "prompt must be a text, a list of token ids, or a list of these; none may be empty", "prompt")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


# Chat requests: messages, images and tools are rendered through the model's chat template to token ids.


def chat_prompt(tokenizer: Tokenizer, body: ChatBody, sight: PromptImages | None) -> tuple[list[int], Images]:
    """Render the prompt for the model's next message; return its token ids and its images.

    `sight` is the image encoding of a vision-language model. Without it, messages with images are refused.
    """
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
    except Exception as error:  # templates raise any type of error for messages that they do not support
        raise ApiError(400, f"the chat template refused the messages: {error}", "messages") from error
    if sight is None:
        return list(rendered), ()
    try:
        prompt = sight.expanded(np.asarray(rendered), tuple(images), 0).tolist()
        for image in images:
            sight.reader.pixels(image)  # decoded here, not in the sampling loop of all requests; cached
    except ValueError as error:
        words = error.words if isinstance(error, RowError) else error
        raise ApiError(400, f"messages: {words}", "messages") from error
    return prompt, tuple(images)


def _as_dict(number: int, message: Message, images: list[bytes]) -> dict[str, Any]:
    """Convert a message into the dict that chat templates take; append its images to `images` in order."""
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
    """Return the content of a message as one string, or as a list of parts if it contains an image."""
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
    # Only data URLs: the server fetches no address and reads no file for a client, because the address could be one
    # that only this machine can reach.
    if not is_data_url(url):
        raise ApiError(
            400, f"messages.{number}: an image must come as a data URL (data:image/...;base64,...)", "messages"
        )
    try:
        return from_data_url(url)
    except ValueError as error:
        raise ApiError(400, f"messages.{number}: {error}", "messages") from error


def _with_parsed_arguments(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a tool call.

    OpenAI clients send the arguments as a JSON string, but chat templates serialise them to JSON themselves.
    """
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
