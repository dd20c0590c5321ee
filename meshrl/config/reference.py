"""`python -m meshrl.config.reference [FILE]`: writes the table of all keys to docs/config_reference.md."""

import sys
from pathlib import Path

from meshrl.config.load import ROOTS
from meshrl.config.show import yaml_value
from meshrl.config.tree import Leaf, leaves, sections, type_name

DOCS_FILE = Path(__file__).parents[2] / "docs" / "config_reference.md"

HEAD = """# Config reference

Written by `python -m meshrl.config.reference`; don't edit it by hand. How recipes, overrides and checks work is in
[config.md](config.md). A key marked *not yet* keeps its default: setting it is refused before anything starts. One
marked *only with* is refused, or noted, where that is not so.
"""


def reference() -> str:
    """The whole reference as Markdown."""
    chapters = [line for command, root in ROOTS.items() for line in (*_chapter(f"`meshrl {command}`", root), "")]
    return "\n".join([HEAD, *chapters])


def _chapter(title: str, root: type) -> list[str]:
    lines = [f"## {title}"]
    current = None
    for leaf in leaves(root).values():
        group, _, last = leaf.name.rpartition(".")
        if group != current:
            current = group
            heading = f"### `{group}`"
            lines += [
                "",
                heading,
                "",
                sections(root)[group],
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
        lines.append(f"| `{last}` | {type_name(leaf.type)} | {_default(leaf)} | {_meaning(leaf)} |")
    return lines


def _default(leaf: Leaf) -> str:
    if leaf.info.follows:
        return f"follows `{leaf.info.follows}`"
    return f"`{yaml_value(leaf.default)}`"


def _meaning(leaf: Leaf) -> str:
    text = leaf.info.doc
    if leaf.info.choices:
        text += " Choices: " + ", ".join(f"`{choice}`" for choice in leaf.info.choices)
        text += ", or your own." if leaf.info.registry else "."
    if leaf.info.only_if:
        text += f" *Only with* {leaf.info.only_if.shown}."
    if leaf.pending:
        text += f" *Not yet:* {leaf.pending}."
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else DOCS_FILE).write_text(reference(), encoding="utf-8")
