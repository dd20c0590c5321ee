"""What changes a row's logits before its token is drawn: repetition penalty, logit bias, and no end before min_tokens.

Log-probs never see these: they are those of the model itself.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshrl.rollout.embedded.rows import Rows, Sequence


class Adjuster:
    """Remembers which tokens each row has seen, and applies the rows' wishes to their logits."""

    def __init__(self, rows: Rows, vocabulary: int, device: torch.device):
        self.rows, self.vocabulary, self.device = rows, vocabulary, device
        self._seen: Tensor | None = None

    def enter(self, sequence: Sequence) -> None:
        """Notes the tokens of a sequence whose first token is about to be sampled."""
        if sequence.params.repetition_penalty == 1:
            return
        if self._seen is None:
            self._seen = torch.zeros(self.rows.capacity, self.vocabulary, dtype=torch.bool, device=self.device)
        seen = self._seen[sequence.row]
        seen.zero_()
        seen[torch.from_numpy(sequence.tokens_with(self.rows)).to(self.device)] = True

    def note(self, rows: Tensor, tokens: Tensor) -> None:
        """Notes sampled tokens."""
        if self._seen is not None:
            self._seen[rows, tokens] = True

    def move(self, source: int, target: int) -> None:
        """Follows a sequence to another row."""
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def adjust(self, logits: Tensor, rows: np.ndarray) -> Tensor | None:
        """Adjusted logits of these rows, or None where nothing changes. Row i of `logits` belongs to row `rows[i]`."""
        made: Tensor | None = None
        for place, row in enumerate(rows.tolist()):
            sequence = self.rows.sequences[row]
            if sequence is None or not sequence.adjusts:
                continue
            made = logits.float().clone() if made is None else made
            self._adjust_row(made[place], sequence, row)
        return made

    def _adjust_row(self, logits: Tensor, sequence: Sequence, row: int) -> None:
        params = sequence.params
        if params.repetition_penalty != 1 and self._seen is not None:
            penalty = params.repetition_penalty
            weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self._seen[row], weaker, logits))
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=self.device)
            logits[tokens] += torch.tensor(list(params.logit_bias.values()), device=self.device)
        if self.rows.launched[row] < params.min_tokens and params.stop_token_ids:
            logits[torch.tensor(params.stop_token_ids, device=self.device)] = -torch.inf
