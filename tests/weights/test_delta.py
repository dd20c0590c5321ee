"""Delta mode: bit for bit the same as sending everything, with fewer bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import MOE, QWEN2, ThreadGroup, copies, fsdp2, megatron, random_tensors, tp

from meshrl.weights.executor import DeltaExchange, pack_bits, unpack_bits
from meshrl.weights.transports import SyncRefusedError


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_bits_go_there_and_back(bits):
    mask = torch.tensor(bits)
    packed = pack_bits(mask)
    assert len(packed) == -(-len(bits) // 8)
    assert unpack_bits(packed, len(bits)).tolist() == bits


def a_few_changed(whole, version, share=0.02):
    """The same tensors with some elements moved to a neighbouring number."""
    generator = torch.Generator().manual_seed(version)
    changed = {}
    for name, tensor in whole.items():
        bits = tensor.clone().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        bits += (torch.rand(bits.shape, generator=generator) < share).to(bits.dtype)
        changed[name] = bits.view(tensor.dtype)
    return changed


def received(results):
    assert not [r for r in results.values() if isinstance(r, Exception)], results
    return sum(r.traffic.received for r in results.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sides",
    [
        lambda: (fsdp2(QWEN2, 4), tp(QWEN2, 2, 2), {}),
        lambda: (megatron(MOE, 4, "grouped", ep=4), tp(MOE, 2, form="packed"), {}),
        lambda: (copies(QWEN2, 1), copies(QWEN2, 3), {"destination_ranks": [1, 2, 3]}),
    ],
    ids=["fsdp", "transposed", "chain"],
)
def test_exact_and_smaller(sides, dtype):
    source, destination, options = sides()
    group = ThreadGroup(source, destination, dtype=dtype, delta=True, **options)
    whole = random_tensors(source.tensors, dtype=dtype)
    group.load(whole)
    everything = received(group.run(1))
    assert everything == group.plan.received().sum()
    for version in (2, 3):
        whole = a_few_changed(whole, version)
        group.load(whole)
        part = received(group.run(version))
        assert group.wrong(whole) == []
        # One bit for each 16-bit unit, and two percent of the elements.
        assert part < 0.13 * everything
    assert received(group.run(4)) < 0.07 * everything


def test_all_new_weights_cost_no_more_than_without():
    group = ThreadGroup(fsdp2(QWEN2, 3), copies(QWEN2, 3), dtype=torch.bfloat16, delta=True)
    sizes = []
    for version in (1, 2):
        whole = random_tensors(group.plan.source.tensors, seed=version, dtype=torch.bfloat16)
        group.load(whole)
        sizes.append(received(group.run(version)))
        assert group.wrong(whole) == []
    assert sizes[1] <= sizes[0]


def test_a_destination_that_lost_its_weights_gets_everything():
    group = ThreadGroup(fsdp2(QWEN2, 3), copies(QWEN2, 3), dtype=torch.bfloat16, delta=True)
    whole = random_tensors(group.plan.source.tensors, dtype=torch.bfloat16)
    group.load(whole)
    everything = received(group.run(1))
    for tensor in group.syncs[1].destination.tensors.values():
        tensor.zero_()
    # Unsaid, the sums find it; nobody takes the mixture for a version.
    results = group.run(2)
    assert all("differs from what ranks" in str(result) for result in results.values())
    assert received(group.run(3)) == everything  # after a failure everything is sent
    assert group.wrong(whole) == []
    for tensor in group.syncs[1].destination.tensors.values():
        tensor.zero_()
    group.syncs[1].forget()
    assert received(group.run(4)) == everything
    assert group.wrong(whole) == []


def test_staged_changes_are_laid_upon_the_version_before(monkeypatch):
    group = ThreadGroup(fsdp2(QWEN2, 3), copies(QWEN2, 3), dtype=torch.bfloat16, delta=True, staged=True)
    whole = random_tensors(group.plan.source.tensors, dtype=torch.bfloat16)
    group.load(whole)
    everything = received(group.run(1))
    for version in (2, 3):
        whole = a_few_changed(whole, version)
        group.load(whole)
        assert received(group.run(version)) < 0.13 * everything
        assert group.wrong(whole) == []
    # A failed sync leaves the old version in place, and what lies beside it is not built upon.
    pack = DeltaExchange._pack

    def flips(self, buffer, pieces):
        pack(self, buffer, pieces)
        buffer[-1] ^= 1

    new = a_few_changed(whole, 4)
    group.load(new)
    with monkeypatch.context() as patch:
        patch.setattr(DeltaExchange, "_pack", flips)
        assert all(isinstance(result, SyncRefusedError) for result in group.run(4).values())
    assert group.wrong(whole) == []
    assert received(group.run(4)) == everything
    assert group.wrong(new) == []
