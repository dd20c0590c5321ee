"""Worker groups: all ranks of a role, called as one object."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshrl.controller.calls import (
    Backend,
    Collective,
    Future,
    GroupBrokenError,
    SerialThread,
    has_pending,
    materialize,
)
from meshrl.controller.dispatch import (
    CallSpec,
    ClassWithInitArgs,
    Execute,
    MeshEntry,
    Plan,
    RankCall,
    Worker,
    at_role,
    call_spec,
    close_worker,
)


class WorkerGroup:
    """All ranks of a role. Every method that the worker class marks with `@register` is a method of the group.

    Make a group with `create_worker_group`. Use it as a context manager, or call `shutdown`.
    """

    def __init__(
        self,
        backend: Backend,
        cls: type,
        role: str,
        role_classes: Mapping[str, type],
        view_of: "WorkerGroup | None" = None,
    ) -> None:
        self.role = role
        self._owner = view_of  # kept alive, because the workers end with the group that started them
        self._backend = backend
        self._start_again: Callable[[], Backend] | None = None
        self.restarts = 0  # the number of restarts of the workers
        self._prefix = f"{role}/" if view_of is not None else ""
        self._role_classes = dict(role_classes)
        self._launcher = SerialThread(f"meshrl-{role}-launcher")
        self._meshes: dict[str, list[MeshEntry]] = {}
        self._specs = _registered_methods(cls)
        for name, spec in self._specs.items():
            if hasattr(type(self), name):
                raise ValueError(f"{cls.__name__}.{name} is registered, but a worker group has its own '{name}'")
            setattr(self, name, self._bound(name, spec, getattr(cls, name).__doc__))

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._backend.world_size

    def execute_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, with the same arguments on all ranks.

        Return the results in rank order.
        """
        return self.execute_all_async(method, *args, **kwargs).get()

    def execute_all_async(self, method: str, /, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call any method on all ranks like `execute_all`, but return a future."""

        def plan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
            return Plan([RankCall(rank, args, kwargs) for rank in range(self.world_size)], list)

        return self._start(method, plan, args, kwargs, blocking=False)

    def ask_all(self, method: str, /, *args: Any) -> Future[list[Any]]:
        """Call a method on all ranks concurrently with their running calls.

        Return a future of the results in rank order.
        """
        future: Future[list[Any]] = Future(self.role)
        calls = [RankCall(rank, args, {}) for rank in range(self.world_size)]
        self._backend.submit(self._prefix + method, calls, future, blocking=True, direct=True)
        return future

    def begin(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a registered method and return a future, even if the method is registered as blocking."""
        getattr(self, method)  # an unknown method raises an error that lists the registered methods
        return self._call(method, self._specs[method], args, kwargs, blocking=False)

    def execute_rank_zero(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 alone, and return its result."""
        return self.execute_rank(0, method, *args, **kwargs)

    def execute_rank(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call any method on one rank alone, and return its result."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the group's {self.world_size} ranks")

        def plan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
            return Plan([RankCall(rank, args, kwargs)], lambda answers: answers[0])

        return self._start(method, plan, args, kwargs, blocking=True).get()

    def mesh_entries(self, mesh_name: str) -> list[MeshEntry]:
        """Return each rank's entry for a mesh. The ranks are asked once, then the entries are cached."""
        if mesh_name not in self._meshes:
            # not through the launcher thread, because a deferred call runs this method in that thread
            future: Future[list[MeshEntry | None]] = Future(self.role)
            calls = [RankCall(rank, (mesh_name,), {}) for rank in range(self.world_size)]
            self._backend.submit(f"{self._prefix}_mesh_entry", calls, future, blocking=True, direct=False)
            entries = future.get()
            missing = [rank for rank, entry in enumerate(entries) if entry is None]
            if missing:
                raise ValueError(
                    f"ranks {missing} of '{self.role}' have not registered mesh '{mesh_name}': "
                    "call register_mesh on every rank first"
                )
            self._meshes[mesh_name] = [entry for entry in entries if entry is not None]
        return self._meshes[mesh_name]

    def spawn(self, roles: Iterable[str] | None = None) -> dict[str, "WorkerGroup"]:
        """Return views of the colocated roles, each with its own methods, over the same processes."""
        if not self._role_classes:
            raise ValueError(f"'{self.role}' holds one role; make its class with create_colocated_worker_cls to spawn")
        wanted = [str(role) for role in roles] if roles is not None else list(self._role_classes)
        unknown = [role for role in wanted if role not in self._role_classes]
        if unknown:
            raise ValueError(f"'{self.role}' holds no role {unknown}; it holds {list(self._role_classes)}")
        return {role: WorkerGroup(self._backend, self._role_classes[role], role, {}, self) for role in wanted}

    def is_alive(self) -> bool:
        """Return whether all ranks' workers are alive and the group can be called."""
        try:
            self._backend.check()
        except GroupBrokenError:
            return False
        return all(self._backend.alive())

    def pids(self) -> list[int]:
        """Return the workers' process ids in rank order, each on its own machine."""
        return self._backend.pids()

    def waits(self) -> list[str]:
        """Return a text line for every open call, with the ranks that have answered and those that have not."""
        return self._backend.waits()

    def stacks(self) -> str:
        """Return the current stacks of the workers' processes as text."""
        return self._backend.stacks()

    def last_words(self) -> str:
        """Return the stderr tails of the workers as far as they are known."""
        return self._backend.last_words()

    def collectives(self) -> dict[int, list[Collective]]:
        """Return each rank's newest collectives from torch's flight recorder, without the ranks that do not answer."""
        return self._backend.collectives()

    def restart(self) -> None:
        """End the remaining workers and start all of them again as new workers; their state is lost."""
        if self._start_again is None:
            raise ValueError(f"'{self.role}' cannot be started again: it is a view, or was started by another process")
        self._backend.stop(GroupBrokenError("it is being started again"), graceful=False)
        self._backend = self._start_again()
        self.restarts += 1
        self._meshes.clear()
        self._launcher = SerialThread(f"meshrl-{self.role}-launcher")
        end_with(self, self._backend)

    def shutdown(self) -> None:
        """End the workers (of all views over them) after their queued calls, within the shutdown deadline."""
        self._backend.stop(GroupBrokenError("it was shut down"), graceful=True)

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # after an error the workers may be in the middle of a call, so they are not waited for
        self._backend.stop(GroupBrokenError("it was shut down"), graceful=kind is None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = ", ".join(sorted(self._specs))
        raise AttributeError(f"'{self.role}' has no registered method '{name}'; registered: {known or 'none'}")

    def _bound(self, name: str, spec: CallSpec, doc: str | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            future = self._call(name, spec, args, kwargs, spec.blocking)
            return future.get() if spec.blocking else future

        call.__name__ = name
        call.__doc__ = doc
        return call

    def _call(
        self, name: str, spec: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any], blocking: bool
    ) -> Future[Any]:
        def plan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
            plan = spec.plan(self, args, kwargs)
            return _only_rank_zero(plan) if spec.execute_mode is Execute.RANK_ZERO else plan

        return self._start(name, plan, args, kwargs, blocking=blocking, resolve=spec.materialize_futures)

    def _start(
        self,
        method: str,
        make_plan: Callable[[tuple[Any, ...], dict[str, Any]], Plan],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        blocking: bool,
        resolve: bool = True,
    ) -> Future[Any]:
        """Dispatch now or, if an argument is not ready, in the background. Calls keep their order either way."""
        future: Future[Any] = Future(self.role)
        backend = self._backend  # a call that waits for its arguments must not run on workers restarted in the meantime

        def dispatch() -> None:
            ready_args, ready_kwargs = materialize(args, kwargs) if resolve else (args, kwargs)
            backend.check()
            plan = make_plan(ready_args, ready_kwargs)
            future.set_transform(plan.collect)
            backend.submit(self._prefix + method, plan.calls, future, blocking=blocking, direct=plan.direct)

        def dispatch_later() -> None:
            try:
                dispatch()
            except BaseException as error:
                future.set_error(error)

        backend.check()
        if self._launcher.busy or (resolve and not blocking and has_pending(args, kwargs)):
            self._launcher.submit(dispatch_later)
        else:
            dispatch()
        return future


def end_with(group: WorkerGroup, backend: Backend) -> None:
    """End the workers when the group is garbage-collected or the interpreter exits."""
    weakref.finalize(group, backend.stop, GroupBrokenError("nobody held it any more"), False)


def _only_rank_zero(plan: Plan) -> Plan:
    return Plan([call for call in plan.calls if call.rank == 0], lambda answers: answers[0], plan.direct)


def _registered_methods(cls: type) -> dict[str, CallSpec]:
    found = {name: call_spec(getattr(cls, name, None)) for name in dir(cls) if not name.startswith("__")}
    return {name: spec for name, spec in found.items() if spec is not None}


# Several roles in one process per rank, which share its devices and its process group.


class ColocatedWorker(Worker):
    """A worker that holds one worker of each role; the group's `spawn` gives each role its own view."""

    def __init__(self, specs: dict[str, ClassWithInitArgs]) -> None:
        self.workers = {role: spec.build(at_role(self.info, role)) for role, spec in specs.items()}

    def close(self) -> None:
        """Close the worker of each role, in order."""
        for worker in self.workers.values():
            close_worker(worker)

    @staticmethod
    def role_classes(spec: ClassWithInitArgs) -> dict[str, type]:
        """Return the worker class of each role."""
        return {role: role_spec.cls for role, role_spec in spec.args[0].items()}


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """Return a worker class that holds a worker of each role; make a group of it, then call `group.spawn(roles)`."""
    if not class_dict:
        raise ValueError("create_colocated_worker_cls needs at least one role")
    for role in class_dict:
        if "/" in role:
            raise ValueError(f"a role's name must not contain '/', got {role!r}")
    return ClassWithInitArgs(ColocatedWorker, {str(role): spec for role, spec in class_dict.items()})
