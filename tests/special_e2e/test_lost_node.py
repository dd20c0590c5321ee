"""A node of a Ray cluster is lost: the run goes on from the copies that the other nodes have in their memory.

The nodes are real raylets on this machine, as Ray's own tests have them; a node's workers and its shelf die with it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_resume import RUN, data  # noqa: F401

from meshrl.config.show import to_yaml

LONG = ("trainer.total_training_steps=10", "trainer.test_freq=-1")
ROOT = Path(__file__).parents[2]
LIMIT = 240.0


@pytest.fixture
def cluster():
    """A head without room for workers and three nodes with room for one each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    started.workers = [started.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(3)]
    yield started
    started.shutdown()


def command(task, out, *overrides):
    """The run as a program: the nodes' processes are this test's, the controller must be another's."""
    config = out.with_suffix(".yaml")
    config.write_text(to_yaml(task.config(out, *overrides)))
    return [sys.executable, "-m", "meshrl.cli", "train", str(config)]


def wait_for(condition, what):
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def steps_of(out):
    file = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def children(cluster, kind):
    """The processes of a kind that the nodes' raylets have, and the node of each."""
    living = [node for node in cluster.workers if "raylet" in node.all_processes]
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


def test_a_lost_node_is_restored_from_the_next_one(task, data, cluster, tmp_path):  # noqa: F811
    """Without checkpoints on the disk; two of three nodes have a rank, and its copy lies on the next node as well."""
    run_of = *RUN, *data, *LONG, "trainer.save_freq=-1"
    whole = task.train(tmp_path / "whole", *run_of, "trainer.n_gpus_per_node=2")
    out, said = tmp_path / "run", tmp_path / "said.txt"
    ray = "trainer.backend=ray", f"ray_init.address={cluster.address}", "trainer.nnodes=2", "trainer.n_gpus_per_node=1"
    survives = "trainer.memory_copy_freq=1", "trainer.max_restarts=3", "trainer.restart_wait=0"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(said, "wb") as output:
        words = command(task, out, *run_of, *ray, *survives)
        run = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        try:
            # Copies are written beside the steps and may lag by two.
            wait_for(lambda: len(steps_of(out)) >= 5 or run.poll() is not None, "five steps")
            assert len(children(cluster, "Shelf")) == 3
            ranks = children(cluster, "RayWorker")
            assert len(ranks) == 2, said.read_text()[-3000:]
            # Its raylet dies, and with it the rank and the shelf of the node.
            cluster.remove_node(ranks[max(ranks)], allow_graceful=False)
            code = run.wait(LIMIT)
        finally:
            run.kill()
    assert code == 0, said.read_text()[-3000:]
    records = [json.loads(line) for line in (out / "restarts.jsonl").read_text().splitlines()]
    assert [record["event"] for record in records] == ["failed", "resumed"]
    assert records[1]["step"] >= 2
    assert "the copy in the nodes' memory was written to" in (out / "log.txt").read_text() + said.read_text()
    assert steps_of(out) == steps_of(whole.path)
    assert not children(cluster, "Shelf")
    weights = load_file(out / "model" / "model.safetensors")
    assert all(weights[name].equal(expected) for name, expected in whole.weights.items())
