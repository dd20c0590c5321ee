"""Which GPUs an engine in processes of its own gets to see, and which words SGLang's server gets."""

import argparse

import pytest
import torch

from meshrl.rollout.build import own_gpus
from meshrl.rollout.sglang.server import command_line


@pytest.mark.parametrize(
    ("visible", "index", "count", "expected"),
    [
        (None, 0, 1, "0"),
        (None, 2, 1, "2"),
        (None, 2, 2, "2,3"),
        ("5,6,7", 1, 1, "6"),
        ("GPU-a,GPU-b", 0, 2, "GPU-a,GPU-b"),
    ],
)
def test_a_server_sees_the_gpu_of_its_own_rank(monkeypatch, visible, index, count, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_gpus(torch.device("cuda", index), count) == {"CUDA_VISIBLE_DEVICES": expected}


def test_gpus_that_are_not_there_are_counted(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match=r"GPU 1 needs 2 GPUs, but CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        own_gpus(torch.device("cuda", 1), 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"GPU 1 needs 2 GPUs, but the node has 2"):
        own_gpus(torch.device("cuda", 1), 2)


def test_on_cpus_nothing_is_hidden():
    assert own_gpus(torch.device("cpu"), 1) == {}


def test_sglang_gets_lists_as_words_and_mappings_as_json():
    wanted = {"cuda_graph_bs": [1, 2, 4], "json_model_override_args": {"rope_theta": 1}, "tp_size": 2, "a": None}
    words = command_line("m", wanted | {"disable_radix_cache": True, "b": False})
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
    for name in ("--json-model-override-args", "--tp-size"):
        parser.add_argument(name)
    parser.add_argument("--disable-radix-cache", action="store_true")
    found = vars(parser.parse_args(words))
    assert found == {
        "model_path": "m",
        "cuda_graph_bs": [1, 2, 4],
        "json_model_override_args": '{"rope_theta": 1}',
        "tp_size": "2",
        "disable_radix_cache": True,
    }
