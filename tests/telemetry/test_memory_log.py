"""Peaks of memory: of a block, of a function, on the way into the ledger."""

import mmap

import pytest

from meshrl.telemetry.device_stats import (
    GIB,
    MemoryLog,
    PeakMemory,
    ProcessProfiler,
    nsys_command,
    reset_peak_rss,
    resident_bytes,
)
from meshrl.telemetry.time_ledger import Ledger

MIB = 1 << 20
SIZE = 96 * MIB


def touch(size=SIZE):
    """Takes memory and gives it back."""
    with mmap.mmap(-1, size) as memory:
        for place in range(0, size, mmap.PAGESIZE):
            memory[place] = 1


def fails():
    touch()
    raise KeyError


needs_reset = pytest.mark.skipif(not reset_peak_rss(), reason="this system cannot forget a process's peak")


@needs_reset
def test_the_peak_of_a_block_is_its_own():
    touch(2 * SIZE)  # a larger peak before does not count
    with MemoryLog("update_actor") as log:
        touch()
    grown = log.found["memory/update_actor/max_rss_gib"] - log.found["memory/update_actor/before_rss_gib"]
    assert 0.9 * SIZE < grown * GIB < 1.5 * SIZE
    assert log.found["memory/update_actor/after_rss_gib"] < log.found["memory/update_actor/max_rss_gib"]
    with MemoryLog("idle") as log:
        pass
    assert log.found["memory/idle/max_rss_gib"] * GIB < resident_bytes()[0] + 16 * MIB


@needs_reset
def test_peaks_go_into_the_ledger_of_the_call_and_the_largest_stays():
    @MemoryLog("gen")
    def generate(size):
        touch(size)

    ledger = Ledger()
    with ledger.serving("generate_sequences"):
        generate(SIZE)
        generate(MIB)
    peaks = ledger.take().peaks
    assert set(peaks) == {"memory/gen/max_rss_gib"}
    assert peaks["memory/gen/max_rss_gib"] * GIB > resident_bytes()[0] + 0.5 * SIZE
    generate(MIB)  # outside of a call nobody hears of it
    assert ledger.take().peaks == {}


@needs_reset
def test_a_phase_above_the_budget_is_named():
    room = resident_bytes()[0] + 2 * SIZE
    with MemoryLog("gen", budget_bytes=room):
        touch()
    with (
        pytest.raises(MemoryError, match=r"phase 'gen' took .*memory_budget_gigabytes .*lower rollout.gpu_memory_util"),
        MemoryLog("gen", budget_bytes=room),
    ):
        touch(3 * SIZE)
    # What lies above it from before is no fault of a phase that adds nothing; an error inside is the one that is told.
    watch = PeakMemory(budget_bytes=MIB)
    watch.before = 1 << 50
    watch.metrics("ref")
    with pytest.raises(KeyError), MemoryLog("gen", budget_bytes=MIB):
        fails()


def test_without_a_peak_to_forget_the_budget_holds_for_what_is_left(monkeypatch):
    monkeypatch.setattr("meshrl.telemetry.device_stats.reset_peak_rss", lambda: False)
    watch = PeakMemory(budget_bytes=1)
    watch.before = 0
    with pytest.raises(MemoryError, match=r"phase 'update_actor' .*smaller micro-batches"):
        watch.metrics("update_actor")


def test_without_a_peak_to_forget_none_is_told(monkeypatch):
    monkeypatch.setattr("meshrl.telemetry.device_stats.reset_peak_rss", lambda: False)
    assert set(PeakMemory().metrics("ref")) == {"memory/ref/before_rss_gib", "memory/ref/after_rss_gib"}


def test_tools_that_need_a_gpu_say_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for tool in ("torch_memory", "nsys"):
        with pytest.raises(ValueError, match=f"{tool} needs a GPU"):
            ProcessProfiler(tool)
    with pytest.raises(ValueError, match="no profiler 'perf'"):
        ProcessProfiler("perf")


def test_the_nsys_command_records_what_is_marked():
    command = nsys_command("out", "meshrl train grpo trainer.seed=2")
    assert command.endswith(" meshrl train grpo trainer.seed=2")
    assert "--capture-range=cudaProfilerApi" in command
    assert "nvtx" in command
