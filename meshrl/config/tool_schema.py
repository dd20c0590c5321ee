"""The JSON schema of a Python function's parameters, from its signature and docstring."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

JSON_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_HEADINGS = re.compile(r"^(args|arguments|parameters|returns|raises|yields|examples?|notes?):\s*$", re.IGNORECASE)
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_PARAM = re.compile(r"^:param\s+(?:[\w\[\], |.]+\s)?(\w+):\s*(.*)$")


def function_schema(function: Callable[..., Any], skip: Sequence[str] = ()) -> dict[str, Any]:
    """The schema of a function's parameters, without those in `skip`; every parameter needs a type hint."""
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ValueError(f"the type hints of tool '{function.__qualname__}' cannot be read: {error}") from error
    _, described = read_docstring(function)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in skip:
            continue
        where = f"parameter '{name}' of tool '{function.__qualname__}'"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{where} cannot be given by name: tools take plain named parameters")
        if name not in hints:
            raise ValueError(f"{where} has no type hint: the model must be told what to give")
        properties[name] = type_schema(hints[name], where)
        if name in described:
            properties[name]["description"] = described[name]
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            properties[name]["default"] = parameter.default
        _check_json(properties[name], where)
    return {"type": "object", "properties": properties, "required": required}


def _check_json(schema: dict[str, Any], where: str) -> None:
    """Chat templates write a schema as JSON, its default and its literals too."""
    try:
        json.dumps(schema)
    except TypeError as error:
        raise ValueError(f"{where} has a default or literal that JSON cannot hold: {error}") from error


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """The schema of one type: plain types, lists, dicts, literals and unions of them."""
    if hint in JSON_NAMES:
        return {"type": JSON_NAMES[hint]}
    if hint is Any:
        return {}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is list or origin in (list, Sequence):
        return {"type": "array"} | ({"items": type_schema(arguments[0], where)} if arguments else {})
    if hint is dict or origin in (dict, Mapping):
        return {"type": "object"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (types.UnionType, typing.Union):
        options = [type_schema(option, where) for option in arguments if option is not types.NoneType]
        return options[0] if len(options) == 1 else {"anyOf": options}
    raise ValueError(f"{where} has the type {hint}, which JSON cannot hold: use str, int, float, bool, list or dict")


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each argument (`Args:` sections and `:param x:` lines)."""
    lines = (inspect.getdoc(function) or "").splitlines()
    text: list[str] = []
    described: dict[str, str] = {}
    section, last = "", ""
    for line in lines:
        heading, param = _HEADINGS.match(line.strip()), _PARAM.match(line.strip())
        if heading:
            section, last = heading[1].lower(), ""
        elif param:
            section, last = "param", param[1]
            described[last] = param[2]
        elif section in ("args", "arguments", "parameters"):
            last = _read_argument(line, last, described)
        elif section == "param" and line.startswith(" ") and last:
            described[last] += " " + line.strip()
        elif not section:
            text.append(line)
    return " ".join(" ".join(text).split()), {name: value.strip() for name, value in described.items()}


def _read_argument(line: str, last: str, described: dict[str, str]) -> str:
    """Takes one line of an `Args:` section; returns the argument that it speaks of."""
    depth = len(line) - len(line.lstrip())
    found = _ARGUMENT.match(line.strip())
    if found and (not last or depth <= 4):
        described[found[1]] = found[2]
        return found[1]
    if last and line.strip():
        described[last] += " " + line.strip()
    return last
