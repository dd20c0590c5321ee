"""Rollouts with processes of their own that die are started again while the trainers keep what they have."""

from __future__ import annotations

import time

from meshrl.controller import WorkerGroup
from meshrl.trainer.failures import kind_of
from meshrl.trainer.restarts import Restarts


class RolloutCare:
    """Replaces the rollout's workers, all of them, when one is lost; they are not connected with the actor's yet."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, restarts: Restarts):
        self.actor, self.rollout, self.restarts = actor, rollout, restarts

    def replace(self, error: BaseException, step: int) -> bool:
        """Starts the rollout again if it is what was lost and the budget allows; new workers have no weights yet."""
        if self.rollout.is_alive() or not self.actor.is_alive() or not kind_of(error).may_be_tried_again:
            return False
        began = time.time()
        if not self.restarts.failed(f"{type(error).__name__}: {error}", "rollout"):
            return False
        self.rollout.restart()
        self.rollout.init_model()
        self.restarts.resumed(step, began)
        return True
