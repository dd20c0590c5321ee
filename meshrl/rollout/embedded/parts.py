"""One rollout over several ranks: each holds a part of the weights, and computes the same tokens as the others.

All ranks must get the same requests in the same order: what they schedule and draw is then the same, since nothing in
it depends on time or chance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.models.buffers import named_weights
from meshrl.models.sizes import of_text


class Parts(ABC):
    """Which part of each weight this rank holds, and how the ranks' results come together.

    `tp`: over how many ranks matrices are cut. `ep`: over how many experts are spread (0: they are not).
    """

    tp, ep = 1, 0

    def __init__(self, hf_model: PreTrainedModel, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        config: Any = of_text(hf_model.config)
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.shapes = {name: weight.shape for name, weight in named_weights(hf_model).items()}

    @abstractmethod
    def _part(self, name: str, value: Tensor) -> Tensor:
        """See `part`."""

    @property
    def local_kv_heads(self) -> int:
        """Key heads that this rank caches."""
        return self.kv_heads

    def logits(self, hidden: Tensor, head: torch.nn.Linear) -> Tensor:
        """Logits of the whole vocabulary, on every rank."""
        return head(hidden)

    def part(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a whole weight."""
        if value.shape != self.shapes[name]:
            raise ValueError(
                f"weight sync: '{name}' has shape {list(self.shapes[name])} here, but was sent as {list(value.shape)}"
            )
        return self._part(name, value)

    @torch.no_grad()
    def shard(self, hf_model: PreTrainedModel, device: torch.device) -> None:
        """Replaces every weight by this rank's part; one without memory (`meta`) gets memory for the part alone."""
        parts: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for name, param in hf_model.named_parameters():
            part = self.part(name, param.data)
            own = torch.zeros_like(part, device=device) if part.is_meta else part.clone()
            parts[param] = torch.nn.Parameter(own, requires_grad=False)
        for module in hf_model.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, parts[param])  # tied ones stay tied
        hf_model.to(device)  # type: ignore[arg-type]

    def add(self, x: Tensor) -> Tensor:
        """Adds the ranks' results up, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers."""
        found = torch.tensor(number, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found)

    def check_in_step(self, tokens: Tensor) -> None:
        """An error on all ranks where they have not sampled the same tokens."""
        places = torch.arange(1, tokens.numel() + 1, device=tokens.device)
        mine = (tokens.flatten().long() * places).sum()
        ends = torch.stack([mine, -mine])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
        if int(ends.sum()):
            raise RuntimeError(f"the {self.size} ranks of one rollout have sampled different tokens")
