"""Engines that cut whole tensors themselves, as vLLM does, get nothing but their part of them: from every trainer."""

import pytest
import torch
import torch.distributed as dist
from sync_trials import BUCKET, PlainRollout, blank_lm, fsdp_engine, multiplied
from test_pool_stream import Engine, describe, train_fsdp, train_megatron
from test_pool_sync import DEADLINE, both, join, meet

from meshrl.rollout.vllm.arguments import Parallel

ROWS, COLUMNS, VOCABULARY = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj"), 64
VERSIONS = (1, 2)


def kept_part(name, whole, rank, size, spreads):
    """What a rank of vLLM keeps of a tensor, cut by hand."""
    kind = name.split(".")[-2]
    if name.endswith("experts.gate_up_proj"):
        if spreads:
            return whole.chunk(size)[rank]
        return torch.cat([half.chunk(size, 1)[rank] for half in whole.chunk(2, 1)], 1)
    if name.endswith("experts.down_proj"):
        return whole.chunk(size)[rank] if spreads else whole.chunk(size, 2)[rank]
    if kind in ROWS:
        return whole.chunk(size)[rank]
    if kind in COLUMNS and not name.endswith("bias"):
        return whole.chunk(size, 1)[rank]
    if kind in ("embed_tokens", "lm_head"):
        step = -(-len(whole) // VOCABULARY) * VOCABULARY // size
        return whole[rank * step : (rank + 1) * step]
    return whole


class CutEngine(PlainRollout):
    """Keeps its part of every tensor, and counts what else it was given."""

    def __init__(self, folder, size, rank, spreads):
        super().__init__()
        self.parallel = Parallel(size, rank, size if spreads else 0)
        self.whole = {name: param.shape for name, param in blank_lm(folder).named_parameters()}

    def update_weights(self, weights, version):
        self.parts, self.surplus = {}, 0
        for name, tensor in weights:
            assert tensor.shape == self.whole[name]
            part = kept_part(name, tensor, self.parallel.rank, self.parallel.size, self.parallel.ep > 0)
            self.parts[name] = part.clone()
            self.surplus += int((~tensor.isnan()).sum()) - part.numel()
        self.version = version

    def stats(self):
        return {"running": 0.0}

    def found(self, report):
        return self.parts, self.surplus, report.traffic.received, report.traffic.copied


def take_cut(folder, address, trainers, spreads):
    """A rollout's side of two syncs, in a pool of its own."""
    from meshrl.weights.disaggregated import connect_rollout

    rank, size = dist.get_rank(), dist.get_world_size()
    rollout = CutEngine(folder, size, rank, spreads)
    group = join(address, trainers + rank, trainers + size)
    sync = connect_rollout(rollout, group, trainers, model=describe(folder))
    found = [rollout.found(sync(rollout, version)) for version in VERSIONS]
    sync.close()
    return found


def colocated(folder, size, spreads, options):
    """The same on the trainers' own ranks."""
    from meshrl.weights import connect
    from meshrl.weights.colocated import policy_sync

    connect.MEGABYTE = BUCKET
    engine = fsdp_engine(folder, **options)
    rollout = CutEngine(folder, size, dist.get_rank() % size, spreads)
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=True, delta=False, deadline=DEADLINE)
    found = []
    for version in VERSIONS:
        with multiplied(engine, 1 + 0.1 * version):
            found.append(rollout.found(sync(rollout, version)))
        # Nothing of the trainer's is kept, which may now go to host memory.
        assert all(not part.source.tensors for part in sync._made.sync.parts)
    assert len(sync._made.sync.parts) > 3
    return found


def check(folder, found, size, spreads):
    """Each version's parts to the bit; no element more than they have was sent or filled in."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for rank, versions in enumerate(found):
        for version, (parts, surplus, received, copied) in zip(VERSIONS, versions, strict=True):
            assert parts.keys() == dict(model.named_parameters()).keys()
            for name, param in model.named_parameters():
                whole = param.detach() * (1 + 0.1 * version)
                assert torch.equal(parts[name], kept_part(name, whole, rank % size, size, spreads)), name
            assert surplus == 0
            assert received + copied == sum(part.nbytes for part in parts.values())
            assert received + copied < 0.7 * sum(param.nbytes for param in model.parameters())
    # The comparison would see one version for the other.
    assert not torch.equal(found[0][0][0]["model.norm.weight"], found[0][1][0]["model.norm.weight"])


POOLS = [("qwen2", False, {}), ("qwen3_moe", False, {"fsdp_size": 2}), ("qwen3_moe", True, {"strategy": "fsdp"})]


@pytest.mark.parametrize(("family", "spreads", "options"), POOLS)
def test_between_pools(ranks, pool_ranks, sync_folders, family, spreads, options):
    folder, point = sync_folders[family], meet()
    _, found = both(
        (ranks(2), train_fsdp, folder, point.address, 2, VERSIONS, options, {}),
        (pool_ranks(2), take_cut, folder, point.address, 2, spreads),
    )
    check(folder, found, 2, spreads)
    assert all(copied == 0 for versions in found for *_, copied in versions)


def test_from_experts_of_megatron_to_spread_ones(megatron_ranks, pool_ranks, sync_folders):
    from megatron_trials import megatron_trial

    folder, point = sync_folders["qwen3_moe"], meet()
    _, found = both(
        (megatron_ranks(2), train_megatron, megatron_trial(folder, {"ep": 2}), point.address, 2, VERSIONS),
        (pool_ranks(2), take_cut, folder, point.address, 2, True),
    )
    check(folder, found, 2, True)


COLOCATED = [("qwen2", 2, 2, False), ("qwen3", 4, 2, False), ("qwen3_moe", 4, 2, True)]


@pytest.mark.parametrize(("family", "world", "size", "spreads"), COLOCATED)
def test_on_the_same_devices(ranks, sync_folders, family, world, size, spreads):
    folder = sync_folders[family]
    found = ranks(world).run(colocated, folder, size, spreads, {})
    check(folder, found, size, spreads)
    # What a rank holds already is not sent to it.
    assert all(copied > 0 for versions in found for *_, copied in versions)


def whole_engine(folder, options):
    """An engine that wants whole tensors: every version's sums are compared before it gets them."""
    from meshrl.weights import connect
    from meshrl.weights.colocated import policy_sync
    from meshrl.weights.executor import Exchange
    from meshrl.weights.transports import SyncError

    connect.MEGABYTE = BUCKET
    engine, rollout = fsdp_engine(folder, **options), Engine(folder)
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=True, delta=False, deadline=DEADLINE)
    with multiplied(engine, 1.1):
        report = sync(rollout, 1)
    unpack = Exchange._unpack

    def unpack_wrongly(self, buffer, pieces):
        unpack(self, buffer, pieces)
        next(iter(self.destination.tensors.values())).view(-1)[0] += 1

    Exchange._unpack = unpack_wrongly
    try:
        with pytest.raises(SyncError, match="differs from what ranks"):
            sync(rollout, 2)
    finally:
        Exchange._unpack = unpack
    return rollout.logits(), rollout.version, report.traffic.received + report.traffic.copied


def test_whole_tensors_are_compared_on_the_same_devices(ranks, sync_folders):
    from sync_trials import one_process_logits

    folder = sync_folders["qwen2"]
    size = sum(param.nbytes for param in blank_lm(folder).parameters())
    for logits, version, moved in ranks(2).run(whole_engine, folder, {}):
        torch.testing.assert_close(logits, one_process_logits(folder, 1), rtol=1e-5, atol=1e-5)
        assert (version, moved) == (1, size)
