"""How a config key is declared: its default, its one-line documentation, and what it may be set to."""

from dataclasses import Field, dataclass, field
from typing import Any

from meshrl.config.conditions import Condition
from meshrl.registry import Registry

METADATA_NAME = "meshrl_key"
# Upper ends of ranges: beyond, a number is a slip of the keyboard.
MOST_RANKS = 100_000
MOST_AT_ONCE = 1_000_000  # sequences, calls
MOST_ROWS = 10**9
MOST_TOKENS = 10**8
MOST_STEPS = 10**9
MOST_MEGABYTES = 2**24
LONGEST_WAIT = 31_536_000  # seconds: a year
LARGEST_SEED = 2**63 - 1


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
    only_if: Condition | None = None  # when the key is read; set otherwise, it is refused
    no_request: tuple[Any, ...] = ()  # values that ask for nothing, and so do no harm where the key is not read
    noted: bool = False  # set where it is not read, it is worth a note and no error: scripts often carry it
    takes_blank: bool = False  # whether a text of white space alone means something


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
    only_if: Condition | None = None,
    no_request: tuple[Any, ...] = (),
    noted: bool = False,
    takes_blank: bool = False,
) -> Any:
    """A dataclass field for one key. Lists and dicts given as default are copied for each config."""
    info = KeyInfo(doc, pending, choices, low, high, follows, registry, only_if, no_request, noted, takes_blank)
    metadata = {METADATA_NAME: info}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, doc: str, *, pending: str | None = None, **defaults: Any) -> Any:
    """A dataclass field for a nested group of keys; `pending` holds for every key in it."""
    return field(default_factory=lambda: cls(**defaults), metadata={METADATA_NAME: KeyInfo(doc, pending)})


def key_info(dataclass_field: Field) -> KeyInfo:
    """The `KeyInfo` a field was declared with."""
    return dataclass_field.metadata[METADATA_NAME]
