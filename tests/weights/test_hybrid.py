"""The switch between training and rollout: order of steps, memory, random numbers, failures."""

import pytest
import torch

from meshrl.telemetry.device_stats import GIB
from meshrl.weights.colocated import HybridEngine
from meshrl.weights.executor import Traffic
from meshrl.weights.session import SyncReport


class Log:
    """Engine, rollout and meter in one: notes what is asked and counts memory."""

    names = ("before_gib", "after_gib", "max_allocated_gib")

    def __init__(self):
        self.calls, self.memory, self.high = [], 10 * GIB, 10 * GIB
        self.sizes = {"weights": 4 * GIB, "kv_cache": 20 * GIB}

    def grow(self, amount):
        self.memory += amount
        self.high = max(self.high, self.memory)

    def to(self, device, *, model, optimizer):
        self.calls.append(("to", str(device), model, optimizer))
        sign = -1 if str(device) == "cpu" else 1
        self.grow(sign * (4 * GIB * model + 6 * GIB * optimizer))

    def release(self, tags):
        self.calls.append(("release", *tags))
        self.grow(-sum(self.sizes[tag] for tag in tags))

    def resume(self, tags):
        self.calls.append(("resume", *tags))
        self.grow(sum(self.sizes[tag] for tag in tags))

    def used(self):
        return self.memory

    def peak(self):
        return self.high

    def reset_peak(self):
        self.high = self.memory

    def further(self):
        return {"max_reserved_gib": self.high + GIB}


class Syncing:
    def __init__(self, log, fails=False):
        self.log, self.fails = log, fails

    def __call__(self, rollout, version):
        self.log.calls.append(("sync", version))
        if self.fails:
            raise RuntimeError("lost")
        self.log.grow(GIB)
        self.log.grow(-GIB)
        return SyncReport(version, 0.5, Traffic(sent=8), 2)

    def forget(self):
        self.log.calls.append(("forget",))


def hybrid(log, **options):
    return HybridEngine(log, log, Syncing(log), device=torch.device("cpu"), meter=log, **options)


def test_a_round_goes_step_by_step():
    log = Log()
    switch = hybrid(log, param_offload=True, optimizer_offload=True)
    metrics = switch.to_rollout(1)
    assert metrics["weight_sync/sent_bytes"] == 8
    assert switch.phase == "rollout"
    switch.to_train()
    log.calls.clear()
    start = log.memory
    metrics = switch.to_rollout(2)
    assert log.calls == [
        ("to", "cpu", True, False),
        ("resume", "weights"),
        ("sync", 2),
        ("to", "cpu", True, True),
        ("resume", "kv_cache"),
    ]
    assert metrics["memory/switch_weights/before_gib"] * GIB == start - 4 * GIB
    assert metrics["memory/switch_sync/max_allocated_gib"] == metrics["memory/switch_sync/after_gib"] + 1
    # The cache comes after the trainer has left.
    assert log.calls.index(("resume", "kv_cache")) > log.calls.index(("to", "cpu", True, True))
    switch.to_train()
    assert log.calls[-2:] == [("release", "weights", "kv_cache"), ("forget",)]
    assert log.version == -1


def test_back_to_the_version_that_was_there():
    log = Log()
    switch = hybrid(log)
    with pytest.raises(RuntimeError, match="no weights yet"):
        switch.back_to_rollout()
    switch.to_rollout(3)
    switch.to_train()
    log.calls.clear()
    switch.back_to_rollout()
    assert log.calls == [("resume", "weights"), ("sync", 3), ("resume", "kv_cache")]
    switch.to_train()
    switch.has_trained = True
    with pytest.raises(RuntimeError, match="gave version 3 up for an update"):
        switch.back_to_rollout()
    with pytest.raises(ValueError, match="version 3 is not newer than the rollout's 3"):
        switch.to_rollout(3)
    switch.to_rollout(4)
    # One that kept weights of its own just goes on.
    kept = hybrid(other := Log(), free_cache_engine=False)
    kept.to_rollout(1)
    kept.to_train()
    kept.has_trained = True
    other.calls.clear()
    kept.back_to_rollout()
    assert other.calls == []
    assert kept.phase == "rollout"


def test_shared_weights_stay_and_a_kept_cache_stays():
    log = Log()
    switch = hybrid(log, shares_weights=True)
    switch.to_rollout(1)
    switch.to_train()
    assert log.calls[-1] == ("release", "kv_cache")
    switch.back_to_rollout()
    switch.to_train()
    switch.has_trained = True
    with pytest.raises(RuntimeError, match="shares the trainer's weights, which an update has moved on from version 1"):
        switch.back_to_rollout()
    switch.to_rollout(2)
    keeps = hybrid(log2 := Log(), free_cache_engine=False)
    keeps.to_rollout(1)
    keeps.to_train()
    assert log2.calls == [("sync", 1)]


def test_ranks_that_share_an_engine_meet_where_memory_changes_hands():
    log = Log()
    switch = hybrid(log, meet=lambda: log.calls.append(("meet",)))
    switch.to_rollout(1)
    switch.to_train()
    assert log.calls[-3:] == [("release", "weights", "kv_cache"), ("meet",), ("forget",)]
    log.calls.clear()
    switch.to_rollout(2)
    assert log.calls == [("meet",), ("resume", "weights"), ("sync", 2), ("meet",), ("resume", "kv_cache")]


def test_phases_take_turns():
    switch = hybrid(Log())
    with pytest.raises(RuntimeError, match="in phase 'train', but the switch starts in phase 'rollout'"):
        switch.to_train()
    switch.to_rollout(1)
    with pytest.raises(RuntimeError, match="in phase 'rollout'"):
        switch.to_rollout(2)


def test_a_step_above_the_budget_is_named():
    log = Log()
    switch = hybrid(log, budget_bytes=30 * GIB)
    switch.to_rollout(1)
    log.grow(24 * GIB)  # the rollout has filled the memory it was given
    switch.to_train()
    with pytest.raises(MemoryError, match=r"'switch_kv_cache' took 34\.00 GiB \(14\.00 before it\), .*\(30\.00\)"):
        switch.to_rollout(2)


def test_a_failed_sync_leaves_the_trainer_in_its_place():
    log = Log()
    switch = hybrid(log, param_offload=True)
    switch.sync = Syncing(log, fails=True)
    with pytest.raises(RuntimeError, match="lost"):
        switch.to_rollout(1)
    assert switch.phase == "train"
    assert log.calls[-1] == ("to", "cpu", True, False)
    switch.sync = Syncing(log)
    switch.to_rollout(1)


def test_the_rollouts_random_numbers_do_not_change_the_trainers():
    def draws(rollout_draws):
        torch.manual_seed(5)
        switch = hybrid(Log(), rollout_seed=3)
        found = [torch.rand(1).item()]
        inside = []
        for version, count in enumerate(rollout_draws, 1):
            switch.to_rollout(version)
            with switch.own_random_numbers():
                inside += torch.rand(count).tolist()
            switch.to_train()
            found.append(torch.rand(1).item())
        return found, inside

    with torch.random.fork_rng():
        few, inside = draws([1, 1])
        many, more = draws([7, 3])
        torch.manual_seed(5)
        assert few == many == [torch.rand(1).item() for _ in range(3)]
        torch.manual_seed(3)
        assert inside == torch.rand(2).tolist()
        assert more[0] == inside[0]
