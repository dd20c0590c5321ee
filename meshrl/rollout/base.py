"""What every rollout offers to the workers, whatever generates inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from meshrl.data.proto import DataProto


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each next token. `temperature` 0: the likeliest token; `top_k` -1 and `top_p` 1: no limit."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k must be -1 (no limit) or at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


class Rollout(ABC):
    """Generates with one version of the policy's weights at a time."""

    version: int

    @abstractmethod
    def generate_sequences(self, prompts: DataProto, params: SamplingParams) -> DataProto:
        """Answers every prompt of a batch.

        Takes `input_ids` and `attention_mask` [batch, prompt], padded on the left, and `seeds` [batch]; gives
        `prompts`, `responses`, `response_mask`, `input_ids`, `attention_mask`, `position_ids`, `rollout_log_probs` and
        `versions`.
        The log-probs are those of the policy at the sampling temperature, before top-k and top-p cut it.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes a new version of every weight, by Hugging Face name."""
