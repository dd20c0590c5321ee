"""Fast imports of large packages: their objects stay for good, so the garbage collector need not search them.

With torch and transformers this search takes a sixth of the import time. It is done once during the import, and again
in every later full collection.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during the imports in this context, near the start of a process.

    If a module is new, all objects that exist at the end are excluded from later collections.
    """
    was_enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if was_enabled:
            gc.enable()
