"""Learning from judged answers: a baseline of answers to other prompts → the reference → optimizer step → metrics."""

from __future__ import annotations

import torch

from meshrl.algorithms import compute_kto_loss
from meshrl.data.judged import GOOD, OTHER
from meshrl.data.proto import DataProto
from meshrl.trainer.preferences import PreferenceTrainer
from meshrl.trainer.sft import Rows
from meshrl.workers.preferences import ROWS


class JudgedTrainer(PreferenceTrainer):
    """The loop of fine-tuning, on answers that are good or bad."""

    def learn(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step."""
        with self.timer.phase("baseline"):
            baseline = self._take_baseline(batch)
        batch.meta_info["baseline"] = baseline
        return super().learn(batch) | {"train/kl": baseline}

    def validate(self, data: Rows) -> dict[str, float]:
        """The mean loss of the held-out answers, how often they are on their side of the baseline, how far apart."""
        losses, leads, scores, good = [], [], [], []
        options = self.config.loss.options
        for batch in self.batches(data):
            baseline = self._take_baseline(batch)
            scores.append(self._scores(batch))
            good.append(batch.batch[GOOD])
            loss, lead = compute_kto_loss(scores[-1], good[-1], baseline, **options)
            losses.append(loss)
            leads.append(lead)
        scored, is_good = torch.cat(scores), torch.cat(good)
        margin = self.config.loss.beta * (_mean(scored[is_good]) - _mean(scored[~is_good]))
        accuracy = float((torch.cat(leads) > 0).float().mean())
        return {"val/loss": float(torch.cat(losses).mean()), "val/accuracy": accuracy, "val/margin": margin}

    def _take_baseline(self, batch: DataProto) -> float:
        """Takes the answers to other prompts out of the batch: by how much the policy likes them better on average."""
        names = [f"{OTHER}{name}" for name in ROWS]
        others = batch.pop(names).rename(names, list(ROWS))
        return max(0.0, float(self._scores(others).mean()))


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
