"""Rollouts with processes of their own that die are started again while the trainers keep what they have."""

from __future__ import annotations

import logging

from meshrl.controller import WorkerGroup
from meshrl.trainer.failures import kind_of
from meshrl.trainer.restarts import Restarts

logger = logging.getLogger(__name__)


class RolloutCare:
    """Replaces the rollout's workers, all of them, when one is lost; they are not connected with the actor's yet."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, restarts: Restarts):
        self.actor, self.rollout, self.restarts = actor, rollout, restarts

    def replace(self, error: BaseException) -> bool:
        """Starts the rollout again if it is what was lost and the budget allows; new workers have no weights yet."""
        if self.rollout.is_alive() or not self.actor.is_alive() or not kind_of(error).may_be_tried_again:
            return False
        if not self.restarts.failed(f"{type(error).__name__}: {error}", "rollout"):
            return False
        self.rollout.restart()
        logger.info("workers of 'rollout': pids %s", self.rollout.pids())
        self.rollout.init_model()
        return True

    def resumed(self, step: int, asked_at: float) -> None:
        """Takes note that the rollout has weights again and is asked again for what it was asked for first then."""
        self.restarts.resumed(step, asked_at)
