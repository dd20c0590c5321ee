"""Tensor and expert parallelism of the embedded rollout: each rank holds a shard and samples the same tokens.

All ranks must get the same requests in the same order. Scheduling and sampling are then equal on all ranks, because
neither depends on time or on global random state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.models.loading import named_weights
from meshrl.models.names import STACK, is_of_tower, of_text
from meshrl.rollout.embedded.layers import FAMILIES, SEEING_FAMILIES, is_plain


class Parts(ABC):
    """The sharding of weights over ranks, and the collectives that combine the ranks' results.

    `tp` is the number of ranks over which matrices are sharded. `ep` is the number of ranks over which experts are
    distributed (0: experts are not distributed).
    """

    tp, ep = 1, 0

    def __init__(self, hf_model: PreTrainedModel, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        config: Any = of_text(hf_model.config)
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.shapes = {name: weight.shape for name, weight in named_weights(hf_model).items()}

    @abstractmethod
    def _part(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's shard of the weight `name`; see `part`."""

    @property
    def local_kv_heads(self) -> int:
        """The number of key heads that this rank caches."""
        return self.kv_heads

    def logits(self, hidden: Tensor, head: torch.nn.Linear) -> Tensor:
        """Return logits of the whole vocabulary, on every rank."""
        return head(hidden)

    def part(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's shard of a whole weight; raise ValueError for a wrong shape."""
        if value.shape != self.shapes[name]:
            raise ValueError(
                f"weight sync: '{name}' has shape {list(self.shapes[name])} here, but was sent as {list(value.shape)}"
            )
        return self._part(name, value)

    @torch.no_grad()
    def shard(self, hf_model: PreTrainedModel, device: torch.device) -> None:
        """Replace every weight by this rank's shard. A weight on `meta` gets memory for the shard only, on `device`."""
        parts: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for name, param in hf_model.named_parameters():
            part = self.part(name, param.data)
            own = torch.zeros_like(part, device=device) if part.is_meta else part.clone()
            parts[param] = torch.nn.Parameter(own, requires_grad=False)
        for module in hf_model.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, parts[param])  # tied weights stay tied
        hf_model.to(device)  # type: ignore[arg-type]

    def add(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors in place (all-reduce)."""
        dist.all_reduce(x, group=self.group)
        return x

    def least(self, number: int, device: torch.device) -> int:
        """Return the minimum of a number over the ranks."""
        found = torch.tensor(number, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found)

    def check_in_step(self, tokens: Tensor) -> None:
        """Raise RuntimeError on all ranks if the ranks have not sampled the same tokens."""
        places = torch.arange(1, tokens.numel() + 1, device=tokens.device)
        mine = (tokens.flatten().long() * places).sum()
        ends = torch.stack([mine, -mine])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
        if int(ends.sum()):
            raise RuntimeError(f"the {self.size} ranks of one rollout have sampled different tokens")


# Tensor parallelism: each rank holds a shard of every matrix and of the KV cache.
#
# Queries, keys, values, gate and up are sharded by rows (whole heads). The matrices after them are sharded by columns,
# and their outputs are summed over the ranks. Embedding and head are sharded by rows of the vocabulary. A vision tower
# is replicated on every rank.


class TensorParallel(Parts):
    """Tensor parallelism, with a shard of every matrix on each rank."""

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
        """The number of this rank's key heads. With more ranks than key heads, several ranks hold the same head."""
        return max(self.kv_heads // self.size, 1)

    @property
    def stretch(self) -> int:
        """The number of rows of embedding and head that a rank holds (the last rank may hold fewer)."""
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
        """Return the embeddings of tokens. Each row comes from the rank that holds it, all other ranks add zeros."""
        rows = ids - self.rank * self.stretch
        is_mine = (rows >= 0) & (rows < len(weight))
        return self.add(F.embedding(rows.clamp(0, len(weight) - 1), weight) * is_mine[:, None])

    def logits(self, hidden: Tensor, head: torch.nn.Linear) -> Tensor:
        mine = F.linear(hidden, head.weight, head.bias)
        mine = F.pad(mine, (0, self.stretch - mine.shape[-1])).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts, -1)[:, : self.vocabulary]


# Expert parallelism: each rank holds some of the experts of every sparse layer, and replicas of all other weights.
#
# All ranks route all tokens equally. Each rank computes the tokens of its own experts, and the outputs are summed.

STACKED = {"gate_up_proj", "down_proj"}


class ExpertParallel(Parts):
    """Expert parallelism, with a contiguous range of experts on each rank."""

    def __init__(self, hf_model: PreTrainedModel, group: dist.ProcessGroup):
        super().__init__(hf_model, group)
        self.ep = self.size
        self._layers: list[Any] = [part for part in hf_model.modules() if _is_stack(part)]
        if not self._layers:
            raise ValueError(
                f"{type(hf_model).__name__} has no experts that can be spread over {self.size} ranks: use an "
                "expert-parallel size of 1"
            )
        for experts in self._layers:
            if experts.num_experts % self.size:
                raise ValueError(
                    f"the model's {experts.num_experts} experts must be divisible by the expert-parallel size "
                    f"({self.size})"
                )

    def _part(self, name: str, value: Tensor) -> Tensor:
        return value.chunk(self.size)[self.rank] if STACK.fullmatch(name) else value

    def shard(self, hf_model: PreTrainedModel, device: torch.device) -> None:
        super().shard(hf_model, device)
        for experts in self._layers:
            experts.num_experts //= self.size
            if hasattr(experts, "_is_expert_parallel"):
                experts._is_expert_parallel = True
            experts.register_forward_pre_hook(self._own_tokens)
            experts.register_forward_hook(lambda *call: self.add(call[-1]))

    def _own_tokens(self, experts: Any, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Set the weights of tokens for other ranks' experts to zero.

        If transformers supports it (`_is_expert_parallel`), those tokens are skipped and cost nothing.
        """
        hidden, chosen, weights = given
        chosen = chosen - self.rank * experts.num_experts
        is_mine = (chosen >= 0) & (chosen < experts.num_experts)
        elsewhere = experts.num_experts if hasattr(experts, "_is_expert_parallel") else 0
        return hidden, chosen.masked_fill(~is_mine, elsewhere), weights.masked_fill(~is_mine, 0.0)


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module is a layer's stacked experts as in transformers, without other parameters."""
    params = dict(module.named_parameters())
    are_stacked = params.keys() == STACKED and all(param.dim() == 3 for param in params.values())
    return are_stacked and hasattr(module, "num_experts")
