"""Trainers and rollouts on different devices: how they meet, and whose error counts when both report one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from meshrl.config.trainer import RunConfig
from meshrl.controller import ControllerError, Future, WorkerGroup
from meshrl.weights.pools import MeetingPoint

T = TypeVar("T")
# How long the other side may take to say what went wrong there.
GRACE_SECONDS = 5.0


def join_pools(actor: WorkerGroup, rollout: WorkerGroup, trainer: RunConfig) -> MeetingPoint:
    """Connects trainers with rollouts, for the weights; the meeting point must be held as long as they talk."""
    point = MeetingPoint("127.0.0.1" if trainer.backend == "local" else own_address())
    joined = actor.join_pool(point.address, rollout.world_size)
    both(lambda: rollout.join_pool(point.address, actor.world_size), joined)
    joined.get()
    return point


def both(call: Callable[[], T], other: Future[object]) -> T:
    """Calls the rollouts while the trainers work; where both fail, the trainers' error is the one that explains."""
    try:
        return call()
    except ControllerError as error:
        try:
            other.get(GRACE_SECONDS)
        except TimeoutError:
            raise error from None
        except ControllerError as cause:
            raise cause from error
        raise


def own_address() -> str:
    """An address of this machine that others can reach."""
    import ray

    return str(ray.util.get_node_ip_address())
