"""The start of worker groups: the only place that chooses a backend by name."""

import itertools
from collections.abc import Mapping
from typing import Any

from meshrl.controller.calls import Backend, Deadlines
from meshrl.controller.dispatch import ClassWithInitArgs, check_environment
from meshrl.controller.resource_pool import ResourcePool, Role
from meshrl.controller.worker_group import WorkerGroup, end_with

_numbers = itertools.count()


def create_worker_group(
    pool: ResourcePool,
    cls_with_args: ClassWithInitArgs,
    *,
    backend: str = "local",
    role: Role | str = "actor",
    deadlines: Deadlines | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    detached: bool = False,
    in_process: bool | None = None,
) -> WorkerGroup:
    """Start one worker on each slot of the pool and return the group of them.

    `backend` is "local" (this machine; a single rank is an object in this process unless `in_process=False`) or "ray".
    `env` adds environment variables, except those that the group sets itself (RANK, WORLD_SIZE, ...). With Ray, `name`
    names the actors, and `detached` lets them outlive this process.
    """
    deadlines = deadlines or Deadlines()
    env = {key: str(value) for key, value in (env or {}).items()}
    if backend not in ("local", "ray"):
        raise ValueError(f"backend must be 'local' or 'ray', got {backend!r}")
    if backend == "local" and detached:
        raise ValueError("detached worker groups need backend='ray': local workers end with the controller")
    if backend == "ray" and in_process:
        raise ValueError("in_process=True needs backend='local'")
    check_environment(env, pool.use_gpu)

    def start() -> Backend:
        pool.check_room()
        started: Any
        if backend == "local":
            from meshrl.controller.local import start_local

            started = start_local(pool, cls_with_args, str(role), deadlines, env, in_process)
        else:
            from meshrl.controller.ray import start_ray

            own_name = name or f"{role}_{next(_numbers)}"
            started = start_ray(pool, cls_with_args, str(role), deadlines, env, own_name, detached)
        pool.add_tenant(started)
        return started

    first = start()
    group = WorkerGroup(first, cls_with_args.cls, str(role), cls_with_args.roles())
    if not detached:
        group._start_again = start
        end_with(group, first)
    return group
