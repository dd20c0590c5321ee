"""Keys of verl's asynchronous trainers (`rollout.*`, `async_training.*`) onto ours."""

import math
from typing import Any

from meshrl.config.alias_rules import Alias, idle, read
from meshrl.config.names import ROLLOUT

SYNC = "async_training"
MIGRATE = "the steps of the run follow from it together with other keys: meshrl migrate computes them"


def _versions(threshold: Any) -> Any:
    """A share of samples that may be begun early, as versions by which they may be behind."""
    return math.ceil(threshold) if isinstance(threshold, int | float) and not isinstance(threshold, bool) else threshold


ASYNC: tuple[Alias, ...] = (
    *(read(f"rollout.{name}", f"{ROLLOUT}.{name}") for name in ("nnodes", "n_gpus_per_node", "n")),
    *(read(f"rollout.{name}", f"trainer.{name}") for name in ("total_epochs", "test_freq")),
    Alias("rollout.total_rollout_steps", instead=MIGRATE),
    read(f"{SYNC}.staleness_threshold", f"{SYNC}.max_staleness", convert=_versions),
    *(
        idle(f"{SYNC}.{name}", "a step trains one batch and then sends its weights", 1, instead=MIGRATE)
        for name in ("trigger_parameter_sync_step", "require_batches")
    ),
    read(f"{SYNC}.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode", weak=1),
    idle(f"{SYNC}.compute_prox_log_prob", "algorithm.rollout_correction.bypass_mode says it", False),
    read(f"{SYNC}.compute_prox_log_prob", "algorithm.rollout_correction.bypass_mode", {True: False}),
    idle(f"{SYNC}.use_trainer_do_validate", "rollouts validate", False, instead="rollouts validate; leave it out"),
    idle(f"{SYNC}.checkpoint_engine", "weights go by the quickest way that the two sides have"),
    idle("actor_rollout_ref.checkpoint_engine", "weights go by the quickest way that the two sides have"),
    idle("actor_rollout_ref.actor.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode says it"),
)
