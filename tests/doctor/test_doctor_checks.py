"""Each check with a case that is really good and one that is really bad."""

import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
import yaml

from meshrl.rewards.sandbox.backends import Backend, SandboxError
from meshrl.tools.doctor import machine
from meshrl.tools.doctor.machine import (
    CONFLICTS,
    Conflict,
    Finding,
    as_json,
    as_lines,
    check_python,
    check_versions,
    is_within,
    judged,
    worst,
)
from meshrl.tools.doctor.measure import Entry, _short_name, matmul_tflops, measure, write_entry

LINKS = ["intra_node_gbs", "inter_node_gbs", "host_gbs", "latency_us"]
KEYS = ["memory_gib", "bf16_tflops", "fp32_tflops", "memory_gbs", *LINKS, "measured"]
Usage = namedtuple("Usage", "total used free")
MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def statuses(findings):
    return [finding.status for finding in findings]


def run_in_child(code, limit=None):
    """Runs code in a process of its own whose limit of open files was really lowered."""
    lower = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=lower, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("limit", "status"), [(100, "fail"), (1024, "warn"), (None, None)])
def test_file_handles(limit, status):
    code = (
        "import json; from meshrl.tools.doctor.machine import check_file_handles as check\n"
        "found = check(2); print(json.dumps([found.status, found.advice, found.numbers['soft']]))"
    )
    seen, advice, soft = run_in_child(code, limit)
    if limit is None:
        assert soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert seen == ("ok" if soft >= 4096 else "warn")
    else:
        assert (seen, soft) == (status, limit)
        assert f"hard limit is {limit}" in advice
        assert "288" in advice


def test_more_ranks_need_more_file_handles():
    code = (
        "import json; from meshrl.tools.doctor.machine import check_file_handles as check\n"
        "print(json.dumps([check(ranks).status for ranks in (2, 64)]))"
    )
    assert run_in_child(code, 1024) == ["warn", "fail"]


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20 - 1, "fail"), (2**29, "warn"), (2**34, "ok")])
def test_shared_memory_by_its_free_bytes(monkeypatch, tmp_path, free, status):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(2**35, 0, free))
    found = machine.check_shared_memory(tmp_path, ranks=1)
    assert found.status == status
    assert ("--shm-size" in found.advice) == (status != "ok")
    assert machine.check_shared_memory(tmp_path, 1, is_needed=False).status == status.replace("fail", "warn")


def test_shared_memory_of_this_machine_and_of_one_without(tmp_path):
    assert machine.check_shared_memory().numbers["free_bytes"] > 0
    assert machine.check_shared_memory(tmp_path / "none").status == "warn"


def test_disk(monkeypatch, tmp_path):
    assert machine.check_disk(tmp_path).numbers["free_bytes"] > 0
    missing = machine.check_disk(tmp_path / "missing")
    assert missing.status == "fail"
    assert "default_local_dir" in missing.advice
    unwritable = machine.check_disk("/proc")  # also for root
    assert unwritable.status == "fail"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(2**40, 0, 2**29))
    assert machine.check_disk(tmp_path).status == "fail"


def test_memory(monkeypatch):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.check_memory(limits=()).numbers["total_bytes"] == whole
    memory = namedtuple("Memory", "available total")(2**29, 2**34)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    assert machine.check_memory().status == "fail"


@pytest.mark.parametrize(("limit", "usage"), [("memory.max", "memory.current"), MEMORY_V1])
def test_memory_of_a_container(tmp_path, limit, usage):
    (tmp_path / usage).write_text(f"{3 * 2**29}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**28}\ntotal_inactive_file {2**29}\n")
    for text, total in (("max\n", None), (f"{2**62}\n", None), (f"{2**31}\n", 2**31)):
        (tmp_path / limit).write_text(text)
        found = machine.check_memory(limits=[tmp_path / limit])
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert found.numbers["total_bytes"] == (total or whole)
        assert ("for this container" in found.found) == (total is not None)
    assert found.numbers["available_bytes"] == 2**30
    assert found.status == "warn"


def test_host_name():
    assert machine.check_host_name("localhost").found == "localhost is 127.0.0.1"
    bad = machine.check_host_name("no-such-host.invalid")
    assert bad.status == "warn"
    assert "/etc/hosts" in bad.advice


def test_devices(monkeypatch):
    found = machine.check_devices()
    if torch.cuda.is_available():
        assert len(found) == torch.cuda.device_count()
    else:
        assert statuses(found) == ["ok" if not machine.NVIDIA_DRIVER.exists() else "fail"]
    assert machine._no_device(None, has_driver=False).status == "ok"
    assert "CUDA build" in machine._no_device(None, has_driver=True).advice
    assert "12.9" in machine._no_device("12.9", has_driver=True).found


def test_python_version():
    assert check_python().status == "ok"
    assert check_python((3, 10, 4)).status == "fail"


def test_installed_versions_are_the_installed_ones():
    found = check_versions()
    assert f"torch {importlib.metadata.version('torch')}" in found[0].found
    assert "fail" not in statuses(found), as_lines(found)


def test_an_unmet_requirement_names_both_sides():
    asked = {"vllm": ["torch==2.11.0", "numpy", "outlines>=1; extra == 'guided'"], "meshrl": ["torch>=2.11"]}
    installed = {"vllm": "0.32.0", "torch": "2.13.0+cu129", "numpy": "2.4.6", "meshrl": "0.1.0"}
    _, found = check_versions(installed, conflicts=(), requirements=asked)
    assert found.status == "warn"
    assert found.found == "vllm 0.32.0 asks for torch==2.11.0, 2.13.0+cu129 is installed"
    assert found.advice == "pip install 'torch==2.11.0'"
    installed["torch"] = "2.11.0+cu129"
    assert len(check_versions(installed, conflicts=(), requirements=asked)) == 1


