"""How finished and growing answers leave the engine: as chunks, or straight into the rectangle of a training batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshrl.data.proto import DataProto
from meshrl.rollout.base import joined, routes_column
from meshrl.rollout.embedded.route_store import whole_routes
from meshrl.rollout.embedded.rows import Sequence
from meshrl.rollout.requests import Chunk


def as_chunk(
    sequence: Sequence,
    tokens: np.ndarray,
    log_probs: np.ndarray,
    finish_reason: str | None = None,
    error: str | None = None,
) -> Chunk:
    """The sequence's tokens from number `sent` on."""
    end = sequence.sent + len(tokens)
    top = sequence.top_log_probs[sequence.sent : end] if sequence.params.top_log_probs else None
    versions = sequence.versions(sequence.sent, end).tolist()
    sequence.sent = end
    return Chunk(
        sequence.request_id,
        sequence.index,
        tokens.tolist(),
        log_probs.tolist(),
        versions,
        finish_reason,
        error,
        top,
        whole_routes(sequence.routes) if finish_reason is not None else None,
    )


class AnswerBatch:
    """The answers to a batch of prompts: rectangles that fill as answers end."""

    def __init__(self, count: int, width: int, pad_token_id: int):
        self.left = count
        self.tokens = np.full((count, width), pad_token_id, np.int64)
        self.log_probs = np.zeros((count, width), np.float32)
        self.versions = np.full((count, width), -1, np.int32)
        self.lengths = np.zeros(count, np.int64)
        self.endings = np.full(count, None, object)
        self.routes: list[list[Tensor]] = [[] for _ in range(count)]

    def take(self, place: int, sequence: Sequence, ending: str) -> None:
        """Writes the answer of a sequence that has given its row back."""
        count = len(sequence.output)
        self.tokens[place, :count], self.log_probs[place, :count] = sequence.output, sequence.log_probs
        self.versions[place, :count] = sequence.versions(0, count)
        self.lengths[place], self.endings[place], self.routes[place] = count, ending, sequence.routes
        self.left -= 1

    def as_data(self, ids: Tensor, mask: Tensor) -> DataProto:
        """Prompts and answers as the trainer wants them; see `Rollout.generate_sequences`."""
        width = self.tokens.shape[1]
        response_mask = (torch.arange(width) < torch.from_numpy(self.lengths)[:, None]).long()
        fields = joined(
            ids,
            mask,
            responses=torch.from_numpy(self.tokens),
            there=response_mask,
            response_mask=response_mask,
            rollout_log_probs=torch.from_numpy(self.log_probs),
            versions=torch.from_numpy(self.versions),
        )
        routes = routes_column(map(whole_routes, self.routes), fields["attention_mask"])
        return DataProto.from_dict(fields, {"ending": self.endings, **routes})
