"""Group estimators against plain loops over samples, and the rule for groups of one."""

import statistics
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshrl.algorithms import (
    compute_advantage,
    compute_gdpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    get_adv_estimator_fn,
    group_metrics,
    informative_samples,
)

GROUP_ESTIMATORS = ["grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg"]
INDEX = np.array(["b", "a", "b", "c", "a", "b", "d", "a", "a"], dtype=object)


def example(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(9, 6, generator=generator) < 0.7).long()
    mask[:, 1] = 1
    return torch.randn(9, 6, generator=generator), mask


def slow_scores(name: str, rewards: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """One number a sample by the formula of each paper, before any whitening."""
    scores = rewards.double().sum(-1).tolist()
    lengths = mask.sum(-1).tolist()
    groups = defaultdict(list)
    for sample, group in enumerate(INDEX):
        groups[group].append(sample)
    out = []
    for sample, group in enumerate(INDEX):
        members = groups[group]
        if len(members) == 1:
            out.append(0.0)
            continue
        own = [scores[m] for m in members]
        mean, std = statistics.mean(own), statistics.stdev(own)
        if name in ("grpo", "gdpo"):
            out.append((scores[sample] - mean) / (std + 1e-6))
        elif name == "rloo":
            out.append(scores[sample] - statistics.mean(scores[m] for m in members if m != sample))
        elif name == "opo":
            baseline = sum(lengths[m] * scores[m] for m in members) / sum(lengths[m] for m in members)
            out.append(scores[sample] - baseline)
        elif name == "gpg":
            out.append((scores[sample] - mean) * len(scores) / sum(s != 0 for s in scores))
        elif name == "grpo_passk":
            best, second = sorted(own, reverse=True)[:2]
            out.append((best - second) / (std + 1e-6) if scores[sample] == best else 0.0)
        else:
            out.append(scores[sample] - mean)
    return out


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
def test_equals_a_loop(name: str, seed: int) -> None:
    rewards, mask = example(seed)
    expected = torch.tensor(slow_scores(name, rewards, mask), dtype=torch.float32)[:, None] * mask
    if name in ("gdpo", "reinforce_plus_plus_baseline"):
        in_group = mask.bool() & torch.tensor([[g not in "cd"] for g in INDEX])
        kept = expected[in_group]
        expected = ((expected - kept.mean()) / (kept.var() + 1e-8).sqrt()) * in_group
    advantages, returns = get_adv_estimator_fn(name)(rewards, mask, INDEX)
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
    assert returns is advantages


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_has_advantage_zero(name: str) -> None:
    rewards, mask = example()
    advantages, _ = get_adv_estimator_fn(name)(rewards, mask, INDEX)
    assert bool((advantages[[3, 6]] == 0).all())
    assert bool((advantages[[0, 2, 5]] != 0).any())
    alone, _ = get_adv_estimator_fn(name)(rewards, mask, np.arange(9))
    assert bool((alone == 0).all())


def test_groups_are_counted() -> None:
    scores = torch.tensor([1.0, 0.3, 1.0, 1.0, 0.3, 1.0, 0.0, 0.3, 0.4])
    metrics = group_metrics(scores, INDEX)
    assert metrics == {
        "groups/count": 4,
        "groups/single_sample": 2,
        "groups/equal_scores": 1,
        "groups/size_min": 1,
        "groups/size_max": 4,
    }
    assert informative_samples(scores, INDEX).tolist() == [False, True, False, False, True, False, False, True, True]


def test_dropped_samples_do_not_scale_gpg() -> None:
    rewards, mask = torch.zeros(6, 3), torch.ones(6, 3)
    rewards[:, -1] = torch.tensor([1.0, 2.0, 0.0, 2.0, 0.0, 5.0])
    gpg = get_adv_estimator_fn("gpg")
    kept, _ = gpg(rewards[:4], mask[:4], list("aabb"))
    mask[4:] = 0  # one whose reward failed, and one that was rejected with its reward
    found, _ = gpg(rewards, mask, list("aabbcd"))
    assert found[:4].equal(kept)
    assert kept[:, 0].tolist() == pytest.approx([-0.5 * 4 / 3, 0.5 * 4 / 3, -4 / 3, 4 / 3])


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_equal_scores_give_exactly_zero(name: str) -> None:
    """0.1 summed and divided again is not 0.1 in float32: no noise may be blown up by the std's epsilon."""
    rewards = torch.full((9, 6), 0.1)
    advantages, _ = get_adv_estimator_fn(name)(rewards, torch.ones(9, 6), INDEX)
    assert bool((advantages == 0).all())


@pytest.mark.parametrize(
    "index",
    [
        np.array([0, 0, 1, 1]),
        ["x", "x", "y", "y"],
        torch.tensor([7, 7, 3, 3]),
        np.array([(1,), (1,), (2,), (2,), 0], dtype=object)[:4],
    ],
)
def test_any_ids_will_do(index: object) -> None:
    rewards = torch.tensor([[1.0], [0.0], [5.0], [1.0]])
    advantages, _ = compute_advantage("rloo", token_level_rewards=rewards, response_mask=torch.ones(4, 1), index=index)
    assert advantages.view(-1).tolist() == [1.0, -1.0, 4.0, -4.0]


def test_index_of_another_length_is_refused() -> None:
    rewards, mask = example()
    with pytest.raises(ValueError, match="index has 8 entries for a batch of 9"):
        compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask, index=INDEX[:8])


def test_passk_ties_have_no_lead() -> None:
    rewards = torch.tensor([[2.0], [2.0], [1.0]])
    advantages, _ = compute_grpo_passk_outcome_advantage(rewards, torch.ones(3, 1), np.zeros(3))
    assert bool((advantages == 0).all())


def test_gdpo_normalises_each_component() -> None:
    """A component a hundred times as large must not drown the other; only its weight counts."""
    generator = torch.Generator().manual_seed(2)
    small, large = torch.rand(8, generator=generator), 100 * torch.rand(8, generator=generator)
    mask, index = torch.ones(8, 3), np.repeat([0, 1], 4)
    normal = lambda x: torch.cat([(g - g.mean()) / (g.std() + 1e-6) for g in x.split(4)])  # noqa: E731
    total = 2 * normal(small) + 3 * normal(large)
    expected = ((total - total.mean()) / (total[:, None] * mask).var().sqrt())[:, None] * mask
    config = SimpleNamespace(gdpo_reward_keys=["s", "l"], gdpo_reward_weights=[2, 3])
    batch = {"s": small.numpy(), "l": np.array(large.tolist(), dtype=object), "other": np.zeros(8)}
    rewards = torch.zeros(8, 3)
    advantages, _ = compute_gdpo_outcome_advantage(rewards, mask, index, config=config, non_tensor_batch=batch)
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
    given, _ = compute_gdpo_outcome_advantage(
        rewards, mask, index, reward_components={"s": small, "l": large}, reward_weights=[2.0, 3.0]
    )
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"names \['l'\], which the reward function did not return"):
        compute_gdpo_outcome_advantage(rewards, mask, index, config=config, non_tensor_batch={"s": small.numpy()})
    with pytest.raises(ValueError, match="reward_weights has 1 entries"):
        compute_gdpo_outcome_advantage(
            rewards, mask, index, reward_components={"s": small, "l": large}, reward_weights=[1.0]
        )
