"""The controller: resource pools, worker groups on them, and calls on all ranks of a group at once."""

from meshrl.controller.calls import (
    ControllerError,
    DeadlineError,
    Deadlines,
    Future,
    GroupBrokenError,
    WorkerDied,
    WorkerError,
)
from meshrl.controller.dispatch import (
    PADDING_ROWS_KEY,
    ClassWithInitArgs,
    Dispatch,
    DispatchMode,
    Execute,
    Worker,
    WorkerInfo,
    make_nd_compute_dataproto_dispatch_fn,
    nd_dispatch,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from meshrl.controller.forkserver import warm_up
from meshrl.controller.resource_pool import ResourcePool, ResourcePoolManager, Role
from meshrl.controller.start import create_worker_group
from meshrl.controller.worker_group import WorkerGroup, create_colocated_worker_cls

__all__ = [
    "PADDING_ROWS_KEY",
    "ClassWithInitArgs",
    "ControllerError",
    "DeadlineError",
    "Deadlines",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "Future",
    "GroupBrokenError",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerInfo",
    "create_colocated_worker_cls",
    "create_worker_group",
    "make_nd_compute_dataproto_dispatch_fn",
    "nd_dispatch",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
    "warm_up",
]
