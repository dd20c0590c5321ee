"""The session's warm process groups: `ranks(n).run(function, *arguments)`; see process_group.py."""

from __future__ import annotations

from collections.abc import Iterator

import megatron_cpu
import pytest
from process_group import ProcessGroups


@pytest.fixture(scope="session")
def ranks() -> Iterator[ProcessGroups]:
    """Groups of gloo processes by size, started at first use and shared by all tests of the session."""
    groups = ProcessGroups()
    yield groups
    groups.close()


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[ProcessGroups]:
    """The same for Megatron-Core, which these processes run on the CPU; see megatron_cpu.py."""
    pytest.importorskip("megatron.core")
    groups = ProcessGroups(megatron_cpu.install)
    yield groups
    groups.close()
