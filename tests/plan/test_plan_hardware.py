"""The table of devices, and files that extend it."""

import pytest

from meshrl.telemetry.hardware import NUMBERS, hardware_table, parse_cluster


def test_the_table_has_what_it_promises():
    table = hardware_table()
    assert {"H100", "H200", "A100", "B200", "L40S", "CPU"} <= set(table)
    for device in table.values():
        assert all(getattr(device, name) > 0 for name in NUMBERS)
        assert device.inter_node_gbs <= device.intra_node_gbs <= device.memory_gbs


def test_a_file_adds_and_changes_devices(tmp_path):
    numbers = "".join(f"  {name}: {place + 1}\n" for place, name in enumerate(NUMBERS))
    file = tmp_path / "own.yaml"
    file.write_text(f"X1:\n{numbers}H200:\n  memory_gib: 100\n  measured: true\n")
    table = hardware_table(file)
    assert (table["X1"].memory_gib, table["X1"].latency_us) == (1.0, 8.0)
    assert table["H200"].memory_gib == 100
    assert table["H200"].measured
    assert table["H200"].bf16_tflops == hardware_table()["H200"].bf16_tflops


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("X1:\n  memory_gib: 1\n", "lacks"),
        ("H200:\n  memory: 1\n", "'memory'"),
        ("H200:\n  memory_gib: -1\n", "above 0"),
        ("- H200\n", "must map"),
        ("H200: 3\n", "mapping"),
        ("H200: [1,", "is not valid YAML"),
        ("H200: {memory_gib: .nan}", "H200.memory_gib must be a finite number above 0, got nan"),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_change(tmp_path, text, word):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=word):
        hardware_table(file)


def test_clusters():
    assert (parse_cluster("8xH200").devices, parse_cluster("8xH200").nodes) == (8, 1)
    assert parse_cluster("16xh100").nodes == 2
    assert parse_cluster("A100").devices == 1
    assert parse_cluster("16xH100", per_node=4).nodes == 4
    for text, per_node in (("8xH201", None), ("0xH200", None), ("12xH200", 8), ("8xH200", 0)):
        with pytest.raises(ValueError, match="--gpus"):
            parse_cluster(text, per_node)
