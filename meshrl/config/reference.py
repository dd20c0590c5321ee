"""The generator of docs/config_reference.md (all keys) and docs/families.md (the table of model families).

Run `python -m meshrl.config.reference [FOLDER]`; without a folder the pages in docs are replaced.
"""

import sys
from pathlib import Path

from meshrl.config.families import FAMILIES, Family
from meshrl.config.keys import Leaf, leaves, sections, type_name
from meshrl.config.load import ROOTS
from meshrl.config.show import yaml_value
from meshrl.files import write_whole

DOCS = Path(__file__).parents[2] / "docs"

HEAD = """# Config reference

Written by `python -m meshrl.config.reference`; don't edit it by hand. How recipes, overrides and checks work is in
[config.md](config.md). A key marked *not yet* keeps its default: setting it is refused before anything starts. One
marked *only with* is refused, or noted, where that is not so.
"""


def reference() -> str:
    """Return the page of all config keys as Markdown, one chapter for each command."""
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


FAMILIES_HEAD = """# Model families

Written by `python -m meshrl.config.reference`; don't edit it by hand. `tests/models/test_every_family.py` holds each
row against Transformers: it builds a tiny model of every causal language family of the installed version, and compares
log-probs and entropies with those of Transformers' own forward over each sample alone, to 1e-5 in float32. Samples have
unequal lengths, beyond windows and chunks.

- **generate**: `meshrl generate`, `serve`, the judge and the rollout with the embedded engine.
- **packed**: training on samples that share a row (`model.use_remove_padding=true`, the default) with FSDP.
- **padded**: training on a padded batch (`model.use_remove_padding=false`) with FSDP, and the engine `hf`.
- **Megatron**: training with `strategy=megatron`; what it asks of a model beside its family is in
  [engines/megatron.md](engines/megatron.md).

What is not computed is refused by its name and with the reason, before a worker starts and where a model is opened.
So is a model type without a row: a module that `model.external_lib` names may add one to
`meshrl.config.families.FAMILIES` when its log-probs have been compared. Rows are for the whole family; what depends on
a field of config.json is looked up there: layers of another kind (`layer_types`), attention in both directions, dropout
of attention's weights, and rotary angles that depend on the longest sample. Latent attention (`kv_lora_rank`) with
keys and values of unequal size generates on a CPU only.

| family | generate | packed | padded | Megatron | why not |
|---|---|---|---|---|---|
"""


def families_page() -> str:
    """Return the page of model families as Markdown, sorted by name."""
    return FAMILIES_HEAD + "".join(f"{_family(name, FAMILIES[name])}\n" for name in sorted(FAMILIES))


def _family(name: str, row: Family) -> str:
    marks = ["–" if what in row.reasons else "✔" for what in ("rollout", "packed", "padded")]
    why = "; ".join(dict.fromkeys(row.reasons.values()))
    if row.on_gpu:
        why = f"generates on a CPU only: {row.on_gpu}"
    return f"| {' | '.join([f'`{name}`', *marks, '✔' if row.megatron else '–', why])} |"


# File name -> function that returns the page's text.
PAGES = {"config_reference.md": reference, "families.md": families_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        write_whole((Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS) / name, page())
