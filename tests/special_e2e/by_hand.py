"""Advantages and losses by plain loops over Python numbers, and a recorder of what a run computed them from."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from meshrl.trainer.rl_trainer import PPOTrainer
from meshrl.workers.actor import ActorRolloutRefWorker, log_prob_request
from meshrl.workers.scoring import CriticWorker

Rows = list[list[float]]


@dataclass
class Recorder:
    """Every batch that was trained on, and every mini-batch with the policy's log-probs just before its step."""

    batches: list[dict[str, Any]] = field(default_factory=list)
    mini_batches: list[dict[str, Any]] = field(default_factory=list)
    critic_batches: list[dict[str, Any]] = field(default_factory=list)

    def watch(self, monkeypatch: Any) -> Recorder:
        """Takes part in runs whose worker lives in this process; pictures of them are not needed."""
        monkeypatch.setattr("meshrl.trainer.launch.write_report", lambda path: path)
        update_actor, update_on = PPOTrainer.update_actor, ActorRolloutRefWorker._update_on

        def watched_update(trainer, batch):
            tensors = {name: value.clone() for name, value in batch.batch.items()}
            self.batches.append(tensors | {"step": trainer.step, **dict(batch.non_tensor_batch)})
            return update_actor(trainer, batch)

        def watched_step(worker, data, compare_with, covariance):
            request = log_prob_request(data, worker.config.rollout, worker.temperature, entropy=False)
            log_probs = worker.actor.forward(request)["log_probs"].clone()
            seen = {name: value.clone() for name, value in data.batch.items()}
            metrics = update_on(worker, data, compare_with, covariance)
            self.mini_batches.append(seen | {"log_probs": log_probs, "metrics": metrics})
            return metrics

        update_critic_on = CriticWorker._update_on

        def watched_critic(worker, data):
            seen = {name: value.clone() for name, value in data.batch.items()}
            request = data.select(["input_ids", "attention_mask", "response_mask"], [])
            request.meta_info = worker._meta()
            seen["predicted"] = worker.engine.forward(request)["values"].clone()
            metrics = update_critic_on(worker, data)
            self.critic_batches.append(seen | {"metrics": metrics})
            return metrics

        monkeypatch.setattr(CriticWorker, "_update_on", watched_critic)
        monkeypatch.setattr(PPOTrainer, "update_actor", watched_update)
        monkeypatch.setattr(ActorRolloutRefWorker, "_update_on", watched_step)
        return self


def tokens_of(mask: torch.Tensor, row: int) -> list[int]:
    return [t for t, inside in enumerate(mask[row].tolist()) if inside]


def groups_of(uids: Any) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    return groups


def scores_of(batch: dict[str, Any]) -> list[float]:
    return [sum(row) for row in batch["token_level_rewards"].tolist()]


def on_tokens(numbers: list[float], mask: torch.Tensor) -> Rows:
    return [[number if inside else 0.0 for inside in row] for number, row in zip(numbers, mask.tolist(), strict=True)]


def grpo(batch: dict[str, Any], by_std: bool = True, scores: list[float] | None = None) -> list[float]:
    scores = scores_of(batch) if scores is None else scores
    advantages = [0.0] * len(scores)
    for rows in groups_of(batch["uid"]).values():
        own = [scores[row] for row in rows]
        spread = statistics.stdev(own) + 1e-6 if by_std else 1.0
        for row in rows:
            advantages[row] = (scores[row] - statistics.fmean(own)) / spread
    return advantages


def rloo(batch: dict[str, Any]) -> list[float]:
    scores, advantages = scores_of(batch), [0.0] * len(batch["uid"])
    for rows in groups_of(batch["uid"]).values():
        for row in rows:
            advantages[row] = scores[row] - statistics.fmean(scores[other] for other in rows if other != row)
    return advantages


def to_go(batch: dict[str, Any]) -> Rows:
    rewards, mask = batch["token_level_rewards"].tolist(), batch["response_mask"]
    found = [[0.0] * mask.shape[1] for _ in rewards]
    for row, own in enumerate(rewards):
        for t in tokens_of(mask, row):
            found[row][t] = sum(own[t:])
    return found


def whitened(rows: Rows, mask: torch.Tensor) -> Rows:
    inside = [rows[row][t] for row in range(len(rows)) for t in tokens_of(mask, row)]
    mean, spread = statistics.fmean(inside), math.sqrt(statistics.variance(inside) + 1e-8)
    return [
        [(value - mean) / spread if there else 0.0 for value, there in zip(row, flags, strict=True)]
        for row, flags in zip(rows, mask.tolist(), strict=True)
    ]


def remax(batch: dict[str, Any]) -> Rows:
    mask, baselines = batch["response_mask"], batch["reward_baselines"].tolist()
    found = to_go(batch)
    for row in range(len(found)):
        for t in tokens_of(mask, row):
            found[row][t] -= baselines[row]
    return found


def gdpo(batch: dict[str, Any], components: dict[str, float]) -> Rows:
    total = [0.0] * len(batch["uid"])
    for column, weight in components.items():
        for row, advantage in enumerate(grpo(batch, scores=[float(value) for value in batch[column]])):
            total[row] += weight * advantage
    return whitened(on_tokens(total, batch["response_mask"]), batch["response_mask"])


