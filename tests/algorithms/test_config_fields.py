"""Every field that a public function takes from its `config` changes its result or is refused, in all forms of configs.

The fields are those that verl's functions of the same names read. The expected numbers come from the same setting given
as an argument, or from closed forms in the functions' own tests.
"""

import inspect
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import meshrl.algorithms as algorithms
from meshrl.algorithms import compute_advantage
from meshrl.registry import POLICY_LOSSES

FORMS = {
    "attributes": lambda fields: SimpleNamespace(
        **{name: SimpleNamespace(**value) if name == "policy_loss" else value for name, value in fields.items()}
    ),
    "keys": dict,
    "omegaconf": OmegaConf.create,
}
ROWS, WIDTH = 6, 5
CLIP = ({"clip_ratio": 0.01}, {"clip_ratio_low": 0.01}, {"clip_ratio_high": 0.01})
COMPONENTS = {"form": np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), "sum": np.array([0.0, 2.0, 5.0, 1.0, 0.0, 3.0])}

# For each function that takes a config: settings of which no two may have the same result.
ADVANTAGES: dict[str, list[dict[str, Any]]] = {
    "compute_grpo_outcome_advantage": [{"norm_adv_by_std_in_grpo": False}],
    "compute_grpo_passk_outcome_advantage": [{"norm_adv_by_std_in_grpo": False}],
    "compute_gdpo_outcome_advantage": [
        {"norm_adv_by_std_in_grpo": False, "gdpo_reward_keys": ["form", "sum"]},
        {"gdpo_reward_keys": ["form", "sum"]},
        {"gdpo_reward_keys": ["form", "sum"], "gdpo_reward_weights": [1.0, 3.0]},
    ],
    "compute_reinforce_plus_plus_outcome_advantage": [{"gamma": 0.5}],
    # No field of a config is a part of these.
    "compute_rloo_outcome_advantage": [],
    "compute_reinforce_plus_plus_baseline_outcome_advantage": [],
    "compute_opo_outcome_advantage": [],
    "compute_gpg_outcome_advantage": [],
    "compute_remax_outcome_advantage": [],
}
LOSSES: dict[str, list[dict[str, Any]]] = {
    "vanilla": [*CLIP, {"clip_ratio_c": 1.01}],
    "gspo": list(CLIP),
    "geo_mean": list(CLIP),
    "cispo": list(CLIP),
    "dppo_tv": [{"clip_ratio": 0.001}, {"clip_ratio_low": 0.001}, {"clip_ratio_high": 0.001}, {"clip_ratio_c": 1.01}],
    "dppo_kl": [{"clip_ratio": 1e-6}, {"clip_ratio_low": 1e-6}, {"clip_ratio_high": 1e-6}, {"clip_ratio_c": 1.01}],
    "sapo": [{"tau_pos": 3.0}, {"tau_neg": 3.0}, {"policy_loss": {"tau_neg": 4.0}}],
    "clip_cov": [
        *CLIP,
        {"policy_loss": {"clip_cov_ratio": 0.5, "clip_cov_lb": -5.0}},
        {"policy_loss": {"clip_cov_ratio": 0.5, "clip_cov_lb": -5.0, "clip_cov_ub": 0.0}},
    ],
    "kl_cov": [{"policy_loss": {"kl_cov_ratio": 0.5}}, {"policy_loss": {"kl_cov_ratio": 0.5, "ppo_kl_coef": 3.0}}],
    "m2po": [{"m2_threshold": 1e-4}],
    "dro": [{"dro_beta": 2.0}],
    "decoupled": [*CLIP, {"behaviour_weight_cap": 1.0}, {"clip_ratio_c": 1.01}],
    "icepop": [*CLIP, {"icepop_low": 0.95}, {"icepop_high": 1.05}, {"clip_ratio_c": 1.01}],
    "bypass_mode": [
        *CLIP,
        *(
            {"policy_loss": {"rollout_correction": correction}}
            for correction in (
                {"loss_type": "reinforce"},
                {"loss_type": "reinforce", "rollout_is": "token"},
                {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.01},
                {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.05},
                {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.3},
            )
        ),
        {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "sequence"}},
    ],
    # The plain gradient has no parameters.
    "gpg": [],
    "topr": [],
}


