"""What goes wrong in a sync is seen on every rank, and no rollout ever generates with parts of two versions."""

import os
import re

import pytest
from layouts import QWEN2, PlainRollout, ThreadGroup, fsdp2, random_tensors, tp

from meshrl.models.loading import new_causal_lm
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.weights.colocated import Stream
from meshrl.weights.disaggregated import connect_rollout
from meshrl.weights.executor import Exchange
from meshrl.weights.session import refuse
from meshrl.weights.transports import Mailboxes, SyncError, SyncRefusedError, SyncTimeoutError, ThreadCarrier


def group_of(make_carrier=None, **options):
    return ThreadGroup(fsdp2(QWEN2, 4), tp(QWEN2, 2, 2), make_carrier=make_carrier, **{"deadline": 10.0} | options)


def synced(group, version=1):
    """A group whose rollouts have a first version."""
    rollouts = {rank: PlainRollout() for rank in group.syncs}
    whole = random_tensors(group.plan.source.tensors, seed=version)
    group.load(whole)
    assert not [r for r in group.run(version, rollouts=rollouts).values() if isinstance(r, Exception)]
    return rollouts, whole


def all_failed(results, kind=SyncError):
    assert all(isinstance(result, kind) for result in results.values()), results
    return "\n".join(map(str, results.values()))


def swap_two_slices(monkeypatch, rank=1):
    """Rank 1 sends, of two pieces of the same size, each in the other's place."""
    pack = Exchange._pack

    def swapped(self, buffer, pieces):
        pack(self, buffer, pieces)
        sizes = [piece["rows"] * piece["cols"] * 4 for piece in pieces]
        for i in range(1, len(pieces)):
            if self.rank == rank and sizes[i] == sizes[i - 1]:
                a, b = (slice(int(pieces[j]["place"]), int(pieces[j]["place"] + sizes[j])) for j in (i - 1, i))
                first = buffer[a].clone()
                buffer[a] = buffer[b]
                buffer[b] = first
                return

    monkeypatch.setattr(Exchange, "_pack", swapped)


def test_a_swapped_slice_is_named_and_the_rollouts_refuse(monkeypatch):
    group = group_of()
    rollouts, _ = synced(group)
    new = random_tensors(group.plan.source.tensors, seed=2)
    group.load(new)
    with monkeypatch.context() as patch:
        swap_two_slices(patch)
        text = all_failed(group.run(2, rollouts=rollouts), SyncRefusedError)
    assert "differs from what ranks [1" in text
    assert "FSDP2 fsdp4 -> rollout separate tp2 dp2" in text
    assert "model." in text
    assert [(r.version, r.released) for r in rollouts.values()] == [(-1, ("weights",))] * 4
    # All agreed, so the connections still work; the next sync makes everything whole.
    assert not [r for r in group.run(2, rollouts=rollouts).values() if isinstance(r, Exception)]
    assert group.wrong(new) == []
    assert [(r.version, r.released) for r in rollouts.values()] == [(2, ())] * 4


def test_a_rollout_that_cannot_even_refuse_does_not_hide_the_cause(monkeypatch):
    group = group_of()
    rollouts, _ = synced(group)
    group.load(random_tensors(group.plan.source.tensors, seed=2))

    def gone(tags):
        raise ConnectionError("its engine is gone")

    rollouts[0].release = gone
    swap_two_slices(monkeypatch)
    results = group.run(2, rollouts=rollouts)
    all_failed(results, SyncRefusedError)
    assert results[0].__notes__ == ["nor could the rollout give its weights up: ConnectionError: its engine is gone"]
    assert rollouts[0].version == -1


def test_without_sums_the_same_swap_goes_unseen(monkeypatch):
    group = group_of(verify=False)
    whole = random_tensors(group.plan.source.tensors)
    group.load(whole)
    swap_two_slices(monkeypatch)
    assert not [r for r in group.run(1).values() if isinstance(r, Exception)]
    assert group.wrong(whole)


def test_staged_rollouts_keep_their_old_version(monkeypatch):
    group = group_of(staged=True)
    rollouts, old = synced(group)
    group.load(random_tensors(group.plan.source.tensors, seed=2))
    swap_two_slices(monkeypatch)
    all_failed(group.run(2, rollouts=rollouts))
    assert group.wrong(old) == []
    assert [(r.version, r.released) for r in rollouts.values()] == [(1, ())] * 4


class Dropping(ThreadCarrier):
    """Loses its n-th message."""

    drop = 0

    def _post(self, slot, nbytes, to, tag):
        self.drop -= 1
        if self.drop == 0:
            return (to, -1)
        return super()._post(slot, nbytes, to, tag)


def test_a_dropped_bucket_ends_at_the_deadline_and_says_who_waits():
    boxes = Mailboxes()
    group = group_of(lambda rank, slot: Dropping(boxes, rank, slot), deadline=1.5)
    rollouts, _ = synced(group)
    # Of rank 2: its word at the beginning, then the second of its messages.
    group.syncs[2].carrier.drop = 3
    group.load(random_tensors(group.plan.source.tensors, seed=2))
    text = all_failed(group.run(2, rollouts=rollouts))
    # The one that lacks it, or one that waits for that one, is the first to say so.
    assert re.search(r"rank \d waited for rank \d to (send|read) a message until the deadline of 1\.5 s", text)
    assert [r.version for r in rollouts.values()] == [-1] * 4
    # These connections are out of step for good.
    assert "the connections broke in an earlier sync" in all_failed(group.run(3, rollouts=rollouts))


