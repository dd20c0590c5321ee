"""Expert parallelism: each rank holds some of the experts of every sparse layer, and everything else whole.

All ranks route all tokens alike. Each computes those that go to its own experts, and the results are added up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.models.key_map import STACK
from meshrl.rollout.embedded.parts import Parts

STACKED = {"gate_up_proj", "down_proj"}


class ExpertParallel(Parts):
    """Some of the experts, in the order of their numbers."""

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
        """Tokens for experts of other ranks count nothing; where transformers leaves them out, they cost nothing."""
        hidden, chosen, weights = given
        chosen = chosen - self.rank * experts.num_experts
        is_mine = (chosen >= 0) & (chosen < experts.num_experts)
        elsewhere = experts.num_experts if hasattr(experts, "_is_expert_parallel") else 0
        return hidden, chosen.masked_fill(~is_mine, elsewhere), weights.masked_fill(~is_mine, 0.0)


def _is_stack(module: nn.Module) -> bool:
    """Whether a module is the experts of a layer, as transformers stacks them, and nothing besides."""
    params = dict(module.named_parameters())
    are_stacked = params.keys() == STACKED and all(param.dim() == 3 for param in params.values())
    return are_stacked and hasattr(module, "num_experts")
