"""Large batches go through controller and workers many times and leave nothing behind, on both backends."""

import re
import time
from itertools import pairwise

import psutil
import torch
from controller_workers import Probe

from meshrl.data.batch import DataProto

# Ray copies a batch into and out of its store, which takes several times as long as handing over a shared file.
STEPS = {"local": 200, "ray": 20}


def private_mib(process: psutil.Process) -> float:
    """A process's memory without pages that it shares, such as those of Ray's object store."""
    return process.memory_full_info().uss / 2**20


def object_store_mib() -> int:
    """What the object store of our own Ray holds; others may run on the machine."""
    import ray
    from ray._private.internal_api import memory_summary

    summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    found = re.search(r"Plasma memory usage (\d+) MiB", summary)
    assert found is not None
    return int(found[1])


def growth(looks: list[float]) -> float:
    """By how much memory grows in the second half of ten looks, but for the largest rise from one to the next.

    A look may catch a batch in flight, and an allocator may come to keep one for good: what leaks goes on to grow.
    """
    rises = [later - earlier for earlier, later in pairwise(looks[4:])]
    return min(looks[-3:]) - max(looks[:5]) - max(0.0, *rises)


def test_what_leaks_is_seen_and_what_is_kept_once_is_not():
    assert growth([100.0 + 10 * look for look in range(10)]) == 20
    assert growth([700.0] * 6 + [752.0] * 4) == 0


def test_memory_stays_flat(make_group, backend):
    """Steps of 100 MB there and 12 MB back."""
    rows = 100
    source = DataProto.from_dict({"x": torch.ones(rows, 32_768), "y": torch.ones(rows, 229_376)})
    assert sum(value.nbytes for value in source.batch.values()) >= 100 * 2**20
    me = psutil.Process()
    group = make_group(Probe)
    workers = [psutil.Process(told["pid"]) for told in group.about()]
    sizes, fds, worker_sizes = [], [], []
    for step in range(STEPS[backend]):
        result = group.first_field(source)
        assert result.batch["x"].shape == (rows, 32_768)
        del result
        if (step + 1) % (STEPS[backend] // 10) == 0:
            sizes.append(private_mib(me))
            fds.append(me.num_fds())
            worker_sizes.append(max(private_mib(worker) for worker in workers))
    assert growth(sizes) < 20, sizes
    assert growth(worker_sizes) < 20, worker_sizes
    assert max(fds[1:]) - fds[0] <= 2, fds
    if backend == "ray":
        # The store frees late, but frees: what steps leave behind would stay.
        deadline = time.monotonic() + 60
        while (held := object_store_mib()) > 160 and time.monotonic() < deadline:
            time.sleep(0.5)
        assert held <= 160