def advantages(function: str, config: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(WIDTH) < torch.tensor([3, 5, 4, 5, 2, 4])[:, None]).long()
    given = {
        "token_level_rewards": torch.randn(ROWS, WIDTH, generator=generator) * mask,
        "response_mask": mask,
        "index": np.array([0, 0, 0, 1, 1, 1]),
        "reward_baselines": torch.zeros(ROWS),
        "non_tensor_batch": COMPONENTS,
        "config": config,
    }
    called = getattr(algorithms, function)
    taken = inspect.signature(called).parameters
    return called(**{name: value for name, value in given.items() if name in taken})[0]


def loss(name: str, config: Any) -> torch.Tensor:
    """The gradient: what a loss says, also where two of its forms have the same value."""
    generator = torch.Generator().manual_seed(1)
    old = -0.5 - torch.rand(ROWS, WIDTH, generator=generator)
    new = (old + 0.3 * torch.randn(ROWS, WIDTH, generator=generator)).requires_grad_()
    mask = (torch.arange(WIDTH) < torch.tensor([3, 5, 4, 5, 2, 4])[:, None]).long()
    signs = torch.randn(ROWS, WIDTH, generator=generator)
    weights = (0.2 * torch.randn(ROWS, WIDTH, generator=generator)).exp()
    found, _ = POLICY_LOSSES.get(name)(old, new, signs, mask, config=config, rollout_is_weights=weights)
    return torch.cat([torch.autograd.grad(found, new)[0].flatten(), found.detach()[None]])


def differ(results: list[torch.Tensor]) -> bool:
    """Whether all results differ from one another."""
    return not any(torch.allclose(a, b, rtol=1e-5, atol=1e-9) for a, b in combinations(results, 2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", ADVANTAGES)
def test_each_field_changes_the_advantages(function: str, form: str) -> None:
    assert differ([advantages(function, FORMS[form](fields)) for fields in ({}, *ADVANTAGES[function])])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_each_field_changes_the_loss_or_is_refused(name: str, form: str) -> None:
    assert differ([loss(name, FORMS[form](fields)) for fields in ({}, *LOSSES[name])])
    with pytest.raises(ValueError, match=r"global_batch_info \(batch_num_tokens, dp_size\).* stats=BatchStats"):
        loss(name, FORMS[form]({"global_batch_info": {"dp_size": 2, "batch_num_tokens": 40}}))
    loss(name, FORMS[form]({"global_batch_info": {}}))


def test_normalising_in_the_batch_is_refused_in_bypass_mode() -> None:
    for make in FORMS.values():
        with pytest.raises(ValueError, match="rollout_is_batch_normalize"):
            loss("bypass_mode", make({"rollout_correction": {"rollout_is_batch_normalize": True}}))


def test_the_tables_name_every_function_with_a_config() -> None:
    public = [getattr(algorithms, name) for name in algorithms.__all__]
    with_config = {f.__name__ for f in public if inspect.isfunction(f) and "config" in inspect.signature(f).parameters}
    losses = {POLICY_LOSSES.get(name).__name__ for name in LOSSES}
    assert with_config - losses - {"compute_advantage", "add_covariance_stats"} == set(ADVANTAGES)
    assert set(POLICY_LOSSES) == set(LOSSES)


@pytest.mark.parametrize("form", FORMS)
def test_an_argument_goes_before_the_config(form: str) -> None:
    config = FORMS[form]({"norm_adv_by_std_in_grpo": False, "gamma": 0.5})
    rewards, mask, index = torch.tensor([[0.0, 1.0], [3.0, 0.0], [0.0, 5.0]]), torch.ones(3, 2), ["a"] * 3
    for function in ("grpo", "grpo_passk", "gdpo"):
        called = algorithms.get_adv_estimator_fn(function)
        by_argument = called(rewards, mask, index, norm_adv_by_std_in_grpo=True, config=config)[0]
        torch.testing.assert_close(by_argument, called(rewards, mask, index)[0])
    best = compute_advantage("grpo_passk", token_level_rewards=rewards, response_mask=mask, index=index, config=config)
    torch.testing.assert_close(best[0], torch.tensor([[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]]))
    # The reward to go of the first token: its own and half of the next one's.
    _, returns = compute_advantage(
        "reinforce_plus_plus", token_level_rewards=rewards, response_mask=mask, config=config
    )
    torch.testing.assert_close(returns, torch.tensor([[0.5, 1.0], [3.0, 0.0], [2.5, 5.0]]))
    _, values = compute_advantage(
        "gae",
        token_level_rewards=rewards,
        response_mask=mask,
        values=torch.zeros(3, 2),
        config=FORMS[form]({"gamma": 0.5, "lam": 0.5}),
    )
    torch.testing.assert_close(values, torch.tensor([[0.25, 1.0], [3.0, 0.0], [1.25, 5.0]]))
