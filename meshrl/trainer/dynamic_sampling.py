"""Dynamic sampling (DAPO): groups of samples with equal rewards give no gradient, so they are replaced by new groups.

surplus of the last step ─┐
prompts → generate, score → keep groups that differ → enough for a step? ── yes → batch; the rest is surplus
   └──────────────────────────── no, another round ◄──────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from meshrl.config.keys import count
from meshrl.config.rl import WHOLE_SCORE, FilterGroupsConfig
from meshrl.data.batch import DataProto, concat_samples, object_array, scored_rows
from meshrl.telemetry.metrics import reduce_metrics

Scored = tuple[DataProto, dict[str, Any]]
# Metrics that are added up over the rounds of a step. Of `LAST` the last value is taken, of all other metrics the mean.
COUNTED = (
    "reward/errors",
    "reward/dropped",
    "reward/baseline/errors",
    "training/stale_dropped",
    "training/empty_batches",
)
LAST = ("training/epoch",)


class DynamicSampling:
    """The sampler of batches with exactly `groups_per_step` groups whose samples differ.

    A group is `samples_per_group` neighbouring rows. Surplus groups wait for the next step, so no informative group is
    thrown away and no prompt is generated for twice.
    """

    def __init__(
        self,
        config: FilterGroupsConfig,
        *,
        groups_per_step: int,
        samples_per_group: int,
        most_rounds: int,
        pad_token_id: int,
        next_batch: Callable[[], Scored | None],
    ):
        """Set the sampler up; `most_rounds` limits the rounds of a step if the config has no limit."""
        self.config, self.groups_per_step, self.samples_per_group = config, groups_per_step, samples_per_group
        self.most_rounds = config.max_num_gen_batches or most_rounds
        self.pad_token_id, self.more = pad_token_id, next_batch
        self.surplus: DataProto | None = None
        self.rounds = 0

    def next_batch(self) -> Scored | None:
        """Return the samples of one step with the metrics of their rounds; None if the prompts are used up before."""
        kept = [] if self.surplus is None else [self.surplus]
        reused = have = self._groups(self.surplus)
        rounds, generated, alike = 0, 0, 0
        collected: dict[str, list[Any]] = {}
        scores: list[float] = []
        while have < self.groups_per_step:
            if rounds == self.most_rounds:
                raise self._too_few(have, rounds, generated)
            found = self._round()
            if found is None:
                # Keep the groups for a run that is resumed with more epochs.
                self.surplus = concat_samples(kept, self.pad_token_id) if kept else None
                return None
            batch, metrics = found
            differ = informative_groups(batch, self.config.metric, self.samples_per_group)
            for name, value in metrics.items():
                collected.setdefault(name, []).append(value)
            scores += batch.batch["token_level_scores"][torch.from_numpy(scored_rows(batch))].sum(1).tolist()
            rounds, generated, alike = rounds + 1, generated + len(differ), alike + int((~differ).sum())
            if differ.any():
                kept.append(batch.select_idxs(np.flatnonzero(np.repeat(differ, self.samples_per_group))))
                have += int(differ.sum())
        whole = concat_samples(kept, self.pad_token_id)
        rows = self.groups_per_step * self.samples_per_group
        self.surplus = whole[rows:] if len(whole) > rows else None
        metrics = _over_rounds(collected) | {
            "filter_groups/rounds": rounds,
            "filter_groups/generated_groups": generated,
            "filter_groups/dropped_groups": alike,
            "filter_groups/reused_groups": min(reused, self.groups_per_step),
            "filter_groups/surplus_groups": self._groups(self.surplus),
        }
        if scores:
            metrics["filter_groups/score_before/mean"] = float(np.mean(scores))
        return whole[:rows], metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the surplus groups and the number of rounds so far."""
        return {"surplus": self.surplus, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the surplus groups and the number of rounds."""
        self.surplus, self.rounds = state["surplus"], int(state["rounds"])

    def _round(self) -> Scored | None:
        found = self.more()
        if found is None:
            return None
        self.rounds += 1
        # Make uids unique: the same row may come again in the next epoch while its earlier group is still surplus.
        uids = [f"{uid}-round{self.rounds}" for uid in found[0].non_tensor_batch["uid"]]
        found[0].non_tensor_batch["uid"] = object_array(uids)
        return found

    def _groups(self, batch: DataProto | None) -> int:
        return 0 if batch is None else len(batch) // self.samples_per_group

    def _too_few(self, have: int, rounds: int, generated: int) -> ValueError:
        limit = self.config.max_num_gen_batches
        why = f"algorithm.filter_groups.max_num_gen_batches={limit}" if limit else "a whole epoch of prompts"
        return ValueError(
            f"dynamic sampling has {have} of the {count(self.groups_per_step, 'group')} of a step after "
            f"{count(rounds, 'round')} with {count(generated, 'group')} ({why}): in all others the samples are alike, "
            f"so the prompts are too easy or too hard for the policy. Use other prompts, raise rollout.n, lower "
            f"data.train_batch_size" + (", or raise the limit (0: an epoch)" if limit else "")
        )


def informative_groups(batch: DataProto, metric: str | None, samples_per_group: int) -> np.ndarray:
    """Return for each group of neighbouring rows whether its samples differ in the metric, `[groups]` bool.

    Dropped samples and samples that are too old do not count.
    """
    values = metric_values(batch, metric).reshape(-1, samples_per_group)
    there = batch.batch["response_mask"].any(1).numpy() & scored_rows(batch)  # stale ones have no mask
    dropped = ~there.reshape(values.shape)
    lowest = np.where(dropped, np.inf, values).min(1)
    highest = np.where(dropped, -np.inf, values).max(1)
    return highest > lowest


def metric_values(batch: DataProto, metric: str | None) -> np.ndarray:
    """Return the metric of each sample, `[B]`; a sample whose reward failed has no such metric and counts as 0."""
    columns = batch.non_tensor_batch
    name = metric or ("acc" if "acc" in columns else WHOLE_SCORE[0])
    if name in WHOLE_SCORE:
        return batch.batch["token_level_scores"].sum(1).double().numpy()
    if name not in columns:
        raise ValueError(
            f"algorithm.filter_groups.metric={name}: the reward function does not return it; there are "
            f"{', '.join(sorted(columns))}, or use {WHOLE_SCORE[0]}"
        )
    try:
        return np.array([0.0 if value is None else float(value) for value in columns[name]])
    except (TypeError, ValueError) as error:
        raise ValueError(f"algorithm.filter_groups.metric={name} must be a number of each sample: {error}") from error


def _over_rounds(collected: dict[str, list[Any]]) -> dict[str, Any]:
    own = {name: float(sum(values)) for name, values in collected.items() if name.startswith(COUNTED)}
    own |= {name: values[-1] for name, values in collected.items() if name in LAST}
    return reduce_metrics({name: values for name, values in collected.items() if name not in own}) | own
