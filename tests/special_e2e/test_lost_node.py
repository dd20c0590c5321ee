"""A node of a Ray cluster is lost: the run goes on from the copies that the other nodes have in their memory.

The nodes are real raylets on this machine, as Ray's own tests have them; a node's workers and its shelf die with it.
"""

import json
import time
from pathlib import Path

import pytest
from test_resume import RUN, assert_equal, data  # noqa: F401

from meshrl.trainer.rl_trainer import PPOTrainer

LONG = ("trainer.total_training_steps=7", "trainer.test_freq=-1", "trainer.save_freq=-1")


@pytest.fixture
def cluster():
    """Three nodes with room for one worker each; the first is the head, which must stay."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    ray.shutdown()  # a run before may have left another one in this process
    room = {"num_cpus": 1, "object_store_memory": 80 << 20}
    started = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    for _ in range(2):
        started.add_node(**room)
    yield started
    ray.shutdown()
    started.shutdown()


def children(cluster, kind):
    """The processes of a kind that the nodes' raylets have, and the node of each."""
    living = [node for node in cluster.list_all_nodes() if "raylet" in node.all_processes]
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in living}
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in raylets and (entry / "cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                found[int(entry.name)] = raylets[parent]
        except (OSError, IndexError):
            continue
    return found


def test_a_lost_node_is_restored_from_the_next_one(task, data, cluster, tmp_path, monkeypatch):  # noqa: F811
    """Without checkpoints on the disk; two of three nodes have a rank, and its copy lies on the next node as well."""
    whole = task.train(tmp_path / "whole", *RUN, *data, *LONG, "trainer.n_gpus_per_node=2")
    update_actor, lost = PPOTrainer.update_actor, []

    def lose_a_node_and_go_on(self, batch):
        # Copies are written beside the steps and may lag by two.
        if self.step == 6 and not lost:
            assert len(children(cluster, "Shelf")) == 3
            ranks = children(cluster, "RayWorker")
            assert len(ranks) == 2
            lost.append(next(node for node in ranks.values() if node is not cluster.head_node))
            # Its raylet dies, and with it the rank and the shelf of the node.
            cluster.remove_node(lost[0], allow_graceful=False)
        return update_actor(self, batch)

    monkeypatch.setattr(PPOTrainer, "update_actor", lose_a_node_and_go_on)
    ray = "trainer.backend=ray", f"ray_init.address={cluster.address}", "trainer.nnodes=2", "trainer.n_gpus_per_node=1"
    survives = "trainer.memory_copy_freq=1", "trainer.max_restarts=3", "trainer.restart_wait=0"
    run = task.train(tmp_path / "run", *RUN, *data, *LONG, *ray, *survives)
    assert lost
    records = [json.loads(line) for line in (run.path / "restarts.jsonl").read_text().splitlines()]
    assert [record["event"] for record in records] == ["failed", "resumed"]
    assert records[1]["step"] >= 2
    assert "the copy in the nodes' memory was written to" in (run.path / "log.txt").read_text()
    until = time.monotonic() + 20
    while children(cluster, "Shelf"):  # Ray ends them beside us
        assert time.monotonic() < until
        time.sleep(0.05)
    for row in run.metrics:
        row.pop("restarts/count"), row.pop("restarts/seconds_lost")
    assert_equal(whole, run)
