"""The policy's loss on one micro-batch: policy gradient, entropy bonus, KL to the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshrl.algorithms import (
    BatchStats,
    agg_loss,
    get_policy_loss_fn,
    is_zero_where_advantage_is_zero,
    kl_penalty,
)
from meshrl.config.actor import ActorConfig
from meshrl.config.algorithm import RolloutCorrectionConfig
from meshrl.data.proto import DataProto
from meshrl.engines.base import LossFunction

# Marks the tokens that the weights of the update itself have sampled: only these can be held against the rollout.
FRESH = "fresh"


@dataclass(frozen=True)
class Counted:
    """How many tokens of a mini-batch are computed, over all ranks, and how many of those are fresh."""

    tokens: int
    fresh: int = 0


def make_actor_loss(
    config: ActorConfig,
    stats: BatchStats,
    computed: Counted,
    compare_with: str | None,
    bypass: RolloutCorrectionConfig | None = None,
) -> LossFunction:
    """The loss function of one mini-batch, which has `stats` over all ranks.

    `computed` says how many of its tokens are computed at all: samples without advantage may be left out. They add
    nothing to the loss, whose means are over all tokens; what is only watched (KL, clipping, entropy) is a mean over
    the computed tokens, and not there where none is. `compare_with` names the rollout's log-probs; its `FRESH` tokens
    are compared while the weights are still the same. With `bypass` the loss is that of two policies, corrected as it
    says.
    """
    name = "bypass_mode" if bypass else config.policy_loss.loss_mode
    policy_loss = get_policy_loss_fn(name)
    settings: Any = SimpleNamespace(**vars(config), rollout_correction=bypass) if bypass else config
    rescale = (stats.num_tokens or 0) / max(1, computed.tokens)

    def mean(values: Tensor, mask: Tensor, tokens: int) -> Tensor:
        return agg_loss(values, mask, "token-mean", stats=BatchStats(1, tokens, stats.num_sequences))

    def loss_function(output: dict[str, Tensor], data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        batch = {name: value.to(output["log_probs"].device) for name, value in data.batch.items()}
        log_prob, mask = output["log_probs"], batch["response_mask"]
        # Before the first step of an on-policy update the old policy is the current one.
        old_log_prob = batch.get("old_log_probs", log_prob.detach())
        found = policy_loss(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=batch["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=settings,
            rollout_is_weights=batch.get("rollout_is_weights"),
            stats=stats,
            **config.policy_loss.loss_kwargs,
        )
        loss, metrics = _checked(found, name, stats)
        metrics = {k: v if k == "actor/pg_loss" else v * rescale for k, v in metrics.items()}
        if "entropys" in output:
            metrics["actor/entropy"] = mean(output["entropys"].detach(), mask, max(1, computed.tokens))
            if config.entropy_coeff != 0:
                loss = loss - config.entropy_coeff * _aggregate(config, output["entropys"], mask, stats)
        if config.use_kl_loss:
            kl = _aggregate(config, kl_penalty(log_prob, batch["ref_log_prob"], config.kl_loss_type), mask, stats)
            loss = loss + config.kl_loss_coef * kl
            metrics["actor/kl_loss"] = kl.detach() / stats.dp_size
        if computed.tokens == 0:  # over all ranks, so that all of them leave out the same
            metrics = {"actor/pg_loss": metrics["actor/pg_loss"]}
        if "watched" in batch:  # one token that somebody wants to see, see meshrl.trainer.replay
            metrics["watched/log_prob"] = (log_prob.detach() * batch["watched"]).sum()
            metrics["watched/seen"] = batch["watched"].sum().to(log_prob.dtype)
        if compare_with is not None and computed.fresh > 0:
            fresh = mask.bool() & batch[FRESH]
            difference = (log_prob.detach() - batch[compare_with]).abs().masked_fill(~fresh, 0.0)
            metrics["training/rollout_log_prob_diff_mean"] = mean(difference, fresh, computed.fresh)
            metrics["training/rollout_log_prob_diff_max"] = difference.max()
        return loss, metrics

    return loss_function


def _checked(found: Any, name: str, stats: BatchStats) -> tuple[Tensor, dict[str, Tensor]]:
    """What a loss returned; one of the user's own may leave out metrics, or give plain numbers."""
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if not isinstance(loss, Tensor) or loss.ndim or not isinstance(metrics, dict):
        raise ValueError(
            f"policy loss {name!r} must return (loss, metrics), a tensor of no dims and a dict, not {found!r}"
        )
    tensors = {key: torch.as_tensor(value, device=loss.device).detach() for key, value in metrics.items()}
    return loss, {"actor/pg_loss": loss.detach().float() / stats.dp_size} | tensors


def skips_samples_without_advantage(config: ActorConfig) -> bool:
    """Whether samples without advantage have no gradient at all, and are left out."""
    only_advantage = config.entropy_coeff == 0 and not config.use_kl_loss
    return (
        config.skip_zero_advantage and only_advantage and is_zero_where_advantage_is_zero(config.policy_loss.loss_mode)
    )


def _aggregate(config: ActorConfig, values: Tensor, mask: Tensor, stats: BatchStats) -> Tensor:
    return agg_loss(values, mask, config.loss_agg_mode, stats=stats)


def count_mini_batch(
    response_mask: Tensor,
    computed: Tensor,
    config: ActorConfig,
    dp_size: int,
    add_over_ranks: Callable[[Tensor], Tensor],
    fresh: Tensor | None = None,
) -> tuple[BatchStats, Counted]:
    """Global counts of a mini-batch, and of the tokens in its rows that are `computed`, the `fresh` ones apart."""
    tokens_of = response_mask.sum(1)
    compared = torch.zeros_like(response_mask) if fresh is None else response_mask * fresh
    local = [tokens_of.sum(), (tokens_of > 0).sum(), tokens_of[computed].sum(), compared[computed].sum()]
    tokens, sequences, computed_tokens, fresh_tokens = add_over_ranks(torch.stack(local)).tolist()
    scale = config.loss_scale_factor or float(response_mask.shape[1])
    # A mini-batch may have lost all its samples: its loss is 0 then.
    return BatchStats(dp_size, max(1, tokens), max(1, sequences), scale), Counted(computed_tokens, fresh_tokens)
