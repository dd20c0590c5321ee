"""Importance weights, rejection and diagnostics against plain loops."""

import math

import pytest
import torch

from meshrl.algorithms import (
    ROLLOUT_RS_MODES,
    RolloutCorrectionConfig,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

LOG_RATIO = torch.tensor([[0.1, -0.9, 0.0, 5.0], [1.2, 0.3, float("nan"), 0.0], [-0.2, 0.1, 0.1, -0.1]])
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 1, 1]])


def rows() -> list[list[tuple[int, float]]]:
    return [
        [(t, x) for t, (x, keep) in enumerate(zip(line, mask, strict=True)) if keep]
        for line, mask in zip(LOG_RATIO.tolist(), MASK.tolist(), strict=True)
    ]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [2.0, "2.0", "0.5_3.0"])
def test_weights_equal_a_loop(level: str, threshold: float | str) -> None:
    expected = torch.zeros(3, 4)
    for row, tokens in enumerate(rows()):
        for t, x in tokens:
            weight = math.exp(x if level == "token" else sum(y for _, y in tokens))
            if threshold == "0.5_3.0":
                expected[row, t] = weight if 0.5 <= weight <= 3.0 else 0.0
            else:
                expected[row, t] = min(weight, 2.0)
    weights, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, level, threshold)
    torch.testing.assert_close(weights, expected)
    kept = expected[MASK.bool()]
    assert metrics["rollout_is_mean"] == pytest.approx(kept.mean().item())
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((kept.mean() ** 2 / (kept**2).mean()).item())
    normal, metrics = compute_rollout_correction_weights(LOG_RATIO, MASK, level, threshold, True)
    mean = kept.mean() if level == "token" else expected.sum(-1).div(MASK.sum(-1)).mean()
    torch.testing.assert_close(normal, expected / mean)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(mean.item())


@pytest.mark.parametrize("mode", ROLLOUT_RS_MODES)
def test_rejection_equals_a_loop(mode: str) -> None:
    level, kind = mode.rsplit("_", 1)
    value = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    combine = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}.get(level)
    low, high, spec = (math.log(0.5), math.log(2.0), "0.5_2.0") if kind == "k1" else (-math.inf, 0.3, 0.3)
    expected = torch.zeros_like(MASK)
    for row, tokens in enumerate(rows()):
        values = [value(x) for _, x in tokens]
        for (t, _), own in zip(tokens, values, strict=True):
            statistic = own if combine is None else combine(values)
            expected[row, t] = int(low <= statistic <= high)
    mask, metrics = compute_rollout_rejection_mask(LOG_RATIO, MASK, mode, spec)
    assert torch.equal(mask, expected)
    assert 0 < int(mask.sum()) < int(MASK.sum()), "the example rejects some and keeps some"
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - mask.sum().item() / MASK.sum().item())
    whole = [bool((expected[r] == MASK[r]).all()) for r in range(3)]
    assert metrics[f"rollout_rs_{mode}_seq_masked_fraction"] == pytest.approx(whole.count(False) / 3)


def test_several_modes_must_all_pass() -> None:
    both, _ = compute_rollout_rejection_mask(LOG_RATIO, MASK, "token_k2, seq_max_k3", "0.3,2.0")
    one, _ = compute_rollout_rejection_mask(LOG_RATIO, MASK, "token_k2", 0.3)
    other, _ = compute_rollout_rejection_mask(LOG_RATIO, MASK, "seq_max_k3", 2.0)
    assert torch.equal(both, one * other)
    assert not torch.equal(one, both)
    assert not torch.equal(other, both)


def test_one_number_for_k1_means_its_reciprocal_below() -> None:
    one, _ = compute_rollout_rejection_mask(LOG_RATIO, MASK, "token_k1", 1.25)
    pair, _ = compute_rollout_rejection_mask(LOG_RATIO, MASK, "token_k1", "0.8_1.25")
    assert torch.equal(one, pair)


