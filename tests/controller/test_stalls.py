"""Stalls that are made for real: what is the matter stands in the first line of the one-page report."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from controller_workers import Probe

from meshrl.controller import ClassWithInitArgs, Deadlines, ResourcePool, WorkerDied, create_worker_group
from meshrl.controller.calls import Collective, disagreements
from meshrl.telemetry.run_folder import RunFolder
from meshrl.trainer.fault_tolerance import Failure, StallWatch, kind_of

STALL = 0.5


@pytest.fixture
def watched(tmp_path):
    """Watches groups; `page()` is the report that must come by itself."""
    watches = []

    def watch(*groups):
        found = StallWatch(
            STALL, RunFolder(tmp_path / "run"), {group.role: group for group in groups}, lambda text: None
        )
        found.step = lambda: 7
        watches.append(found.__enter__())
        found.moved("update_actor")
        return found

    def page(seconds=30.0):
        until = time.monotonic() + seconds
        while not (files := sorted((tmp_path / "run").glob("stall-*.txt"))):
            assert time.monotonic() < until, "no report"
            time.sleep(0.05)
        time.sleep(0.1)
        return files[0].read_text()

    watch.page = page
    yield watch
    for found in watches:
        found.__exit__(None, None, None)


@pytest.fixture
def local_pair():
    pool = ResourcePool([2], use_gpu=False)
    deadlines = Deadlines(start=240, call=60, shutdown=1)  # some are left in a collective that never ends
    with create_worker_group(pool, ClassWithInitArgs(Probe), deadlines=deadlines) as group:
        yield group


def test_a_full_queue_of_calls(local_pair, watched):
    """A rank that is stopped reads nothing; the calls for it fill its socket, until one cannot be sent."""
    stopped = local_pair.pids()[1]
    watch = watched(local_pair)
    os.kill(stopped, signal.SIGSTOP)
    futures = []
    sender = threading.Thread(
        target=lambda: futures.extend(local_pair.execute_all_async("broadcast", bytes([i]) * 30000) for i in range(20))
    )
    sender.start()
    try:
        page = watched.page()
    finally:
        os.kill(stopped, signal.SIGCONT)
    first = page.splitlines()[0]
    assert "step 7, update_actor" in first
    assert "rank 1 of 'actor' does not read and the queue of its calls is full" in first
    assert "sending it broadcast for" in first
    assert "the system says: T (stopped)" in page
    sender.join(30)
    assert [future.get(30)[1][1][0] for future in futures] == list(range(20))  # nothing is lost by it
    assert not [line for line in local_pair.waits() if "full" in line]
    watch.moved("")


def test_one_rank_sleeps_before_a_collective(local_pair, watched):
    local_pair.all_reduce()
    watched(local_pair)
    local_pair.execute_all_async("stuck_in_collective")
    page = watched.page()
    place = "collective 2 of default_pg: ranks [1] wait in barrier; not there, after their last one: rank 0 (all_reduce"
    assert place in page.splitlines()[0]
    assert "in stuck_in_collective" in page


def test_one_rank_has_another_shape(local_pair, watched):
    """Rank 1 brings nothing to the sum, goes on and waits in the next collective, while rank 0 waits in this one."""
    local_pair.all_reduce()
    watched(local_pair)
    future = local_pair.execute_all_async("reduce_sizes", [4, 0], "a word of warning\n")
    page = watched.page()
    first = page.splitlines()[0]
    assert "reduce_sizes on 'actor' has run for" in first
    differ = "the ranks do not fit together: rank 0 all_reduce of [4], rank 1 all_reduce of [0] (done)"
    assert f"collective 2 of default_pg: {differ}" in first
    assert "rank 1 of 'actor': the last is 3, barrier" in page
    assert "Last words of 'actor'\nrank 1:\na word of warning" in page
    assert not future.done()


def test_a_shape_that_ends_the_process_is_named_and_not_tried_again(local_pair):
    """gloo gives up at once if more arrives than fits: what it says then is a part of the error."""
    local_pair.all_reduce()
    with pytest.raises(WorkerDied, match="Is there a distributed collective mismatch") as caught:
        local_pair.execute_all("reduce_sizes", [20000, 4])
    assert caught.value.rank == 1
    assert kind_of(caught.value) is Failure.USER_CODE


def collective(number, name="all_reduce", sizes=((4,),), done=True, group="dp"):
    return Collective(group, number, name, sizes, done)


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ({0: [collective(1)], 1: [collective(1)]}, []),
        (
            {0: [collective(1), collective(2, done=False)], 1: [collective(1)], 2: [collective(3, group="tp")]},
            ["collective 2 of dp: ranks [0] wait in all_reduce of [4]; not there, after their last one: "
             "rank 1 (all_reduce of [4])"],
        ),
        (
            {0: [collective(2, done=False)], 1: [collective(2, "barrier", (), False)]},
            ["collective 2 of dp: the ranks do not fit together: rank 0 all_reduce of [4], rank 1 barrier"],
        ),
        (  # each rank gives as much as it has
            {0: [collective(2, "all_to_all", ((3,),), False)], 1: [collective(2, "all_to_all", ((5,),), False)]},
            ["collective 2 of dp: ranks [0, 1] are in all_to_all"],
        ),
    ],
)  # fmt: skip
def test_where_ranks_do_not_fit_together(by_rank, expected):
    assert disagreements(by_rank) == expected


@pytest.fixture
def second_node(ray_instance):
    """A node beside the first, whose CPUs are all taken; `kill -9` is all that ends it."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    taken = placement_group([{"CPU": 8}], strategy="STRICT_PACK")
    assert taken.wait(30)
    address = ray.get_runtime_context().gcs_address
    # Ray would write down for everybody on this machine that this is the cluster to join.
    quiet = "import ray._private.utils as u; u.write_ray_address = lambda *_: None; import ray.scripts.scripts as s"
    words = [sys.executable, "-c", f"{quiet}; s.main()", "start", f"--address={address}", "--num-cpus=1", "--block"]
    words += ["--object-store-memory=80000000", "--disable-usage-stats"]
    node = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def children(pid):
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
        return [int(word) for word in found.stdout.split()]

    def end():
        pids = [node.pid]
        for pid in pids:
            pids += children(pid)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        node.wait(30)

    yield end
    end()
    remove_placement_group(taken)


def test_a_dead_ray_node(second_node, watched):
    """All of a node is killed at once, as when a machine goes away: Ray itself has not noticed yet."""
    pool = ResourcePool([1], use_gpu=False)
    group = create_worker_group(
        pool,
        ClassWithInitArgs(Probe),
        backend="ray",
        role="rollout",
        deadlines=Deadlines(start=240, call=120, shutdown=1),
    )
    with group:
        future = group.execute_all_async("sleep", 60)
        watched(group)
        second_node()
        page = watched.page()
        first = page.splitlines()[0]
        assert "the Ray node" in first
        assert "which has ranks [0] of 'rollout', is lost" in first
        assert "sleep on 'rollout' has run for" in page or future.done()
