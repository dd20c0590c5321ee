"""Which GPUs an engine in processes of its own gets to see, and which words and arguments it is started with."""

import argparse
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshrl.config.engine import ModelConfig
from meshrl.config.rollout import EngineKwargs, RolloutConfig
from meshrl.rollout import remote
from meshrl.rollout.build import build_rollout, own_gpus
from meshrl.rollout.remote import Bystander
from meshrl.rollout.sglang import sglang_engine
from meshrl.rollout.sglang import sglang_engine as sglang_server
from meshrl.rollout.sglang.sglang_engine import command_line

MODEL = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))


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


@pytest.fixture
def build(monkeypatch):
    """Builds a rank's rollout on a node of four GPUs; gives it, and what its engine would be started with."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    started = []

    def note(path, *, arguments, environment=None):
        started.append(SimpleNamespace(arguments=arguments, seen=(environment or {}).get("CUDA_VISIBLE_DEVICES")))

    monkeypatch.setattr(sglang_server, "SglangServer", note)
    monkeypatch.setattr(sglang_engine, "SglangEngine", note)
    # Which needs vLLM itself to be imported.
    monkeypatch.setitem(sys.modules, "meshrl.rollout.vllm.server", SimpleNamespace(VllmServer=note))
    monkeypatch.setattr(remote, "RemoteRollout", lambda client, **options: SimpleNamespace(**options))

    def make(config, device, ranks=1, adapter_rank=0):
        group, index = None, device.index or 0
        if ranks > 1:
            group = object()
            monkeypatch.setattr(dist, "get_world_size", lambda given: ranks)
            monkeypatch.setattr(dist, "get_rank", lambda given: index % ranks)
        started.clear()
        tokenizer = SimpleNamespace(pad_token_id=0)
        made = build_rollout(
            config, ModelConfig(path="m"), MODEL, tokenizer, device=device, can_share=False, rank_group=group,
            adapter_rank=adapter_rank,
        )  # fmt: skip
        return made, started[0] if started else None

    return make


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("as_server", [True, False])
def test_sglang_can_give_its_memory_up_where_there_is_a_gpu(build, frees, device, as_server):
    config = RolloutConfig(name="sglang", free_cache_engine=frees, as_server=as_server)
    _, started = build(config, torch.device(device, 1 if device == "cuda" else None))
    assert started.arguments["enable_memory_saver"] == (frees and device == "cuda")


@pytest.mark.parametrize(("name", "key"), [("sglang", "tp_size"), ("vllm", "tensor_parallel_size")])
def test_the_first_rank_of_a_replica_has_its_engine_and_the_gpus_of_all(build, name, key):
    config = RolloutConfig(name=name, as_server=True, tensor_model_parallel_size=2)
    made = [build(config, torch.device("cuda", index), ranks=2) for index in range(4)]
    assert [started and started.seen for _, started in made] == ["0,1", None, "2,3", None]
    assert [isinstance(rollout, Bystander) for rollout, _ in made] == [False, True, False, True]
    assert {rollout.replica_ranks for rollout, _ in made} == {2}
    assert {started.arguments[key] for _, started in made if started} == {2}
    # Without the key each rank has an engine, on its own GPU.
    made = [build(RolloutConfig(name=name, as_server=True), torch.device("cuda", index)) for index in range(4)]
    assert [started.seen for _, started in made] == ["0", "1", "2", "3"]


def test_vllm_has_room_for_adapters_that_come_alone_and_all_ranks_know_it(build):
    config = RolloutConfig(name="vllm", as_server=True, tensor_model_parallel_size=2)
    (_, started), (other, _) = (build(config, torch.device("cuda", i), ranks=2, adapter_rank=9) for i in (0, 1))
    assert other.takes_adapters
    assert {key: started.arguments[key] for key in ("enable_lora", "max_lora_rank", "max_loras")} == {
        "enable_lora": True, "max_lora_rank": 16, "max_loras": 1,
    }  # fmt: skip
    (_, started), (other, _) = (build(config, torch.device("cuda", i), ranks=2) for i in (0, 1))
    assert not other.takes_adapters
    assert "enable_lora" not in started.arguments
    with pytest.raises(ValueError, match=r"up to rank 512, not 513: set .*adapters=merged"):
        build(config, torch.device("cpu"), adapter_rank=513)


def test_sglang_within_the_first_rank_begins_at_its_gpu(build):
    config = RolloutConfig(name="sglang", as_server=False, tensor_model_parallel_size=2)
    _, started = build(config, torch.device("cuda", 2), ranks=2)
    assert (started.arguments["base_gpu_id"], started.arguments["tp_size"]) == (2, 2)


def test_a_single_rank_may_have_an_engine_of_several_gpus(build):
    config = RolloutConfig(name="sglang", engine_kwargs=EngineKwargs(sglang={"tp_size": 2, "pp_size": 2}))
    assert build(config, torch.device("cuda", 0))[1].seen == "0,1,2,3"
