"""Tool calls in three formats, well-formed and not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.agents.messages import MalformedCall, ToolCall
from meshrl.agents.parsers import CodeBlockParser, HermesParser, Llama3JsonParser, make_parser
from meshrl.agents.tools import tool


@tool
def python(code: str, limit: int = 3) -> str:
    """Runs code."""
    return code


@tool
def shell(script: str) -> str:
    """Runs a script."""
    return script


HERMES = [
    ("just words", "just words", []),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "", [("f", {"x": 1})]),
    (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "a\nb"}}\n</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call> so',
        "Let me see.\n\n so",
        [("f", {"x": "a\nb"}), ("g", {})],
    ),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 2}"}</tool_call>', "", [("f", {"x": 2})]),
    ('<tool_call>{"name": "f", "parameters": {"x": 2}}</tool_call>', "", [("f", {"x": 2})]),
    ('a<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', "a", ["not valid JSON"]),
    ("<tool_call>f(1)</tool_call>", "", ["not valid JSON"]),
    ('<tool_call>["f"]</tool_call>', "", ['with a "name"']),
    ('<tool_call>{"name": 3}</tool_call>', "", ['with a "name"']),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "", ["must be a JSON object"]),
    ('<tool_call>{"name": "f", "arguments": "x=1"}</tool_call>', "", ["arguments are not valid JSON"]),
    ('<tool_call>{"name": "f"}', "", ["without </tool_call>"]),
    (
        '<tool_call>oh</tool_call><tool_call>{"name": "f"}</tool_call>',
        "",
        ["not valid JSON", ("f", {})],
    ),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "", ["not valid JSON"]),
]
LLAMA = [
    ("just words", "just words", []),
    ('{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
    (' {"name": "f", "parameters": {"x": 1}}; {"name": "g", "arguments": {}}\n', "", [("f", {"x": 1}), ("g", {})]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ('Well<|python_tag|>{"name": "f"}', "Well", [("f", {})]),
    ('{"answer": 4}', '{"answer": 4}', []),
    ('{"name": "Ann", "age": 4}', '{"name": "Ann", "age": 4}', []),
    ('<|python_tag|>print(3)', "", ["not valid JSON"]),
    ('{"name": "f", "parameters": {"x": 1}', "", ["not valid JSON"]),
    ('{"name": "f", "parameters": {"x": 1}} then words', "", [("f", {"x": 1}), "not valid JSON"]),
    ('{"name": 3, "parameters": {}}', "", ['with a "name"']),
]  # fmt: skip
CODE = [
    ("no code", "no code", []),
    ("So:\n```python\nprint(1)\n```\nthere", "So:\n\nthere", [("python", {"code": "print(1)\n"})]),
    ("```shell\nls\n```", "", [("shell", {"script": "ls\n"})]),
    ("```\nx\n```", "```\nx\n```", []),  # two tools, and nobody says which
    ("```python\nprint('``` in a line')\n```", "", [("python", {"code": "print('``` in a line')\n"})]),
    ("```python\nprint(1)", "", ["no closing"]),
]


def check(parser, text, content, calls):
    parsed = parser.parse(text)
    assert parsed.content == content
    assert len(parsed.calls) == len(calls)
    for found, wanted in zip(parsed.calls, calls, strict=True):
        if isinstance(wanted, str):
            assert isinstance(found, MalformedCall)
            assert wanted in found.problem
        else:
            assert found == ToolCall(*wanted)


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text, content, calls):
    check(HermesParser(), text, content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA)
def test_llama3_json(text, content, calls):
    check(Llama3JsonParser(), text, content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), CODE)
def test_code_blocks(text, content, calls):
    check(CodeBlockParser([python, shell]), text, content, calls)


def test_the_only_tool_gets_blocks_of_any_language():
    check(CodeBlockParser([shell]), "```py\nx\n```", "", [("shell", {"script": "x\n"})])


WORDS = st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=6), st.dictionaries(WORDS, VALUES, max_size=3)), max_size=3))
def test_what_json_writes_comes_back(calls):
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    # A string of JSON may hold the closing mark itself: there the format is ambiguous.
    if any("tool_call>" in text for text in written):
        return
    wanted = [ToolCall(name, arguments) for name, arguments in calls]
    assert HermesParser().parse("".join(f"<tool_call>{text}</tool_call>" for text in written)).calls == wanted
    if calls:
        assert Llama3JsonParser().parse("<|python_tag|>" + "; ".join(written)).calls == wanted


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='<>/tool_cal{}":,` \npython|_g', max_size=60))
def test_nothing_that_a_model_writes_raises(text):
    for name in ("hermes", "qwen", "llama3_json", "code"):
        parsed = make_parser(name, [python]).parse(text)
        assert isinstance(parsed.content, str)
        assert all(isinstance(call, ToolCall | MalformedCall) for call in parsed.calls)


def test_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="hermes"):
        make_parser("xml", [])
