"""Plans carried out by real exchanges between threads: every layout pair, bit for bit, twice with changed weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LATENT, MOE, QWEN2, QWEN3, ThreadGroup, copies, fsdp1, fsdp2, megatron, random_tensors, tp
from test_plan import random_sides

PAIRS = {
    "fsdp4-tp2dp2": lambda: (fsdp2(QWEN2, 4), tp(QWEN2, 2, 2)),
    "fsdp3-packed-tp4": lambda: (fsdp2(QWEN3, 3), tp(QWEN3, 4, form="packed")),
    "hsdp2x2-copies": lambda: (fsdp2(QWEN3, 4, 2), copies(QWEN3, 4)),
    "ddp2-fsdp2-tp2": lambda: (fsdp2(QWEN2, 4, fsdp_size=2), tp(QWEN2, 2)),
    "fsdp1-tp2dp2": lambda: (fsdp1(QWEN2, 4), tp(QWEN2, 2, 2, form="packed")),
    "fsdp1-aligned": lambda: (fsdp1(MOE, 3, alignment=4), tp(MOE, 2)),
    "tp2pp2-tp2": lambda: (megatron(QWEN2, 4, tp=2, pp=2), tp(QWEN2, 2)),
    "tp2pp2-tp4": lambda: (megatron(QWEN3, 4, tp=2, pp=2), tp(QWEN3, 4, form="packed")),
    "pp2vpp2-copies": lambda: (megatron(QWEN3, 2, pp=2, vpp=2), copies(QWEN3, 2)),
    "ep4-tp2": lambda: (megatron(MOE, 4, ep=4), tp(MOE, 2, form="packed")),
    "ep2etp2-grouped-ep2": lambda: (megatron(MOE, 4, "grouped", tp=2, ep=2, etp=2), tp(MOE, 2, ep=2)),
    "latent-pp2ep2-tp2dp2": lambda: (megatron(LATENT, 4, pp=2, ep=2), tp(LATENT, 2, 2, form="packed")),
    "moe-fsdp3-ep2": lambda: (fsdp2(MOE, 3), tp(MOE, 2, ep=2, form="packed")),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("apart", [False, True], ids=["colocated", "apart"])
def test_every_pair_is_exact_twice(name, apart):
    source, destination = PAIRS[name]()
    ranks = range(source.world_size, source.world_size + destination.world_size) if apart else None
    group = ThreadGroup(source, destination, destination_ranks=ranks)
    for version in (1, 2):
        whole = random_tensors(source.tensors, seed=version)
        group.load(whole)
        assert group.wrong(whole)
        for result in group.run(version).values():
            if isinstance(result, Exception):
                raise result
        assert group.wrong(whole) == []


def test_float32_training_weights_arrive_rounded_to_the_rollouts_type():
    source, destination = PAIRS["fsdp4-tp2dp2"]()
    group = ThreadGroup(source, destination, dtype=torch.bfloat16)
    whole = random_tensors(source.tensors)
    group.load(whole)
    assert not [r for r in group.run(1).values() if isinstance(r, Exception)]
    assert group.wrong({name: t.bfloat16() for name, t in whole.items()}) == []
    assert group.wrong({name: (t * 1.01).bfloat16() for name, t in whole.items()})


def test_bytes_moved_are_those_planned():
    source, destination = PAIRS["fsdp4-tp2dp2"]()
    group = ThreadGroup(source, destination)
    group.load(random_tensors(source.tensors))
    results = group.run(1)
    plan = group.plan
    for rank, report in results.items():
        assert report.traffic.received == plan.received()[rank] == plan.missing()[rank]
        assert report.traffic.sent == plan.sent()[rank]
        assert report.traffic.copied == plan.copied()[rank]


def test_one_source_feeds_copies_as_a_chain():
    source, destination = fsdp2(QWEN3, 1), copies(QWEN3, 4)
    group = ThreadGroup(source, destination, destination_ranks=[1, 2, 3, 4])
    assert group.plan.feed == "chain"
    size = destination.elements() * 4
    # Nobody sends more than one copy: the trainer feeds one rollout and each of them the next.
    assert group.plan.sent().tolist() == [size, size, size, size, 0]
    whole = random_tensors(source.tensors)
    group.load(whole)
    assert not [r for r in group.run(1).values() if isinstance(r, Exception)]
    assert group.wrong(whole) == []
    direct = ThreadGroup(source, destination, destination_ranks=[1, 2, 3, 4], feed="direct")
    assert direct.plan.sent().tolist() == [4 * size, 0, 0, 0, 0]


def test_shared_storage_is_not_copied():
    source = copies(QWEN3, 1)
    group = ThreadGroup(source, copies(QWEN3, 1))
    sync = group.syncs[0]
    sync.destination.tensors = sync.source.tensors
    report = sync.run(1)
    assert report.traffic.shared == report.traffic.copied == source.elements() * 4


@settings(max_examples=25, deadline=None)
@given(random_sides(), st.sampled_from(["direct", "chain"]), st.booleans(), st.sampled_from([16, 48]))
def test_no_layout_makes_ranks_wait_in_a_circle(sides, feed, apart, bucket):
    source, destination = sides
    start = source.world_size if apart else 0
    group = ThreadGroup(
        source,
        destination,
        destination_ranks=range(start, start + destination.world_size),
        feed=feed,
        bucket_bytes=bucket,
    )
    whole = random_tensors(source.tensors)
    group.load(whole)
    assert not [result for result in group.run(1).values() if isinstance(result, Exception)]
    assert group.wrong(whole) == []