class Flipping(ThreadCarrier):
    """Changes one bit of its n-th message."""

    flip = 0

    def _post(self, slot, nbytes, to, tag):
        self.flip -= 1
        if self.flip == 0:
            slot[nbytes // 2] ^= 4
        return super()._post(slot, nbytes, to, tag)


@pytest.mark.parametrize("staged", [False, True])
def test_one_flipped_bit_is_seen(staged):
    boxes = Mailboxes()
    group = group_of(lambda rank, slot: Flipping(boxes, rank, slot), staged=staged)
    rollouts, old = synced(group)
    group.syncs[3].carrier.flip = 2
    group.load(random_tensors(group.plan.source.tensors, seed=2))
    assert "differs from what ranks" in all_failed(group.run(2, rollouts=rollouts), SyncRefusedError)
    assert (group.wrong(old) == []) == staged


def test_stale_and_different_versions_change_nothing():
    group = group_of()
    rollouts, whole = synced(group, version=4)
    for version in (4, 3):
        text = all_failed(group.run(version, rollouts=rollouts), SyncRefusedError)
        assert f"version {version} is not newer than the 4 there" in text
    text = all_failed(group.run(5, versions={2: 6}, rollouts=rollouts), SyncRefusedError)
    assert "ranks [0, 1, 3] have version 5; ranks [2] have version 6" in text
    assert group.wrong(whole) == []
    assert [r.version for r in rollouts.values()] == [4] * 4
    assert not [r for r in group.run(5, rollouts=rollouts).values() if isinstance(r, Exception)]


def test_ranks_with_different_plans_are_told():
    group = group_of()
    other = group_of(bucket_bytes=8192)
    group.syncs[1].plan = other.plan
    assert "the ranks differ: ranks [0, 2, 3] have plan" in all_failed(group.run(1), SyncRefusedError)


def test_a_rank_that_raises_ends_all(monkeypatch):
    group = group_of()
    rollouts, old = synced(group)
    group.load(random_tensors(group.plan.source.tensors, seed=2))
    pack = Exchange._pack

    def breaks(self, buffer, pieces):
        if self.rank == 1:
            raise RuntimeError("no memory left")
        pack(self, buffer, pieces)

    monkeypatch.setattr(Exchange, "_pack", breaks)
    results = group.run(2, rollouts=rollouts)
    assert "no memory left" in str(results[1])
    assert all("rank 1 gave up: RuntimeError: no memory left" in str(results[rank]) for rank in (0, 2, 3))
    assert not isinstance(results[0], SyncTimeoutError)
    # A rank that learns of it before its own exchange begins still has all of the old version.
    whole = [rank for rank, rollout in rollouts.items() if rollout.version == 1]
    assert not [rank for rank, _ in group.wrong(old) if rank in whole]
    assert rollouts[1].version == -1
    assert all(rollout.version == -1 for rank, rollout in rollouts.items() if rank not in whole)
    monkeypatch.undo()
    # New connections know nothing of it.
    again, new = group_of(), random_tensors(group.plan.source.tensors, seed=3)
    again.load(new)
    assert not [r for r in again.run(3, rollouts=rollouts).values() if isinstance(r, Exception)]
    assert again.wrong(new) == []
    assert [(r.version, r.released) for r in rollouts.values()] == [(3, ())] * 4


class Alone:
    """An engine on one rank that knows nothing of plans."""

    def __init__(self, model):
        self.module = model

    def per_tensor_params(self):
        yield from self.module.named_parameters()


class Describing:
    """A group of two pools in which everybody says what this rank says, until weights have been described."""

    rank, world = 1, 2

    def gather(self, told, what):
        self.told = told
        if what == "to describe their weights":
            raise LookupError
        return [told] * self.world


def test_a_rollout_that_refused_takes_the_next_stream_and_the_next_connection(make_lm, monkeypatch):
    model = make_lm("qwen3")
    rollout = EmbeddedRollout(new_causal_lm(model.config, ATTENTION_NAME), pad_token_id=0)
    stream, copy = Stream(Alone(model), verify=True), rollout._copy

    def copy_wrongly(weights):
        copy(weights)
        rollout._own["model.norm.weight"].data[0] += 1

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "_copy", copy_wrongly)
        with pytest.raises(SyncError, match=r"'model.norm.weight' differs"):
            stream(rollout, 1)
    assert rollout.version == -1
    assert stream(rollout, 2).version == rollout.version == 2

    refuse(rollout, RuntimeError("its trainer is gone"))
    group = Describing()
    with pytest.raises(LookupError):
        connect_rollout(rollout, group, 1)
    assert {name: shape for name, (shape, _) in group.told["params"].items()} == {
        name: list(param.shape) for name, param in model.named_parameters()
    }
    assert rollout.version == -1


class DyingGroup:
    """A group of NCCL that cannot even be given up."""

    def __init__(self):
        self.asked = 0

    def rank(self):
        return 0

    def abort(self):
        self.asked += 1
        raise RuntimeError("a peer is gone")


def test_giving_a_group_up_never_hides_why(caplog):
    from meshrl.weights.transports import ProcessGroupCarrier

    carrier = ProcessGroupCarrier(64, "cpu", DyingGroup(), owns=True)
    assert not carrier.owns_nccl  # gloo ends by itself
    carrier.owns_nccl = True
    carrier.abort("the first reason")
    assert carrier.broken == "the first reason"
    assert "a peer is gone" in caplog.text
    carrier.abort("another one")
    carrier.close()
    assert carrier.group.asked == 1


def test_what_torch_reads_for_a_group_is_put_back(monkeypatch):
    from meshrl.weights import disaggregated

    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    with disaggregated._surviving():
        assert disaggregated.OUTLIVES.items() <= os.environ.items()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
