"""Which devices a role has: those of the policy, or some of its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.config.key import MOST_RANKS, key
from meshrl.config.names import REF

if TYPE_CHECKING:
    from meshrl.config.root import PPOConfig

SECTIONS = {"ref": REF, "critic": "critic", "reward_model": "reward_model", "judge": "reward.judge"}


@dataclass
class OwnDevices:
    """What sections of roles have that may stand apart from the policy."""

    nnodes: int = key(
        0, "Machines of its own, to work beside the policy; 0: it shares the policy's devices.", low=0, high=MOST_RANKS
    )
    n_gpus_per_node: int = key(0, "Processes on each of these machines.", low=0, high=MOST_RANKS)

    @property
    def has_own_devices(self) -> bool:
        """Whether it is apart from the policy."""
        return self.nnodes > 0 and self.n_gpus_per_node > 0

    @property
    def processes(self) -> list[int]:
        """How many on each of its own machines."""
        return [self.n_gpus_per_node] * self.nnodes


def ranks_of(config: "PPOConfig", place: OwnDevices) -> int:
    """How many ranks a role has, on its own devices or on the policy's."""
    return sum(place.processes) if place.has_own_devices else config.trainer.world_size


def num_devices(config: "PPOConfig") -> int:
    """All processes of a run that have a device."""
    rollout = config.actor_rollout_ref.rollout
    rollouts = 0 if config.actor_rollout_ref.hybrid_engine else rollout.nnodes * rollout.n_gpus_per_node
    return config.trainer.world_size + rollouts + sum(sum(place.processes) for place in places(config).values())


def places(config: "PPOConfig") -> dict[str, OwnDevices]:
    """Where each role is that may stand apart from the policy; `SECTIONS` has the names of these sections."""
    return {
        "ref": config.actor_rollout_ref.ref,
        "critic": config.critic,
        "reward_model": config.reward_model,
        "judge": config.reward.judge,
    }


def roles_apart(config: "PPOConfig") -> set[str]:
    """The roles with devices of their own."""
    return {role for role, place in places(config).items() if place.has_own_devices}


def whose(place: OwnDevices, name: str) -> str:
    """The section whose `nnodes * n_gpus_per_node` are a role's ranks."""
    return name if place.has_own_devices else "trainer"


def pool_problems(config: "PPOConfig") -> list[str]:
    """Half of what says how many devices a role has, and more machines than one without Ray."""
    problems = []
    for role, place in places(config).items():
        name = SECTIONS[role]
        if (place.nnodes > 0) != (place.n_gpus_per_node > 0):
            problems.append(
                f"{name}.nnodes * n_gpus_per_node ({place.nnodes} * {place.n_gpus_per_node}) gives it no devices: set "
                "both for devices of its own, or none to share the policy's"
            )
        if place.nnodes > 1 and config.trainer.backend != "ray":
            problems.append(f"{name}.nnodes={place.nnodes} needs trainer.backend=ray")
    return problems
