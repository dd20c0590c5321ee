"""`meshrl plan-sync`."""

import json

import pytest

from meshrl.cli import main
from meshrl.weights.planner import as_bytes
from meshrl.weights.sync_command import parse_axes

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.mark.parametrize("train", ["fsdp=4", "fsdp=2,ddp=2", "tp=2,pp=2", "pp=2,vpp=2,dp=2"])
def test_prints_bytes_beside_gathering(folder, capsys, train):
    assert main(["plan-sync", folder, "--train", train, "--rollout", "tp=2,dp=2"]) == 0
    out = capsys.readouterr().out
    assert "rollout separate tp2 dp2 (4 ranks)" in out
    assert "train+rollout" in out
    assert "of what gathering everything on every rollout rank receives" in out


def test_apart_everything_is_received(folder, capsys):
    assert main(["plan-sync", folder, "--train", "fsdp=1", "--rollout", "tp=1", "--apart", "--dtype", "fp32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    trainer, rollout = (next(line for line in lines if line.endswith(f"  {role}")) for role in ("train", "rollout"))
    # One copy goes from the one to the other: (64 * 32 + 4 layers of 2 * (32 * 32 + 16 * 32) + 3 * 32 * 48 + ...) * 4
    tensors = 64 * 32 + 32 + 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 8)
    assert as_bytes(tensors * 4) in trainer
    assert rollout.count(as_bytes(tensors * 4)) == 2


def test_mistakes_are_told_in_a_line(folder, capsys):
    assert main(["plan-sync", folder, "--train", "tp=2", "--rollout", "tp=3"]) == 2
    assert "4 attention heads must be divisible by tensor_model_parallel_size (3)" in capsys.readouterr().err
    assert main(["plan-sync", folder, "--train", "warp=2", "--rollout", "tp=1"]) == 2
    assert "'warp=2' is no axis of 'warp=2': use tp=N, pp=N" in capsys.readouterr().err
    assert main(["plan-sync", folder, "--train", "tp=2", "--rollout", "tp=2,tp=2"]) == 2
    assert "'tp=2,tp=2' names the axis tp twice" in capsys.readouterr().err
    assert main(["plan-sync", folder + "/none", "--train", "tp=2", "--rollout", "tp=1"]) == 2


def test_axes_and_units():
    assert parse_axes("tp=2,pp=16", ("tp", "pp")) == {"tp": 2, "pp": 16}
    assert [as_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]
