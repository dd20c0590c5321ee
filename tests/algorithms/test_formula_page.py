"""docs/formulas.md: every algorithm that can be named has its formula there, and some are computed as written."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.algorithms import compute_advantage, get_policy_loss_fn
from meshrl.algorithms.kl import KL_PENALTIES
from meshrl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formulas.md").read_text()
NAMES = {
    name
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([\w]+)`", line.split("|")[1])
}


def test_everything_that_can_be_named_is_there_and_nothing_else():
    # Other tests register functions of their own.
    own = {
        name
        for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES)
        for name in registry
        if registry.get(name).__module__.startswith("meshrl.")
    }
    assert own | set(KL_PENALTIES) == NAMES


def test_metrics_that_the_page_names_are_in_the_code():
    named = set(re.findall(r"`((?:actor|critic|reward|timing_s)/[\w/]+)`", PAGE))
    code = "\n".join(file.read_text() for file in (ROOT / "meshrl").rglob("*.py"))
    missing = []
    for name in named:
        last = name.split("/", 1)[1]
        parts = [name, f'"{last}"', f"{{prefix}}/{last}", f"/{last}"]
        if not any(part in code for part in parts) and "LABEL" not in name:
            missing.append(name)
    assert not missing
    assert len(named) > 10


TOKENS = {"old": -1.3, "new": -1.0}


@pytest.mark.parametrize(
    ("name", "advantage", "written"),
    [
        ("vanilla", 2.0, lambda a, p, q: max(-a * p / q, -a * min(max(p / q, 0.8), 1.2))),
        ("gpg", 2.0, lambda a, p, q: -a * np.log(p)),
        ("cispo", -1.5, lambda a, p, q: -a * min(max(p / q, 0.8), 1.2) * np.log(p)),
        ("sapo", -1.5, lambda a, p, q: -a * 4 / 1.05 / (1 + np.exp(-1.05 * (p / q - 1)))),
        ("dro", 2.0, lambda a, p, q: -a * np.log(p) + 0.1 / 2 * np.log(p / q) ** 2),
        ("geo_mean", 2.0, lambda a, p, q: -a * np.exp(min(np.log(p / q), 0.2))),
    ],
)
def test_losses_as_written(name, advantage, written):
    old, new = (torch.tensor([[TOKENS[which]]]) for which in ("old", "new"))
    loss, _ = get_policy_loss_fn(name)(old, new, torch.tensor([[advantage]]), torch.ones(1, 1))
    assert float(loss) == pytest.approx(written(advantage, np.exp(TOKENS["new"]), np.exp(TOKENS["old"])), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("grpo", lambda s, i: (s[i] - s.mean()) / (s.std(ddof=1) + 1e-6)),
        ("rloo", lambda s, i: s[i] - np.delete(s, i).mean()),
        ("gpg", lambda s, i: len(s) / np.count_nonzero(s) * (s[i] - s.mean())),
        ("opo", lambda s, i: s[i] - (np.array([1, 2, 3, 2]) * s).sum() / 8),
    ],
)
def test_advantages_as_written(name, written):
    scores = np.array([1.0, 0.0, 0.5, 2.0])
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]])
    rewards = torch.zeros(4, 3)
    rewards[:, 0] = torch.tensor(scores)
    found, _ = compute_advantage(
        name, token_level_rewards=rewards, response_mask=mask, index=["g"] * 4, gamma=1.0, lam=1.0
    )
    for row in range(4):
        assert float(found[row, 0]) == pytest.approx(written(scores, row), rel=1e-5)
