"""Tensor parallelism: each rank holds a slice of every matrix and of the cache.

Queries, keys, values, gate and up are cut by rows (whole heads), the products after them by columns and added up over
the ranks, the embedding and the head by rows of the vocabulary. What looks at images is whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.models.key_map import is_of_tower
from meshrl.models.sizes import of_text
from meshrl.rollout.embedded.layers import FAMILIES, SEEING_FAMILIES, is_plain
from meshrl.rollout.embedded.parts import Parts


class TensorParallel(Parts):
    """A slice of every matrix."""

    def __init__(self, hf_model: PreTrainedModel, group: dist.ProcessGroup):
        super().__init__(hf_model, group)
        self.tp = self.size
        config: Any = of_text(hf_model.config)
        self.heads, self.inner = config.num_attention_heads, config.intermediate_size
        self.vocabulary = config.vocab_size
        self._check(hf_model)

    def _check(self, hf_model: PreTrainedModel) -> None:
        if not is_plain(hf_model, FAMILIES + SEEING_FAMILIES):
            raise ValueError(f"{type(hf_model).__name__} cannot be split over ranks: use a tensor-parallel size of 1")
        for name, count in (("attention heads", self.heads), ("inner width", self.inner)):
            if count % self.size:
                raise ValueError(f"{name} ({count}) must be divisible by the tensor-parallel size ({self.size})")
        if (self.size - 1) * self.stretch >= self.vocabulary:
            raise ValueError(f"a vocabulary of {self.vocabulary} leaves some of {self.size} ranks without a row")
        if max(self.kv_heads, self.size) % min(self.kv_heads, self.size):
            raise ValueError(
                f"key-value heads ({self.kv_heads}) and the tensor-parallel size ({self.size}) must divide one another"
            )

    @property
    def local_kv_heads(self) -> int:
        """Key heads of this rank; with more ranks than key heads several ranks hold the same one."""
        return max(self.kv_heads // self.size, 1)

    @property
    def stretch(self) -> int:
        """Rows of the embedding and of the head that a rank holds (the last one fewer)."""
        return -(-self.vocabulary // self.size)

    def _part(self, name: str, value: Tensor) -> Tensor:
        if is_of_tower(name):
            return value
        kind = name.split(".")[-2]
        if kind in ("k_proj", "v_proj"):
            rows = len(value) // self.kv_heads
            first = self.rank * self.kv_heads // self.size
            return value[first * rows : (first + self.local_kv_heads) * rows]
        if kind in ("q_proj", "gate_proj", "up_proj"):
            return value.chunk(self.size, 0)[self.rank]
        if kind in ("o_proj", "down_proj") and name.endswith("weight"):
            return value.chunk(self.size, 1)[self.rank]
        if kind in ("embed_tokens", "lm_head"):
            return value[self.rank * self.stretch : (self.rank + 1) * self.stretch]
        return value

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Embeddings of tokens: each comes from the rank that holds its row, the others add zeros."""
        rows = ids - self.rank * self.stretch
        is_mine = (rows >= 0) & (rows < len(weight))
        return self.add(F.embedding(rows.clamp(0, len(weight) - 1), weight) * is_mine[:, None])

    def logits(self, hidden: Tensor, head: torch.nn.Linear) -> Tensor:
        mine = F.linear(hidden, head.weight, head.bias)
        mine = F.pad(mine, (0, self.stretch - mine.shape[-1])).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts, -1)[:, : self.vocabulary]
