"""Groups of samples that share a prompt: numbering them and their sums, vectorised.

A group of one sample has no baseline. Every group estimator here gives it the advantage 0 (no learning signal),
never its raw reward; `group_metrics` counts such groups.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from meshrl.algorithms.checks import check_length


@dataclass(frozen=True)
class Groups:
    """For each sample the number of its group (by first appearance); for each group its size and first sample."""

    of_sample: torch.Tensor  # [batch] int64
    sizes: torch.Tensor  # [groups] int64
    first_sample: torch.Tensor  # [groups] int64

    @classmethod
    def of(cls, index: np.ndarray | Sequence[Any] | torch.Tensor, batch: int, device: torch.device) -> "Groups":
        """Number the group ids in `index`: any hashable ids, one a sample."""
        check_length("index", len(index), batch)
        ids = index.tolist() if hasattr(index, "tolist") else list(index)
        numbers: defaultdict[Any, int] = defaultdict(count().__next__)  # an id that is not in yet gets the next number
        of_sample = np.fromiter(map(numbers.__getitem__, ids), dtype=np.int64, count=batch)
        first = np.empty(len(numbers), dtype=np.int64)
        first[of_sample[::-1]] = np.arange(batch)[::-1]  # the last one written is the first sample
        sizes = np.bincount(of_sample, minlength=len(numbers))
        return cls(*(torch.from_numpy(array).to(device) for array in (of_sample, sizes, first)))

    @property
    def size_of_sample(self) -> torch.Tensor:
        return self.sizes.index_select(0, self.of_sample)

    @property
    def is_single(self) -> torch.Tensor:
        """Per sample: is it alone in its group?"""
        return self.size_of_sample == 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over each group: [batch, ...] -> [groups, ...]."""
        total = torch.zeros((len(self.sizes), *values.shape[1:]), dtype=values.dtype, device=values.device)
        return total.index_add_(0, self.of_sample, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over its group, for each sample of a [batch] vector."""
        return (self.sum(values) / self.sizes).index_select(0, self.of_sample)

    def centered(self, values: torch.Tensor) -> torch.Tensor:
        """Each sample's value minus its group's mean; exactly 0 where all of a group are equal."""
        offset = values - self.first(values)
        return offset - self.mean(offset)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """The value of the first sample of its group, for each sample."""
        return values.index_select(0, self.first_sample).index_select(0, self.of_sample)

    def std(self, centered: torch.Tensor) -> torch.Tensor:
        """The sample standard deviation (n - 1) of its group, for each of the centered samples; 0 in a group of one."""
        squares = self.sum(centered.square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt().index_select(0, self.of_sample)


def group_metrics(
    scores: torch.Tensor, index: np.ndarray | Sequence[Any] | torch.Tensor, prefix: str = "groups"
) -> dict[str, float]:
    """Counts of the groups: all, those of one sample (advantage 0 by rule), and those whose scores are all equal."""
    groups = Groups.of(index, len(scores), scores.device)
    differs = groups.sum((scores != groups.first(scores)).long()) > 0
    single = groups.sizes == 1
    return {
        f"{prefix}/count": float(len(groups.sizes)),
        f"{prefix}/single_sample": float(single.sum()),
        f"{prefix}/equal_scores": float((~differs & ~single).sum()),
        f"{prefix}/size_min": float(groups.sizes.min()) if len(groups.sizes) else 0.0,
        f"{prefix}/size_max": float(groups.sizes.max()) if len(groups.sizes) else 0.0,
    }


def informative_samples(scores: torch.Tensor, index: np.ndarray | Sequence[Any] | torch.Tensor) -> torch.Tensor:
    """Per sample: do the scores of its group differ? Groups that do not carry no signal (DAPO's dynamic sampling)."""
    groups = Groups.of(index, len(scores), scores.device)
    return (groups.sum((scores != groups.first(scores)).long()) > 0)[groups.of_sample]
