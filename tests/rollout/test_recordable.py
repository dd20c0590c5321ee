"""Which operations a recorded step must not hold: those after which the host has to know what the device found."""

import pytest
import torch

from meshrl.rollout.embedded.graph_capture import what_waits

X = torch.arange(12.0).view(3, 4)
WAITING = {
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 3),
    "item": lambda: X.sum().item(),
    "mask": lambda: X[X > 3],
    "put by a mask": lambda: X.clone().__setitem__(X > 3, 0.0),
    "unique": lambda: X.unique(),
    "grouped product in float32": lambda: torch._grouped_mm(X, torch.ones(2, 4, 8), offs=torch.tensor([1, 3]).int()),
}
RECORDABLE = {
    "products": lambda: (X @ X.T).softmax(-1),
    "index": lambda: X[torch.tensor([2, 0])],
    "bytes put by places": lambda: torch.zeros(4, dtype=torch.uint8).index_put(
        (torch.tensor([1]),), torch.ones(1).byte()
    ),
    "top-k and sort": lambda: X.topk(2).indices.sort(),
    "histogram": lambda: torch.histc(X, bins=4, min=0, max=3).cumsum(0),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_named(name):
    assert what_waits(WAITING[name]) is not None


@pytest.mark.parametrize("name", RECORDABLE)
def test_what_does_not_wait_is_let_through(name):
    assert what_waits(RECORDABLE[name]) is None
