"""Pools of devices, and the mapping of roles to pools."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakSet

from meshrl.controller.calls import Backend, GroupBrokenError


class Role(StrEnum):
    """The role of a worker. The value is the role's name in configs, metrics and messages."""

    Actor = "actor"
    Rollout = "rollout"
    RefPolicy = "ref"
    Critic = "critic"
    RewardModel = "reward_model"
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"


@dataclass(frozen=True)
class NodeSlots:
    """Some slots (one process each) of one node of the pool that first asked for that node."""

    origin: "ResourcePool"
    node: int
    slots: tuple[int, ...]


class ResourcePool:
    """Slots for worker processes: `process_on_nodes[i]` of them on the i-th node, with one GPU each if `use_gpu`.

    Up to `max_colocate_count` worker groups may share a pool. `split` and `merge` make pools over the same slots.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        max_colocate_count: int = 3,
        name_prefix: str = "",
    ) -> None:
        counts = [int(count) for count in process_on_nodes]
        if not counts or min(counts) < 1:
            raise ValueError(f"process_on_nodes must list at least one process per node, got {list(process_on_nodes)}")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.name_prefix = name_prefix
        self.first_device = 0  # the first GPU on this machine, for the local backend; ResourcePoolManager sets it
        self.parts = [NodeSlots(self, node, tuple(range(count))) for node, count in enumerate(counts)]
        self._tenants: dict[tuple[int, int], WeakSet[Backend]] = defaultdict(WeakSet)  # by (node, slot)

    @property
    def process_on_nodes(self) -> list[int]:
        """The number of processes on each node."""
        return [len(part.slots) for part in self.parts]

    @property
    def world_size(self) -> int:
        """The number of processes in the pool."""
        return sum(self.process_on_nodes)

    def check_room(self) -> None:
        """Raise a ValueError if `max_colocate_count` worker groups already live on one of the slots."""
        for part in self.parts:
            for slot in part.slots:
                living = sum(_lives(tenant) for tenant in part.origin._tenants[part.node, slot])
                if living >= self.max_colocate_count:
                    raise ValueError(
                        f"process {slot} of node {part.node} of the pool holds {living} worker groups and "
                        f"max_colocate_count is {self.max_colocate_count}: shut one down, raise max_colocate_count, or "
                        "put several roles into one process (create_colocated_worker_cls)"
                    )

    def add_tenant(self, backend: Backend) -> None:
        """Count a group's workers on the pool's slots until they end."""
        for part in self.parts:
            for slot in part.slots:
                part.origin._tenants[part.node, slot].add(backend)

    def split(self, sizes_or_ratios: Sequence[int] | Sequence[float]) -> list["ResourcePool"]:
        """Return disjoint pools that together are this pool.

        Whole numbers are sizes: the first pool takes that many slots in rank order, and so on. Fractions are shares of
        every node, so that each pool spans all nodes.
        """
        values = list(sizes_or_ratios)
        if not values or any(value <= 0 for value in values):
            raise ValueError(f"split needs positive sizes or ratios, got {values}")
        if all(isinstance(value, int) for value in values):
            return self._split_by_sizes([int(value) for value in values])
        return self._split_by_ratios([float(value) for value in values])

    def _split_by_sizes(self, sizes: list[int]) -> list["ResourcePool"]:
        if sum(sizes) != self.world_size:
            raise ValueError(f"sizes {sizes} sum to {sum(sizes)}, but the pool holds {self.world_size} processes")
        slots = [(part.origin, part.node, slot) for part in self.parts for slot in part.slots]
        pools, start = [], 0
        for index, size in enumerate(sizes):
            pools.append(self._part_of(slots[start : start + size], index))
            start += size
        return pools

    def _split_by_ratios(self, ratios: list[float]) -> list["ResourcePool"]:
        if abs(sum(ratios) - 1.0) > 1e-6:
            raise ValueError(f"ratios {ratios} sum to {sum(ratios):g}, they must sum to 1")
        chosen: list[list[tuple[ResourcePool, int, int]]] = [[] for _ in ratios]
        for part in self.parts:
            start = 0
            for index, ratio in enumerate(ratios):
                share = ratio * len(part.slots)
                count = round(share)
                if abs(share - count) > 1e-6:
                    raise ValueError(
                        f"ratio {ratio:g} of {len(part.slots)} processes on a node is {share:g}, not a whole number; "
                        "choose other ratios, or split by sizes"
                    )
                chosen[index] += [(part.origin, part.node, slot) for slot in part.slots[start : start + count]]
                start += count
        return [self._part_of(slots, index) for index, slots in enumerate(chosen)]

    def _part_of(self, slots: list[tuple["ResourcePool", int, int]], index: int) -> "ResourcePool":
        by_node: dict[tuple[int, int], tuple[ResourcePool, int, list[int]]] = {}
        for origin, node, slot in slots:
            by_node.setdefault((id(origin), node), (origin, node, []))[2].append(slot)
        pool = ResourcePool([len(found) for _, _, found in by_node.values()], self.use_gpu, self.max_colocate_count)
        pool.name_prefix = f"{self.name_prefix}_{index}" if self.name_prefix else ""
        pool.parts = [NodeSlots(origin, node, tuple(found)) for origin, node, found in by_node.values()]
        pool.first_device = self.first_device
        return pool

    @staticmethod
    def merge(pools: Sequence["ResourcePool"]) -> "ResourcePool":
        """Return one pool over the slots of all pools. Parts that were split from one node become one node again."""
        if not pools:
            raise ValueError("merge needs at least one pool")
        first = pools[0]
        for pool in pools[1:]:
            if (pool.use_gpu, pool.max_colocate_count) != (first.use_gpu, first.max_colocate_count):
                raise ValueError("pools that are merged must agree in use_gpu and max_colocate_count")
        slots = [(part.origin, part.node, slot) for pool in pools for part in pool.parts for slot in part.slots]
        if len({(id(origin), node, slot) for origin, node, slot in slots}) != len(slots):
            raise ValueError("the pools to merge share slots: each slot can be in the merged pool once")
        merged = first._part_of(slots, 0)
        merged.name_prefix = first.name_prefix
        return merged

    def __repr__(self) -> str:
        kind = "GPU" if self.use_gpu else "CPU"
        return f"ResourcePool({self.process_on_nodes}, {kind}, name_prefix={self.name_prefix!r})"


def _lives(backend: Backend) -> bool:
    try:
        backend.check()
    except GroupBrokenError:
        return False
    return True


class ResourcePoolManager:
    """Named pools and the pool of each role. Roles mapped to the same pool are colocated."""

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role | str, str],
        use_gpu: bool = True,
        max_colocate_count: int = 3,
    ) -> None:
        self.resource_pool_spec = {name: list(counts) for name, counts in resource_pool_spec.items()}
        self.mapping = {str(role): pool for role, pool in mapping.items()}
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.resource_pool_dict: dict[str, ResourcePool] = {}
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                known = ", ".join(sorted(self.resource_pool_spec))
                raise ValueError(f"role '{role}' is mapped to pool '{pool}', which is not one of: {known}")

    def create_resource_pool(self) -> dict[str, ResourcePool]:
        """Create the pools at the first call, and return all pools by name."""
        first_device = 0
        for name, counts in self.resource_pool_spec.items():
            if name not in self.resource_pool_dict:
                pool = ResourcePool(counts, self.use_gpu, self.max_colocate_count, name_prefix=name)
                pool.first_device = first_device
                self.resource_pool_dict[name] = pool
            first_device += sum(counts)
        return self.resource_pool_dict

    def get_resource_pool(self, role: Role | str) -> ResourcePool:
        """Return the pool that a role runs on."""
        if str(role) not in self.mapping:
            raise ValueError(f"role '{role}' has no pool; mapped roles: {', '.join(sorted(self.mapping))}")
        return self.create_resource_pool()[self.mapping[str(role)]]

    def get_n_gpus(self) -> int:
        """Return the number of processes (GPUs, with `use_gpu`) in all pools."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())

    def check_available(self, devices_per_node: Sequence[int] | None = None, *, backend: str = "local") -> None:
        """Raise a ValueError with the numbers if the pools do not fit on the nodes.

        Without `devices_per_node` the backend is asked for the devices.
        """
        have = list(devices_per_node) if devices_per_node is not None else self._devices_of(backend)
        kind = "GPUs" if self.use_gpu else "CPUs"
        wanted = ", ".join(f"{name} {'+'.join(map(str, counts))}" for name, counts in self.resource_pool_spec.items())
        asked = f"the pools ask for {self.get_n_gpus()} {kind} ({wanted})"
        found = f"{sum(have)} {kind} on {len(have)} node(s) ({'+'.join(map(str, have)) or '0'})"
        if self.get_n_gpus() > sum(have):
            raise ValueError(f"{asked}, but there are {found}; lower trainer.n_gpus_per_node or trainer.nnodes")
        free = sorted(have, reverse=True)
        for count in sorted((count for counts in self.resource_pool_spec.values() for count in counts), reverse=True):
            fitting = [index for index, left in enumerate(free) if left >= count]
            if not fitting:
                raise ValueError(f"{asked}; no node has {count} of them free together: there are {found}")
            free[min(fitting, key=lambda index: free[index])] -= count

    def _devices_of(self, backend: str) -> list[int]:
        if backend == "ray":
            from meshrl.controller.ray import devices_per_node

            return devices_per_node(self.use_gpu)
        if not self.use_gpu:
            return [self.get_n_gpus()]  # processes on one machine share its cores
        import torch

        return [torch.cuda.device_count()]
