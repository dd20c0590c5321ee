"""One engine for several ranks: its own rank gets whole tensors, the others get nothing and keep the version."""

import pytest
import torch
import torch.distributed as dist
from sync_trials import BUCKET, fsdp_engine, multiplied
from test_pool_stream import Engine, describe, train_fsdp
from test_pool_sync import DEADLINE, both, join, meet

from meshrl.rollout.remote import Bystander

SIZE = 2
VERSIONS = (1, 2)


class SharedEngine(Engine):
    replica_ranks = SIZE

    def found(self, report):
        weights = {name: param.detach().clone() for name, param in self.own.named_parameters()}
        return weights, self.version, report.traffic.received + report.traffic.copied


class Lender(Bystander):
    def found(self, report):
        return None, self.version, report.traffic.received + report.traffic.copied


def rollout_of(folder):
    first = dist.get_rank() % SIZE == 0
    return SharedEngine(folder) if first else Lender(pad_token_id=0, replica_ranks=SIZE)


def colocated(folder, options):
    """Two versions on the trainers' own ranks."""
    from meshrl.weights import connect
    from meshrl.weights.colocated import policy_sync

    connect.MEGABYTE = BUCKET
    engine, rollout = fsdp_engine(folder, **options), rollout_of(folder)
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=True, delta=False, deadline=DEADLINE)
    found = []
    for version in VERSIONS:
        with multiplied(engine, 1 + 0.1 * version):
            found.append(rollout.found(sync(rollout, version)))
    return found


def take(folder, address, trainers):
    """The same in a pool of its own."""
    from meshrl.weights.disaggregated import connect_rollout

    rank, size, rollout = dist.get_rank(), dist.get_world_size(), rollout_of(folder)
    group = join(address, trainers + rank, trainers + size)
    sync = connect_rollout(rollout, group, trainers, model=describe(folder))
    found = [rollout.found(sync(rollout, version)) for version in VERSIONS]
    sync.close()
    return found


def check(folder, found):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for rank, versions in enumerate(found):
        for version, (weights, stamped, moved) in zip(VERSIONS, versions, strict=True):
            assert stamped == version
            if rank % SIZE:
                assert moved == 0
                continue
            assert moved == sum(param.nbytes for param in model.parameters())
            for name, param in model.named_parameters():
                assert torch.equal(weights[name], param.detach() * (1 + 0.1 * version)), name


@pytest.mark.parametrize(("world", "options"), [
    (4, {}), (2, {"strategy": "fsdp"}), (4, {"fsdp_size": 2}), (4, {"ulysses_sequence_parallel_size": 2}),
])  # fmt: skip
def test_on_the_same_devices(ranks, sync_folders, world, options):
    folder = sync_folders["qwen3"]
    check(folder, ranks(world).run(colocated, folder, options))


def test_between_pools(ranks, pool_ranks, sync_folders):
    folder, point = sync_folders["qwen3"], meet()
    _, found = both(
        (ranks(2), train_fsdp, folder, point.address, 2, VERSIONS, {}, {}),
        (pool_ranks(2), take, folder, point.address, 2),
    )
    check(folder, found)
