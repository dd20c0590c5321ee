"""The same suite on both backends, with real workers."""

import asyncio
import os
import signal
import time

import pytest
import torch
from controller_workers import Counter, Probe, has_ended

from meshrl.controller import (
    ClassWithInitArgs,
    Deadlines,
    GroupBrokenError,
    ResourcePool,
    WorkerError,
    WorkerInfo,
    create_colocated_worker_cls,
    create_worker_group,
)
from meshrl.data.batch import DataProto


@pytest.fixture(scope="module", params=["in_process", "local", "ray"])
def group(request):
    """A group that the tests of one kind share: four ranks, two on Ray, or the single rank in this process."""
    if request.param == "ray":
        request.getfixturevalue("ray_instance")
    backend = "ray" if request.param == "ray" else "local"
    pool = ResourcePool({"in_process": [1], "local": [2, 2], "ray": [1, 1]}[request.param], use_gpu=False)
    spec = ClassWithInitArgs(Probe, base=5)
    env = {"TEST_EXTRA": "more"}
    with create_worker_group(pool, spec, backend=backend, env=env, deadlines=Deadlines(start=240, call=60)) as made:
        yield made


def batch(rows, **meta):
    return DataProto.from_dict({"x": torch.arange(rows)}, {"name": [f"n{i}" for i in range(rows)]}, meta)


