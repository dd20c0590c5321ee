"""The Ray backend: workers as Ray actors, on one machine or a cluster. Imported only if this backend is used."""

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pickle import PickleBuffer
from typing import Any

from meshrl.controller.calls import (
    CallBook,
    Collective,
    ControllerError,
    Deadlines,
    Future,
    GroupBrokenError,
    RayStartError,
    recorded,
)
from meshrl.controller.dispatch import (
    ClassWithInitArgs,
    Failure,
    RankCall,
    WorkerInfo,
    apply_environment,
    call_worker,
    close_worker,
    host_rendezvous,
    limit_threads,
    loopback_interface,
    place_ranks,
)
from meshrl.controller.resource_pool import ResourcePool
from meshrl.controller.worker_group import WorkerGroup
from meshrl.data.serialization import dumps, loads
from meshrl.imports import importing

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError("the Ray backend needs Ray: pip install 'meshrl[ray]', or use backend='local'") from error

logger = logging.getLogger(__name__)

_TICK = 0.2
REACH_SECONDS = 10.0  # the time in which a cluster's address must answer
_NAMESPACE = "meshrl"


def init_ray(
    address: str | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    object_store_memory: int | None = None,
    namespace: str = _NAMESPACE,
    **options: Any,
) -> None:
    """Connect to the cluster at `address`, or start Ray on this machine with these resources.

    The address `auto` is the cluster that `ray start` began on this machine. If Ray is already connected, nothing
    happens.
    """
    if ray.is_initialized():
        return
    options.setdefault("include_dashboard", False)
    if address is not None:
        options.pop("include_dashboard")
        if num_cpus is not None or num_gpus is not None:
            raise ValueError(
                f"num_cpus and num_gpus belong to the cluster at {address}: leave them out with an address"
            )
    _check_reachable(address or os.environ.get("RAY_ADDRESS") or "local")
    try:
        ray.init(
            # Without an address Ray would join the cluster that was last started on this machine, by any user.
            address=address or os.environ.get("RAY_ADDRESS") or "local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=object_store_memory,
            namespace=namespace,
            **options,
        )
    except (ValueError, TypeError):  # the arguments are wrong
        raise
    except Exception as error:
        ray.shutdown()  # Ray may have started in part
        raise RayStartError(f"Ray could not be started or reached: {type(error).__name__}: {error}") from error


