"""libyaml writes and reads what PyYAML's own Python does, and the latter takes what the former cannot."""

import pytest
import yaml

from meshrl.config import quick_yaml
from meshrl.config.recipe import find_recipe

VALUES = [
    "1e-3", "a: b", "é 日本", "x" * 300, "line\nbreak", "'q\"", "", "null", "~", "- a", None, 1.5, 1e-8, [1, "a b"],
    {"k": [1, {"z": None}]}, "  lead", "{a}", "yes", "1_000", "\t tab", "a #b", "\ud800x", "\x00",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=ascii)
def test_both_ways_give_the_same_text_and_value(value):
    text = quick_yaml.as_text({"key": value}, sort_keys=False, width=120)
    assert text == yaml.safe_dump({"key": value}, sort_keys=False, width=120, allow_unicode=True)
    assert quick_yaml.parsed(text) == yaml.safe_load(text)


def test_recipes_are_read_alike():
    text = find_recipe("demo_grpo").read_text()
    assert quick_yaml.parsed(text) == yaml.safe_load(text)


@pytest.mark.parametrize("read", [quick_yaml.parsed, quick_yaml.composed])
def test_an_error_shows_the_place(read):
    with pytest.raises(yaml.YAMLError, match="other: }"):
        read("key: [1,\nother: }")


def test_nodes_know_their_lines():
    nodes = quick_yaml.composed("a: 1\nb:\n  c: 2\n").value
    assert [key.start_mark.line for key, _ in nodes] == [0, 1]