def test_diagnostics_equal_a_loop() -> None:
    old = torch.tensor([[-1.0, -2.0, float("nan")], [-0.5, -0.5, -1.0], [0.0, 0.0, 0.0]])
    rollout = torch.tensor([[-1.1, -1.7, 3.0], [-0.5, -0.9, -1.2], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    pairs = [[(-1.0, -1.1), (-2.0, -1.7)], [(-0.5, -0.5), (-0.5, -0.9), (-1.0, -1.2)]]
    flat = [o - r for pair in pairs for o, r in pair]
    metrics = compute_offpolicy_metrics(old, rollout, mask)
    expected = {
        "kl": -sum(flat) / 5,
        "k3_kl": sum(math.exp(x) - 1 - x for x in flat) / 5,
        "training_ppl": sum(math.exp(-sum(o for o, _ in pair) / len(pair)) for pair in pairs) / 2,
        "rollout_ppl": sum(math.exp(-sum(r for _, r in pair) / len(pair)) for pair in pairs) / 2,
        "log_ppl_diff": sum(sum(r - o for o, r in pair) / len(pair) for pair in pairs) / 2,
        "chi2_token": sum(math.exp(2 * x) for x in flat) / 5 - 1,
        "chi2_seq": sum(math.exp(2 * sum(o - r for o, r in pair)) for pair in pairs) / 2 - 1,
        "log_prob_abs_diff_max": 0.4,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_whole_correction() -> None:
    old, rollout = LOG_RATIO.nan_to_num(0.0) - 1.0, torch.full((3, 4), -1.0)
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old, rollout, MASK, "token", 2.0, rollout_rs="seq_max_k2", rollout_rs_threshold=1.0
    )
    assert weights is not None
    assert weights.max().item() == 2.0
    assert torch.equal(mask[0], torch.zeros(4, dtype=mask.dtype))
    assert torch.equal(mask[2], MASK[2])
    assert {"rollout_corr/kl", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_masked_fraction"} <= set(
        metrics
    )
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(old, rollout, MASK)
    assert weights is None
    assert mask is MASK


def test_config_is_read_from_dicts_and_objects() -> None:
    read = RolloutCorrectionConfig.read({"rollout_is": "token", "loss_type": None})
    assert read == RolloutCorrectionConfig(rollout_is="token")
    assert RolloutCorrectionConfig.read(None) == RolloutCorrectionConfig()
    assert RolloutCorrectionConfig.read(read) is read


@pytest.mark.parametrize(
    ("rs", "threshold", "message"),
    [
        ("token_k4", 1.0, "did you mean 'token_k"),
        ("token_k1", None, "needs rollout_rs_threshold"),
        ("token_k1,token_k2", "1,2,3", "has 3 entries for 2 modes"),
        ("token_k2", "0.1_0.2", "upper bound only"),
        ("token_k1", "2.0_0.5", "lower_upper"),
        ("token_k1", "abc", "is no number"),
        (" ,", 1.0, "rollout_rs is empty"),
    ],
)
def test_bad_options(rs: str, threshold: float | str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_rollout_rejection_mask(LOG_RATIO, MASK, rs, threshold)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"log_ratio has 1 non-finite values, the first is nan at \(1, 2\)"):
        compute_rollout_correction_weights(LOG_RATIO, torch.ones_like(MASK))
    with pytest.raises(ValueError, match="did you mean 'sequence'"):
        compute_rollout_correction_weights(LOG_RATIO, MASK, "sequnce")
    with pytest.raises(ValueError, match="every importance weight is 0"):
        compute_rollout_correction_weights(LOG_RATIO, MASK, "token", "1000_2000", True)
    with pytest.raises(ValueError, match="selects no token"):
        compute_rollout_rejection_mask(LOG_RATIO, torch.zeros_like(MASK), "token_k1", 2.0)
