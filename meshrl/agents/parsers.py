"""Parsers of tool calls in the model's text. Parse errors are reported to the model, never raised."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.agents.messages import MalformedCall, ToolCall
from meshrl.agents.tools import Tool, fits

Call = ToolCall | MalformedCall


@dataclass(frozen=True)
class Parsed:
    """The model's text without its calls, and the calls in the order written."""

    content: str
    calls: list[Call] = field(default_factory=list)


class ToolParser(ABC):
    """The base class of parsers, one for each format of tool calls."""

    def __init__(self, tools: Sequence[Tool] = ()):
        self.tools = list(tools)

    @abstractmethod
    def parse(self, text: str) -> Parsed:
        """Parse a whole turn of the model, which includes special tokens except the stop token that ended it."""


class HermesParser(ToolParser):
    """A parser of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""

    BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> Parsed:
        calls: list[Call] = []
        for body, end in self.BLOCK.findall(text):
            calls.append(_one_call(body) if end else MalformedCall("<tool_call> without </tool_call>"))
        return Parsed(self.BLOCK.sub("", text).strip(), calls)


class Llama3JsonParser(ToolParser):
    """A parser of turns that consist only of `{"name": ..., "parameters": {...}}` objects, separated by `;`.

    After `<|python_tag|>` all text must be calls. Without the tag, any other JSON is an ordinary answer.
    """

    TAG = "<|python_tag|>"
    NAME, PARAMETERS = re.compile(r'"name"\s*:'), re.compile(r'"(arguments|parameters)"\s*:')

    def parse(self, text: str) -> Parsed:
        content, tag, body = text.rpartition(self.TAG)
        if not tag:
            content, body = "", text
        body = body.strip()
        if not tag and not (body.startswith("{") and self.NAME.search(body) and self.PARAMETERS.search(body)):
            return Parsed(text.strip())
        return Parsed(content.strip(), list(self._calls(body)))

    @staticmethod
    def _calls(body: str) -> Iterator[Call]:
        decoder = json.JSONDecoder(strict=False)
        at = 0
        while at < len(body):
            try:
                value, at = decoder.raw_decode(body, at)
            except (ValueError, RecursionError) as error:
                yield MalformedCall(f"the call is not valid JSON: {error}")
                return
            yield _as_call(value)
            while at < len(body) and body[at] in "; \n\r\t,":
                at += 1


class MistralParser(ToolParser):
    """A parser of the format of Mistral models.

    The calls are `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.
    """

    TAG, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    def parse(self, text: str) -> Parsed:
        content, *bodies = text.split(self.TAG)
        return Parsed(content.strip(), [call for body in bodies for call in self._calls(body.strip())])

    def _calls(self, body: str) -> Iterator[Call]:
        head, named, arguments = body.partition(self.ARGUMENTS)
        if named:
            yield _named_call(head.partition(self.ID)[0], arguments)
            return
        try:
            values = json.loads(body, strict=False)
        except (ValueError, RecursionError) as error:
            yield MalformedCall(f"the call is not valid JSON: {error}")
            return
        yield from map(_as_call, values if isinstance(values, list) else [values])


class DeepSeekParser(ToolParser):
    """A parser of the format of DeepSeek models.

    A call is `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. V3 and R1 write `function` in place of
    the name, then the name and a fenced block of JSON.
    """

    AROUND = re.compile("<｜tool▁calls▁(?:begin|end)｜>")
    BLOCK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁sep｜>(.*?))?(<｜tool▁call▁end｜>|\Z)", re.DOTALL)
    FENCED = re.compile(r"([^\n]+)\n```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)

    def parse(self, text: str) -> Parsed:
        text = self.AROUND.sub("", text)
        return Parsed(self.BLOCK.sub("", text).strip(), [self._call(*found) for found in self.BLOCK.findall(text)])

    def _call(self, head: str, body: str, end: str) -> Call:
        if not end:
            return MalformedCall("<｜tool▁call▁begin｜> without <｜tool▁call▁end｜>")
        fenced = self.FENCED.fullmatch(body.strip()) if head.strip() == "function" else None
        return _named_call(*fenced.groups()) if fenced else _named_call(head, body)


class TaggedParser(ToolParser):
    """A parser of calls between `<tool_call>` and `</tool_call>`, with arguments as plain text between tags."""

    FORM = ""

    def parse(self, text: str) -> Parsed:
        block, calls = HermesParser.BLOCK, []
        for body, end in block.findall(text):
            calls.append(self._call(body.strip()) if end else MalformedCall("<tool_call> without </tool_call>"))
        return Parsed(block.sub("", text).strip(), calls)

    def _call(self, body: str) -> Call:
        # Split at the opening tags instead of searching for pairs, because a model may repeat one tag endlessly.
        found = self._cut(body)
        if found is None:
            return MalformedCall(f"a call must be {self.FORM}")
        name, texts = found
        return _call_with_texts(self.tools, name, texts)

    @abstractmethod
    def _cut(self, body: str) -> tuple[str, dict[str, str]] | None:
        """Return the tool's name and its arguments, or None if the body has another form."""


