"""What SGLang is asked for around a trainer's turn, by the same switch as every other rollout."""

from types import SimpleNamespace

import torch

from meshrl.rollout.remote import ModelFacts, RemoteRollout
from meshrl.rollout.sglang.client import SglangClient
from meshrl.rollout.weight_files import FileWeights
from meshrl.weights.colocated import HybridEngine
from meshrl.weights.executor import Traffic
from meshrl.weights.session import SyncReport


class NoWeights(FileWeights):
    def __init__(self):
        self.shapes, self._others = {}, {}


class Noting(SglangClient):
    """Notes every call that would go to SGLang, with the tags of those that have them."""

    start_seconds = 10.0

    def __init__(self, **arguments):
        self._arguments, self._ranks, self.calls = arguments, 1, []
        self.facts = ModelFacts(10, 10, NoWeights())

    async def start(self): ...
    async def close(self): ...

    async def _ask(self, call, **fields):
        self.calls.append((call, *fields.get("tags", ())))

    def _events(self, fields):
        raise NotImplementedError


class Sync:
    def __call__(self, rollout, version):
        rollout.update_weights([], version)
        return SyncReport(version, 0.0, Traffic(), 0)

    def forget(self): ...


def turns(**arguments):
    """The calls of a version, a trainer's turn and the next version."""
    client = Noting(**arguments)
    rollout = RemoteRollout(client, pad_token_id=0)
    phases = HybridEngine(SimpleNamespace(), rollout, Sync(), device=torch.device("cpu"))
    try:
        phases.to_rollout(0)
        client.calls.clear()
        phases.to_train()
        before, _ = client.calls[:], client.calls.clear()
        phases.to_rollout(1)
    finally:
        rollout.close()
    return before, client.calls


def test_memory_is_given_up_before_training_and_taken_back_in_two_parts():
    before, after = turns(enable_memory_saver=True)
    assert before == [("pause_generation",), ("flush_cache",), ("release_memory_occupation", "kv_cache", "weights")]
    taken = [call for call in after if call[0] == "resume_memory_occupation"]
    assert taken == [("resume_memory_occupation", "weights"), ("resume_memory_occupation", "kv_cache")]
    # The weights arrive between the two, and nothing is generated before both are there.
    first, second = (after.index(call) for call in taken)
    assert first < after.index(("begin_weight_update",)) < after.index(("end_weight_update",)) < second
    assert second < after.index(("continue_generation",))


def test_without_the_saver_nothing_is_asked_that_it_could_not_do():
    before, after = turns(enable_memory_saver=False)
    assert before == [("pause_generation",), ("flush_cache",)]
    assert not [call for call in after if "memory" in call[0]]
