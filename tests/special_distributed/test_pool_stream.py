"""Whole tensors from one pool to engines of another, a bucket at a time: exact, bounded in memory, all or nothing."""

import weakref

import pytest
import torch
import torch.distributed as dist
from sync_trials import BUCKET, IDS, PlainRollout, blank_lm, fsdp_engine, one_process_logits
from test_pool_sync import DEADLINE, both, join, meet, train_lora

from meshrl.rollout.weight_files import buckets, checked
from meshrl.weights.transports import SyncError

# What a process keeps from one call to the next.
kept = {}


class Engine(PlainRollout):
    """Takes whole tensors into a form of its own, as vLLM does; between two versions it must not generate."""

    def __init__(self, folder):
        super().__init__()
        self.own = blank_lm(folder)
        self.shapes = {name: list(param.shape) for name, param in self.own.named_parameters()}
        self.fails_at = None

    def update_weights(self, weights, version):
        own = dict(self.own.named_parameters())
        for number, bucket in enumerate(buckets(checked(weights, self.shapes), BUCKET // 2)):
            if number == self.fails_at:
                raise RuntimeError("the engine broke")
            for name, tensor in bucket:
                own[name].data.copy_(tensor)
            del tensor
        self.version = version

    def stats(self):
        return {"running": 0.0}

    def logits(self):
        with torch.no_grad():
            return self.own(IDS).logits


def describe(folder):
    from meshrl.models.loading import empty_model

    return empty_model(folder, "eager", dtype=torch.float32)


def begin_training(address, rollouts, settings, engine):
    from meshrl.weights.disaggregated import connect_trainer

    group = join(address, dist.get_rank(), dist.get_world_size() + rollouts)
    kept.setdefault("engine", engine)
    kept["sync"] = connect_trainer(kept["engine"], group, rollouts, bucket_megabytes=1, deadline=DEADLINE, **settings)
    kept.setdefault("first", [param.detach().clone() for param in kept["engine"].module.parameters()])


def begin_fsdp(folder, address, rollouts, options, settings):
    begin_training(address, rollouts, settings, kept.get("engine") or fsdp_engine(folder, **options))


def train_fsdp(folder, address, rollouts, versions, options, settings):
    begin_fsdp(folder, address, rollouts, options, settings)
    return send_all(versions)


def train_megatron(trial, address, rollouts, versions):
    from meshrl.engines.engine_class import engine_class
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    try:
        engine = engine_class(trial.engine)(trial.model, trial.engine, None, device=torch.device("cpu"))
        engine.initialize()
        begin_training(address, rollouts, {}, engine)
        return send_all(versions)
    finally:
        leave_parallel_state()


def send_all(versions):
    texts = [send(version) for version in versions]
    leave()
    return texts


def begin_engine(folder, address, trainers):
    from meshrl.weights.disaggregated import connect_rollout

    kept.setdefault("rollout", Engine(folder))
    group = join(address, trainers + dist.get_rank(), trainers + dist.get_world_size())
    kept["sync"] = connect_rollout(kept["rollout"], group, trainers, model=describe(folder))


def send(version):
    """A trainer's part of a sync of weights that only this version has; an error's text."""
    with torch.no_grad():
        for param, first in zip(kept["engine"].module.parameters(), kept["first"], strict=True):
            param.copy_(first).mul_(1 + 0.1 * version)
    return told(None, version)[0]


def told(rollout, version):
    try:
        return "", kept["sync"](rollout, version)
    except (SyncError, RuntimeError) as error:
        return str(error), None


def take(version, wrong_part=None, fails_at=None):
    """A rollout's part: an error's text, version and what was released then, logits, bytes, most memory."""
    from meshrl.weights.executor import Exchange
    from meshrl.weights.session import StreamedSync

    rollout, unpack, blank = kept["rollout"], Exchange._unpack, StreamedSync._blank_tensors
    alive, most = [0], [0]
    rollout.fails_at = fails_at

    def unpack_wrongly(self, buffer, pieces):
        unpack(self, buffer, pieces)
        if wrong_part is not None and self.plan is kept["sync"].sync.parts[wrong_part].plan:
            next(iter(self.destination.tensors.values())).view(-1)[0] += 1

    def counted(self, part):
        made = blank(self, part)
        for tensor in made.values():
            alive[0] += tensor.nbytes
            weakref.finalize(tensor, lambda size=tensor.nbytes: alive.__setitem__(0, alive[0] - size))
        most[0] = max(most[0], alive[0])
        return made

    Exchange._unpack, StreamedSync._blank_tensors = unpack_wrongly, counted
    try:
        text, report = told(rollout, version)
    finally:
        Exchange._unpack, StreamedSync._blank_tensors = unpack, blank
    moved = None if report is None else (report.traffic.received, most[0], alive[0], report.buffer_bytes)
    return text, rollout.version, rollout.released, rollout.logits(), moved


def take_all(folder, address, trainers, versions):
    begin_engine(folder, address, trainers)
    found = [take(version) for version in versions]
    leave()
    return found


def leave():
    if "sync" in kept:  # the last test's processes have ended already
        kept.pop("sync").close()
    kept.clear()


def check(folder, found, versions):
    """Logits of each version as one process has them; memory of two parts at most."""
    params = [param.nbytes for param in blank_lm(folder).parameters()]
    size, part = sum(params), max(BUCKET // 2, *params)
    assert 6 * part < size  # or the bounds below would say nothing
    for rank in found:
        for version, (text, held, _, mine, moved) in zip(versions, rank, strict=True):
            assert text == ""
            assert held == version
            torch.testing.assert_close(mine, one_process_logits(folder, version), rtol=1e-5, atol=1e-5)
            received, most, left, buffers = moved
            assert received == size
            assert part < most <= 2 * part
            assert left == 0
            # With the messages, two buckets.
            assert most <= buffers <= 2 * max(BUCKET, 2 * part)
    # The comparison would see one version for the other.
    assert (found[0][0][3] - found[0][-1][3]).abs().max() > 1e-2


CASES = [
    ("qwen2", 2, 2, {}, {"carrier": "shared_memory"}),
    ("qwen3_moe", 2, 2, {"fsdp_size": 2}, {"carrier": "process_group"}),
    ("qwen3", 1, 3, {}, {}),
    ("qwen2", 2, 1, {"strategy": "fsdp"}, {"verify": False}),
    ("qwen2", 2, 2, {"context_parallel_size": 2}, {}),
]


@pytest.mark.parametrize(("family", "trainers", "rollouts", "options", "settings"), CASES)
def test_exact_twice_in_the_memory_of_two_parts(
    ranks, pool_ranks, sync_folders, family, trainers, rollouts, options, settings
):
    folder, point, versions = sync_folders[family], meet(), (1, 2)
    _, found = both(
        (ranks(trainers), train_fsdp, folder, point.address, rollouts, versions, options, settings),
        (pool_ranks(rollouts), take_all, folder, point.address, trainers, versions),
    )
    check(folder, found, versions)


def test_megatron_exact_twice(megatron_ranks, pool_ranks, sync_folders):
    from megatron_trials import megatron_trial

    folder, point, versions = sync_folders["qwen2"], meet(), (1, 2)
    _, found = both(
        (megatron_ranks(2), train_megatron, megatron_trial(folder, {"tp": 2}), point.address, 1, versions),
        (pool_ranks(1), take_all, folder, point.address, 2, versions),
    )
    check(folder, found, versions)


def test_adapters_arrive_merged(ranks, pool_ranks, sync_folders):
    pytest.importorskip("peft")
    folder, point = sync_folders["qwen2"], meet()
    (expected, _), found = both(
        (ranks(2), train_lora, folder, point.address, "alone"),
        (pool_ranks(2), take_all, folder, point.address, 2, (1, 2, 3)),
    )
    size = sum(p.nbytes for p in blank_lm(folder).parameters())
    for rank in found:
        assert [moved[0] for *_, moved in rank] == [size] * 3
        logits = [mine for *_, mine, _ in rank]
        for mine, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert (logits[0] - logits[1]).abs().max() > 1e-2


def refused(begin, *arguments):
    with pytest.raises(ValueError, match="set delta=False"):
        begin(*arguments)


def test_changes_alone_are_refused(ranks, pool_ranks, sync_folders):
    folder, point = sync_folders["qwen2"], meet()
    both(
        (ranks(1), refused, begin_fsdp, folder, point.address, 1, {}, {"delta": True}),
        (pool_ranks(1), refused, begin_engine, folder, point.address, 1),
    )
    both((ranks(1), leave), (pool_ranks(1), leave))


@pytest.fixture
def connected(ranks, pool_ranks, sync_folders):
    """One trainer and two engines that have version 1, and a way to meet again."""
    folder = sync_folders["qwen2"]

    def connect(verify=True):
        point = meet()
        both(
            (ranks(1), begin_fsdp, folder, point.address, 2, {}, {"verify": verify}),
            (pool_ranks(2), begin_engine, folder, point.address, 1),
        )
        return point

    yield connect
    both((ranks(1), leave), (pool_ranks(2), leave))


def run_both(ranks, pool_ranks, version, *faults):
    (sent,), taken = both((ranks(1), send, version), (pool_ranks(2), take, version, *faults))
    return sent, taken


def assert_all_have(folder, taken, version):
    for _, held, released, logits, _ in taken:
        assert (held, released) == (version, ())
        torch.testing.assert_close(logits, one_process_logits(folder, version), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", [0, 3])
def test_what_came_wrong_is_named_and_the_old_version_stays_or_nothing_is_generated(
    ranks, pool_ranks, sync_folders, connected, part
):
    folder, _ = sync_folders["qwen2"], connected()
    run_both(ranks, pool_ranks, 1)
    sent, taken = run_both(ranks, pool_ranks, 2, part)
    assert "differs from what ranks [0" in sent
    for text, held, released, logits, _ in taken:
        assert text == sent
        if part:
            assert (held, released) == (-1, ("weights",))
        else:
            assert (held, released) == (1, ())
            torch.testing.assert_close(logits, one_process_logits(folder, 1), rtol=1e-5, atol=1e-5)
    # All agreed, so the connections still work.
    sent, taken = run_both(ranks, pool_ranks, 2)
    assert sent == ""
    assert_all_have(folder, taken, 2)


def test_without_sums_the_same_goes_unseen(ranks, pool_ranks, sync_folders, connected):
    folder, _ = sync_folders["qwen2"], connected(verify=False)
    sent, taken = run_both(ranks, pool_ranks, 1, 3)
    assert sent == ""
    assert (taken[0][3] - one_process_logits(folder, 1)).abs().max() > 1e-3


def test_a_version_that_is_not_newer_disturbs_nobody(ranks, pool_ranks, sync_folders, connected):
    folder, _ = sync_folders["qwen2"], connected()
    run_both(ranks, pool_ranks, 1)
    sent, taken = run_both(ranks, pool_ranks, 1)
    assert "version 1 is not newer than the 1 there" in sent
    assert_all_have(folder, taken, 1)


def break_one(version):
    return take(version, None, 2 if dist.get_rank() == 0 else None)


def test_an_engine_that_breaks_ends_the_sync_everywhere_and_the_next_connection_heals(
    ranks, pool_ranks, sync_folders, connected
):
    folder, _ = sync_folders["qwen2"], connected()
    run_both(ranks, pool_ranks, 1)
    (sent,), taken = both((ranks(1), send, 2), (pool_ranks(2), break_one, 2))
    assert "gave up" in sent  # nobody waits for the deadline
    assert taken[0][0] == "the engine broke"
    assert "gave up" in taken[1][0]
    assert [(held, released) for _, held, released, *_ in taken] == [(-1, ("weights",))] * 2
    connected()
    sent, taken = run_both(ranks, pool_ranks, 2)
    assert sent == ""
    assert_all_have(folder, taken, 2)


def restart_second(folder):
    if dist.get_rank() == 1:
        kept["rollout"] = Engine(folder)
    else:
        kept["rollout"].update_weights = None  # whoever has the version is not asked


def test_a_newcomer_gets_the_version_that_others_have(ranks, pool_ranks, sync_folders, connected):
    folder, _ = sync_folders["qwen2"], connected()
    run_both(ranks, pool_ranks, 1)
    pool_ranks(2).run(restart_second, folder)
    connected()
    sent, taken = run_both(ranks, pool_ranks, 1)
    assert sent == ""
    assert_all_have(folder, taken, 1)
