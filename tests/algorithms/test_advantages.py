"""GAE, REINFORCE++ and ReMax against plain loops over the tokens of each response."""

import math

import numpy as np
import pytest
import torch

from meshrl.algorithms import (
    ADVANTAGE_ESTIMATORS,
    compute_advantage,
    compute_distillation_advantage,
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    get_adv_estimator_fn,
    masked_var,
    masked_whiten,
    register_adv_est,
)
from meshrl.algorithms.advantages import discounted_suffix_sum


def example(batch: int, length: int, gaps: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    if gaps:
        mask *= (torch.rand(batch, length, generator=generator) < 0.6).long()
    mask[:, 0] = 1
    mask[-1] = 0
    rewards = torch.randn(batch, length, generator=generator) * mask
    return rewards, mask, torch.randn(batch, length, generator=generator)


def steps(mask: torch.Tensor, row: int) -> list[int]:
    return mask[row].nonzero().view(-1).tolist()


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = values[mask.bool()].double().tolist()
    mean = sum(kept) / len(kept)
    variance = sum((x - mean) ** 2 for x in kept) / (len(kept) - 1)
    return (values - mean) / math.sqrt(variance + 1e-8) * mask


def slow_gae(rewards, values, mask, gamma, lam):  # type: ignore[no-untyped-def]
    advantages = torch.zeros_like(rewards)
    for row in range(len(mask)):
        next_value = running = 0.0
        for t in reversed(steps(mask, row)):
            delta = rewards[row, t].item() + gamma * next_value - values[row, t].item()
            running = delta + gamma * lam * running
            next_value = values[row, t].item()
            advantages[row, t] = running
    return advantages


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 300])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_equals_a_loop(length: int, gaps: bool, gamma: float, lam: float) -> None:
    rewards, mask, values = example(5, length, gaps)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    slow = slow_gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(returns, (slow + values) * mask, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(advantages, whitened(slow, mask), rtol=1e-4, atol=2e-5)


def test_gae_of_very_long_rows_crosses_three_levels() -> None:
    values = torch.randn(2, 9001, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slow = torch.zeros_like(values)
    running = torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(9001)):
        running = values[:, t] + 0.999 * running
        slow[:, t] = running
    torch.testing.assert_close(discounted_suffix_sum(values, 0.999), slow)
    assert not torch.allclose(discounted_suffix_sum(values, 0.998), slow, rtol=1e-3)


@pytest.mark.parametrize("length", [5, 32, 64, 100, 8224])
def test_a_suffix_sum_goes_where_it_is_told_and_leaves_its_input_alone(length: int) -> None:
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(1))
    given, slow = values.clone(), torch.zeros(3, length, dtype=torch.float64)
    running = torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        running = values[:, t] + 0.5 * running
        slow[:, t] = running
    out = torch.full_like(values, float("nan"))
    discounted_suffix_sum(given, 0.5, out=out)
    torch.testing.assert_close(out, slow.float())
    assert torch.equal(given, values)
    torch.testing.assert_close(discounted_suffix_sum(given.T.contiguous().T, 0.5), slow.float())


def test_rows_in_several_blocks_some_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, gapped = example(5, 65, gaps=False), example(5, 65, gaps=True, seed=1)
    rewards, mask, values = (torch.cat(pair) for pair in zip(plain, gapped, strict=True))
    slow = slow_gae(rewards, values, mask, 0.99, 0.95)
    for rows in (1, 3, 5, 10):
        monkeypatch.setattr("meshrl.algorithms.masking.BLOCK_ELEMENTS", rows * 65)
        advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
        torch.testing.assert_close(returns, (slow + values) * mask, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(advantages, whitened(slow, mask), rtol=1e-4, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tf32_for_models_leaves_advantages_exact() -> None:
    rewards, mask, values = example(5, 300, gaps=False)
    expected = compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = compute_gae_advantage_return(rewards.cuda(), values.cuda(), mask.cuda(), 0.99, 0.95)
    finally:
        torch.set_float32_matmul_precision(before)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gaps", [False, True])
def test_padding_does_not_matter(gaps: bool) -> None:
    rewards, mask, values = example(4, 9, gaps)
    expected = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.9)
    poisoned = values.masked_fill(mask == 0, float("nan"))
    for one, other in zip(compute_gae_advantage_return(rewards, poisoned, mask, 0.9, 0.9), expected, strict=True):
        torch.testing.assert_close(one, other)
        assert bool((one[mask == 0] == 0).all())


def test_a_reward_on_tool_output_belongs_to_the_action_before_it() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 0]])
    values = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    on_tool, on_action = torch.zeros(1, 6), torch.zeros(1, 6)
    on_tool[0, 3], on_tool[0, 5] = 1.0, 2.0
    on_action[0, 1], on_action[0, 4] = 1.0, 2.0
    for given, expected in zip(
        compute_gae_advantage_return(on_tool, values, mask, 0.9, 0.8),
        compute_gae_advantage_return(on_action, values, mask, 0.9, 0.8),
        strict=True,
    ):
        torch.testing.assert_close(given, expected)
    with pytest.raises(ValueError, match="before the first token"):
        compute_gae_advantage_return(on_tool, values, torch.tensor([[0, 0, 0, 0, 1, 1]]), 0.9, 0.8)


