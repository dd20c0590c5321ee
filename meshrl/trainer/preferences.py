"""Learning from pairs of answers: what the reference thinks of them → optimizer step → metrics."""

from __future__ import annotations

import torch

from meshrl.algorithms import compute_preference_loss
from meshrl.config.preferences import PreferenceConfig
from meshrl.data.proto import DataProto
from meshrl.trainer.sft import Rows, SFTTrainer


class PreferenceTrainer(SFTTrainer):
    """The loop of fine-tuning, on pairs."""

    config: PreferenceConfig

    def learn(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step."""
        if self.config.has_reference:
            with self.timer.phase("reference"):
                batch = batch.union(self.model.compute_reference(batch))
        return super().learn(batch)

    def validate(self, data: Rows) -> dict[str, float]:
        """The mean loss of the held-out pairs, how often and by how much the chosen answer leads."""
        scores = torch.cat([self._scores(batch) for batch in self.batches(data)])
        loss = self.config.loss
        losses, margin = compute_preference_loss(loss.name, scores[::2], scores[1::2], **loss.options)
        found = {"loss": losses, "accuracy": (margin > 0).float(), "margin": margin}
        return {f"val/{name}": float(values.mean()) for name, values in found.items()}

    def _scores(self, batch: DataProto) -> torch.Tensor:
        if self.config.has_reference:
            batch = batch.union(self.model.compute_reference(batch))
        return self.model.evaluate(batch).batch["scores"]
