"""AdamW with split master weights against torch's own AdamW on float32 weights."""

import gc
import weakref

import pytest
import torch
from torch import nn

from meshrl.engines.optim import MasterAdamW, join, split


def test_a_float32_number_is_its_bfloat16_and_a_remainder():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(100_000, generator=generator) * torch.logspace(-30, 30, 100_000)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.00390625, 1.01171875, 3.38e38, 1e-38, 1e-45, -1e-45])
    numbers = torch.cat([numbers, special])
    high, remainder = split(numbers)
    assert torch.equal(join(high, remainder).view(torch.int32), numbers.view(torch.int32))
    # nearest, as torch rounds, but for ties, which torch sends to even
    rounded = numbers.bfloat16()
    ties = remainder == -32768
    assert torch.equal(high[~ties].view(torch.int16), rounded[~ties].view(torch.int16))


def reference(weights, gradients, **options):
    param = nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([param], **options)
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    return param.detach(), optimizer.state[param]["exp_avg_sq"]


OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_steps_equal_adamw_in_float32():
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(33, 17, generator=generator)
    gradients = [torch.randn(33, 17, generator=generator).bfloat16().float() for _ in range(20)]
    expected, square = reference(weights, gradients, **OPTIONS)
    param = nn.Parameter(weights.bfloat16())
    optimizer = MasterAdamW([param, nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], **OPTIONS)
    optimizer.set_master(param, weights)
    for gradient in gradients:
        optimizer.zero_grad()
        (param * gradient.bfloat16()).sum().backward()
        optimizer.step()
    torch.testing.assert_close(optimizer.master(param), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], square, rtol=1e-5, atol=1e-7)
    # what bfloat16 alone would have lost
    assert (param.detach().float() - expected).abs().max() > 1e-3
    assert (param.detach().float() - expected).abs().max() < 2**-8 * expected.abs().max()


def test_tiny_updates_are_not_lost():
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterAdamW([param], lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for _ in range(100):
        optimizer.zero_grad()
        (param.float().sum() * 1.0).backward()
        optimizer.step()
    assert torch.all(optimizer.master(param) < 0.9905)
    torch.testing.assert_close(param.detach().float(), optimizer.master(param), rtol=2**-8, atol=0)


@pytest.mark.parametrize("in_float32", [True, False])
def test_micro_batches_add_up(in_float32):
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW(
        [param], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, accumulate_in_float32=in_float32
    )
    parts = [1.0, *[1 / 512] * 256]
    for part in parts:
        (param * part).sum().backward()
    total = float(optimizer.grads[0][0])
    if in_float32:
        assert total == pytest.approx(1.5)
    else:
        assert total == 1.0  # each part alone is below bfloat16's next number after 1
    norm = optimizer.clip_grad_norm(0.5)
    assert norm == pytest.approx(2 * total)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"][0] == pytest.approx(0.1 * total * 0.5 / norm, rel=1e-5)


def test_it_refuses_other_types():
    with pytest.raises(ValueError, match="bfloat16"):
        MasterAdamW([nn.Parameter(torch.zeros(2))], **OPTIONS)


def test_moving_away_and_back_changes_nothing():
    param = nn.Parameter(torch.linspace(-1, 1, 130, dtype=torch.bfloat16))
    other = nn.Parameter(torch.ones(7, 3, dtype=torch.bfloat16))
    optimizer = MasterAdamW([param, other], **OPTIONS)
    for _ in range(3):
        optimizer.zero_grad()
        (param.sum() * other.sum()).backward()
        optimizer.step()
        before = [optimizer.master(p).clone() for p in (param, other)]
        optimizer.move(torch.device("cpu"), params=True, states=True)
        assert all(torch.equal(optimizer.master(p), kept) for p, kept in zip((param, other), before, strict=True))
        assert param.data_ptr() == optimizer.flat["param"].data_ptr()


@pytest.mark.parametrize("in_float32", [True, False])
def test_gradients_that_are_no_longer_needed_rest_nowhere(in_float32):
    """As an update leaves them; those that have not been applied are kept."""
    param = nn.Parameter(torch.ones(130, dtype=torch.bfloat16))
    optimizer = MasterAdamW([param], **OPTIONS, accumulate_in_float32=in_float32)
    there, home = torch.device("meta"), torch.device("cpu")

    def moved(clears):
        """What was moved on the way to a device where nothing is kept."""
        optimizer.zero_grad()
        param.sum().backward()
        if clears:
            optimizer.step()
            optimizer.zero_grad()
        seen = []
        optimizer._host.move = lambda name, tensor, device: (seen.append(name), tensor)[1]
        optimizer.move(there, params=False, states=True)
        optimizer.move(home, params=False, states=True)
        return seen

    assert ("grad" in moved(clears=True)) == (not in_float32)
    assert float(optimizer.flat["grad"].abs().max()) == 0
    assert "grad" in moved(clears=False)
    assert float(optimizer.flat["grad"].abs().max()) == 1


def test_an_optimizer_is_freed_with_its_parameters():
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([param], **OPTIONS)
    param.sum().backward()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