def test_each_rank_knows_its_place(group):
    about = group.about()
    n = group.world_size
    local = n // 2 or 1
    assert [a["info"] for a in about] == [(r, n, r % local, local, r // local, "actor") for r in range(n)]
    for rank, told in enumerate(about):
        assert told["env"]["RANK"] == str(rank)
        assert told["env"]["WORLD_SIZE"] == str(n)
        assert told["env"]["LOCAL_RANK"] == str(rank % local)
        assert told["env"]["TEST_EXTRA"] == "more"
        assert told["env"]["MASTER_ADDR"], told["env"]["MASTER_PORT"] == told["master"]
        assert told["master"] == about[0]["master"]
    assert len({told["pid"] for told in about}) == n
    assert (os.getpid() in {told["pid"] for told in about}) == (n == 1)


def test_simple_modes(group):
    n = group.world_size
    assert group.on_rank_zero(3) == (0, 8)
    assert group.broadcast("hello") == [(rank, "hello") for rank in range(n)]
    assert group.broadcast_to_zero("hello") == (0, "hello")
    assert group.scatter([10 + r for r in range(n)], factor=[2] * n) == [20 + 3 * r for r in range(n)]
    assert group.per_rank([[r, r] for r in range(n)]) == [2 * r for r in range(n)]
    assert group.custom([r + 1 for r in range(n)]) == sum((n - r) * 10**r for r in range(n))
    assert group.execute_all("read_log") == [[]] * n
    assert group.execute_rank(n - 1, "on_rank_zero", 1) == (n - 1, 6)
    assert group.execute_rank_zero("on_rank_zero", x=1) == (0, 6)


@pytest.mark.parametrize("rows", [1, 6, 8, 101])
def test_proto_mode_shards_pads_and_unpads(group, rows):
    data = batch(rows, step=4)
    other = DataProto.from_dict({"y": 100 * torch.arange(rows)})
    result = group.shard(data, other, scale=2)
    assert torch.equal(result.batch["x"], 102 * torch.arange(rows))
    shard = -(-rows // group.world_size)
    assert result.batch["rank"].tolist() == [row // shard for row in range(rows)]
    assert list(result.non_tensor_batch["name"]) == [f"n{row}@{row // shard}" for row in range(rows)]
    assert result.meta_info == {"step": 4}
    repeated = group.repeat_rows(data, times=3)
    assert torch.equal(repeated.batch["x"], torch.arange(rows).repeat_interleave(3))


def test_large_batches_and_in_place_work_on_what_arrives(group):
    rows = 4 * 1001
    data = DataProto.from_dict({"x": torch.randn(rows, 301)}, {"name": ["a"] * rows})
    before = data.batch["x"].clone()
    result = group.multiply_in_place(data)
    assert torch.equal(result.batch["x"], before * 3)
    assert list(data.non_tensor_batch) == ["name"]
    if group.world_size > 1:
        assert torch.equal(data.batch["x"], before)
    result.batch["x"].add_(1)
    assert torch.equal(result.batch["x"], before * 3 + 1)


def test_metric_mode_returns_one_answer_per_rank(group):
    answers = group.metric(batch(8))
    assert len(answers) == group.world_size
    assert sum(answer["sum"] for answer in answers) == sum(range(8))
    assert all(answer["padding"] == 0 for answer in answers)
    assert sum(answer["padding"] for answer in group.metric(batch(7))) == (1 if group.world_size > 1 else 0)


def test_nd_dispatch_with_tensor_parallel_peers(group):
    dp = group.world_size // 2 or 1
    with pytest.raises(ValueError, match=r"ranks \[0.*have not registered mesh 'grid'"):
        group.on_grid(batch(4))
    group.lay_out("grid", {"dp": dp, "tp": group.world_size // dp})
    result = group.on_grid(batch(7), offset=1)
    assert result.batch["x"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    logs = group.execute_all("read_log")
    assert logs[0] == logs[group.world_size // dp - 1]
    shard = -(-7 // dp)
    assert result.batch["rank"].tolist() == [2 * (row // shard) for row in range(7)]
    group.lay_out("grid", {"dp": dp, "tp": group.world_size // dp})
    with pytest.raises(WorkerError, match="is registered on rank"):
        group.lay_out("grid", {"dp": 1, "tp": 4} if dp > 1 else {"tp": 1, "dp": 2})


def test_methods_that_are_coroutines_run_to_their_end(group):
    """On every backend, in every way to call: the answer is what they return, their errors are the workers'."""
    n = group.world_size
    assert group.in_a_while(5) == [(rank, 18, True) for rank in range(n)]
    assert group.begin("in_a_while", 5).get(30) == group.in_a_while(5)
    dp = n // 2 or 1
    group.lay_out("grid", {"dp": dp, "tp": n // dp})
    assert group.on_grid_in_a_while(batch(7)).batch["x"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert group.asked_in_a_while() == list(range(n))
    assert group.asked_in_a_while(rank=n - 1) == n - 1
    assert group.execute_all("unregistered_in_a_while", 3) == [3] * n
    with pytest.raises(WorkerError, match=r"in_a_while failed on rank 0 .*ValueError: after the wait") as error:
        group.in_a_while(5, then_fail=True)
    assert "controller_workers.py" in error.value.traceback_text
    with pytest.raises(WorkerError, match="numbers is a generator, which cannot leave the worker's process"):
        group.numbers()
    assert group.broadcast("still whole")[0] == (0, "still whole")


def test_coroutines_inside_an_event_loop(group):
    async def call():
        return group.asked_in_a_while() and group.in_a_while(1)

    if group.pids() != [os.getpid()]:
        assert asyncio.run(call())[0] == (0, 6, True)
        return

    async def call_here():
        return group.in_a_while(1)

    with pytest.raises(WorkerError, match="runs an event loop already: start its group with in_process=False"):
        asyncio.run(call_here())


@pytest.mark.parametrize("kind", ["in_process", "local", "ray"])
@pytest.mark.parametrize("name", sorted(WorkerInfo().environment()))
def test_variables_of_the_group_are_refused(kind, name):
    """Before anything starts: with another WORLD_SIZE the ranks would wait for others, or each be alone."""
    pool = ResourcePool([1 if kind == "in_process" else 2], use_gpu=False)
    with pytest.raises(ValueError, match=rf"env of a worker group must not have {name}: "):
        create_worker_group(
            pool, ClassWithInitArgs(Probe), backend="ray" if kind == "ray" else "local", env={"OWN": "1", name: "7"}
        )


def test_visible_gpus_are_the_pools():
    spec, env = ClassWithInitArgs(Probe), {"CUDA_VISIBLE_DEVICES": "1", "RANK": "0"}
    with pytest.raises(ValueError, match=r"must not have CUDA_VISIBLE_DEVICES, RANK: .* of the controller"):
        create_worker_group(ResourcePool([2], use_gpu=True), spec, env=env)
    del env["RANK"]
    with create_worker_group(ResourcePool([1], use_gpu=False), spec, env=env, in_process=False) as group:
        assert group.execute_all("variable", "CUDA_VISIBLE_DEVICES") == ["1"]


def test_short_form_of_registering_a_mesh(group):
    if group.world_size == 1:
        pytest.skip("needs two ranks per shard")
    group.lay_out_short("short")
    assert group.on_short(batch(4)).batch["rank"].tolist() == ([1, 1, 3, 3] if group.world_size == 4 else [1] * 4)
    if group.world_size == 4:
        with pytest.raises(ValueError, match="5 rows cannot be divided over 2"):
            group.on_short(batch(5))


def test_futures(group):
    future = group.slow_shard(batch(6), 2.0)
    assert not future.done()
    with pytest.raises(TimeoutError, match="slow_shard"):
        future.get(timeout=0.01)
    passed_on = group.slow_shard(future, 0.1)  # before it is ready
    assert not future.done()
    assert group.shard.__doc__.startswith("Scale x")
    assert torch.equal(passed_on.get(30).batch["x"], torch.arange(6) + 200)
    assert future.done()
    assert torch.equal(future.get().batch["x"], torch.arange(6) + 100)
    assert future.get() is future.get()


def test_calls_keep_their_order_though_one_waits_for_a_future(group):
    start = len(group.execute_rank_zero("read_log"))
    slow = group.slow_shard(batch(4), 0.4)
    noted = [group.note(slow), group.note("second"), group.note("third")]
    noted[-1].get(30)
    log = group.execute_rank_zero("read_log")[start:]
    assert [entry if isinstance(entry, str) else len(entry) for entry in log] == [4, "second", "third"]


def test_a_future_that_failed_fails_what_waits_for_it(group):
    bad = group.slow_shard(DataProto.from_dict({"z": torch.zeros(4)}), 0.2)
    waiting = group.slow_shard(bad, 0)
    for future in (waiting, bad):
        with pytest.raises(WorkerError, match=r"slow_shard failed on rank .* of 'actor': KeyError"):
            future.get(30)


def test_direct_calls_run_beside_the_running_call(group):
    running = group.wait_for_release()
    time.sleep(0.2)
    assert not running.done()
    assert group.release("go", rank=0) == (0, "go")
    if group.world_size > 1:
        assert not running.done()
        assert [answer for _, answer in group.release("all")] == ["all"] * group.world_size
    assert running.get(10) == [True] * group.world_size


def test_all_reduce_inside_the_workers(group):
    expected = float(2**group.world_size - 1)
    assert group.all_reduce() == [expected] * group.world_size
    if group.world_size == 1:
        torch.distributed.destroy_process_group()


def test_an_exception_comes_with_rank_method_and_traceback_and_the_group_lives_on(group):
    last = group.world_size - 1
    with pytest.raises(WorkerError) as caught:
        group.fail([last])
    error = caught.value
    assert (error.rank, error.role, error.method, error.error_type) == (last, "actor", "fail", "KeyError")
    assert f"missing on {last}" in str(error)
    assert "controller_workers.py" in error.traceback_text
    assert 'raise KeyError(f"missing on {self.rank}")' in str(error)
    assert group.fail([]) == ["fine"] * group.world_size
    with pytest.raises(WorkerError, match=r"AttributeError: .*no_such_method"):
        group.execute_all("no_such_method")
    assert group.is_alive()


def test_what_cannot_be_sent(group):
    if group.world_size > 1:
        with pytest.raises(WorkerError, match="unsendable"):
            group.unsendable()
        with pytest.raises((AttributeError, TypeError), match=r"lambda|pickle"):
            group.broadcast(lambda: 1)
    assert group.broadcast(1)[0] == (0, 1)
    with pytest.raises(AttributeError, match=r"'actor' has no registered method 'shart'; registered: .*shard"):
        group.shart(1)


# --- groups of their own ---


def test_failing_constructor(make_group):
    with pytest.raises(WorkerError, match="no model at rank 0") as caught:
        make_group(Probe, fail_on=0, world_size=1)
    assert (caught.value.method, caught.value.rank) == ("__init__", 0)


def test_colocated_roles_share_a_process(make_group):
    spec = create_colocated_worker_cls(
        {"actor_rollout_ref": ClassWithInitArgs(Probe, base=7), "critic": ClassWithInitArgs(Counter, 40)}
    )
    group = make_group(spec, world_size=2, role="all")
    views = group.spawn(["actor_rollout_ref", "critic"])
    actor, critic = views["actor_rollout_ref"], views["critic"]
    assert actor.on_rank_zero(1) == (0, 8)
    added = critic.add(2)
    assert [(count, role) for count, role, _ in added] == [(42, "critic")] * 2
    assert [pid for _, _, pid in added] == [told["pid"] for told in actor.about()]
    assert actor.about()[1]["info"][-1] == "actor_rollout_ref"
    actor.lay_out("grid", {"dp": 2})
    assert actor.on_grid(batch(3)).batch["x"].tolist() == [0, 1, 2]
    with pytest.raises(WorkerError, match="actor_rollout_ref/fail failed on rank 0"):
        actor.fail([0])
    with pytest.raises(ValueError, match="holds no role \\['ref'\\]"):
        group.spawn(["ref"])
    with pytest.raises(ValueError, match="create_colocated_worker_cls to spawn"):
        critic.spawn()
    group.shutdown()
    assert not critic.is_alive()
    assert all(has_ended(pid) for _, _, pid in added)
    with pytest.raises(GroupBrokenError, match="was shut down"):
        critic.add(1)


def test_groups_on_the_parts_of_a_split_pool_work_side_by_side(make_group):
    left, right = ResourcePool([2], use_gpu=False).split([1, 1])
    first, second = make_group(Probe, pool=left), make_group(Probe, pool=right)
    future = first.slow_shard(batch(5), 0.3)
    result = second.shard(DataProto.from_dict({"x": torch.arange(4)}, {"name": ["a"] * 4}))
    passed = second.slow_shard(future, 0)
    assert result.batch["rank"].tolist() == [0, 0, 0, 0]
    assert passed.get(30).batch["x"].tolist() == [200, 201, 202, 203, 204]
    assert first.about()[0]["master"] != second.about()[0]["master"]


def test_mistakes_in_creating():
    pool, spec = ResourcePool([2], use_gpu=False), ClassWithInitArgs(Probe)
    with pytest.raises(ValueError, match="'local' or 'ray', got 'slurm'"):
        create_worker_group(pool, spec, backend="slurm")
    with pytest.raises(ValueError, match="detached worker groups need backend='ray'"):
        create_worker_group(pool, spec, detached=True)
    with pytest.raises(ValueError, match="pool of 1 process, this one has 2"):
        create_worker_group(pool, spec, in_process=True)
    with pytest.raises(ValueError, match="'call' must be positive"):
        Deadlines(call=0)
    with pytest.raises(ValueError, match="needs a class"):
        ClassWithInitArgs(Probe())


def test_a_pool_takes_no_more_groups_than_it_says(make_group, backend):
    if backend == "ray":  # actors take seconds to start, and who counts them is the pool, on both backends
        left = pool = ResourcePool([1], use_gpu=False, max_colocate_count=2)
    else:
        pool = ResourcePool([2], use_gpu=False, max_colocate_count=2)
        left, right = pool.split([1, 1])
    groups = [make_group(Counter, 1, pool=pool), make_group(Counter, 2, pool=left)]
    full = r"process 0 of node 0 of the pool holds 2 worker groups and max_colocate_count is 2: shut one down"
    for full_pool in (pool, left):
        with pytest.raises(ValueError, match=full):
            make_group(Counter, 3, pool=full_pool)
    groups[0].shutdown()
    assert [count for count, _, _ in make_group(Counter, 5, pool=left).add(1)] == [6]
    if backend == "ray":
        return
    assert [count for count, _, _ in make_group(Counter, 4, pool=right).add(1)] == [5]
    os.kill(groups[1].add(0)[0][2], signal.SIGKILL)  # a group that died makes room, too
    while groups[1].is_alive():
        time.sleep(0.02)
    assert [count for count, _, _ in make_group(Counter, 6, pool=left).add(1)] == [7]
