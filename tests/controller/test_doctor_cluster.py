"""The doctor's look at a Ray cluster, on the instance that the controller's tests share."""

import json

import pytest

from meshrl.cli import main
from meshrl.tools.doctor.network import Witness, check_cluster, judge_hosts, judge_software, measure_pairs


@pytest.mark.usefixtures("ray_instance")
def test_a_living_cluster(capsys):
    import ray

    code = main(["doctor", "--json", "--ranks", "1", "--address", ray.get_runtime_context().gcs_address])
    by_check = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert code in (0, 1)
    assert by_check["ray"]["status"] == "ok"
    assert "1 of 1 node alive, 8 CPUs" in by_check["ray"]["found"]
    assert by_check["ray software"]["status"] == "ok"
    assert by_check["clock skew"]["numbers"]["offset_s"] < 1
    assert "one node" in by_check["hosts"]["found"]
    assert ray.is_initialized()  # it was connected before


@pytest.mark.usefixtures("ray_instance")
def test_links_between_nodes():
    import ray

    witness = ray.remote(num_cpus=0)(Witness).remote()  # one actor is both ends: it listens in a thread
    (link,) = measure_pairs([witness, witness], ["127.0.0.1", "127.0.0.1"])
    ray.kill(witness)
    assert link["gbs"] > 0.001
    assert link["latency_us"] > 0


def test_no_cluster_there_and_none_asked_for(monkeypatch):
    ray = pytest.importorskip("ray")

    def refuse(**_):
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setattr("meshrl.controller.ray.init_ray", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    (found,) = check_cluster("127.0.0.1:1")
    assert found.status == "fail"
    assert "127.0.0.1:1: Could not find any running Ray instance." in found.found
    assert "ray start" in found.advice
    assert check_cluster(None)[0].status == "ok"


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [("torch", "1.0", "fail"), ("ray", "missing", "fail"), ("python", "3.8.1", "fail"), ("other", "1", "ok")],
)
def test_other_software_on_a_node(name, version, status):
    here = Witness().about()
    there = here | {"host": "b", "versions": here["versions"] | {name: version}}
    found = judge_software([here, there])
    assert found.status == status
    if status == "fail":
        assert f"b has {name} {version}" in found.found


def test_patch_levels_of_python_do_not_matter():
    here = Witness().about()
    major, minor, _ = here["versions"]["python"].split(".")[:3]
    there = here | {"versions": here["versions"] | {"python": f"{major}.{minor}.99"}}
    assert judge_software([there]).status == "ok"


def test_the_slowest_host_is_named():
    links = [{"gbs": 1.0, "latency_us": 40.0}, {"gbs": 0.05, "latency_us": 90.0}]
    found = judge_hosts(links, ["a", "b", "c"])
    assert found.status == "warn"
    assert found.found.startswith("a to c: 0.05 GB/s")
    assert judge_hosts(links[:1], ["a", "b"]).status == "ok"
