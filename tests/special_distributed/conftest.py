"""The session's warm process groups: `ranks(n).run(function, *arguments)`; see process_group.py."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import megatron_cpu
import pytest
from process_group import ON_GPU, ProcessGroups
from sync_trials import SYNC_FAMILIES

STARTED: list[ProcessGroups] = []


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Groups rest between files: even idle ones take time from others, by the threads of gloo that wake up for ever."""
    if nextitem is None or nextitem.path != item.path:
        for groups in STARTED:
            groups.close()


def started(groups: ProcessGroups) -> ProcessGroups:
    STARTED.append(groups)
    return groups


@pytest.fixture(scope="session")
def ranks() -> ProcessGroups:
    """Groups of processes by size, started at first use and shared by all tests of a file."""
    return started(ProcessGroups())


@pytest.fixture(scope="session")
def megatron_ranks() -> ProcessGroups:
    """The same for Megatron-Core, which these processes run on the CPU unless on GPUs; see megatron_cpu.py."""
    if find_spec("megatron") is None:  # importing it here would take seconds, and only the ranks need it
        pytest.skip("Megatron-Core is not installed")
    return started(ProcessGroups(None if ON_GPU else megatron_cpu.install))


@pytest.fixture(scope="session")
def pool_ranks() -> ProcessGroups:
    """A second pool beside `ranks`, with process groups of its own."""
    return started(ProcessGroups())


@pytest.fixture(scope="session")
def sync_folders(make_lm: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models for the tests of weight sync, by family."""
    found = {}
    for family in SYNC_FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        # With experts one layer more: its largest tensor must be a small part of it.
        layers = 3 if family == "qwen3_moe" else 2
        make_lm(family, "eager", num_hidden_layers=layers).save_pretrained(found[family])
    return found
