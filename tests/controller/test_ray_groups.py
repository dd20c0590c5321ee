"""What only the Ray backend has: placement groups, and groups that outlive their creator."""

import os
import time

import pytest
from controller_workers import Probe, has_ended

from meshrl.controller import (
    ClassWithInitArgs,
    ControllerError,
    Deadlines,
    ResourcePool,
    ResourcePoolManager,
    create_worker_group,
)

pytestmark = pytest.mark.usefixtures("ray_instance")


def free_cpus(expected, within=10.0):
    """The cluster's free CPUs, waiting for it to notice that some were given back."""
    import ray

    until = time.monotonic() + within
    while (free := ray.available_resources().get("CPU", 0)) != expected and time.monotonic() < until:
        time.sleep(0.1)
    return free


def test_a_detached_group_is_found_by_its_name_and_gives_everything_back():
    from meshrl.controller.ray import attach_worker_group

    before = free_cpus(8)
    pool = ResourcePool([1], use_gpu=False)
    group = create_worker_group(
        pool,
        ClassWithInitArgs(Probe, base=1),
        backend="ray",
        name="keeper",
        detached=True,
        deadlines=Deadlines(start=240),
    )
    pid = group.about()[0]["pid"]
    del group
    found = attach_worker_group("keeper", Probe)
    assert found.world_size == 1
    assert found.on_rank_zero(1) == (0, 2)
    assert found.about()[0]["pid"] == pid != os.getpid()
    assert free_cpus(before - 1) == before - 1
    found.shutdown()
    assert has_ended(pid)
    assert free_cpus(before) == before
    with pytest.raises(ValueError, match="no detached worker group 'keeper'"):
        attach_worker_group("keeper", Probe)


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers():
    spec = ClassWithInitArgs(Probe)
    with pytest.raises(ControllerError, match=r"no room for a pool of 3\+9 CPUs within 1 s: the cluster has 8 CPUs"):
        create_worker_group(
            ResourcePool([3, 9], use_gpu=False), spec, backend="ray", deadlines=Deadlines(start=1, call=10)
        )
    assert free_cpus(8) == 8
    manager = ResourcePoolManager({"a": [6], "b": [3]}, {"actor": "a"}, use_gpu=False)
    with pytest.raises(ValueError, match=r"ask for 9 CPUs \(a 6, b 3\), but there are 8 CPUs on 1 node"):
        manager.check_available(backend="ray")
    ResourcePoolManager({"a": [6]}, {}, use_gpu=False).check_available(backend="ray")


def test_an_address_excludes_resources(monkeypatch):
    import ray

    from meshrl.controller.ray import init_ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"num_cpus and num_gpus belong to the cluster at 10.0.0.1:6379"):
        init_ray(address="10.0.0.1:6379", num_cpus=4)
