"""The optimizer and its schedule against AdamW's formulas and schedules written out by hand."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from meshrl.config.engine import OptimConfig
from meshrl.engines.optim import LearningRate, LocalAdamW, build_optimizer, lr_factor


def rates(config: OptimConfig, total: int, steps: int) -> list[float]:
    """The learning rate that each optimizer step would have, by the scheduler."""
    optimizer = build_optimizer([nn.Parameter(torch.ones(2))], config)
    scheduler = LearningRate(optimizer, config, total)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_constant_after_warm_up():
    config = OptimConfig(lr=2.0, lr_warmup_steps=4)
    assert rates(config, 6, 8) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates(OptimConfig(lr=0.3), 5, 2) == [0.3, 0.3]
    assert rates(OptimConfig(lr=0.3, lr_warmup_steps=0, lr_warmup_steps_ratio=0.9), 10, 2) == [0.3, 0.3]


def test_warm_up_by_ratio():
    config = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.25)
    assert rates(config, 10, 4) == [0.5, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_its_floor_and_stays_there():
    config = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.2)
    assert rates(config, 6, 9) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay():
    config = OptimConfig(lr=3.0, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    wanted = [3.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * min(step, 5) / 5)) / 2) for step in range(8)]
    assert rates(config, 5, 8) == pytest.approx(wanted)
    assert wanted[-1] == pytest.approx(0.3)


def test_warm_up_stable_decay():
    config = OptimConfig(
        lr=2.0, lr_scheduler_type="wsd", lr_warmup_steps=2, lr_decay_steps_ratio=0.4, min_lr_ratio=0.25
    )
    stable, decay = [2.0] * 5, [2.0 * (1 - 0.75 * step / 4) for step in range(1, 5)]
    assert rates(config, 10, 13) == pytest.approx([1.0, 2.0, *stable[:4], 2.0, *decay[:3], *[decay[3]] * 3])
    assert decay[3] == 0.5


def test_wsd_between_constant_and_linear():
    def factors(**fields):
        factor = lr_factor(OptimConfig(lr_warmup_steps=3, **fields), 12)
        return [factor(step) for step in range(15)]

    constant, linear = factors(), factors(lr_scheduler_type="linear")
    assert factors(lr_scheduler_type="wsd", lr_decay_steps_ratio=1.0) == linear
    late = factors(lr_scheduler_type="wsd", lr_decay_steps_ratio=0.25)
    assert late[:10] == constant[:10]
    assert late[12:] == linear[12:]
    assert constant != late != linear
    assert factors(lr_scheduler_type="wsd", lr_decay_steps_ratio=0.0)[:12] == constant[:12]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("total", [0, 1, 3])
def test_short_runs_and_long_warm_ups_stay_between_zero_and_one(kind, total):
    factor = lr_factor(OptimConfig(lr_scheduler_type=kind, lr_warmup_steps=5), total)
    found = [factor(step) for step in range(12)]
    assert all(0.0 <= value <= 1.0 for value in found)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_two_steps_of_adamw_by_hand():
    config = OptimConfig(lr=0.1, betas=[0.8, 0.95], weight_decay=0.3)
    param = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = build_optimizer([param], config)
    value, first, second = param.detach().double().clone(), torch.zeros(3).double(), torch.zeros(3).double()
    for step, grad in enumerate(torch.tensor([[0.1, -3.0, 0.0], [2.0, 0.5, 0.0]]), 1):
        param.grad = grad.clone()
        optimizer.step()
        first = 0.8 * first + 0.2 * grad.double()
        second = 0.95 * second + 0.05 * grad.double() ** 2
        value = value * (1 - 0.1 * 0.3)
        value -= 0.1 * (first / (1 - 0.8**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
    torch.testing.assert_close(param.detach().double(), value, rtol=1e-6, atol=1e-6)


def test_frozen_parameters_are_left_alone():
    frozen, trained = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([frozen, trained], OptimConfig(lr=0.1))
    assert [p is trained for group in optimizer.param_groups for p in group["params"]] == [True]
    trained.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(frozen, torch.ones(2))
    assert not torch.equal(trained, torch.ones(2))


def test_states_asked_for_before_the_first_step_leave_that_step_as_it_is():
    def weights_after(asks: bool) -> torch.Tensor:
        module = torch.nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.arange(6.0).view(2, 3))
        optimizer = LocalAdamW(module.parameters(), lr=0.1, fused=True)
        if asks:
            optimizer.make_states()
            found = get_optimizer_state_dict(module, optimizer)
            assert found["state"]["weight"]["step"] == 0
        module(torch.tensor([[1.0, -2.0, 3.0]])).sum().backward()
        optimizer.step()
        return module.weight.detach()

    assert torch.equal(weights_after(True), weights_after(False))