def test_what_meshrl_asks_for_fails_also_in_its_extras():
    asked = {"meshrl": ["numpy>=1.26", "megatron-core==0.16.1; extra == 'megatron'", "ray>=2.40; extra == 'ray'"]}
    found = check_versions({"meshrl": "0.1.0", "megatron-core": "0.15.0"}, (), asked)[1:]
    assert statuses(found) == ["fail", "fail"]  # numpy is missing, megatron-core is another; ray need not be there
    assert "numpy>=1.26, it is not installed" in found[0].found


def test_a_known_conflict_needs_all_of_its_packages():
    table = (Conflict({"some_engine": "<2", "torch": "build:cpu"}, "fail", "the reason", "the advice"),)
    clash = {"some-engine": "1.9", "torch": "2.13.0+cpu"}
    assert [f.found for f in check_versions(clash, table, {}) if f.status == "fail"] == [
        "some-engine 1.9 with torch 2.13.0+cpu: the reason"
    ]
    for fine in ({"some-engine": "2.0"}, {"torch": "2.13.0"}):
        assert worst(check_versions(clash | fine, table, {})) == "ok"


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda c: "-".join(c.packages))
def test_every_entry_of_the_table_can_apply(conflict):
    likely = ["0.32.0", "2.3.0", "2.13.0+cpu", "4.13.2", "0.16.1", "2.4.6"]
    chosen = {name: next(v for v in likely if is_within(v, spec)) for name, spec in conflict.packages.items()}
    found = check_versions(chosen, (conflict,), {})
    assert conflict.advice in [f.advice for f in found]
    assert conflict.status != "ok"


def test_lines_json_and_the_worst():
    findings = [Finding("a", "ok", "fine"), Finding("b", "warn", "so so", "do this", {"x": 1.5})]
    assert worst(findings) == "warn"
    assert worst([*findings, Finding("c", "fail", "bad")]) == "fail"
    assert worst([]) == "ok"
    assert [line.split() for line in as_lines(findings)] == [
        ["ok", "a", "fine"],
        ["warn", "b", "so", "so"],
        ["->", "do", "this"],
    ]
    assert json.loads(json.dumps(as_json(findings)))["findings"][1]["numbers"] == {"x": 1.5}
    assert [judged(v, warn=4, fail=1) for v in (5, 3, 0)] == ["ok", "warn", "fail"]
    assert [judged(v, warn=1, fail=4, low_is_bad=False) for v in (0, 3, 5)] == ["ok", "warn", "fail"]


def test_the_hardware_file(tmp_path, monkeypatch):
    monkeypatch.setattr("meshrl.tools.doctor.measure.MINIMUM_SECONDS", 0.01)
    # Processors without instructions for bfloat16 take seconds for a large product.
    monkeypatch.setattr(
        "meshrl.tools.doctor.measure.matmul_tflops", lambda device, kind, _: matmul_tflops(device, kind, 128)
    )
    links = Finding("links", "ok", "2 local ranks over gloo", numbers={"gbs": 3.0, "latency_us": 50.0})
    entry = measure([links])
    file = tmp_path / "hardware.yaml"
    file.write_text("Other: {memory_gib: 80}\nCPU: {memory_gib: 1}\n")
    write_entry(entry, file)
    written = yaml.safe_load(file.read_text())
    assert written.pop("Other") == {"memory_gib": 80}
    assert list(written) == [entry.name]
    numbers = written[entry.name]
    assert list(numbers) == KEYS
    assert all(numbers[key] > 0 for key in KEYS)
    assert (numbers["intra_node_gbs"], numbers["latency_us"], numbers["inter_node_gbs"]) == (3.0, 50.0, 3.0)
    assert "inter_node_gbs: 3  # not measured" in file.read_text()
    hosts = Finding("hosts", "ok", "a to b", numbers={"gbs": 1.0, "latency_us": 90.0})
    assert measure([links, hosts]).numbers["inter_node_gbs"] == 1.0
    assert "guess" in measure([]).remarks["latency_us"]


def test_a_file_that_is_no_hardware_file_stays(tmp_path):
    file = tmp_path / "list.yaml"
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match="no hardware file"):
        write_entry(Entry("CPU", {}, {}), file)
    assert file.read_text() == "[1, 2]"


def test_operations_are_counted_right(monkeypatch):
    monkeypatch.setattr("meshrl.tools.doctor.measure.seconds_of", lambda work, device: work() is None or 0.5)
    assert matmul_tflops(torch.device("cpu"), "float32", 100) == pytest.approx(2 * 100**3 / 0.5 / 1e12)


def test_names_of_devices():
    assert [_short_name(n) for n in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla T4")] == [
        "H200",
        "H100",
        "A100",
        "T4",
    ]


def test_the_sandbox_is_named(monkeypatch):
    def refuse():
        raise SandboxError("nothing here can keep a program in (bwrap: no). Install bubblewrap")

    for name, status in (("bwrap", "ok"), ("namespaces", "ok"), ("landlock", "warn")):
        monkeypatch.setattr(
            machine, "chosen_backend", lambda name=name: Backend(name, "/usr/bin/python3", ("bwrap: no",))
        )
        found = machine.check_sandbox()
        assert (found.status, bool(found.advice)) == (status, status == "warn")
        assert found.found.startswith(f"{name}, ")
        assert found.found.endswith("(not bwrap: no)")
    monkeypatch.setattr(machine, "chosen_backend", refuse)
    assert machine.check_sandbox().status == "warn"
    assert machine.check_sandbox().found == "nothing here can keep a program in (bwrap: no)"