def _check_reachable(address: str) -> None:
    """Raise a RayStartError if nothing listens at `host:port`, because Ray itself would retry for many minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "//" in address:  # auto, local, or Ray's client
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise RayStartError(
            f"nobody listens at {address} ({error}): start Ray there (ray start --head), or change ray_init.address"
        ) from error


def devices_per_node(use_gpu: bool) -> list[int]:
    """Return the number of GPUs (or CPUs) of each living node of the cluster that has any."""
    init_ray()
    kind = "GPU" if use_gpu else "CPU"
    counts = [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]
    return [count for count in counts if count > 0]


class Sealed:
    """A serialised object whose buffers Ray puts into its object store unchanged, out of band."""

    def __init__(self, data: bytes, buffers: Sequence[Any]) -> None:
        self._data = data
        self._buffers = buffers

    @staticmethod
    def of(obj: Any) -> "Sealed":
        """Serialise an object into data and out-of-band buffers."""
        return Sealed(*dumps(obj))

    def open(self) -> Any:
        """Return the object on its own memory, because the memory of the object store is read-only."""
        return loads(self._data, self._buffers)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Sealed, (self._data, [PickleBuffer(buffer) for buffer in self._buffers])


@dataclass(frozen=True)
class Place:
    """The place where an actor runs: process, node, GPUs and placement group."""

    pid: int
    node_id: str
    address: str
    gpu_ids: list[str]
    group: PlacementGroup | None


class RayWorker:
    """The Ray actor of one rank, which holds the worker and runs the calls on it."""

    def __init__(self, sys_path: list[str]) -> None:
        sys.path += [path for path in sys_path if path not in sys.path]
        self._worker: Any = None
        self._world_size = 0
        self._never = threading.Event()

    def place(self) -> Place:
        """Return the process, node, GPUs and placement group of this actor."""
        context = ray.get_runtime_context()
        group = ray.util.get_current_placement_group()
        gpu_ids = [str(gpu) for gpu in ray.get_gpu_ids()]
        return Place(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), gpu_ids, group)

    def world_size(self) -> int:
        """Return the number of ranks in this actor's group; 0 if the worker was never built."""
        return self._world_size

    def host(self, address: str) -> int:
        """Open the rendezvous store at `address` and return its port."""
        return host_rendezvous(address)

    def build(self, info: WorkerInfo, env: dict[str, str], threads: str | None, spec: bytes) -> Failure | None:
        """Construct the worker; return a `Failure` if that fails."""
        try:
            os.environ.pop("OMP_NUM_THREADS", None)  # set by Ray; the controller's setting applies on every backend
            apply_environment(info, {**({"OMP_NUM_THREADS": threads} if threads else {}), **env})
            limit_threads(info.local_world_size)
            with importing():
                maker = ray.cloudpickle.loads(spec)
            self._worker = maker.build(info)
            self._world_size = info.world_size
        except (Exception, SystemExit) as error:
            return Failure.of(error)
        return None

    def call(self, method: str, n_args: int, keywords: list[str], *sealed: Sealed) -> Sealed | Failure:
        """Run one call on the worker, and return its sealed result or a `Failure`."""
        try:
            values = [value.open() for value in sealed]
            kwargs = dict(zip(keywords, values[n_args:], strict=True))
            return Sealed.of(call_worker(self._worker, method, tuple(values[:n_args]), kwargs))
        except (Exception, SystemExit) as error:
            return Failure.of(error)

    def watch(self) -> None:
        """Block forever: this call ends only with the actor, so its end reports the actor's death."""
        self._never.wait()

    def stacks(self) -> str:
        """Return the last frames of the stacks of all threads in this process."""
        frames = sys._current_frames().items()
        return "\n".join("".join(traceback.format_stack(frame)[-8:]) for _, frame in frames)

    def collectives(self) -> list[Collective] | None:
        """Return the newest collectives of this process, or None if torch does not record them."""
        return recorded()

    def close(self) -> None:
        """Close the worker, so that it frees what outlives a process."""
        if self._worker is not None:
            close_worker(self._worker)


