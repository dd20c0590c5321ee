"""The policy's workers: actor, rollout and reference on the same devices, or the reference on its own devices.

    ActorRolloutRefWorker   one rank of the policy: trained, generating, and as its own frozen reference
    make_actor_loss         the loss of a mini-batch: policy gradient, entropy bonus, KL to the reference
    ReferenceWorker         one rank of a frozen reference or teacher on devices of its own

The controller calls the methods that are marked with `register`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.algorithms import (
    BatchStats,
    CovarianceStats,
    agg_loss,
    get_policy_loss_fn,
    is_zero_where_advantage_is_zero,
    kl_penalty,
)
from meshrl.config.actor_critic import ActorConfig, RefConfig
from meshrl.config.engine import ModelConfig
from meshrl.config.rl import ActorRolloutRefConfig, RolloutCorrectionConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.controller import Dispatch, Worker, nd_dispatch, register
from meshrl.data.batch import DataProto, columns_of
from meshrl.data.images import IMAGES
from meshrl.engines.engine_class import engine_class
from meshrl.engines.training_engine import Engine, LossFunction
from meshrl.models.loading import torch_dtype
from meshrl.models.lora import adapter_rank
from meshrl.models.moe_routing import ROUTED_EXPERTS
from meshrl.models.saving import save_hf_folder
from meshrl.parallel.mesh import contiguous_group, wait_for_all
from meshrl.telemetry.device_stats import MemoryLog, PeakMemory
from meshrl.telemetry.metrics import count_steps, reduce_metrics
from meshrl.telemetry.time_ledger import booked
from meshrl.weights.colocated import ROLLOUT, TRAIN, HybridEngine, policy_sync, sends_adapters
from meshrl.weights.disaggregated import PoolGroup, PoolSync, connect_trainer
from meshrl.workers.checkpointing import CheckpointedWorker
from meshrl.workers.generation import Answering
from meshrl.workers.setup import WorkerSettings, awake, import_external_lib, join_ranks, rests, send_to_rest


class ActorRolloutRefWorker(CheckpointedWorker):
    """One rank of actor, rollout and reference. Batches are split over the data-parallel ranks of the mesh `actor`."""

    preload = ("meshrl.models.preloaded", "meshrl.rollout.embedded.embedded_rollout")

    def __init__(self, config: ActorRolloutRefConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engines and then the rollout; this order lets them share memory."""
        import_external_lib(self.config.model)
        self.device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        actor, model = self.config.actor, self.config.model
        self.actor = engine_class(actor)(
            model,
            actor,
            actor.optim,
            device=self.device,
            total_steps=self.settings.total_optimizer_steps,
            seed=self.settings.seed,
            replays_routes=actor.router_replay.mode != "disabled",
        )
        self.actor.initialize()
        self.register_mesh("actor", self.actor.dp_rank, self.actor.dp_size, is_collect=self.actor.is_collect)
        split = self.config.rollout.replica_size
        self.register_mesh("rollout", self.rank // split, self.world_size // split, is_collect=self.rank % split == 0)
        # With LoRA adapters the reference is the actor's model with the adapters disabled.
        self.ref: Engine | None = None
        if self.settings.with_reference and (own_weights := self._reference_model()) is not None:
            self.ref = engine_class(actor)(own_weights, actor, None, device=self.device)
            self.ref.initialize()
            send_to_rest(self.ref, self.config.ref.fsdp_config.param_offload, False)
        self.phases: HybridEngine | None = None
        if self.settings.with_rollout:
            # The rollout may generate with an unsharded trainer's own module of the same dtype, without a copy.
            can_share = not self.actor.is_sharded and not self.actor.has_adapters and not rests(actor)[0]
            alone = sends_adapters(self.actor, self.config.rollout.update_weights_adapters)
            self.replica = contiguous_group(split, self.settings.collective_deadline)
            self.answering = Answering(
                self.config.rollout,
                model,
                self.actor.hf_model,
                device=self.device,
                can_share=can_share,
                rank_group=self.replica,
                adapter_rank=adapter_rank(self.actor.hf_model) if alone else 0,
                memory_budget=self.config.memory_budget_bytes,
                template_kwargs=self.settings.template_kwargs,
                records_routes=self.config.records_routes,
            )
            self.rollout = self.answering.rollout
            self.phases = self._make_phases(self.config.rollout)
        send_to_rest(self.actor, *rests(actor))

    def _make_phases(self, config: RolloutConfig) -> HybridEngine:
        """Make the `HybridEngine` that switches this rank's memory between training and generation."""
        sync = policy_sync(
            self.actor,
            self.rollout,
            bucket_megabytes=config.update_weights_bucket_megabytes,
            verify=config.update_weights_verify,
            delta=config.update_weights_delta,
            adapters=config.update_weights_adapters,
            dtype=torch_dtype(config.dtype),
            deadline=self.settings.collective_deadline,
        )
        return HybridEngine(
            self.actor,
            self.rollout,
            sync,
            device=self.device,
            free_cache_engine=config.free_cache_engine,
            param_offload=rests(self.config.actor)[0],
            shares_weights=getattr(self.rollout, "shares_weights", False),
            budget_bytes=self.config.memory_budget_bytes,
            expandable_segments=self.config.expandable_segments,
            rollout_seed=self.settings.seed,
            # One rank's engine allocates and frees memory on the devices of all ranks of the replica.
            meet=partial(wait_for_all, self.replica) if config.is_elsewhere and self.replica is not None else None,
        )

    def close(self) -> None:
        """Close the rollout with the processes that it started, and reset the allocator's settings."""
        phases: HybridEngine | None = getattr(self, "phases", None)
        if phases is not None:
            phases.close()
        if hasattr(self, "rollout"):
            self.rollout.close()

    def _reference_model(self) -> ModelConfig | None:
        """Return the config of the reference's model, or None if the reference is the policy without its adapters."""
        is_the_policy = self.config.ref.model.path is None and self.actor.has_adapters
        return None if is_the_policy else reference_model(self.config)

    def _awake(self, engine: Engine, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Keep the engine's weights (and optimizer states) on the device inside the context.

        The rollout frees its memory first.
        """
        if self.phases is not None:
            self.phases.ensure(TRAIN)
        model, states = rests(self.config.actor)
        if engine is self.ref:
            model = self.config.ref.fsdp_config.param_offload
        return awake(engine, self.device, model=model, optimizer=optimizer and states)

    def _checkpointed(self) -> tuple[Engine, ModelConfig]:
        return self.actor, self.config.model

    @contextmanager
    def _engine_awake(self) -> Iterator[None]:
        beside = self._saved_beside()
        with self._awake(self.actor, optimizer=True), self._awake(beside["ref"]) if beside else nullcontext():
            yield

    def _saved_beside(self) -> dict[str, Engine]:
        """Return the reference if it is refreshed during the run, because a checkpoint must then hold its weights."""
        return {} if self.ref is None or self.config.ref.update_every is None else {"ref": self.ref}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("sync")
    def sync_weights(self, version: int) -> dict[str, float]:
        """Sync the actor's weights to the rollout as `version`; return times, bytes and the memory of each phase."""
        assert self.phases is not None
        self.phases.ensure(TRAIN)
        return self.phases.to_rollout(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join_pool(self, address: str, num_rollouts: int) -> None:
        """Connect with rollouts on devices of their own, which call their `join_pool` at the same time."""
        lost: PoolSync | None = getattr(self, "pool_sync", None)
        if lost is not None:  # the rollouts of the earlier connection died
            lost.leave()
        deadline = self.settings.collective_deadline
        group = PoolGroup.join(address, self.rank, self.world_size + num_rollouts, deadline)
        rollout = self.config.rollout
        with self._awake(self.actor):
            self.pool_sync: PoolSync = connect_trainer(
                self.actor,
                group,
                num_rollouts,
                bucket_megabytes=rollout.update_weights_bucket_megabytes,
                verify=rollout.update_weights_verify,
                delta=rollout.update_weights_delta,
                adapters=rollout.update_weights_adapters,
                deadline=deadline,
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    @booked("sync")
    def send_weights(self, version: int) -> dict[str, float]:
        """Send the actor's weights as `version` to rollouts on other devices, which receive them at the same time."""
        with self._awake(self.actor):
            return self.pool_sync(None, version).metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("checkpoint")
    def save_model(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder: all ranks take part, rank 0 writes."""
        with self._awake(self.actor):
            save_hf_folder(folder, self.actor.per_tensor_params(), self.actor.hf_model, writes=self.rank == 0)

    @register(dispatch_mode=nd_dispatch("rollout"))
    @booked("generate")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response to each prompt with the rollout's weights.

        `meta_info["validate"]` selects the sampling parameters of validation, `meta_info["greedy"]` greedy decoding.
        """
        assert self.phases is not None
        self.phases.ensure(ROLLOUT)
        with self.phases.own_random_numbers():
            return self.answering(prompts)

    @register(dispatch_mode=nd_dispatch("rollout"))
    @booked("generate")
    def start_generation(self, prompts: DataProto) -> None:
        """Start `generate_sequences` in the background; `take_generated` returns the responses as they end."""
        assert self.phases is not None
        self.phases.ensure(ROLLOUT)
        self.answering.start(prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("generate")
    def take_generated(self, seconds: float) -> tuple[np.ndarray, DataProto] | None:
        """Return the finished rows of this rank's part with their responses; None if none ends within `seconds`."""
        return self.answering.take(seconds)

    @register(dispatch_mode=nd_dispatch("actor"))
    @booked("log_prob")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Compute the actor's log-probs and entropies of the responses: `old_log_probs`, `entropys`, both `[B, T]`.

        If an estimator needs it, also `sum_pi_squared`. Expert routes that come with the batch are replayed. In mode R2
        the result has the expert routes of this pass, for the updates to replay.
        """
        with MemoryLog("old_log_prob", self.device, self.config.memory_budget_bytes), self._awake(self.actor):
            request = log_prob_request(
                data,
                self.config.rollout,
                self.temperature,
                entropy=True,
                sum_pi_squared=self.settings.with_sum_pi_squared,
            )
            if ROUTED_EXPERTS in data.non_tensor_batch:
                request.non_tensor_batch[ROUTED_EXPERTS] = data.non_tensor_batch[ROUTED_EXPERTS]
            request.meta_info["record_routes"] = self.config.actor.router_replay.mode == "R2"
            output = self.actor.forward_backward_batch(request, None, forward_only=True)
        names = {"old_log_probs": "log_probs", "entropys": "entropys", "sum_pi_squared": "sum_pi_squared"}
        answer = renamed(output.tensors, **names)
        if output.routes is not None:
            answer.non_tensor_batch[ROUTED_EXPERTS] = output.routes
        return answer

    @register(dispatch_mode=nd_dispatch("actor"))
    @booked("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute the reference's log-probs of the responses: `ref_log_prob` `[B, T]`."""
        request = log_prob_request(data, self.config.ref, self.temperature, entropy=False)
        if self.ref is not None:
            with MemoryLog("ref", self.device, self.config.memory_budget_bytes), self._awake(self.ref):
                output = self.ref.forward(request)
        elif self.actor.has_adapters:
            with (
                MemoryLog("ref", self.device, self.config.memory_budget_bytes),
                self._awake(self.actor),
                self.actor.adapters_off(),
            ):
                output = self.actor.forward(request)
        else:
            raise ValueError("this worker has no reference policy: set use_kl_loss or use_kl_in_reward")
        return renamed(output, ref_log_prob="log_probs")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("ref")
    def refresh_reference(self) -> None:
        """Copy the actor's current weights into the reference."""
        if self.ref is None:
            raise ValueError("this worker has no reference of its own to refresh")
        with self._awake(self.actor), self._awake(self.ref):
            self.ref.copy_weights_from(self.actor)

    @property
    def temperature(self) -> float:
        """The sampling temperature at which the policy is trained."""
        return self.config.rollout.policy_temperature

    @register(dispatch_mode=nd_dispatch("actor", pad=False))
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """Run one PPO update: epochs → mini-batches → micro-batches. Return its metrics, the same on every rank.

        Without `old_log_probs` the update is on-policy: the old policy is the policy before the step.
        `meta_info["compare_with"]` names the rollout's log-probs. They are compared with the actor's log-probs before
        its first step, on the tokens that `FRESH` marks. Metrics of tokens are not measured on a mini-batch without
        computed tokens.
        """
        collected: dict[str, list[float]] = {}
        mini_batches = data.chunk(self.settings.mini_batches)
        memory = PeakMemory(self.device, self.config.memory_budget_bytes)
        if self.phases is not None:
            self.phases.has_trained = True
        with self._awake(self.actor, optimizer=True):
            for epoch in range(self.config.actor.ppo_epochs):
                for number, mini_batch in enumerate(mini_batches):
                    compare_with = data.meta_info.get("compare_with") if epoch == number == 0 else None
                    covariance = data.meta_info.get("covariance", [None] * len(mini_batches))[number]
                    metrics = self._update_on(mini_batch, compare_with, covariance)
                    if epoch == number == 0 and "actor/ppo_kl" in metrics:
                        # Before the first optimizer step of a batch, policy and old policy must be the same.
                        metrics["actor/ppo_kl_before"] = metrics["actor/ppo_kl"]
                    for name, value in metrics.items():
                        collected.setdefault(name, []).append(value)
            self.actor.optimizer_zero_grad()
        counts = count_steps("actor", collected)
        return reduce_metrics(collected) | counts | memory.metrics("update_actor")

    def _update_on(
        self, data: DataProto, compare_with: str | None, covariance: CovarianceStats | None
    ) -> dict[str, float]:
        """Take one optimizer step on this rank's part of a mini-batch."""
        config, engine = self.config.actor, self.actor
        computed = self._rows_to_compute(data)
        stats, counted = count_mini_batch(
            data.batch["response_mask"],
            computed,
            config,
            engine.gradient_ranks,
            engine.sum_over_data_parallel,
            fresh=None if compare_with is None else data.batch[FRESH],
        )
        stats = replace(stats, covariance=covariance)
        rows = data.select_idxs(computed) if len(computed) else self._blank(data)
        rows.meta_info = {
            "temperature": self.temperature,
            "use_dynamic_bsz": config.use_dynamic_bsz,
            "max_token_len": config.ppo_max_token_len_per_gpu,
            "micro_batch_size": config.ppo_micro_batch_size_per_gpu,
            "calculate_entropy": config.entropy_coeff != 0 or data.meta_info["measure_entropy"],
        }
        engine.optimizer_zero_grad()
        loss_function = make_actor_loss(config, stats, counted, compare_with, self.settings.bypass)
        metrics = engine.forward_backward_batch(rows, loss_function).metrics
        norm = engine.optimizer_step()
        return metrics | {
            "actor/grad_norm": norm,
            "actor/skipped_steps": float(not np.isfinite(norm)),
            "actor/lr": engine.lr_scheduler_step(),
            "actor/computed_tokens_share": counted.tokens / max(1, stats.num_tokens or 0),
        }

    def _rows_to_compute(self, data: DataProto) -> Tensor:
        """Return the rows that can have a gradient.

        These rows have response tokens. If only the advantage drives the loss, they also have a non-zero advantage.
        """
        needed = data.batch["response_mask"].any(1)
        if skips_samples_without_advantage(self.config.actor):
            # Not `> 0`: a NaN among the advantages must reach the loss, where it is noticed.
            needed &= (data.batch["advantages"] * data.batch["response_mask"]).abs().sum(1) != 0
        return needed.nonzero()[:, 0]

    @staticmethod
    def _blank(data: DataProto) -> DataProto:
        """Return one row with an empty mask, so that this rank still takes part in the other ranks' collectives."""
        row = data.select_idxs([0])
        row.batch["response_mask"] = torch.zeros_like(row.batch["response_mask"])
        return row


# The policy's loss on one micro-batch: policy gradient, entropy bonus, KL to the reference.

# The column that marks tokens sampled by the policy version that is updated. Only the rollout's log-probs of these
# tokens are comparable with the actor's.
FRESH = "fresh"


@dataclass(frozen=True)
class Counted:
    """The number of a mini-batch's tokens that are computed, over all ranks, and how many of them are fresh."""

    tokens: int
    fresh: int = 0


def make_actor_loss(
    config: ActorConfig,
    stats: BatchStats,
    computed: Counted,
    compare_with: str | None,
    bypass: RolloutCorrectionConfig | None = None,
) -> LossFunction:
    """Return the loss function of a mini-batch whose counts over all ranks are `stats`.

    `computed` counts the tokens that are computed at all, because samples without advantage may be left out. Such
    samples add nothing to the loss, whose means are over all tokens. Metrics that are only monitored (KL, clipping,
    entropy) are means over the computed tokens, and are left out if no token is computed. `compare_with` names the
    rollout's log-probs, which are compared on `FRESH` tokens while the weights are still the same. With `bypass` the
    loss has only two policies, rollout and actor, and corrects for their difference as `bypass` says.
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
        # In an on-policy update the old policy is the current one.
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
        if computed.tokens == 0:  # counted over all ranks, so that all ranks leave out the same metrics
            metrics = {"actor/pg_loss": metrics["actor/pg_loss"]}
        if "watched" in batch:  # a token to explain, see meshrl.trainer.replay
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
    """Check what a policy loss returned; a user's loss may leave out metrics or return plain numbers as metrics."""
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if not isinstance(loss, Tensor) or loss.ndim or not isinstance(metrics, dict):
        raise ValueError(
            f"policy loss {name!r} must return (loss, metrics), a tensor of no dims and a dict, not {found!r}"
        )
    tensors = {key: torch.as_tensor(value, device=loss.device).detach() for key, value in metrics.items()}
    return loss, {"actor/pg_loss": loss.detach().float() / stats.dp_size} | tensors


def skips_samples_without_advantage(config: ActorConfig) -> bool:
    """Return whether samples without advantage have no gradient at all and are therefore left out."""
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
    """Count a mini-batch's tokens and sequences over all ranks, and the tokens of its `computed` rows.

    The second result also counts the `fresh` ones among the computed tokens.
    """
    tokens_of = response_mask.sum(1)
    compared = torch.zeros_like(response_mask) if fresh is None else response_mask * fresh
    local = [tokens_of.sum(), (tokens_of > 0).sum(), tokens_of[computed].sum(), compared[computed].sum()]
    tokens, sequences, computed_tokens, fresh_tokens = add_over_ranks(torch.stack(local)).tolist()
    scale = config.loss_scale_factor or float(response_mask.shape[1])
    # All samples of a mini-batch may have been dropped: its loss is 0 then.
    return BatchStats(dp_size, max(1, tokens), max(1, sequences), scale), Counted(computed_tokens, fresh_tokens)


# The policy's reference or teacher on devices of its own: a frozen model that computes log-probs of tokens.


class ReferenceWorker(Worker):
    """One rank of the reference, in an engine like the actor's. Batches are split over the ranks of the mesh `ref`."""

    def __init__(self, config: ActorRolloutRefConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine without an optimizer, because the reference only runs forward passes."""
        import_external_lib(self.config.model)
        self.device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        engine = self.config.ref.engine(self.config.actor)
        self.engine = engine_class(engine)(reference_model(self.config), engine, None, device=self.device)
        self.engine.initialize()
        self.register_mesh("ref", self.engine.dp_rank, self.engine.dp_size, is_collect=self.engine.is_collect)
        send_to_rest(self.engine, self.config.ref.fsdp_config.param_offload, False)

    @register(dispatch_mode=nd_dispatch("ref"))
    @booked("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute the reference's log-probs of the responses: `ref_log_prob` `[B, T]`."""
        request = log_prob_request(data, self.config.ref, self.config.rollout.policy_temperature, entropy=False)
        resting = awake(self.engine, self.device, model=self.config.ref.fsdp_config.param_offload, optimizer=False)
        with MemoryLog("ref", self.device), resting:
            return renamed(self.engine.forward(request), ref_log_prob="log_probs")


def reference_model(config: ActorRolloutRefConfig) -> ModelConfig:
    """Return the config of the reference's model: its own path if it has one, or else the policy's without adapters."""
    plain = replace(config.model, lora_rank=0, lora_adapter_path=None)
    return plain if config.ref.model.path is None else replace(plain, path=config.ref.model.path, random_init=False)


def log_prob_request(
    data: DataProto, how: RolloutConfig | RefConfig, temperature: float, *, entropy: bool, sum_pi_squared: bool = False
) -> DataProto:
    """Return the columns and settings that an engine needs to compute log-probs, with micro-batches as `how` says."""
    meta = {
        "temperature": temperature,
        "use_dynamic_bsz": how.log_prob_use_dynamic_bsz,
        "max_token_len": how.log_prob_max_token_len_per_gpu,
        "micro_batch_size": how.log_prob_micro_batch_size_per_gpu,
        "calculate_entropy": entropy,
        "calculate_sum_pi_squared": sum_pi_squared,
    }
    selected = data.select(["input_ids", "attention_mask", "response_mask"], [])
    return DataProto(selected.batch, columns_of(data, [IMAGES]), meta)


def renamed(output: dict[str, Tensor], **names: str) -> DataProto:
    """Return an engine's outputs under the controller's names; only collecting ranks have outputs."""
    return DataProto.from_dict({new: output[old] for new, old in names.items() if old in output})
