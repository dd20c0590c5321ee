"""Segments of GPU memory by phase: they grow in place while training, have fixed sizes while generating."""

import os
import subprocess
import sys

import pytest
import torch

from meshrl.weights.colocated import HybridEngine, Segments
from meshrl.weights.executor import Traffic
from meshrl.weights.session import SyncReport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
MIB = 1 << 20
SIZE = 64 * MIB


def kind_of(tensor):
    """Whether the segment that a tensor lies in can grow."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return segment["is_expandable"]
    raise AssertionError("no segment holds the tensor")


def taken():
    return torch.empty(SIZE, dtype=torch.uint8, device=GPU)


class Rollout:
    """Takes memory when told and gives it back; the engine of the switch does nothing."""

    version = -1
    shares_allocator = True

    def __init__(self):
        self.held = {"weights": taken(), "kv_cache": taken()}

    def to(self, device, *, model, optimizer):
        raise AssertionError("nothing rests")

    def release(self, tags):
        for tag in tags:
            del self.held[tag]
        torch.cuda.empty_cache()

    def resume(self, tags):
        self.held |= {tag: taken() for tag in tags}


class Syncing:
    fails = False

    def __call__(self, rollout, version):
        self.buffer = taken()
        if self.fails:
            raise RuntimeError("lost")
        return SyncReport(version, 0.5, Traffic(), 1)

    def forget(self):
        self.buffer = None


@pytest.fixture(autouse=True)
def as_before():
    yield
    segments = Segments()
    segments.grow_now = True
    segments.grow(False)


def test_each_phase_has_its_kind_of_segments():
    rollout, sync = Rollout(), Syncing()
    phases = HybridEngine(rollout, rollout, sync, device=GPU, expandable_segments=True)
    for version in range(3):
        trained = taken()
        assert kind_of(trained)
        metrics = phases.to_rollout(version)
        assert metrics["memory/switch_sync/max_reserved_gib"] >= metrics["memory/switch_sync/max_allocated_gib"] > 0
        assert kind_of(trained)  # what is there stays
        for tensor in (sync.buffer, *rollout.held.values(), taken()):
            assert not kind_of(tensor)
        phases.to_train()
        assert kind_of(taken())
    # A sync that fails leaves the trainer's kind.
    sync.fails = True
    with pytest.raises(RuntimeError, match="lost"):
        phases.to_rollout(3)
    assert kind_of(taken())


def test_the_control_has_one_kind():
    rollout = Rollout()
    phases = HybridEngine(rollout, rollout, Syncing(), device=GPU, expandable_segments=False)
    assert not kind_of(taken())
    phases.to_rollout(0)
    phases.to_train()
    assert not kind_of(taken())


def test_cached_memory_of_one_kind_is_given_back_for_the_other():
    segments = Segments()
    segments.grow(True)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    many = [taken() for _ in range(8)]
    del many
    assert torch.cuda.memory_reserved() - before >= 8 * SIZE
    segments.grow(False)
    assert torch.cuda.memory_reserved() - before < SIZE


def test_what_the_environment_sets_besides_stays():
    program = """
import torch
from meshrl.weights.colocated import Segments
torch.zeros(1, device="cuda")
segments = Segments()
for wanted in (True, False, True):
    segments.grow(wanted)
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    print(found["expandable_segments"], found["max_split_size"])
"""
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{wanted} {128 * MIB}" for wanted in (True, False, True)]
