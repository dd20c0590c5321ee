"""Importing large packages quickly: what they make stays, so nobody looks for garbage among it.

With torch and transformers that looking takes a sixth of the time: once while they are imported, and again in every
later search of the whole memory.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Around imports, near a process's start: if any is new, what there is at the end is never looked at again."""
    was_enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if was_enabled:
            gc.enable()