class Qwen3CoderParser(TaggedParser):
    """A parser of `<function=name><parameter=x>value</parameter></function>` between the tags of a call."""

    FORM = "<function=NAME> with <parameter=NAME>VALUE</parameter> inside"

    def _cut(self, body: str) -> tuple[str, dict[str, str]] | None:
        if not body.startswith("<function=") or not body.endswith("</function>"):
            return None
        head, *parts = body.removeprefix("<function=").removesuffix("</function>").split("<parameter=")
        name, closed, rest = head.partition(">")
        texts = {}
        for part in parts:
            key, _, value = part.rstrip().partition(">")
            if not value.endswith("</parameter>"):
                return None
            texts[key.strip()] = value.removesuffix("</parameter>").removeprefix("\n").removesuffix("\n")
        return (name.strip(), texts) if closed and not rest.strip() else None


class GlmParser(TaggedParser):
    """A parser of `name<arg_key>x</arg_key><arg_value>value</arg_value>` between the tags of a call."""

    FORM = "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"

    def _cut(self, body: str) -> tuple[str, dict[str, str]] | None:
        name, *parts = body.split("<arg_key>")
        texts = {}
        for part in parts:
            key, _, value = part.partition("</arg_key>")
            value = value.strip()
            if not value.startswith("<arg_value>") or not value.endswith("</arg_value>"):
                return None
            texts[key.strip()] = value.removeprefix("<arg_value>").removesuffix("</arg_value>")
        return (name.strip(), texts) if name.strip() and "<" not in name else None


class CodeBlockParser(ToolParser):
    """A parser of fenced code blocks, each a call of the tool named by the block's language, or of the only tool.

    The code becomes the tool's first parameter.
    """

    BLOCK = re.compile(r"```([\w+-]*)[ \t]*\n(.*?)(^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)

    def parse(self, text: str) -> Parsed:
        calls: list[Call] = []
        kept, at = [], 0
        for found in self.BLOCK.finditer(text):
            tool = self._tool_for(found[1])
            if tool is None:
                continue
            kept.append(text[at : found.start()])
            at = found.end()
            if not found[3]:
                calls.append(MalformedCall("the code block has no closing ```"))
                continue
            parameter = next(iter((tool.parameters or {}).get("properties", {})), "code")
            calls.append(ToolCall(tool.name, {parameter: found[2]}))
        return Parsed("".join([*kept, text[at:]]).strip(), calls)

    def _tool_for(self, language: str) -> Tool | None:
        named = next((tool for tool in self.tools if tool.name == language), None)
        return named or (self.tools[0] if len(self.tools) == 1 else None)


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
    "qwen3_coder": Qwen3CoderParser,
    "glm": GlmParser,
    "code": CodeBlockParser,
}


def make_parser(name: str, tools: Sequence[Tool]) -> ToolParser:
    """Make the parser of a format by its name in `PARSERS`."""
    if name not in PARSERS:
        raise ValueError(f"unknown format of tool calls '{name}': use one of {', '.join(PARSERS)}")
    return PARSERS[name](tools)


def _one_call(body: str) -> Call:
    try:
        return _as_call(json.loads(body, strict=False))
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the call is not valid JSON: {error}")


def _named_call(name: str, arguments: str) -> Call:
    try:
        return _as_call({"name": name.strip(), "arguments": json.loads(arguments, strict=False)})
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the arguments are not valid JSON: {error}")


def _call_with_texts(tools: Sequence[Tool], name: str, texts: Mapping[str, str]) -> Call:
    """Make a call from arguments given as text.

    An argument that does not fit the tool's schema as text is read as JSON.
    """
    parameters = next((tool.parameters for tool in tools if tool.name == name), None) or {}
    schemas = parameters.get("properties", {})
    return ToolCall(name, {key: _value(text, schemas.get(key, {})) for key, text in texts.items()})


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if fits(text, schema):
        return text
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text  # the check of arguments against the schema reports the problem


def _as_call(value: Any) -> Call:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return MalformedCall('a call must be a JSON object with a "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # a string of JSON, as in OpenAI's messages
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError) as error:
            return MalformedCall(f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, Mapping):
        return MalformedCall("the arguments must be a JSON object")
    return ToolCall(value["name"], arguments)
