"""Learning from pairs of answers: what the reference thinks of them → optimizer step → metrics."""

from __future__ import annotations

import torch

from meshrl.algorithms.preference_losses import margins, preference_losses
from meshrl.config.preferences import WITH_REFERENCE, PreferenceConfig
from meshrl.data.proto import DataProto
from meshrl.trainer.sft import Rows, SFTTrainer


class PreferenceTrainer(SFTTrainer):
    """The loop of fine-tuning, on pairs."""

    config: PreferenceConfig

    def learn(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step."""
        with self.timer.phase("reference"):
            batch = self._with_reference(batch)
        return super().learn(batch)

    def validate(self, data: Rows) -> dict[str, float]:
        """The mean loss of the held-out pairs, how often and by how much the chosen answer leads."""
        scores = torch.cat([self.model.evaluate(self._with_reference(b)).batch["scores"] for b in self.batches(data)])
        loss, pair = self.config.loss, (scores[::2], scores[1::2])
        lead = margins(loss, *pair)
        found = {"loss": preference_losses(loss, *pair), "accuracy": (lead > 0).float(), "margin": lead}
        return {f"val/{name}": float(values.mean()) for name, values in found.items()}

    def _with_reference(self, batch: DataProto) -> DataProto:
        if self.config.loss.name not in WITH_REFERENCE:
            return batch
        return batch.union(self.model.compute_reference(batch))
