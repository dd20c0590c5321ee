"""Every carrier between real processes: exact, within two buckets of memory, and quick to see a death."""

import ctypes
import multiprocessing
import os
import re
import shutil
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from layouts import QWEN2, PlainRollout, copies, fsdp2, random_tensors, tp

from meshrl.rollout.weight_files import MEMORY, SharedFile, memory_folder
from meshrl.weights.executor import Exchange
from meshrl.weights.placement import Shards, local_tensors
from meshrl.weights.planner import plan_reshard
from meshrl.weights.session import WORD_BYTES, WeightSync
from meshrl.weights.transports import (
    Deadline,
    FolderCarrier,
    ProcessGroupCarrier,
    SharedMemoryCarrier,
    SyncTimeoutError,
    open_together,
)

BUCKET = 4096


def carrier_of(kind, folder, rank, world, slot):
    if kind == "process_group":
        store = dist.FileStore(str(Path(folder, "store")), world)
        if dist.is_initialized():  # a group of the process we were forked from, by a test before
            dist.distributed_c10d._update_default_pg(None)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return ProcessGroupCarrier(slot)
    made = SharedMemoryCarrier if kind == "shared_memory" else FolderCarrier
    return made(folder, rank, slot)


def sync_of(kind, folder, rank, plan, **options):
    source, destination = plan.source, plan.destination
    blank = {name: torch.zeros(shape) for name, shape in destination.tensors.items()}
    ours, theirs = (ranks.tolist() for ranks in (plan.source_ranks, plan.destination_ranks))
    slot = max(plan.slot_bytes, WORD_BYTES)
    return WeightSync(
        plan,
        rank,
        source=Shards(source, ours.index(rank), local_tensors(source, ours.index(rank), blank))
        if rank in ours
        else None,
        destination=Shards(destination, theirs.index(rank), local_tensors(destination, theirs.index(rank), blank))
        if rank in theirs
        else None,
        dtypes=dict.fromkeys(plan.names, torch.float32),
        carrier=carrier_of(kind, folder, rank, len(plan.ranks), slot),
        **{"deadline": 30.0} | options,
    )


def load(sync, version):
    whole = random_tensors(sync.plan.source.tensors, seed=version)
    if sync.source is not None:
        sync.source.tensors = local_tensors(sync.source.placement, sync.source.rank, whole)
    return whole


def two_versions(kind, folder, rank, plan):
    sync = sync_of(kind, folder, rank, plan)
    wrong = 0
    for version in (1, 2):
        whole = load(sync, version)
        sync.run(version)
        if sync.destination is not None:
            expected = local_tensors(sync.destination.placement, sync.destination.rank, whole)
            wrong += sum(not torch.equal(sync.destination.tensors[name], value) for name, value in expected.items())
    return wrong


def dies_midway(kind, folder, rank, plan):
    """Rank 1 is gone after its second message of the second sync; the others say what they saw and how soon."""
    sync, rollout = sync_of(kind, folder, rank, plan, deadline=30.0), PlainRollout()
    load(sync, 1)
    sync.run(1, rollout)
    pack, packed = Exchange._pack, []

    def pack_and_die(self, buffer, pieces):
        packed.append(1)
        if rank == 1 and len(packed) == 2:
            os._exit(7)
        pack(self, buffer, pieces)

    Exchange._pack = pack_and_die
    started = time.monotonic()
    try:
        sync.run(2, rollout)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started, rollout.version, rollout.released
    return "no error"


def _child(function, connection, *args):
    torch.set_num_threads(1)
    try:
        connection.send(function(*args))
    except BaseException as error:
        connection.send(error)


