import pytest

from meshrl.controller import ClassWithInitArgs, Deadlines, ResourcePool, create_worker_group

BACKENDS = ["local", "ray"]


@pytest.fixture(scope="session")
def ray_instance():
    """One small Ray instance for all tests of the controller."""
    pytest.importorskip("ray")
    import ray

    from meshrl.controller.ray import init_ray

    ray.shutdown()  # a run before may have left a smaller one in this process
    init_ray(num_cpus=8, object_store_memory=400 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    if request.param == "ray":
        request.getfixturevalue("ray_instance")
    return request.param


@pytest.fixture
def make_group(backend):
    """Starts groups on the backend under test and ends them after the test."""
    groups = []

    def make(cls, *args, world_size=2, deadlines=None, pool=None, role="actor", **kwargs):
        pool = pool or ResourcePool([world_size], use_gpu=False)
        spec = cls if isinstance(cls, ClassWithInitArgs) else ClassWithInitArgs(cls, *args, **kwargs)
        options = {"in_process": False} if backend == "local" else {}
        deadlines = deadlines or Deadlines(start=240, call=60)
        group = create_worker_group(pool, spec, backend=backend, role=role, deadlines=deadlines, **options)
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.shutdown()
