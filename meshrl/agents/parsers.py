"""Reading tool calls out of what the model wrote. What cannot be read is told to the model, never raised."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.agents.messages import MalformedCall, ToolCall
from meshrl.agents.tools import Tool

Call = ToolCall | MalformedCall


@dataclass(frozen=True)
class Parsed:
    """The model's words without its calls, and the calls in the order written."""

    content: str
    calls: list[Call] = field(default_factory=list)


class ToolParser(ABC):
    """One format of tool calls."""

    def __init__(self, tools: Sequence[Tool] = ()):
        self.tools = list(tools)

    @abstractmethod
    def parse(self, text: str) -> Parsed:
        """Takes a whole turn of the model, special tokens included, without the one that ended it."""


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""

    BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> Parsed:
        calls: list[Call] = []
        for body, end in self.BLOCK.findall(text):
            calls.append(_one_call(body) if end else MalformedCall("<tool_call> without </tool_call>"))
        return Parsed(self.BLOCK.sub("", text).strip(), calls)


class Llama3JsonParser(ToolParser):
    """A turn that is nothing but `{"name": ..., "parameters": {...}}`, several of them with `;` between.

    After `<|python_tag|>` everything must be calls; without it, other JSON is an answer like any other.
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


class CodeBlockParser(ToolParser):
    """A fenced code block is a call of the tool that runs code: the one its language names, or the only one.

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
    "code": CodeBlockParser,
}


def make_parser(name: str, tools: Sequence[Tool]) -> ToolParser:
    """The parser of a format by its name."""
    if name not in PARSERS:
        raise ValueError(f"unknown format of tool calls '{name}': use one of {', '.join(PARSERS)}")
    return PARSERS[name](tools)


def _one_call(body: str) -> Call:
    try:
        return _as_call(json.loads(body, strict=False))
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the call is not valid JSON: {error}")


def _as_call(value: Any) -> Call:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return MalformedCall('a call must be a JSON object with a "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # written as a string of JSON, as in OpenAI's messages
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError) as error:
            return MalformedCall(f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, Mapping):
        return MalformedCall("the arguments must be a JSON object")
    return ToolCall(value["name"], arguments)
