"""KL estimators, their gradients, controllers and KL in the reward."""

import math
from types import SimpleNamespace

import pytest
import torch

from meshrl.algorithms import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    compute_kl_loss,
    get_kl_controller,
    kl_penalty,
)

VALUES = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
SAME = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("name", [*VALUES, *SAME])
@pytest.mark.parametrize("plus", ["", "+"])
def test_values(name: str, plus: str) -> None:
    logprob = torch.tensor([-1.0, -0.5, -3.0, -0.1])
    reference = torch.tensor([-1.2, -0.5, -1.5, -2.1])
    expected = [VALUES[SAME.get(name, name)](d) for d in (logprob - reference).tolist()]
    assert kl_penalty(logprob, reference, name + plus).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", [*VALUES, *SAME])
def test_plus_has_the_gradient_of_k2(name: str) -> None:
    reference = torch.tensor([-1.2, -0.5, -1.5])
    gradients = []
    for kind in (name + "+", "k2", name):
        logprob = torch.tensor([-1.0, -0.7, -3.0], requires_grad=True)
        kl_penalty(logprob, reference, kind).sum().backward()
        gradients.append(logprob.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert torch.allclose(gradients[2], gradients[1]) == (name in ("k2", "mse"))


def test_k3_plus_has_the_gradient_of_the_true_kl_in_expectation() -> None:
    """Exact expectation over a small vocabulary: plain k1's is zero, the + form's is the true one."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5, 0.2]), 0)
    log_p = torch.log_softmax(logits, 0)
    (true,) = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits, retain_graph=True)
    weights = log_p.exp().detach()
    (plus,) = torch.autograd.grad((weights * kl_penalty(log_p, reference, "k3+")).sum(), logits, retain_graph=True)
    (plain,) = torch.autograd.grad((weights * kl_penalty(log_p, reference, "k1")).sum(), logits)
    torch.testing.assert_close(plus, true)
    assert plain.abs().max() < 1e-6


def test_extremes_are_finite_and_bounded() -> None:
    values = kl_penalty(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]), "k3")
    assert values.tolist() == [10.0, 10.0]


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'low_var_kl\+'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "lowvar_kl+")
    with pytest.raises(ValueError, match="unknown kl_penalty 'full'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")
    with pytest.raises(ValueError, match="shape"):
        kl_penalty(torch.zeros(1), torch.zeros(2), "k1")


def test_kl_loss_is_the_aggregated_estimate() -> None:
    log_prob, reference = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    loss, metrics = compute_kl_loss(log_prob, reference, torch.tensor([[1, 1, 0]]), "k2")
    assert loss.item() == pytest.approx((0.125 + 0.5) / 2)
    assert metrics["actor/kl_loss"].item() == pytest.approx(loss.item())


def test_rewards_with_kl() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [5.0, 0.0, 0.0]])
    old, reference = torch.full((3, 3), -1.0), torch.tensor([[-1.5, -2.0, 7.0], [-1.0, -1.0, -0.5], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    controller = FixedKLController(0.1)
    rewards, metrics = apply_kl_penalty(scores, old, reference, mask, controller)
    expected = torch.tensor([[-0.05, 0.9, 0.0], [0.0, 0.0, 2.05], [5.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)
    # Mean over the two sequences that have tokens, of 0.75 and -1/6.
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.75 - 0.5 / 3) / 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    with pytest.raises(ValueError, match="selects no token"):
        apply_kl_penalty(scores, old, reference, torch.zeros_like(mask), controller)


def test_adaptive_controller_moves_towards_the_target_and_resumes() -> None:
    controller = AdaptiveKLController(0.2, target_kl=6.0, horizon=100)
    controller.update(current_kl=60.0, n_steps=10)
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 10 / 100))
    controller.update(current_kl=5.7, n_steps=50)
    assert controller.value == pytest.approx(0.2 * 1.02 * (1 - 0.05 * 0.5))
    resumed = AdaptiveKLController(9.9, target_kl=6.0, horizon=100)
    resumed.load_state_dict(controller.state_dict())
    for one in (controller, resumed):
        one.update(0.0, 10)
    assert resumed.value == controller.value
    fixed = FixedKLController(0.3)
    fixed.update(100.0, 100)
    assert fixed.value == 0.3


def test_a_resumed_fixed_controller_has_the_configs_coefficient() -> None:
    for saved in (FixedKLController(0.001), AdaptiveKLController(0.001, 0.1, 100)):
        changed = FixedKLController(0.5)
        changed.load_state_dict(saved.state_dict())
        assert changed.value == 0.5
    adaptive = AdaptiveKLController(0.5, 0.1, 100)
    adaptive.load_state_dict(FixedKLController(0.001).state_dict())
    assert adaptive.value == 0.5


def test_the_adaptive_coefficient_stays_positive_with_many_samples() -> None:
    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=1000)
    controller.update(current_kl=0.0, n_steps=4900)
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 4.9))  # the formula, as long as it is positive
    for _ in range(3):
        before = controller.value
        controller.update(current_kl=0.0, n_steps=8192)
        assert 0 < controller.value < before


def test_controller_by_config() -> None:
    config = SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.2, horizon=1000)
    assert isinstance(get_kl_controller(config), AdaptiveKLController)
    config.type = "fixed"
    assert get_kl_controller(config).value == 0.1
    config.type = "adaptve"
    with pytest.raises(ValueError, match="did you mean 'adaptive'"):
        get_kl_controller(config)
    with pytest.raises(ValueError, match="must be positive"):
        AdaptiveKLController(0.1, 0.0, 10)