class RayBackend:
    """A backend that runs the workers of one group as Ray actors."""

    def __init__(
        self,
        actors: list[Any],
        places: list[Place],
        role: str,
        deadlines: Deadlines,
        pool: ResourcePool | None,
    ) -> None:
        """Watch the actors and start to collect their results.

        `pool` is None for actors that another process has started.
        """
        self.world_size = len(actors)
        self._actors = actors
        self._places = places
        self._role = role
        self._deadlines = deadlines
        self._pool = pool
        self._stopping = False
        self._order = threading.Lock()  # all ranks get the calls of several threads in the same order
        self._gone: set[int] = set()
        self._ended = threading.Event()
        self._events: queue.SimpleQueue[tuple[int | None, int, Any]] = queue.SimpleQueue()
        self._book = CallBook(role, deadlines, self._kill_all, self._stacks_of)
        for rank, actor in enumerate(actors):
            self._track(None, rank, actor.watch.options(concurrency_group="watch").remote())
        self._pump_thread = threading.Thread(target=self._pump, name=f"meshrl-{role}-pump", daemon=True)
        self._pump_thread.start()

    def submit(
        self, method: str, calls: Sequence[RankCall], future: Future[Any], *, blocking: bool, direct: bool
    ) -> None:
        """Put every argument into the object store once, and call the actors with the references."""
        self.check()
        values = {id(value): value for call in calls for value in (*call.args, *call.kwargs.values())}
        refs = {key: ray.put(Sealed.of(value)) for key, value in values.items()}
        with self._order:
            number = self._book.open(method, [call.rank for call in calls], future, direct=direct)
            for call in calls:
                arguments = [refs[id(value)] for value in (*call.args, *call.kwargs.values())]
                method_of = self._actors[call.rank].call
                if direct:
                    method_of = method_of.options(concurrency_group="direct")
                self._track(number, call.rank, method_of.remote(method, len(call.args), list(call.kwargs), *arguments))

    def build(self, infos: list[WorkerInfo], envs: list[dict[str, str]], spec: bytes) -> None:
        """Construct the workers in the actors, and wait until all are constructed."""
        built: Future[list[None]] = Future()
        number = self._book.open("__init__", [info.rank for info in infos], built, limit=self._deadlines.start)
        threads = os.environ.get("OMP_NUM_THREADS")
        for info, env in zip(infos, envs, strict=True):
            self._track(number, info.rank, self._actors[info.rank].build.remote(info, env, threads, spec))
        built.get()

    def _track(self, number: int | None, rank: int, ref: Any) -> None:
        ref.future().add_done_callback(lambda done: self._events.put((number, rank, done)))

    def _pump(self) -> None:
        """Report results and deaths to the call book and check deadlines, until the group has ended."""
        while not self._ended.is_set():
            try:
                self._note(*self._events.get(timeout=_TICK))
            except queue.Empty:
                self._notice_shutdown()
            self._book.tick()

    def _notice_shutdown(self) -> None:
        if not ray.is_initialized():
            self._stopping = True
            self._book.break_group(GroupBrokenError("ray.shutdown() has ended it"))
            self._ended.set()

    def _note(self, number: int | None, rank: int, done: Any) -> None:
        error = done.exception()
        if error is None:
            value = done.result()
            if isinstance(value, Sealed):
                try:
                    value = value.open()
                except Exception as broken:
                    value = Failure.of(broken)
            if number is not None:
                self._book.answer(number, rank, value)
        elif isinstance(error, ray.exceptions.RayActorError):
            self._gone.add(rank)
            if not self._stopping:
                self._book.died(rank, self._places[rank].pid, None, str(error))
        elif number is not None:
            self._book.answer(number, rank, Failure(type(error).__name__, str(error), str(error), 0.0))

    def check(self) -> None:
        """Raise a GroupBrokenError if the group is broken or was shut down."""
        if not self._ended.is_set():
            self._notice_shutdown()
        self._book.check()

    def alive(self) -> list[bool]:
        """Return, for each rank, whether its actor is alive as far as is known."""
        return [rank not in self._gone for rank in range(self.world_size)]

    def pids(self) -> list[int]:
        """Return the ranks' process ids, each on its own machine."""
        return [place.pid for place in self._places]

    def waits(self) -> list[str]:
        """Return a text line for every open call, after a line for every unreachable node with ranks of the group."""
        return self._lost_nodes() + self._book.waits()

    def _lost_nodes(self) -> list[str]:
        # Ray itself reports a node as dead only after several failed health checks, half a minute later.
        lines = []
        for node in ray.nodes():
            ranks = [rank for rank, place in enumerate(self._places) if place.node_id == node["NodeID"]]
            if ranks and (why := _why_lost(node)):
                lines.append(
                    f"the Ray node {node['NodeManagerAddress']} ({node['NodeID'][:8]}), "
                    f"which has ranks {ranks} of '{self._role}', is lost: {why}"
                )
        return lines

    def stacks(self) -> str:
        """Return the current stacks of the ranks' processes as text."""
        return self._stacks_of(range(len(self._actors)))

    def stop(self, error: ControllerError, graceful: bool) -> None:
        """End the actors and, if no other group uses the pool's resources, release them."""
        if self._stopping or not ray.is_initialized():
            self._ended.set()
            return
        whole = self._book.broken is None
        self._stopping = True
        if graceful and whole:
            closing = [actor.close.remote() for actor in self._actors]
            ray.wait(closing, num_returns=len(closing), timeout=self._deadlines.shutdown)
        self._book.break_group(error)
        self._kill_all()
        self._ended.set()
        if threading.current_thread() is not self._pump_thread:
            self._pump_thread.join(self._deadlines.shutdown)
        # Ray ends the whole process if a handle is freed after ray.shutdown(), so the handles are freed now
        self._actors.clear()
        if self._pool is not None:
            _release_placement_groups(self._pool)
        else:
            for group in {place.group.id: place.group for place in self._places if place.group}.values():
                remove_placement_group(group)

    def _kill_all(self) -> None:
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)

    def _stacks_of(self, ranks: Sequence[int]) -> str:
        told = self._ask("stacks", ranks)
        silent = "it has not said where it is: its process or its node is stopped or gone"
        return "\n".join(f"rank {rank}:\n{told.get(rank, silent)}" for rank in ranks)

    def last_words(self) -> str:
        """Return "": Ray keeps the stderr of the actors in the logs of its session."""
        return ""

    def collectives(self) -> dict[int, list[Collective]]:
        """Return the newest collectives of the ranks that answer in time."""
        return {rank: found for rank, found in self._ask("collectives", range(len(self._actors))).items() if found}

    def _ask(self, method: str, ranks: Sequence[int], seconds: float = 2.0) -> dict[int, Any]:
        """Call a method of the actors concurrently with other calls.

        Return the results by rank, without the ranks that do not answer within `seconds`.
        """
        methods = {rank: getattr(self._actors[rank], method) for rank in ranks}
        asked = {rank: found.options(concurrency_group="watch").remote() for rank, found in methods.items()}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
        told = {}
        for rank, ref in asked.items():
            if ref in ready:
                with contextlib.suppress(ray.exceptions.RayError):
                    told[rank] = ray.get(ref, timeout=seconds)
        return told