def run_ranks(function, kind, folder, plan, start="fork"):
    """One process a rank, by default a forked one; what each answered, None where it died."""
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["torch.distributed", "torch.profiler", "meshrl.weights.session"])
    started = []
    for rank in plan.ranks:
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(function, theirs, kind, folder, rank, plan))
        process.start()
        theirs.close()
        started.append((process, ours))
    answers = []
    for process, connection in started:
        try:
            answers.append(connection.recv() if connection.poll(90) else "late")
        except EOFError:
            answers.append(None)
        process.join(5)
        process.kill()
    return answers


@pytest.mark.parametrize("kind", ["shared_memory", "process_group", "folder"])
@pytest.mark.parametrize("pair", ["spread", "chain"])
def test_exact_twice(tmp_path, kind, pair):
    if pair == "spread":
        plan = plan_reshard(fsdp2(QWEN2, 3), tp(QWEN2, 2), itemsize=4, bucket_bytes=BUCKET)
    else:
        plan = plan_reshard(
            fsdp2(QWEN2, 1), copies(QWEN2, 3), itemsize=4, bucket_bytes=BUCKET, destination_ranks=[1, 2, 3]
        )
        assert plan.feed == "chain"
    assert run_ranks(two_versions, kind, tmp_path, plan) == [0] * len(plan.ranks)


@pytest.mark.parametrize("kind", ["shared_memory", "process_group"])
def test_a_death_is_seen_at_once_and_the_rollouts_refuse(tmp_path, kind):
    plan = plan_reshard(fsdp2(QWEN2, 3), copies(QWEN2, 3), itemsize=4, bucket_bytes=BUCKET)
    answers = run_ranks(dies_midway, kind, tmp_path, plan)
    assert answers[1] is None
    for rank in (0, 2):
        name, text, seconds, version, released = answers[rank]
        assert name == "SyncError", answers
        assert re.search(r"rank \d (died|gave up)|lost rank \d", text), text
        assert seconds < 20  # of a deadline of 30
        assert (version, released) == (-1, ("weights",))
    # Whoever sees it first says who died; another may only see that one give up.
    assert any(re.search(r"rank 1 died|lost rank 1", answers[rank][1]) for rank in (0, 2)), answers


def peak_growth(kind, folder, rank, plans):
    """The most a sync takes: bytes of tensors, growth of the process, and what the carrier says it holds."""
    keep_no_free_memory()
    warm, plan = plans.warm, plans.measured
    # Without memory: allocators keep what is freed, and the sync would then take that.
    whole = {name: torch.ones(1).expand(shape) for name, shape in plan.source.tensors.items()}
    ours = Shards(plan.source, rank, local_tensors(plan.source, rank, whole))
    theirs = Shards(plan.destination, rank, local_tensors(plan.destination, rank, whole))
    del whole
    options = {"source": ours, "destination": theirs, "dtypes": dict.fromkeys(plan.names, torch.float32)}
    # The same with small buckets first: what libraries take for themselves is not the sync's.
    WeightSync(warm, rank, carrier=carrier_of(kind, folder, rank, 2, warm.slot_bytes), **options).run(1)
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")
    sync = WeightSync(plan, rank, carrier=ProcessGroupCarrier(plan.slot_bytes), **options)
    sync.run(2)
    growth, held = resident("VmHWM") - before, sync.carrier.memory_bytes()
    del sync
    tensors = most_allocated(
        lambda: WeightSync(plan, rank, carrier=ProcessGroupCarrier(plan.slot_bytes), **options).run(3)
    )
    return tensors, growth, held


def most_allocated(work):
    """The most bytes that tensors made during `work` held at one time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    steps = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(steps, initial=0))


def keep_no_free_memory():
    """Large tensors get pages of their own and give them back: else they take what others, such as imports, freed."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of glibc
        large_from = -3  # M_MMAP_THRESHOLD
        libc.mallopt(large_from, 1 << 20)