@pytest.mark.parametrize("gaps", [False, True])
def test_reinforce_plus_plus_equals_a_loop(gaps: bool) -> None:
    rewards, mask, _ = example(5, 70, gaps, seed=3)
    slow = torch.zeros_like(rewards)
    for row in range(5):
        running = 0.0
        for t in reversed(steps(mask, row)):
            running = rewards[row, t].item() + 0.97 * running
            slow[row, t] = running
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.97)
    torch.testing.assert_close(returns, slow, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(advantages, whitened(slow, mask), rtol=1e-4, atol=1e-5)
    undiscounted, _ = compute_reinforce_plus_plus_outcome_advantage(rewards, mask)
    assert not torch.allclose(undiscounted, advantages)


@pytest.mark.parametrize("gaps", [False, True])
def test_remax_equals_a_loop(gaps: bool) -> None:
    rewards, mask, _ = example(4, 20, gaps, seed=4)
    baselines = torch.tensor([0.5, -1.0, 0.0, 2.0])
    slow = torch.zeros_like(rewards)
    for row in range(4):
        for t in steps(mask, row):
            slow[row, t] = sum(rewards[row, s].item() for s in steps(mask, row) if s >= t) - baselines[row]
    advantages, returns = compute_remax_outcome_advantage(rewards, baselines, mask)
    torch.testing.assert_close(advantages, slow, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, (slow + baselines[:, None]) * mask, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """Over all tokens of a small vocabulary, each as often as the policy samples it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, requires_grad=True)
    policy, teacher = logits.log_softmax(0), torch.randn(7, generator=generator).log_softmax(0)
    every_token = policy.detach()[:, None], torch.ones(7, 1)
    advantages, _ = compute_distillation_advantage(teacher[:, None], *every_token)
    surrogate = -(policy.detach().exp() * advantages[:, 0] * policy).sum()
    (found,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, expected)
    (forward,) = torch.autograd.grad((teacher.exp() * (teacher - policy)).sum(), logits)
    assert not torch.allclose(found, forward, rtol=0.1)


def test_distillation_looks_at_tokens_of_the_policy_only() -> None:
    teacher, old = torch.tensor([[-1.0, float("nan"), -3.0]]), torch.tensor([[-2.0, -1.0, -1.0]])
    advantages, returns = compute_distillation_advantage(teacher, old, torch.tensor([[1, 0, 1]]))
    assert advantages.tolist() == returns.tolist() == [[1.0, 0.0, -2.0]]
    with pytest.raises(ValueError, match="ref_log_prob"):
        compute_distillation_advantage(teacher, old, torch.ones(1, 3))


def test_whitening() -> None:
    values = torch.tensor([[1.0, 2.0, float("nan")], [4.0, float("inf"), 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    kept = np.array([1.0, 2.0, 4.0, 9.0])
    white = masked_whiten(values, mask)
    np.testing.assert_allclose(white[mask.bool()].numpy(), (kept - 4) / kept.std(ddof=1), rtol=1e-6)
    assert bool((white[mask == 0] == 0).all())
    shifted = masked_whiten(values, mask, shift_mean=False)
    assert shifted[mask.bool()].mean().item() == pytest.approx(4.0)
    assert masked_var(values, mask).item() == pytest.approx(kept.var(ddof=1))
    with pytest.raises(ValueError, match="selects no token"):
        masked_whiten(values, torch.zeros_like(mask))


def test_whitening_keeps_its_digits_far_from_zero() -> None:
    values = 1000.0 + torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(7, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    kept = values[mask].double()
    white = masked_whiten(values, mask)
    torch.testing.assert_close(white[mask].double(), (kept - kept.mean()) / kept.std(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.1, 33.3, -100.1, 1000.1])
def test_equal_values_are_whitened_to_exactly_zero(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.arange(70) < 50 + torch.arange(64)[:, None] % 7
    values = torch.full((64, 70), value)
    rewards = torch.zeros(64, 70)
    rewards[torch.arange(64), mask.sum(1) - 1] = value
    for elements in (2**18, 640):  # at once, and in blocks of nine rows
        monkeypatch.setattr("meshrl.algorithms.masking.BLOCK_ELEMENTS", elements)
        assert not masked_whiten(values, mask).any()
        assert not compute_reinforce_plus_plus_outcome_advantage(rewards, mask)[0].any()
        assert not compute_gae_advantage_return(rewards, torch.zeros(64, 70), mask, 1.0, 1.0)[0].any()
        # The control: one that differs by little is seen, also in a block of its own.
        other = values.clone()
        other[-1, 0] *= 1.001
        assert masked_whiten(other, mask)[-1, 0].abs() > 0.5


def test_by_name_with_the_arguments_it_takes() -> None:
    rewards, mask, values = example(4, 6, gaps=True)
    index = np.array(["a", "a", "b", "b"])
    by_name = compute_advantage(
        "gae", token_level_rewards=rewards, response_mask=mask, index=index, values=values, gamma=0.9, lam=0.8
    )
    torch.testing.assert_close(by_name[0], compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)[0])
    with pytest.raises(ValueError, match="'gae' needs values"):
        compute_advantage("gae", token_level_rewards=rewards, response_mask=mask)
    with pytest.raises(ValueError, match="'grpo' needs index"):
        compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask)
    with pytest.raises(ValueError, match="'remax' needs reward_baselines"):
        compute_advantage("remax", token_level_rewards=rewards, response_mask=mask)
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        get_adv_estimator_fn("grop")
    without_std = compute_advantage(
        "grpo",
        token_level_rewards=rewards,
        response_mask=mask,
        index=index,
        config=type("C", (), {"norm_adv_by_std_in_grpo": False}),
    )
    with_std = compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask, index=index)
    assert not torch.allclose(without_std[0], with_std[0])


def test_the_field_is_there() -> None:
    assert set(ADVANTAGE_ESTIMATORS) >= {
        "gae",
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "gdpo",
        "rloo",
        "rloo_vectorized",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gpg",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }


def test_a_registered_estimator_is_run_by_name() -> None:
    @register_adv_est("test_only_estimator")
    def mine(token_level_rewards: torch.Tensor, **extra: object) -> tuple[torch.Tensor, torch.Tensor]:
        assert "response_mask" in extra
        return token_level_rewards, token_level_rewards

    rewards = torch.ones(1, 2)
    assert compute_advantage("test_only_estimator", token_level_rewards=rewards, response_mask=rewards)[0] is rewards
    del ADVANTAGE_ESTIMATORS._functions["test_only_estimator"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_ESTIMATORS) - {"distillation"}))  # it has no rewards
def test_bad_rewards_are_refused_with_their_place(name: str, bad: float) -> None:
    rewards, mask, values = example(4, 6, gaps=False)
    rewards[2, 0] = bad
    arguments = {
        "response_mask": mask,
        "index": np.array([0, 0, 1, 1]),
        "values": values,
        "reward_baselines": torch.zeros(4),
        "old_log_probs": -torch.ones(4, 6),
        "sum_pi_squared": torch.ones(4, 6),
    }
    with pytest.raises(ValueError, match=r"token_level_rewards has 1 non-finite values, .* at \(2, 0\)"):
        compute_advantage(name, token_level_rewards=rewards, **arguments)
    rewards[2, 0] = 0.0
    compute_advantage(name, token_level_rewards=rewards, **arguments)
    with pytest.raises(ValueError, match="selects no token"):
        compute_advantage(name, token_level_rewards=rewards, **{**arguments, "response_mask": torch.zeros_like(mask)})
    with pytest.raises(ValueError, match="shape"):
        compute_advantage(name, token_level_rewards=rewards[:, :5], **arguments)


def test_bad_values_are_refused() -> None:
    rewards, mask, values = example(3, 4, gaps=False)
    values[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"values has 1 non-finite values, the first is nan at \(0, 0\)"):
        compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_grpo_over_the_batchs_deviation_is_trls_scaling(name, offset):
    """`scale_rewards="batch"` of TRL: less the group's mean, over the deviation of all rewards."""
    scores = np.asarray([0.0, 1.0, 1.0, 3.0, 0.5, 0.5, 2.0, 7.0]) + offset
    rewards, mask = torch.zeros(8, 3), torch.ones(8, 3)
    rewards[:, -1] = torch.from_numpy(scores)
    groups = scores.reshape(2, 4)
    wanted = (groups - groups.mean(1, keepdims=True)).reshape(-1) / (scores.std(ddof=1) + 1e-6)
    index = list("aaaabbbb")
    given = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
    for settings in ({"norm_adv_std_over": "batch"}, {"config": {"norm_adv_std_over": "batch"}}):
        found, _ = compute_advantage(name, **given, **settings)
        torch.testing.assert_close(found[:, 0].double(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5)
    by_group, _ = compute_advantage(name, **given, norm_adv_std_over="group")
    assert not torch.allclose(by_group[:, 0].double(), torch.from_numpy(wanted), rtol=1e-2)
    assert torch.equal(by_group, compute_advantage(name, **given)[0])
    without, _ = compute_advantage(name, **given, norm_adv_std_over="batch", norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(without[:, 0].double() / (scores.std(ddof=1) + 1e-6), torch.from_numpy(wanted))
    with pytest.raises(ValueError, match="did you mean 'batch'"):
        compute_advantage(name, **given, norm_adv_std_over="btach")


def test_a_batch_of_one_sample_has_no_deviation():
    one = torch.ones(1, 2)
    found, _ = compute_advantage(
        "grpo", token_level_rewards=one, response_mask=one, index=["a"], norm_adv_std_over="batch"
    )
    assert found.tolist() == [[0.0, 0.0]]