def _why_lost(node: Mapping[str, Any]) -> str | None:
    """Return the reason why a node cannot be reached, or None if the node is alive."""
    if not node["Alive"]:
        return f"Ray says that it is dead ({node.get('DeathReasonMessage') or 'no reason given'})"
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=1.0).close()
    except OSError as error:
        return f"its raylet does not answer ({error})"
    return None


_placement_groups: dict[int, tuple[ResourcePool, list[PlacementGroup], int]] = {}


def start_ray(
    pool: ResourcePool,
    spec: ClassWithInitArgs,
    role: str,
    deadlines: Deadlines,
    env: Mapping[str, str],
    name: str,
    detached: bool,
) -> RayBackend:
    """Start the workers of a group as actors on the pool's placement groups."""
    init_ray()
    packed = ray.cloudpickle.dumps(spec)
    groups = _hold_placement_groups(pool, deadlines.start, detached)
    actors: list[Any] = []
    backend: RayBackend | None = None
    try:
        for part in pool.parts:
            for slot in part.slots:
                actor_name = f"{name}_{len(actors)}"
                actors.append(_start_actor(groups[id(part.origin)][part.node], slot, pool, actor_name, detached))
        places = _wait(role, "start", [actor.place.remote() for actor in actors], deadlines.start)
        address = places[0].address
        (port,) = _wait(role, "start", [actors[0].host.remote(address)], deadlines.start)
        infos = place_ranks(pool.process_on_nodes, role)
        infos = [replace(info, master_addr=address, master_port=port) for info in infos]
        backend = RayBackend(actors, places, role, deadlines, pool)
        backend.build(infos, _environments(infos, places, env), packed)
    except BaseException:
        if backend is not None:
            backend.stop(GroupBrokenError(f"worker group '{role}' failed to start"), graceful=False)
        else:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            _release_placement_groups(pool)
        raise
    return backend


def attach_worker_group(name: str, cls: type, role: str = "actor", deadlines: Deadlines | None = None) -> WorkerGroup:
    """Return the group of detached actors that another process started under this name."""
    init_ray()
    deadlines = deadlines or Deadlines()
    try:
        first: Any = ray.get_actor(f"{name}_0")
    except ValueError as error:
        raise ValueError(f"there is no detached worker group '{name}' in this Ray namespace") from error
    (world_size,) = _wait(role, "attach", [first.world_size.remote()], deadlines.start)
    actors = [ray.get_actor(f"{name}_{rank}") for rank in range(world_size)]
    places = _wait(role, "attach", [actor.place.remote() for actor in actors], deadlines.start)
    return WorkerGroup(RayBackend(actors, places, role, deadlines, None), cls, role, {})


