"""What an update measures: over the computed tokens, over the fresh ones, and nothing where there are none."""

import pytest
import torch

from meshrl.config.actor_critic import ActorConfig
from meshrl.data.batch import DataProto
from meshrl.engines.batching import add_metrics
from meshrl.workers.actor import FRESH, count_mini_batch, make_actor_loss

DIFFERENCE = "training/rollout_log_prob_diff"
# Two ranks of two samples each: the response tokens, and which of them the present weights have sampled.
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
IS_FRESH = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]]).bool()
GAP = torch.tensor([[0.1, 9.0, 7.0], [-0.2, 0.4, 8.0], [9.0, 6.0, 6.0], [9.0, 0.3, 5.0]])


def measured(mask=MASK, fresh=IS_FRESH, computed=(0, 1), compare=True):
    """The metrics of a mini-batch whose rows `computed` of each rank are computed; a rank without any has a blank."""
    ranks = [slice(0, 2), slice(2, 4)]
    rows = torch.tensor(computed, dtype=torch.long)
    # What the ranks would add up between them.
    whole = torch.cat([rows, rows + 2])
    stats, counted = count_mini_batch(mask, whole, ActorConfig(), 2, lambda counts: counts, fresh if compare else None)
    loss = make_actor_loss(ActorConfig(), stats, counted, "rollout_log_probs" if compare else None)
    parts = []
    for rank in ranks:
        log_probs = -torch.ones(2, 3)
        tensors = {
            "response_mask": mask[rank],
            "advantages": torch.ones(2, 3),
            "rollout_log_probs": log_probs - GAP[rank],
            FRESH: fresh[rank],
        }
        data = DataProto.from_dict(tensors)
        data = data.select_idxs(rows) if len(rows) else data
        if not len(rows):
            data.batch["response_mask"] = torch.zeros(2, 3, dtype=torch.long)
        output = {"log_probs": log_probs[: len(data)], "entropys": torch.full((len(data), 3), 0.5)}
        parts.append(loss(output, data)[1])
    return add_metrics(parts, None)


def test_where_no_token_is_computed_nothing_is_measured():
    assert measured(computed=()) == {"actor/pg_loss": 0.0}
    assert measured(mask=torch.zeros_like(MASK), computed=()) == {"actor/pg_loss": 0.0}
    assert measured()["actor/entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize("computed", [(0, 1), (1,)])
def test_only_tokens_of_the_present_weights_are_compared(computed):
    gaps = [abs(GAP[row, at].item()) for row, at in IS_FRESH.nonzero().tolist() if row % 2 in computed]
    found = measured(computed=computed)
    assert found[f"{DIFFERENCE}_mean"] == pytest.approx(sum(gaps) / len(gaps))
    assert found[f"{DIFFERENCE}_max"] == pytest.approx(max(gaps))


def test_without_fresh_tokens_there_is_no_comparison():
    assert not any(name.startswith(DIFFERENCE) for name in measured(fresh=torch.zeros_like(IS_FRESH)))
    assert not any(name.startswith(DIFFERENCE) for name in measured(compare=False))
