"""The session's warm process groups: `ranks(n).run(function, *arguments)`; see process_group.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron_cpu
import pytest
from process_group import ProcessGroups
from sync_trials import SYNC_FAMILIES


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


@pytest.fixture(scope="session")
def pool_ranks() -> Iterator[ProcessGroups]:
    """A second pool beside `ranks`, with process groups of its own."""
    groups = ProcessGroups()
    yield groups
    groups.close()


@pytest.fixture(scope="session")
def sync_folders(make_lm: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models for the tests of weight sync, by family."""
    found = {}
    for family in SYNC_FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        make_lm(family, "eager", num_hidden_layers=4).save_pretrained(found[family])
    return found
