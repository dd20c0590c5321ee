"""Routes of the rollout are there where they are replayed, and are not taken for others."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshrl.data.batch import DataProto
from meshrl.models.moe_routing import ROUTED_EXPERTS
from meshrl.trainer.rl_trainer import check_routes


def check(records, column):
    batch = DataProto.from_dict({"x": torch.zeros(2)}, {} if column is None else {ROUTED_EXPERTS: column})
    check_routes(batch, SimpleNamespace(actor_rollout_ref=SimpleNamespace(records_routes=records)))
    return ROUTED_EXPERTS in batch.non_tensor_batch


def column(*values):
    made = np.full(len(values), None, object)
    for place, value in enumerate(values):
        made[place] = value
    return made


def test_routes_are_kept_for_r3_alone():
    some = column(None, np.zeros((3, 1, 1), np.uint8))
    assert check(True, some)
    assert not check(False, some)
    assert not check(False, None)


@pytest.mark.parametrize("missing", [None, column(None, None)])
def test_a_batch_without_any_is_an_error(missing):
    with pytest.raises(ValueError, match="no sample of the batch has routed_experts"):
        check(True, missing)
