"""Learning from answers that were judged one by one, on the same engine as the policy."""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.algorithms import compute_kto_loss
from meshrl.controller import nd_dispatch, register
from meshrl.data.judged import GOOD
from meshrl.data.proto import DataProto
from meshrl.workers.preferences import REFERENCE, PreferenceWorker


class JudgedWorker(PreferenceWorker):
    """One rank of a policy that learns which answers are good."""

    @register(dispatch_mode=nd_dispatch("model", pad=False))
    def train_batch(self, data: DataProto) -> dict[str, float]:
        """One optimizer step on the mean loss of the answers; `meta_info` has the baseline."""
        engine, config, baseline = self.engine, self.config.loss, float(data.meta_info["baseline"])
        counts = torch.stack([data.batch[GOOD].sum(), (~data.batch[GOOD]).sum()])
        all_good, all_bad = (int(n) for n in engine.sum_over_data_parallel(counts))
        answers = all_good + all_bad

        def loss_function(output: dict[str, Tensor], micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
            scores = self._scores(output, micro_batch)
            good = micro_batch.batch[GOOD].to(scores.device)
            losses, lead = compute_kto_loss(scores, good, baseline, **config.options)
            loss = losses.sum() / answers
            better, worse = (scores * good).sum() / max(1, all_good), (scores * ~good).sum() / max(1, all_bad)
            metrics = {
                "train/loss": loss,
                "train/accuracy": (lead > 0).sum() / answers,
                "train/margin": config.beta * (better - worse),
                "train/chosen_score": better,
                "train/rejected_score": worse,
            }
            return loss * engine.gradient_ranks, {name: value.detach() for name, value in metrics.items()}

        request = self._request(data)
        request.batch[REFERENCE], request.batch[GOOD] = data.batch[REFERENCE], data.batch[GOOD]
        return self._step(request, loss_function)
