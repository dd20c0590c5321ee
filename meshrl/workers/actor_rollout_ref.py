"""The policy in its three roles on the same devices: trained, generating, and frozen as its own reference."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from meshrl.agents.batch import make_agent_rollout
from meshrl.algorithms import CovarianceStats
from meshrl.config.actor import RefConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.root import ActorRolloutRefConfig
from meshrl.controller import Dispatch, Worker, nd_dispatch, register
from meshrl.data.proto import DataProto
from meshrl.engines.base import Engine
from meshrl.engines.build import engine_class
from meshrl.models.loading import load_tokenizer, stop_token_ids
from meshrl.models.saving import save_hf_folder
from meshrl.rollout.base import Rollout, SamplingParams
from meshrl.rollout.build import build_rollout
from meshrl.telemetry.memory import PeakMemory
from meshrl.telemetry.metrics import reduce_metrics
from meshrl.weights.sync import sync_weights
from meshrl.workers.actor_loss import count_mini_batch, make_actor_loss, skips_samples_without_advantage
from meshrl.workers.generating import start_generation
from meshrl.workers.joining import join_ranks
from meshrl.workers.resting import awake, rests, send_to_rest
from meshrl.workers.settings import WorkerSettings


class ActorRolloutRefWorker(Worker):
    """One rank of actor, rollout and reference. Batches are split over the data-parallel ranks of the mesh `actor`."""

    def __init__(self, config: ActorRolloutRefConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engines and the rollout, in the order in which they share memory."""
        self.device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        actor, model = self.config.actor, self.config.model
        self.actor = engine_class(actor)(
            model,
            actor,
            actor.optim,
            device=self.device,
            total_steps=self.settings.total_optimizer_steps,
            seed=self.settings.seed,
        )
        self.actor.initialize()
        self.register_mesh("actor", self.actor.dp_rank, self.actor.dp_size, is_collect=self.actor.is_collect)
        self.register_mesh("rollout", self.rank, self.world_size, is_collect=True)
        # With adapters the reference is the same model without them.
        self.ref: Engine | None = None
        if self.settings.with_reference and (own_weights := self._reference_model()) is not None:
            self.ref = engine_class(actor)(own_weights, actor, None, device=self.device)
            self.ref.initialize()
            send_to_rest(self.ref, self.config.ref.fsdp_config.param_offload, False)
        self.rollout = self._build_rollout(self.config.rollout)
        send_to_rest(self.actor, *rests(actor))

    def _reference_model(self) -> ModelConfig | None:
        """What the reference is loaded from, or None where it is the policy without its adapters."""
        model, path = self.config.model, self.config.ref.model.path
        if path is not None:
            return replace(model, path=path, lora_rank=0, lora_adapter_path=None, random_init=False)
        return None if self.actor.has_adapters else model

    def _awake(self, engine: Engine, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Inside, the engine's weights (and optimizer) are on the device."""
        model, states = rests(self.config.actor)
        if engine is self.ref:
            model = self.config.ref.fsdp_config.param_offload
        return awake(engine, self.device, model=model, optimizer=optimizer and states)

    def _build_rollout(self, config: RolloutConfig) -> Rollout:
        path = self.config.model.path or ""
        tokenizer = load_tokenizer(self.config.model.tokenizer_path or path, self.config.model.trust_remote_code)
        self.stop_token_ids = tuple(stop_token_ids(path, tokenizer))
        # An unsharded trainer in the rollout's own type lends its module: no copy of the weights at all.
        can_share = not self.actor.is_sharded and not self.actor.has_adapters and not rests(self.config.actor)[0]
        rollout = build_rollout(
            config, self.config.model, self.actor.hf_model, tokenizer, device=self.device, can_share=can_share
        )
        self.agents = None
        if config.multi_turn.enable:
            self.agents = make_agent_rollout(rollout, tokenizer, config, self.stop_token_ids)
        return rollout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int) -> None:
        """Brings the actor's weights into the rollout as this version."""
        with self._awake(self.actor):
            sync_weights(self.actor, self.rollout, version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, folder: str) -> None:
        """Writes the policy as a Hugging Face folder: all ranks take part, rank 0 writes."""
        with self._awake(self.actor):
            save_hf_folder(folder, self.actor.per_tensor_params(), self.actor.hf_model, writes=self.rank == 0)

    @register(dispatch_mode=nd_dispatch("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers prompts with the rollout's weights.

        `meta_info["validate"]` chooses the sampling of validation, `meta_info["greedy"]` the likeliest tokens.
        """
        output = (self.agents or self.rollout).generate_sequences(prompts, self._sampling(prompts))
        if not self.config.rollout.calculate_log_probs:
            output.pop(batch_keys=["rollout_log_probs"])
        return output

    @register(dispatch_mode=nd_dispatch("rollout"))
    def start_generation(self, prompts: DataProto) -> None:
        """`generate_sequences`, beside other calls: `take_generated` gives the answers as they end."""
        self.generation = start_generation(self.rollout, self.agents, prompts, self._sampling(prompts))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_generated(self, seconds: float) -> tuple[np.ndarray, DataProto] | None:
        """What has ended of this rank's part: its rows and the answers, or None if nothing did within `seconds`."""
        found = self.generation.take(seconds)
        if found is not None and not self.config.rollout.calculate_log_probs:
            found[1].pop(batch_keys=["rollout_log_probs"])
        return found

    def _sampling(self, prompts: DataProto) -> SamplingParams:
        config = self.config.rollout
        how = config.val_kwargs if prompts.meta_info.get("validate") else config
        return SamplingParams(
            max_tokens=config.response_length or 1,
            temperature=how.temperature if how.do_sample and not prompts.meta_info.get("greedy") else 0.0,
            top_k=how.top_k,
            top_p=how.top_p,
            stop_token_ids=self.stop_token_ids,
        )

    @register(dispatch_mode=nd_dispatch("actor"))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """The actor's own log-probs and entropies of the responses: `old_log_probs`, `entropys`.

        Where an estimator needs them also `sum_pi_squared`.
        """
        with self._awake(self.actor):
            output = self.actor.forward(self._for_log_probs(data, self.config.rollout, entropy=True))
        return _renamed(output, old_log_probs="log_probs", entropys="entropys", sum_pi_squared="sum_pi_squared")

    @register(dispatch_mode=nd_dispatch("actor"))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """The reference's log-probs of the responses: `ref_log_prob`."""
        request = self._for_log_probs(data, self.config.ref, entropy=False)
        if self.ref is not None:
            with self._awake(self.ref):
                output = self.ref.forward(request)
        elif self.actor.has_adapters:
            with self._awake(self.actor), self.actor.adapters_off():
                output = self.actor.forward(request)
        else:
            raise ValueError("this worker has no reference policy: set use_kl_loss or use_kl_in_reward")
        return _renamed(output, ref_log_prob="log_probs")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refresh_reference(self) -> None:
        """The reference becomes what the actor is now."""
        if self.ref is None:
            raise ValueError("this worker has no reference of its own to refresh")
        with self._awake(self.actor), self._awake(self.ref):
            self.ref.copy_weights_from(self.actor)

    def _for_log_probs(self, data: DataProto, how: RolloutConfig | RefConfig, entropy: bool) -> DataProto:
        meta = {
            "temperature": self.temperature,
            "use_dynamic_bsz": how.log_prob_use_dynamic_bsz,
            "max_token_len": how.log_prob_max_token_len_per_gpu,
            "micro_batch_size": how.log_prob_micro_batch_size_per_gpu,
            "calculate_entropy": entropy,
            "calculate_sum_pi_squared": self.settings.with_sum_pi_squared and how is self.config.rollout,
        }
        selected = data.select(["input_ids", "attention_mask", "response_mask"], [])
        return DataProto(selected.batch, {}, meta)

    @property
    def temperature(self) -> float:
        """The temperature at which the policy is trained: that of sampling (greedy generation trains at 1)."""
        rollout = self.config.rollout
        return rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0

    @register(dispatch_mode=nd_dispatch("actor", pad=False))
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """One PPO update: epochs → mini-batches → micro-batches. Returns its metrics, the same on every rank.

        Without `old_log_probs` the update is on-policy: the old policy is the one before the step.
        `meta_info["compare_with"]` names the rollout's log-probs, compared with the actor's before its first step.
        """
        collected: dict[str, list[float]] = {}
        mini_batches = data.chunk(self.settings.mini_batches)
        memory = PeakMemory(self.device)
        with self._awake(self.actor, optimizer=True):
            for epoch in range(self.config.actor.ppo_epochs):
                for number, mini_batch in enumerate(mini_batches):
                    compare_with = data.meta_info.get("compare_with") if epoch == number == 0 else None
                    covariance = data.meta_info.get("covariance", [None] * len(mini_batches))[number]
                    for name, value in self._update_on(mini_batch, compare_with, covariance).items():
                        collected.setdefault(name, []).append(value)
            self.actor.optimizer_zero_grad()
        skipped = {"actor/skipped_steps": sum(collected["actor/skipped_steps"])}
        # Before the first step of a batch the policy must still be the old one.
        skipped["actor/ppo_kl_before"] = collected["actor/ppo_kl"][0]
        return reduce_metrics(collected) | skipped | memory.metrics("update_actor")

    def _update_on(
        self, data: DataProto, compare_with: str | None, covariance: CovarianceStats | None
    ) -> dict[str, float]:
        """One optimizer step on this rank's part of a mini-batch."""
        config, engine = self.config.actor, self.actor
        computed = self._rows_to_compute(data)
        stats, computed_tokens = count_mini_batch(
            data.batch["response_mask"], computed, config, engine.gradient_ranks, engine.sum_over_data_parallel
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
        loss_function = make_actor_loss(config, stats, computed_tokens, compare_with, self.settings.bypass)
        metrics = engine.forward_backward_batch(rows, loss_function).metrics
        norm = engine.optimizer_step()
        if not np.isfinite(norm) and self.settings.stop_on_nan_gradient:
            raise FloatingPointError(f"the gradient norm is {norm} and trainer.nan_gradient=stop")
        return metrics | {
            "actor/grad_norm": norm,
            "actor/skipped_steps": float(not np.isfinite(norm)),
            "actor/lr": engine.lr_scheduler_step(),
            "actor/computed_tokens_share": computed_tokens / max(1, stats.num_tokens or 0),
        }

    def _rows_to_compute(self, data: DataProto) -> Tensor:
        """Rows that can have a gradient: those with tokens and, where only the advantage drives the loss, with one."""
        needed = data.batch["response_mask"].any(1)
        if skips_samples_without_advantage(self.config.actor):
            # Not `> 0`: a NaN among the advantages must reach the loss and be seen.
            needed &= (data.batch["advantages"] * data.batch["response_mask"]).abs().sum(1) != 0
        return needed.nonzero()[:, 0]

    @staticmethod
    def _blank(data: DataProto) -> DataProto:
        """One row that counts for nothing, so that this rank still takes part in the collectives of the others."""
        row = data.select_idxs([0])
        row.batch["response_mask"] = torch.zeros_like(row.batch["response_mask"])
        return row


def _renamed(output: dict[str, Tensor], **names: str) -> DataProto:
    """An engine's outputs under the controller's names; only collecting ranks have any."""
    return DataProto.from_dict({new: output[old] for new, old in names.items() if old in output})
