"""How a config key is declared: its default, its one-line documentation, and what it may be set to."""

from dataclasses import Field, dataclass, field
from typing import Any

from meshrl.registry import Registry

METADATA_NAME = "meshrl_key"


@dataclass(frozen=True)
class KeyInfo:
    """What is known of a key besides its type and default."""

    doc: str
    pending: str | None = None  # why the key may keep its default only
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    follows: str | None = None  # the dotted key whose value this one takes while it is null
    registry: Registry | None = None  # beside the choices: the names that users register in it, and file.py:name


def key(
    default: Any,
    doc: str,
    *,
    pending: str | None = None,
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    follows: str | None = None,
    registry: Registry | None = None,
) -> Any:
    """A dataclass field for one key. Lists and dicts given as default are copied for each config."""
    metadata = {METADATA_NAME: KeyInfo(doc, pending, choices, low, high, follows, registry)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, doc: str, *, pending: str | None = None, **defaults: Any) -> Any:
    """A dataclass field for a nested group of keys; `pending` holds for every key in it."""
    return field(default_factory=lambda: cls(**defaults), metadata={METADATA_NAME: KeyInfo(doc, pending)})


def key_info(dataclass_field: Field) -> KeyInfo:
    """The `KeyInfo` a field was declared with."""
    return dataclass_field.metadata[METADATA_NAME]
