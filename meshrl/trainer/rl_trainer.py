"""The RL training loop: one controller process runs the algorithm as a plain loop, and worker groups do the work.

    prompts → generate → reward → old and reference log-probs, values → advantages → updates → weight sync → metrics

`SampleSource` (rollout_source.py) does the steps up to the reward. `PPOTrainer` here does the rest of a training step.
A call on a worker group splits the batch over the data-parallel ranks, runs the method and concatenates the results.
After the class follow functions for batch metrics, rollout correction and the masking of truncated responses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from meshrl.algorithms import (
    COVARIANCE_LOSSES,
    BatchStats,
    CovarianceStats,
    add_covariance_stats,
    agg_loss,
    apply_kl_penalty,
    compute_advantage,
    compute_distillation_advantage,
    compute_rollout_correction_and_rejection_mask,
    estimator_takes,
    get_kl_controller,
)
from meshrl.balance import seqlen_metrics
from meshrl.config.rl import (
    RATIO_LOSSES,
    AlgorithmConfig,
    PPOConfig,
    RolloutCorrectionConfig,
    correction_of,
    has_teacher,
    num_devices,
    uses_reference,
)
from meshrl.controller import WorkerGroup
from meshrl.data.batch import DataProto, columns_of, scored_rows
from meshrl.data.images import IMAGES
from meshrl.data.prompts import PromptDataset, PromptStream
from meshrl.data.sampling import RowOrder
from meshrl.models.moe_routing import ROUTED_EXPERTS
from meshrl.rewards.manager import RewardManager
from meshrl.telemetry.console import validation_accuracies
from meshrl.telemetry.metrics import compute_data_metrics, compute_throughput_metrics
from meshrl.telemetry.samples import SampleLog
from meshrl.telemetry.time_ledger import PhaseTimer
from meshrl.telemetry.trackers import Tracker
from meshrl.trainer.dynamic_sampling import DynamicSampling
from meshrl.trainer.health_checks import Gates
from meshrl.trainer.rollout_source import Answer, SampleSource, kin_of, reward_components
from meshrl.trainer.run_state import Keeper
from meshrl.trainer.validation import Validator
from meshrl.workers.actor import FRESH, skips_samples_without_advantage

logger = logging.getLogger(__name__)


class PPOTrainer(SampleSource):
    """A trainer of a policy by PPO-style updates on its own samples, with the configured estimator and loss."""

    def __init__(
        self,
        config: PPOConfig,
        groups: Mapping[str, WorkerGroup],
        train_data: PromptDataset | PromptStream,
        order: RowOrder,
        reward: RewardManager,
        validator: Validator | None,
        tracker: Tracker,
        samples: SampleLog,
        timer: PhaseTimer,
        keeper: Keeper,
        gates: Gates | None = None,
    ):
        super().__init__(config, groups, train_data, order, reward, timer)
        self.ref = groups.get("ref", self.actor)
        self.critic, self.correction = groups.get("critic"), correction_of(config)
        self.validator, self.tracker, self.samples = validator, tracker, samples
        self.keeper, self.gates = keeper, gates
        if validator is not None:
            validator.with_rollout = self.with_rollout
            if all(spec.scores_nothing for spec in self.reward.specs):
                validator.add_model_scores = lambda batch: self.add_model_scores(batch, self.begin_model_scores(batch))
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.dynamic_sampling = self._make_dynamic_sampling()
        self.best: dict[str, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return all state besides the workers' that the rest of the run depends on."""
        place = self.place if self.begun else {"batches": self.batches_begun, **self.order.state_dict()}
        waiting = self.dynamic_sampling.state_dict() if self.dynamic_sampling else {}
        return {
            "step": self.step,
            "version": self.version,
            "data": place,
            "kl_controller": self.kl_controller.state_dict(),
            "best": self.best,
            **self.keeper.nonfinite.state_dict(),
            "gates": self.gates.state_dict() if self.gates else None,
            **waiting,
            **(self.updates.state_dict() if self.begun else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, so that the run continues from that step."""
        # `fit` begins with a weight sync, which increments the version to its saved value.
        self.step, self.version = state["step"], state["version"] - 1
        self.place = dict(state["data"])
        self.order.load_state_dict(self.place)
        self.updates.load_state_dict(state)
        self.batches_begun = self.place["batches"]
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.best = state["best"]
        self.keeper.nonfinite.load_state_dict(state)
        if self.gates and state["gates"]:
            self.gates.load_state_dict(state["gates"])
        if self.dynamic_sampling and "rounds" in state:
            self.dynamic_sampling.load_state_dict(dict(state))

    def _make_dynamic_sampling(self) -> DynamicSampling | None:
        filters = self.config.algorithm.filter_groups
        if not filters.enable:
            return None
        return DynamicSampling(
            filters,
            groups_per_step=self.config.data.train_batch_size,
            samples_per_group=self.config.actor_rollout_ref.rollout.n,
            most_rounds=self.order.batches_per_epoch,
            pad_token_id=int(self.reward.tokenizer.pad_token_id),
            next_batch=self.next_batch,
        )

    def fit(self) -> None:
        """Run the training loop from the current step to the last, with validation, checkpoints and logging."""
        self.sync_weights()
        val_before_train = self.config.trainer.val_before_train and self.step == 0
        if self.validator and (val_before_train or self.config.trainer.val_only):
            self.tracker.log(self.validate(), self.step)
        if self.config.trainer.val_only:
            return
        while self.step < self.total_steps:
            self.step += 1
            self.begin_step()
            found = self.dynamic_sampling.next_batch() if self.dynamic_sampling else self.next_batch()
            if found is None:
                self.end_early()
                return
            batch, metrics = found
            self.keeper.keep_batch(batch, metrics, self.step)
            metrics |= self.train_step(batch)
            if self.is_time_to_validate():
                metrics |= self.validate()
            metrics |= self.gates.after_step(self.step, metrics) if self.gates else {}
            metrics |= self.keeper.after_step(self, metrics)
            self.tracker.log(metrics | self.time_metrics(metrics), self.step)
            self.keeper.after_log(self)
            if self.gates:
                self.gates.raise_if_stopped(self.step, metrics)

    def end_early(self) -> None:
        """Validate and save after the prompts of all epochs are used up before the last step."""
        self.step -= 1
        logger.warning("the prompts of all epochs are used up after step %d of %d", self.step, self.total_steps)
        if self.validator is not None and self.config.trainer.test_freq > 0:
            self.tracker.log(self.validate(), self.step)
        self.keeper.save_last(self)

    def train_step(self, batch: DataProto) -> dict[str, Any]:
        """Run one step of the algorithm on a batch of scored samples and return the step's metrics."""
        metrics: dict[str, Any] = {"training/global_step": self.step}
        metrics |= self.order.metrics()
        check_routes(batch, self.config)
        values: Answer | None = None
        if self.critic is not None:
            with self.phase("values"):
                is_apart, dp_size = self.config.critic.has_own_devices, self.units.critic_dp_size
                values = self.begin_balanced(self.critic, "compute_values", batch, dp_size, is_apart)
        references: Answer | None = None
        if self.needs_reference and self.config.actor_rollout_ref.ref.has_own_devices:
            with self.phase("ref"):
                references = self.begin_references(batch)
        if self.needs_old_log_probs or self.surplus_rows(batch).any():
            with self.phase("old_log_prob"):
                metrics |= self.add_old_log_probs(batch)
                if self.corrects_rollout:
                    metrics |= correct_rollout(batch, self.correction, self.loss_mode)
        cut_off = truncated_rows(batch, self.config.algorithm)
        if self.config.algorithm.mask_truncated_responses:
            metrics["training/truncated_masked"] = float(cut_off.sum())
        if not batch.batch["response_mask"][~cut_off].any():
            for asked in (values, references):
                if asked is not None:
                    asked()  # wait for the result, so that an error of the call is raised
            return metrics | self.pass_over(batch)
        if self.needs_reference:
            with self.phase("ref"):
                batch = batch.union((references or self.begin_references(batch))())
        if values is not None:
            with self.phase("values"):
                batch = batch.union(values())
        if self.gates:
            self.gates.check_batch(batch, self.step)
        with self.phase("adv"):
            metrics |= self.add_advantages(batch)
        if self.gates:
            self.gates.check_batch(batch, self.step)
        # Mask truncated responses only after the advantages: their rewards count in the baseline of their group.
        trained = without_rows(batch, cut_off)
        critic_update: Callable[[], dict[str, float]] = dict
        if self.critic is not None:
            with self.phase("update_critic"):
                critic_update = self.begin_update_critic(trained)
        if self.step > self.config.trainer.critic_warmup:
            with self.phase("update_actor"):
                metrics |= self.update_actor(trained)
            self.refresh_reference_if_due()
            with self.phase("sync"):
                metrics |= self.sync_weights()
        if self.critic is not None:
            with self.phase("update_critic"):
                metrics |= critic_update()
        self.updates.update(batch)
        self.samples.log_training(batch, self.reward.decode, self.step)
        return metrics | data_metrics(trained, self.config)

    def pass_over(self, batch: DataProto) -> dict[str, Any]:
        """Finish a step without an update, because all samples of its batch were rejected or truncated."""
        cut_off = truncated_rows(batch, self.config.algorithm)
        if cut_off.any():
            logger.warning(
                "step %d: all samples that are left (%d) were cut off at data.max_response_length=%d and masked "
                "(algorithm.mask_truncated_responses): there is no update. If that goes on, raise the length",
                self.step,
                int(cut_off.sum()),
                self.config.data.max_response_length,
            )
        else:
            logger.warning(
                "step %d: algorithm.rollout_correction.rollout_rs=%s has rejected all samples: there is no update. If "
                "that goes on, widen rollout_rs_threshold (%s) or find out why rollout and trainer differ",
                self.step,
                self.correction.rollout_rs,
                self.correction.rollout_rs_threshold,
            )
        tensors = batch.batch
        tensors["token_level_rewards"] = tensors["token_level_scores"]
        for name in ("advantages", "returns"):
            tensors[name] = torch.zeros_like(tensors["token_level_scores"])
        if self.step > self.config.trainer.critic_warmup:
            self.refresh_reference_if_due()
        self.updates.update(batch)
        self.samples.log_training(batch, self.reward.decode, self.step)
        return {"training/rejected_batches": 1.0} | data_metrics(without_rows(batch, cut_off), self.config)

    @property
    def needs_reference(self) -> bool:
        """True if a loss or reward term compares the policy with its reference."""
        return uses_reference(self.config)

    def begin_references(self, batch: DataProto) -> Answer:
        """Request the reference's log-probs for the responses of a batch.

        A reference on its own devices computes concurrently with the policy's work.
        """
        is_apart = self.config.actor_rollout_ref.ref.has_own_devices
        return self.begin_balanced(self.ref, "compute_ref_log_prob", batch, self.units.ref_dp_size, is_apart)

    def refresh_reference_if_due(self) -> None:
        """Copy the policy's weights into the reference every `ref.update_every` steps."""
        every = self.config.actor_rollout_ref.ref.update_every
        if every is not None and self.step % every == 0:
            with self.phase("refresh_ref"):
                self.actor.refresh_reference()

    def surplus_rows(self, batch: DataProto) -> Tensor:
        """Return a `[B]` bool tensor: True for samples that dynamic sampling kept from an older policy version."""
        older = (batch.batch["versions"] >= 0) & (batch.batch["versions"] < self.version)
        return older.any(1) & (self.dynamic_sampling is not None and not self.bypasses_old_log_probs)

    @property
    def bypasses_old_log_probs(self) -> bool:
        """True if the rollout's log-probs serve as the old policy's log-probs."""
        return self.config.algorithm.rollout_correction.bypass_mode

    @property
    def needs_old_log_probs(self) -> bool:
        """True if a forward pass of the actor computes `old_log_probs` before the update."""
        return needs_old_log_probs(self.config, self.units.optimizer_steps_per_step)

    @property
    def corrects_rollout(self) -> bool:
        """True if importance weights or rejection correct for differences between rollout policy and trainer policy."""
        return corrects_rollout(self.correction, self.loss_mode)

    @property
    def loss_mode(self) -> str:
        """The name of the configured policy loss."""
        return self.config.actor_rollout_ref.actor.policy_loss.loss_mode

    def add_old_log_probs(self, batch: DataProto) -> dict[str, float]:
        """Add the actor's `old_log_probs` `[B, T]` to a batch.

        Return the actor's entropy and the difference between its log-probs and the rollout's.
        """
        output = self.call_balanced(self.actor.compute_log_prob, batch, [ROUTED_EXPERTS])
        mask, old = batch.batch["response_mask"], output.batch["old_log_probs"]
        batch.batch["old_log_probs"] = old
        if "sum_pi_squared" in output.batch.keys():
            batch.batch["sum_pi_squared"] = output.batch["sum_pi_squared"]
        if ROUTED_EXPERTS in output.non_tensor_batch:
            batch.non_tensor_batch[ROUTED_EXPERTS] = output.non_tensor_batch[ROUTED_EXPERTS]
        metrics = {"actor/entropy": float(agg_loss(output.batch["entropys"], mask, "token-mean"))}
        if "rollout_log_probs" in batch.batch.keys():
            # Tokens of older versions differ because the policy was updated since, not because the rollout is wrong.
            fresh = mask.bool() & (batch.batch["versions"] == self.version)
            if fresh.any():
                difference = (old - batch.batch["rollout_log_probs"])[fresh].abs().double()
                metrics["training/rollout_log_prob_diff_mean"] = float(difference.mean())
                metrics["training/rollout_log_prob_diff_max"] = float(difference.max())
        surplus = self.surplus_rows(batch)
        if surplus.any() and not self.corrects_rollout:
            # An older version sampled these rows and its weights are gone: only the rollout's log-probs are left of it.
            batch.batch["old_log_probs"][surplus] = batch.batch["rollout_log_probs"][surplus]
        return metrics

    def add_advantages(self, batch: DataProto) -> dict[str, float]:
        """Add `token_level_rewards`, `advantages` and `returns`, all `[B, T]`.

        The rewards are the scores, less the KL penalty if `algorithm.use_kl_in_reward` is set.
        """
        tensors, algorithm = batch.batch, self.config.algorithm
        if self.bypasses_old_log_probs:
            tensors["old_log_probs"] = tensors["rollout_log_probs"]
        metrics: dict[str, float] = {}
        tensors["token_level_rewards"] = tensors["token_level_scores"]
        if algorithm.use_kl_in_reward:
            tensors["token_level_rewards"], metrics = apply_kl_penalty(
                tensors["token_level_scores"],
                tensors["old_log_probs"],
                tensors["ref_log_prob"],
                tensors["response_mask"],
                self.kl_controller,
                algorithm.kl_penalty,
            )
        extra: dict[str, Any] = {}
        if algorithm.adv_estimator == "gdpo":
            rm_weight = self.config.reward_model.weight
            found = reward_components(batch, algorithm, self.reward.specs, rm_weight)
            extra = {} if found is None else {"reward_components": found[0], "reward_weights": found[1]}
        tensors["advantages"], tensors["returns"] = compute_advantage(
            algorithm.adv_estimator,
            token_level_rewards=tensors["token_level_rewards"],
            response_mask=tensors["response_mask"],
            index=batch.non_tensor_batch["uid"],
            values=tensors.get("values"),
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            norm_adv_std_over=algorithm.norm_adv_std_over,
            config=algorithm,
            reward_baselines=tensors.get("reward_baselines"),
            old_log_probs=tensors.get("old_log_probs"),
            ref_log_prob=tensors.get("ref_log_prob"),
            sum_pi_squared=tensors.get("sum_pi_squared"),
            rollout_is_weights=tensors.get("rollout_is_weights"),
            **extra,
            **algorithm.adv_kwargs,
        )
        return metrics | (self.add_teacher(tensors) if has_teacher(self.config) else {})

    def add_teacher(self, tensors: TensorDict) -> dict[str, float]:
        """Add the teacher's distillation advantage to the advantages from rewards; return the reverse KL."""
        mask = tensors["response_mask"]
        likelier, _ = compute_distillation_advantage(tensors["ref_log_prob"], tensors["old_log_probs"], mask)
        # Not in place: some estimators return the same tensor for advantages and returns.
        tensors["advantages"] = tensors["advantages"] + self.config.algorithm.distillation_coef * likelier
        return {"distillation/reverse_kl": -float(agg_loss(likelier, mask, "token-mean"))}

    def update_actor(self, batch: DataProto) -> dict[str, float]:
        """Update the actor on the samples of a batch.

        The samples are ordered so that the n-th mini-batches of all ranks together form one global mini-batch.
        """
        names = ["input_ids", "attention_mask", "response_mask", "advantages"]
        compare_with = None
        if "old_log_probs" in batch.batch.keys():
            names.append("old_log_probs")
            compare_with = "old_log_probs" if self.bypasses_old_log_probs else None
        elif "rollout_log_probs" in batch.batch.keys():
            compare_with = "rollout_log_probs"
            names.append(compare_with)
        if self.config.actor_rollout_ref.actor.use_kl_loss:
            names.append("ref_log_prob")
        names += [name for name in ("rollout_is_weights", "watched") if name in batch.batch.keys()]
        tensors = batch.batch.select(*names)
        if compare_with is not None:
            # Tokens of older versions differ because the policy was updated since, not because the rollout is wrong.
            tensors[FRESH] = batch.batch["versions"] == self.version
        measures_entropy = "old_log_probs" not in names or self.bypasses_old_log_probs
        meta = {"compare_with": compare_with, "measure_entropy": measures_entropy}
        data = DataProto(tensors, columns_of(batch, [ROUTED_EXPERTS, IMAGES]), meta)
        kin = kin_of(data, self.config)
        if self.config.actor_rollout_ref.actor.shuffle:
            kin = 1
            data.reorder(np.random.default_rng((self.config.trainer.seed, self.step)).permutation(len(data)))
        if self.loss_mode in COVARIANCE_LOSSES:
            data.meta_info["covariance"] = self.covariance_of_mini_batches(data)
        lengths = data.batch["attention_mask"].sum(1).numpy()
        work = lengths
        if skips_samples_without_advantage(self.config.actor_rollout_ref.actor):
            work = np.where(_without_advantage(data.batch["advantages"]).numpy(), 0, lengths)
        order = self.balanced_order(work, self.units.mini_batches_per_epoch, self.units.dp_size, kin)
        data.reorder(order)
        metrics = self.actor.update_actor(data)[0]
        return metrics | seqlen_metrics(lengths, order, self.units.dp_size)

    def begin_update_critic(self, batch: DataProto) -> Callable[[], dict[str, float]]:
        """Start to regress the critic's values towards the returns.

        A critic on its own devices computes concurrently with the actor's update. Return a function that waits for the
        metrics. The metrics include the share of the returns' variance that the values explained before the update.
        """
        assert self.critic is not None
        names = ("input_ids", "attention_mask", "response_mask", "returns", "values")
        data = DataProto(batch.batch.select(*names), {}, {})
        if self.config.critic.shuffle:
            data.reorder(np.random.default_rng((self.config.trainer.seed, self.step, 1)).permutation(len(data)))
        lengths = data.batch["attention_mask"].sum(1).numpy()
        data.reorder(self.balanced_order(lengths, self.units.critic_mini_batches_per_epoch, self.units.critic_dp_size))
        mask = batch.batch["response_mask"].bool()
        returns, values = batch.batch["returns"][mask], batch.batch["values"][mask]
        unexplained = (returns - values).var() / (returns.var() + 1e-5)
        explained = {"critic/vf_explained_var": float(1 - unexplained)}
        answer = self.begin_call(self.critic, "update_critic", data, self.config.critic.has_own_devices)
        return lambda: answer()[0] | explained

    def covariance_of_mini_batches(self, data: DataProto) -> list[CovarianceStats | None]:
        """Compute the statistics that clip_cov, kl_cov and m2po need of each global mini-batch.

        The controller computes the statistics because each rank has only a part of a mini-batch.
        """
        found: list[CovarianceStats | None] = []
        for part in data.chunk(self.units.mini_batches_per_epoch):
            old, advantages, mask = (part.batch[name] for name in ("old_log_probs", "advantages", "response_mask"))
            if not mask.any():  # all samples of the mini-batch were dropped: choose no token
                found.append(CovarianceStats(0.0, 0.0, bound=float("inf")))
                continue
            actor = self.config.actor_rollout_ref.actor
            weights = part.batch.get("rollout_is_weights")
            stats = add_covariance_stats(BatchStats.of(mask), self.loss_mode, old, advantages, mask, actor, weights)
            found.append(stats.covariance)
        return found

    def is_time_to_validate(self) -> bool:
        """Return whether this step is a multiple of `test_freq` or the last step."""
        every = self.config.trainer.test_freq
        return self.validator is not None and every > 0 and (self.step % every == 0 or self.step == self.total_steps)

    def validate(self) -> dict[str, float]:
        """Measure accuracy on the held-out prompts and update the best result so far."""
        assert self.validator is not None
        with self.phase("testing"):
            metrics = self.validator.run(self.step)
        accuracies = [value for name, value in validation_accuracies(metrics).items() if "mean@" in name]
        mean = sum(accuracies) / max(1, len(accuracies))
        if self.best is None or mean > self.best["accuracy"]:
            self.best = {"accuracy": mean, "step": self.step}
        return metrics

    def time_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Return the step's timings and its throughput, which excludes the time of validation and checkpoints."""
        times = self.timer.metrics()
        aside = times.get("timing_s/testing", 0.0) + times.get("timing_s/save_checkpoint", 0.0)
        seconds = times["timing_s/step"] - aside
        tokens = int(metrics["perf/total_num_tokens"])
        devices = num_devices(self.config)
        whole = times["timing_s/step"]
        booked = self.books.close_step(self.step, self.timer.began, self.timer.began + whole) if self.books else {}
        return times | booked | compute_throughput_metrics(tokens, seconds, devices)


def data_metrics(batch: DataProto, config: PPOConfig) -> dict[str, Any]:
    """Return statistics of a batch: scores, rewards, advantages, lengths and the share of samples without advantage."""
    tensors, scored = batch.batch, torch.from_numpy(scored_rows(batch))
    mask, width = tensors["attention_mask"], tensors["responses"].shape[1]
    metrics: dict[str, Any] = compute_data_metrics(
        tensors["token_level_scores"][scored],
        tensors["token_level_rewards"][scored],
        tensors["advantages"],
        tensors["returns"],
        tensors["response_mask"],
        mask[:, :-width].sum(1),
        mask[:, -width:].sum(1),
        width,
        config.data.max_prompt_length,
    )
    metrics["perf/total_num_tokens"] = int(mask.sum())
    if tensors["response_mask"].any():
        metrics["training/zero_advantage_share"] = float(_without_advantage(tensors["advantages"]).float().mean())
    return metrics


def check_routes(batch: DataProto, config: PPOConfig) -> None:
    """Drop recorded expert routes that are not to be replayed, and raise if routes to be replayed are missing."""
    if not config.actor_rollout_ref.records_routes:
        batch.non_tensor_batch.pop(ROUTED_EXPERTS, None)
    elif all(routes is None for routes in batch.non_tensor_batch.get(ROUTED_EXPERTS, [None])):
        raise ValueError(
            f"router_replay.mode=R3, but no sample of the batch has {ROUTED_EXPERTS}: it was not generated so, or the "
            "rollout's engine does not return them; set R2 or disabled"
        )


def _without_advantage(advantages: Tensor) -> Tensor:
    return torch.count_nonzero(advantages, dim=1) == 0


# Correction for differences between rollout policy and trainer policy: importance weights and rejection.


def corrects_rollout(config: RolloutCorrectionConfig, loss_mode: str) -> bool:
    """Return whether anything corrects for the difference between `old_log_probs` and the rollout's log-probs."""
    return config.rollout_is is not None or config.rollout_rs is not None or loss_mode in RATIO_LOSSES


def needs_old_log_probs(config: PPOConfig, optimizer_steps: int) -> bool:
    """Return whether a forward pass must compute `old_log_probs` before the update.

    On-policy, with one optimizer step a batch, the update computes the old log-probs itself and needs no such pass.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    loss_mode = actor.policy_loss.loss_mode
    if algorithm.rollout_correction.bypass_mode:
        return False
    wanted = (
        algorithm.use_kl_in_reward
        or has_teacher(config)
        or loss_mode in COVARIANCE_LOSSES
        or estimator_takes(algorithm.adv_estimator, "old_log_probs")
        or estimator_takes(algorithm.adv_estimator, "sum_pi_squared")
        or corrects_rollout(correction_of(config), loss_mode)
        or actor.router_replay.mode == "R2"
    )
    return wanted or optimizer_steps > 1


def correct_rollout(batch: DataProto, config: RolloutCorrectionConfig, loss_mode: str) -> dict[str, float]:
    """Add `rollout_is_weights` `[B, T]` and remove rejected tokens from `response_mask`; return the diagnostics."""
    tensors = batch.batch
    old, rollout, mask = (tensors[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old,
        rollout,
        mask,
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    if loss_mode in RATIO_LOSSES:
        weights = (old - rollout).exp() * mask
    if weights is not None:
        tensors["rollout_is_weights"] = weights
    tensors["response_mask"] = kept.to(mask.dtype)
    return metrics


# Masking of responses that the length limit truncated (`algorithm.mask_truncated_responses`).

ENDING, CUT_OFF = "ending", "length"


def truncated_rows(batch: DataProto, algorithm: AlgorithmConfig) -> Tensor:
    """Return a `[B]` bool tensor: True for truncated samples to be masked.

    All entries are False unless `mask_truncated_responses` is set.
    """
    if not algorithm.mask_truncated_responses:
        return torch.zeros(len(batch), dtype=torch.bool)
    cut_off = torch.from_numpy((batch.non_tensor_batch[ENDING] == CUT_OFF).astype(bool))
    return cut_off & batch.batch["response_mask"].any(1)


def without_rows(batch: DataProto, rows: Tensor) -> DataProto:
    """Return a batch in which no token of the given rows counts in the losses; the given batch is not changed."""
    if not rows.any():
        return batch
    tensors = batch.batch.clone(recurse=False)
    for name in ("response_mask", "advantages", "returns"):
        tensors[name] = tensors[name].masked_fill(rows[:, None], 0)
    return DataProto(tensors, batch.non_tensor_batch, batch.meta_info)