def resident(line="VmRSS"):
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{line}:")[1].split()[0]) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's counters of memory")
def test_two_buckets_are_all_the_memory(tmp_path):
    from meshrl.parallel.mesh import shard_layout
    from meshrl.weights.placement import fsdp2 as placed
    from meshrl.weights.placement import replicas

    # Large beside what huge pages, libraries and the rows being summed may take.
    shapes = {f"layer{i}.weight": (1024, 2048) for i in range(24)}  # 192 MiB
    bucket = 24 << 20
    sides = placed(shapes, shard_layout(2)), replicas(shapes, 2)
    plan = plan_reshard(*sides, itemsize=4, bucket_bytes=bucket)
    warm = plan_reshard(*sides, itemsize=4, bucket_bytes=1 << 20)
    gathered = 96 << 20  # what a way that gathers first would hold
    assert plan.received().min() == gathered
    plans = SimpleNamespace(warm=warm, measured=plan, ranks=plan.ranks)
    # Of a server that has only imported: forked from here they would take what the tests before have freed.
    answers = run_ranks(peak_growth, "process_group", tmp_path, plans, start="forkserver")
    assert [held for _, _, held in answers] == [2 * bucket] * 2
    assert all(2 * bucket <= tensors < 2 * bucket + bucket // 8 for tensors, _, _ in answers), answers
    assert all(bucket < growth < gathered for _, growth, _ in answers), answers  # the whole process


@pytest.fixture
def folder():
    """In shared memory, of which nothing stays."""
    made = Path(memory_folder())
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.skipif(not MEMORY.exists() or not hasattr(os, "posix_fallocate"), reason="needs Linux's shared memory")
@pytest.mark.parametrize("kind", ["carrier", "file"])
def test_memory_that_is_not_there_is_an_error(folder, kind):
    """Not the end of the process when it writes."""
    size = shutil.disk_usage(folder).total + (1 << 20)
    large = torch.ones(1, dtype=torch.uint8).expand(size)
    wants = {
        "carrier": lambda: SharedMemoryCarrier(folder, 0, size).outgoing(size),
        "file": lambda: SharedFile(folder / "weights").write([("large", large)]),
    }
    with pytest.raises(OSError, match=rf"No space left for {size} .* \d+ bytes are free.*update_weights_bucket_megab"):
        wants[kind]()


def test_memory_is_taken_by_what_is_sent(folder):
    carrier = SharedMemoryCarrier(folder, 0, 1 << 20)

    def taken():
        return os.stat(folder / "rank0").st_blocks * 512

    assert taken() < 1 << 16
    carrier.outgoing(1 << 19).fill_(1)
    assert 1 << 19 <= taken() < 1 << 20
    carrier.send(1 << 19, 1, 1)
    carrier.outgoing(1 << 20).fill_(1)
    assert 3 << 19 <= taken() < 2 << 20
    carrier.close()


def test_both_slots_hold_elements_of_any_type(folder):
    sender, reader = (SharedMemoryCarrier(folder, rank, 2050) for rank in (0, 1))
    written, read = [slot for slot, _ in sender._slots], reader.peer(0)[1]
    assert [len(slot) for slot in read] == [sender.slot_bytes] * 2
    for number, slot in enumerate(written):
        slot[:2048].view(torch.float64).fill_(number + 0.5)
    assert [slot[:2048].view(torch.float64).unique().tolist() for slot in read] == [[0.5], [1.5]]


def test_nothing_is_left_of_memory_that_not_all_opened(folder):
    carrier = SharedMemoryCarrier(folder, 0, 1 << 10)
    carrier.deadline = Deadline(0.05)
    SharedMemoryCarrier(folder, 1, 1 << 10)  # of one that died
    with pytest.raises(SyncTimeoutError, match="rank 2 to open its shared memory"):
        open_together(carrier, 3, lambda: None)
    assert not folder.exists()


def test_the_count_of_tensors_sees_a_copy():
    def careless():
        parts = [torch.ones(1 << 20) for _ in range(3)]
        return torch.cat(parts)

    assert 24 << 20 <= most_allocated(careless) < 25 << 20
