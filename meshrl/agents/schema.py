"""Checks of a tool call's arguments against the JSON schema of its parameters."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any


def argument_problem(arguments: Any, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments, in words for the model, or None."""
    if not isinstance(arguments, Mapping):
        return f"the arguments must be a JSON object, not {_json_name(arguments)}"
    properties: Mapping[str, Any] = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in arguments]
    if missing:
        return f"missing argument '{missing[0]}'"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument '{name}': it takes {', '.join(properties) or 'none'}"
        if not fits(value, properties[name]) and not (value is None and name not in schema.get("required", ())):
            wanted = properties[name].get("type") or properties[name].get("enum") or "another type"
            wanted = " or ".join(map(str, wanted)) if isinstance(wanted, list) else wanted
            return f"argument '{name}' must be {wanted}, not {_json_name(value)}"
    return None


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value read from JSON has the type that a schema asks for."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return any(fits(value, {**schema, "type": option}) for option in kind)
    if kind == "array":
        return isinstance(value, list) and all(fits(item, schema.get("items", {})) for item in value)
    if kind in ("integer", "number"):
        numbers = int if kind == "integer" else int | float
        return isinstance(value, numbers) and not isinstance(value, bool)
    wanted: dict[str, Any] = {"string": str, "boolean": bool, "object": Mapping, "null": types.NoneType}
    return isinstance(value, wanted.get(str(kind), object))  # we know no more of others


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)
