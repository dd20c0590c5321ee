"""An order that learns goes on with all that it had learned, though its place in the data is an older one."""

import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from meshrl.data.batch import DataProto
from meshrl.data.sampling import RowOrder
from meshrl.trainer.rollout_source import HeardUpdates


class Learner(RowOrder):
    """Counts what it has heard, with weights that depend on the order of hearing."""

    learns = True
    batches_per_epoch = 1

    def __init__(self):
        self.epoch = self.position = 0
        self.learned = 1.0

    def __iter__(self):
        return iter(())

    def update(self, batch):
        self.learned = self.learned * 2 + float(batch.batch["x"].sum())

    def state_dict(self):
        return super().state_dict() | {"learned": self.learned}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.learned = state["learned"]


class Deaf(Learner):
    learns = False


def batch(number):
    return DataProto.from_dict({"x": torch.tensor([[number]])})


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("resumed_twice", [False, True])
def test_what_was_heard_is_heard_again(ahead, resumed_twice):
    """As the loop goes: begin as many batches as are allowed ahead, train the oldest; at every step as if it ended."""
    order = Learner()
    updates, begun, place = HeardUpdates(order), deque(), None
    for step in range(1, 9):
        while len(begun) < 1 + ahead:
            order.position += 1
            begun.append(SimpleNamespace(data=copy.deepcopy(order.state_dict()), heard=updates.count))
        oldest = begun.popleft()
        place = oldest.data
        updates.forget_before(oldest.heard)
        updates.update(batch(step))
        assert len(updates.state_dict()) <= ahead + 1
        later = Learner()
        later.load_state_dict(place)
        again = HeardUpdates(later)
        again.load_state_dict(updates.state_dict())
        assert (later.learned, later.position) == (order.learned, place["position"])
        if resumed_twice:  # saved again before anything new was begun
            third = Learner()
            third.load_state_dict(place)
            HeardUpdates(third).load_state_dict(again.state_dict())
            assert third.learned == order.learned


def test_an_order_that_does_not_learn_keeps_nothing():
    updates = HeardUpdates(Deaf())
    updates.update(batch(1))
    assert updates.state_dict() == {}
