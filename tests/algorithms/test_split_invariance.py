"""Any split of a mini-batch over ranks and micro-batches gives the same loss, gradient and metrics, for every loss."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.algorithms import (
    KL_PENALTIES,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    BatchStats,
    add_covariance_stats,
    compute_entropy_loss,
    compute_kl_loss,
    compute_value_loss,
    get_policy_loss_fn,
)

CONFIG = SimpleNamespace(
    clip_ratio=0.2,
    clip_ratio_high=0.3,
    clip_cov_ratio=0.2,
    clip_cov_lb=-0.1,
    kl_cov_ratio=0.3,
    policy_loss=SimpleNamespace(
        rollout_correction={
            "loss_type": "reinforce",
            "rollout_is": "sequence",
            "rollout_rs": "token_k3",
            "rollout_rs_threshold": 0.1,
        }
    ),
)
HORIZON = 9.0
few = settings(max_examples=12, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> SimpleNamespace:
    """A mini-batch with gaps and empty rows in its mask, and for each sample a (rank, micro-batch)."""
    batch, length, ranks, micro = draw(st.integers(2, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 3)), 2
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = (torch.rand(batch, length, generator=generator) < 0.7).long()
    mask[0, 0] = 1
    old = -2 * torch.rand(batch, length, generator=generator)
    return SimpleNamespace(
        mask=mask,
        old=old,
        new=(old + 0.5 * torch.randn(batch, length, generator=generator)).clamp(max=0.0),
        ref=old + 0.3 * torch.randn(batch, length, generator=generator),
        advantages=torch.randn(batch, length, generator=generator),
        weights=0.2 + 2 * torch.rand(batch, length, generator=generator),
        ranks=ranks,
        place=draw(
            st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(0, micro - 1)), min_size=batch, max_size=batch)
        ),
    )


def check_split(data: SimpleNamespace, compute, stats_of_whole: BatchStats, tol: float = 2e-5) -> None:  # type: ignore[no-untyped-def]
    """`compute(rows, parameter, stats) -> (loss, metrics)` on the whole and on the parts."""
    whole = data.new.clone().requires_grad_()
    loss, metrics = compute(slice(None), whole, stats_of_whole)
    loss.backward()

    split_stats = replace(stats_of_whole, dp_size=data.ranks)
    parameter = data.new.clone().requires_grad_()
    summed: dict[str, float] = dict.fromkeys(metrics, 0.0)
    total = 0.0
    for place in sorted(set(data.place)):
        rows = torch.tensor([i for i, own in enumerate(data.place) if own == place])
        part, part_metrics = compute(rows, parameter[rows], split_stats)
        # Gradients of micro-batches add up; those of ranks are averaged.
        (part / data.ranks).backward()
        total += part.item() / data.ranks
        assert set(part_metrics) == set(metrics)
        for name, value in part_metrics.items():
            summed[name] += float(value)
    assert total == pytest.approx(loss.item(), rel=tol, abs=tol)
    torch.testing.assert_close(parameter.grad, whole.grad, rtol=tol, atol=tol)
    for name, value in metrics.items():
        assert summed[name] == pytest.approx(float(value), rel=tol, abs=tol), name


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@few
@given(data=batches())
def test_policy_losses(name: str, data: SimpleNamespace) -> None:
    loss_fn = get_policy_loss_fn(name)
    stats = BatchStats.of(data.mask, loss_scale_factor=HORIZON)
    stats = add_covariance_stats(stats, name, data.old, data.advantages, data.mask, CONFIG, data.weights)
    for mode in LOSS_AGG_MODES:

        def compute(rows, parameter, stats, mode=mode):  # type: ignore[no-untyped-def]
            return loss_fn(
                data.old[rows],
                parameter,
                data.advantages[rows],
                data.mask[rows],
                mode,
                CONFIG,
                data.weights[rows],
                stats,
            )

        check_split(data, compute, stats)


@few
@given(data=batches())
def test_value_loss(data: SimpleNamespace) -> None:
    stats = BatchStats.of(data.mask, loss_scale_factor=HORIZON)
    for mode in LOSS_AGG_MODES:

        def compute(rows, parameter, stats, mode=mode):  # type: ignore[no-untyped-def]
            loss, clip = compute_value_loss(
                parameter, data.ref[rows], data.old[rows], data.mask[rows], 0.2, mode, stats=stats
            )
            return loss, {"clip": clip}

        check_split(data, compute, stats)


@few
@given(data=batches(), kind=st.sampled_from([*KL_PENALTIES, *(name + "+" for name in KL_PENALTIES)]))
def test_kl_loss(data: SimpleNamespace, kind: str) -> None:
    stats = BatchStats.of(data.mask, loss_scale_factor=HORIZON)
    for mode in LOSS_AGG_MODES:

        def compute(rows, parameter, stats, mode=mode):  # type: ignore[no-untyped-def]
            return compute_kl_loss(parameter, data.ref[rows], data.mask[rows], kind, mode, stats)

        check_split(data, compute, stats)


@few
@given(data=batches())
def test_entropy_loss(data: SimpleNamespace) -> None:
    stats = BatchStats.of(data.mask, loss_scale_factor=HORIZON)
    for mode in LOSS_AGG_MODES:

        def compute(rows, parameter, stats, mode=mode):  # type: ignore[no-untyped-def]
            logits = torch.stack([parameter, 0 * parameter, data.ref[rows]], dim=-1)
            return compute_entropy_loss(logits, data.mask[rows], mode, stats), {}

        check_split(data, compute, stats)


@pytest.mark.parametrize("mode", [mode for mode in LOSS_AGG_MODES if mode != "token-sum"])
def test_control_local_counts_do_depend_on_the_split(mode: str) -> None:
    """The same comparison fails when each part is normalised by itself: the property is not empty."""
    generator = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(4, 6, generator=generator)
    data = SimpleNamespace(
        mask=torch.tensor([[1] * 6, [1] + [0] * 5, [1, 1] + [0] * 4, [0] * 6]),
        old=old,
        new=old + 0.1,
        advantages=torch.randn(4, 6, generator=generator),
        ranks=2,
        place=[(0, 0), (0, 1), (1, 0), (1, 0)],
    )

    def compute(rows, parameter, stats):  # type: ignore[no-untyped-def]
        local = BatchStats.of(data.mask[rows], dp_size=1)
        return get_policy_loss_fn("vanilla")(
            data.old[rows], parameter, data.advantages[rows], data.mask[rows], mode, None, None, local
        )

    with pytest.raises(AssertionError):
        check_split(data, compute, BatchStats.of(data.mask))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po"])
def test_covariance_losses_refuse_a_part_without_the_whole(name: str) -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match="add_covariance_stats"):
        get_policy_loss_fn(name)(-ones, -ones, ones, ones, rollout_is_weights=ones, stats=BatchStats(2, 12, 4))
