"""Links and clocks by real processes; the whole command."""

import json

import pytest

from meshrl.cli import main
from meshrl.tools.doctor import measure
from meshrl.tools.doctor.network import LinkRun, judge_clocks, judge_links


def pair(gbs=3.0, latency=50.0, offset=0.0, error=1e-4):
    return {"peer": 1, "gbs": gbs, "latency_us": latency, "clock_offset_s": offset, "clock_error_s": error}


def test_the_whole_command(capsys, tmp_path, monkeypatch):
    product = measure.matmul_tflops
    monkeypatch.setattr(measure, "MINIMUM_SECONDS", 0.01)
    monkeypatch.setattr(measure, "matmul_tflops", lambda device, dtype, size: product(device, dtype, 64))
    file = tmp_path / "hardware.yaml"
    code = main(["doctor", "--json", "--disk", str(tmp_path), "--address", "", "--measure", str(file)])
    answer = json.loads(capsys.readouterr().out)
    by_check = {finding["check"]: finding for finding in answer["findings"]}
    assert code == (1 if answer["status"] == "fail" else 0)
    assert by_check["links"]["numbers"]["gbs"] > 0
    # Two processes of one machine read one clock: what is left is the error of the measurement.
    clock = by_check["clock skew"]["numbers"]
    assert clock["offset_s"] <= clock["error_s"] + 0.001
    (numbers,) = answer["hardware"].values()
    assert numbers["intra_node_gbs"] == pytest.approx(by_check["links"]["numbers"]["gbs"])
    assert file.read_text().startswith("#")


def test_a_failed_check_is_exit_code_one(capsys, tmp_path):
    assert main(["doctor", "--ranks", "1", "--disk", str(tmp_path / "missing"), "--address", ""]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if " disk " in line)
    assert line.startswith("fail")


def test_no_ranks_is_a_mistake_in_the_command(capsys):
    assert main(["doctor", "--ranks", "0"]) == 2
    assert "--ranks" in capsys.readouterr().err


def test_processes_that_cannot_meet():
    with LinkRun(2, "gloo", {"GLOO_SOCKET_IFNAME": "nowhere0"}) as run:
        measured = run.result()
    assert isinstance(measured, str)
    (found,) = judge_links(measured)
    assert found.status == "fail"
    assert "rank" in found.found
    assert "GLOO_SOCKET_IFNAME" in found.advice


def test_processes_that_take_too_long_are_ended():
    with LinkRun(2, "gloo") as run:
        measured = run.result(seconds=0.01)
    assert "did not end" in measured
    assert all(process.poll() is not None for process in run._processes)


@pytest.mark.parametrize(
    ("measured", "status"),
    [(pair(), "ok"), (pair(gbs=0.1), "warn"), (pair(gbs=0.001), "fail"), (pair(latency=9000), "warn")],
)
def test_links_are_judged_by_the_slowest(measured, status):
    links, _ = judge_links({"backend": "gloo", "pairs": [pair(), measured]})
    assert links.status == status
    assert bool(links.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("offset", "error", "status"),
    [(0.01, 0.001, "ok"), (-0.2, 0.001, "warn"), (3.0, 0.001, "fail"), (0.2, 0.19, "ok")],
)
def test_clocks(offset, error, status):
    found = judge_clocks([pair(), pair(offset=offset, error=error)])
    assert found.status == status
    assert found.numbers["offset_s"] == abs(offset)


def test_a_slow_node_does_not_hide_the_clock_of_another():
    found = judge_clocks([pair(offset=0.5, error=3.0), pair(offset=3.0, error=0.001)])
    assert (found.status, found.numbers["offset_s"]) == ("fail", 3.0)
