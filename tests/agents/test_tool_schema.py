"""Schemas inferred from Python functions, and arguments checked against them."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from meshrl.agents.messages import ToolResult
from meshrl.agents.tools import Tool, argument_problem, as_result, fits, tool
from meshrl.config.user_code import function_schema, read_docstring


@tool
def search(query: str, limit: int = 3, unit: Literal["c", "f"] = "c", tags: list[str] | None = None) -> str:
    """Finds pages
    of all kinds.

    Args:
        query (str): what to look for,
            in words: any
        limit: how many

    Returns:
        limit: not an argument
    """
    return query * limit


def test_a_function_says_all_that_the_model_needs():
    assert search.schema() == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds pages of all kinds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in words: any"},
                    "limit": {"type": "integer", "description": "how many", "default": 3},
                    "unit": {"enum": ["c", "f"], "default": "c"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["query"],
            },
        },
    }
    assert search("ab", 2) == "abab"


def test_types():
    def f(a: float, b: bool, c: dict[str, int], d: list, e: int | str, g: Any) -> None: ...

    assert function_schema(f)["properties"] == {
        "a": {"type": "number"},
        "b": {"type": "boolean"},
        "c": {"type": "object"},
        "d": {"type": "array"},
        "e": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "g": {},
    }


def test_param_lines():
    def f(a: int, b: int) -> None:
        """Adds.

        :param a: the first
            of two
        :param int b: the second
        :returns: a sum
        """

    assert read_docstring(f) == ("Adds.", {"a": "the first of two", "b": "the second"})


def no_hint(a):
    """Something."""


def stars(*a: int) -> None: ...


def odd(a: complex) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"), [(no_hint, "no type hint"), (stars, "by name"), (odd, "JSON cannot hold")]
)
def test_what_cannot_be_described_is_refused(function, words):
    with pytest.raises(ValueError, match=words):
        function_schema(function)


class Notes(Tool):
    """Keeps lines."""

    def execute(self, state: Any, line: str) -> str:
        """Adds one.

        Args:
            line: what to keep
        """
        return line


def test_a_class_is_described_by_its_execute():
    described = Notes().schema()["function"]
    assert (described["name"], described["description"]) == ("notes", "Keeps lines.")
    assert described["parameters"]["properties"] == {"line": {"type": "string", "description": "what to keep"}}


def test_models_are_not_shown_the_docstring_of_the_base_class():
    class Bare(Tool):
        def execute(self, state: Any, line: str) -> str:
            return line

    assert Bare().schema()["function"]["description"] == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "limit": 2, "tags": None}, None),
        ({}, "missing argument 'query'"),
        ({"query": "x", "lim": 2}, "unknown argument 'lim'"),
        ({"query": 3}, "'query' must be string, not integer"),
        ({"query": None}, "not null"),
        ({"query": "x", "limit": 2.5}, "must be integer, not number"),
        ({"query": "x", "limit": True}, "must be integer, not boolean"),
        ({"query": "x", "unit": "k"}, "'unit' must be"),
        ({"query": "x", "tags": ["a", 1]}, "'tags' must be array"),
        (["x"], "must be a JSON object"),
    ],
)
def test_arguments_are_checked(arguments, problem):
    found = argument_problem(arguments, search.parameters)
    assert found is None if problem is None else problem in found


def test_numbers_take_integers_and_no_booleans():
    assert fits(3, {"type": "number"})
    assert not fits(True, {"type": "number"})
    assert fits("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]})


@pytest.mark.parametrize(
    ("kind", "value", "fine"),
    [
        (["string", "null"], "b", True),
        (["string", "null"], None, True),
        (["string", "null"], 3, False),
        (["array", "null"], [1], False),
        ("null", None, True),
        ("null", "b", False),
        ("of another draft", "b", True),
    ],
)
def test_types_of_a_schema_that_is_not_ours(kind, value, fine):
    schema = {"properties": {"site": {"type": kind, "items": {"type": "string"}}}, "required": ["site"]}
    problem = argument_problem({"site": value}, schema)
    assert (problem is None) == fine
    if isinstance(kind, list) and not fine:
        assert f"must be {kind[0]} or null" in problem


def test_results_become_text():
    assert as_result(ToolResult(42, 1)) == ToolResult("42", 1.0)
    assert as_result("a").text == "a"
    assert as_result(None).text == ""
    assert as_result({"a": [1, "ä"]}).text == '{"a": [1, "ä"]}'
    assert as_result(ToolResult("b", 0.5)).reward == 0.5