def _start_actor(group: PlacementGroup, bundle: int, pool: ResourcePool, name: str, detached: bool) -> Any:
    share = int(10000 / pool.max_colocate_count) / 10000  # Ray counts in ten-thousandths
    actor_class: Any = ray.remote(concurrency_groups={"direct": 8, "watch": 4})(RayWorker)  # type: ignore[call-overload]
    options: dict[str, Any] = {"name": name, "lifetime": "detached"} if detached else {}
    return actor_class.options(
        num_cpus=share,
        num_gpus=share if pool.use_gpu else 0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        **options,
    ).remote(list(sys.path))


def _environments(infos: list[WorkerInfo], places: list[Place], env: Mapping[str, str]) -> list[dict[str, str]]:
    """Return each rank's variables: the GPUs of its pool node in rank order, and `env`.

    If all ranks are on one node, the loopback interface is set for gloo.
    """
    loopback = loopback_interface() if len({place.node_id for place in places}) == 1 else None
    environments = []
    for info in infos:
        own: dict[str, str] = {}
        peers = [place for other, place in zip(infos, places, strict=True) if other.node_rank == info.node_rank]
        gpus = [gpu for peer in peers for gpu in peer.gpu_ids]
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if loopback is not None:
            own["GLOO_SOCKET_IFNAME"] = loopback
        environments.append({**own, **env})
    return environments


def _hold_placement_groups(pool: ResourcePool, timeout: float, detached: bool) -> dict[int, list[PlacementGroup]]:
    """Return the placement groups under the pool's slots, created if missing, and count one more user of each."""
    held: dict[int, list[PlacementGroup]] = {}
    for origin in {id(part.origin): part.origin for part in pool.parts}.values():
        _, groups, users = _placement_groups.get(id(origin), (origin, [], 0))
        groups = groups or _make_placement_groups(origin, timeout, detached)
        _placement_groups[id(origin)] = (origin, groups, users + 1)
        held[id(origin)] = groups
    return held


def _make_placement_groups(pool: ResourcePool, timeout: float, detached: bool) -> list[PlacementGroup]:
    bundle = {"CPU": 1, "GPU": 1} if pool.use_gpu else {"CPU": 1}
    groups = [
        placement_group(
            [dict(bundle) for _ in range(count)],
            strategy="STRICT_PACK",
            name=f"{pool.name_prefix}_node{node}" if pool.name_prefix else "",
            lifetime="detached" if detached else None,
        )
        for node, count in enumerate(pool.process_on_nodes)
    ]
    _, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=timeout)
    if waiting:
        for group in groups:
            remove_placement_group(group)
        kind = "GPU" if pool.use_gpu else "CPU"
        total = ray.cluster_resources().get(kind, 0)
        free = ray.available_resources().get(kind, 0)
        raise ControllerError(
            f"no room for a pool of {'+'.join(map(str, pool.process_on_nodes))} {kind}s within {timeout:g} s: "
            f"the cluster has {total:g} {kind}s, {free:g} of them free (each node's share must fit on one node)"
        )
    return groups


def _release_placement_groups(pool: ResourcePool) -> None:
    for key in {id(part.origin) for part in pool.parts}:
        if key not in _placement_groups:
            continue
        origin, groups, users = _placement_groups[key]
        if users > 1:
            _placement_groups[key] = (origin, groups, users - 1)
            continue
        del _placement_groups[key]
        for group in groups:
            remove_placement_group(group)


def _wait(role: str, what: str, refs: list[Any], timeout: float) -> list[Any]:
    try:
        return ray.get(refs, timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        answered = [rank for rank, ref in enumerate(refs) if ref in ready]
        raise ControllerError(
            f"{what} of '{role}': after {timeout:g} s only ranks {answered} of {len(refs)} have answered"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise GroupBrokenError(f"{what} of '{role}': an actor died: {error}") from error