def distillation(batch: dict[str, Any]) -> Rows:
    mask, teacher, old = batch["response_mask"], batch["ref_log_prob"].tolist(), batch["old_log_probs"].tolist()
    found = [[0.0] * mask.shape[1] for _ in old]
    for row in range(len(old)):
        for t in tokens_of(mask, row):
            found[row][t] = teacher[row][t] - old[row][t]
    return found


def gae(batch: dict[str, Any], gamma: float, lam: float) -> tuple[Rows, Rows]:
    mask, values, rewards = batch["response_mask"], batch["values"].tolist(), batch["token_level_rewards"].tolist()
    advantages = [[0.0] * mask.shape[1] for _ in values]
    returns = [[0.0] * mask.shape[1] for _ in values]
    for row in range(len(values)):
        carried, after = 0.0, 0.0
        for t in reversed(tokens_of(mask, row)):
            carried = rewards[row][t] + gamma * after - values[row][t] + gamma * lam * carried
            after = values[row][t]
            advantages[row][t], returns[row][t] = carried, carried + values[row][t]
    return whitened(advantages, mask), returns


def token_baseline(batch: dict[str, Any]) -> Rows:
    mask, returns = batch["response_mask"], to_go(batch)
    old, squares = batch["old_log_probs"].tolist(), batch["sum_pi_squared"].tolist()
    energy = [[0.0] * mask.shape[1] for _ in returns]
    for row in range(len(returns)):
        path = 0.0
        for t in tokens_of(mask, row):
            path += 1 - 2 * math.exp(old[row][t]) + squares[row][t]
            energy[row][t] = path
    found = [[0.0] * mask.shape[1] for _ in returns]
    for rows in groups_of(batch["uid"]).values():
        for t in range(mask.shape[1]):
            there = [row for row in rows if mask[row, t]]
            weight = sum(energy[row][t] for row in there)
            if not there:
                continue
            # A sample that is alone there is its own baseline.
            baseline = sum(energy[row][t] * returns[row][t] for row in there) / weight
            for row in there:
                found[row][t] = returns[row][t] - baseline
    return found


def value_loss(mini_batch: dict[str, Any], clip: float) -> float:
    """Half the larger of the squared errors of the prediction and of the one clipped around the old value."""
    losses = []
    for row in range(len(mini_batch["values"])):
        for t in tokens_of(mini_batch["response_mask"], row):
            new, old, wanted = (mini_batch[name][row, t].item() for name in ("predicted", "values", "returns"))
            near = min(max(new, old - clip), old + clip)
            losses.append(0.5 * max((new - wanted) ** 2, (near - wanted) ** 2))
    return statistics.fmean(losses)


def kl_of(mini_batch: dict[str, Any]) -> float:
    """The k3 estimate of the KL to the reference, at most 10 a token, a mean over tokens."""
    terms = []
    for row in range(len(mini_batch["log_probs"])):
        for t in tokens_of(mini_batch["response_mask"], row):
            difference = (mini_batch["ref_log_prob"][row, t] - mini_batch["log_probs"][row, t]).item()
            terms.append(min(math.exp(difference) - 1 - difference, 10.0))
    return statistics.fmean(terms)


@dataclass(frozen=True)
class Loss:
    """A policy loss in plain words; `weights` and `rejected` are functions of the ratio's logs of one sample."""

    kind: str = "vanilla"
    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0
    aggregation: str = "token-mean"
    token_weight_cap: float | None = None
    reject_above_k3: float | None = None

    def value(self, mini_batch: dict[str, Any]) -> float:
        """The loss of a whole mini-batch."""
        mask = mini_batch["response_mask"]
        rows = [self._of_sample(mini_batch, row) for row in range(len(mask))]
        rows = [losses for losses in rows if losses]
        if self.aggregation == "token-mean":
            return sum(map(sum, rows)) / sum(map(len, rows))
        if self.aggregation == "seq-mean-token-mean":
            return statistics.fmean(statistics.fmean(losses) for losses in rows)
        assert self.aggregation == "seq-mean-token-sum-norm"
        return sum(map(sum, rows)) / len(rows) / mask.shape[1]

    def _of_sample(self, mini_batch: dict[str, Any], row: int) -> list[float]:
        places = tokens_of(mini_batch["response_mask"], row)
        new, old, advantages = (
            [mini_batch[name][row, t].item() for t in places] for name in ("log_probs", "old_log_probs", "advantages")
        )
        logs = [a - b for a, b in zip(new, old, strict=True)]
        rejected = False
        if self.reject_above_k3 is not None:
            rejected = statistics.fmean(math.exp(x) - 1 - x for x in logs) > self.reject_above_k3
        if self.kind == "gspo":
            logs = [statistics.fmean(logs)] * len(logs)
        losses = [self._of_token(x, a, lp) for x, a, lp in zip(logs, advantages, new, strict=True)]
        if self.token_weight_cap is not None:
            losses = [loss * min(math.exp(x), self.token_weight_cap) for loss, x in zip(losses, logs, strict=True)]
        return [0.0 if rejected else loss for loss in losses]

    def _of_token(self, log_ratio: float, advantage: float, log_prob: float) -> float:
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, 1 - self.low), 1 + self.high)
        if self.kind == "reinforce":
            return -advantage * log_prob
        if self.kind == "cispo":
            return -advantage * clipped * log_prob
        loss = max(-advantage * ratio, -advantage * clipped)
        if self.kind == "vanilla" and advantage < 0:
            loss = min(loss, -advantage * self.dual)
        return loss
