"""A trainer with LoRA and the real vLLM: the base travels once, then adapters alone, and answers go through them."""

from __future__ import annotations

import os
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("peft")

from contract import CONTEXT, PROMPTS, chosen, log_probs_of, make_model, request
from pool_trials import fsdp_engine, model_folder

from meshrl.config.engine import ModelConfig
from meshrl.config.rollout import EngineKwargs, RolloutConfig
from meshrl.models.loading import load_tokenizer
from meshrl.parallel.mesh import contiguous_group
from meshrl.rollout.requests import SamplingParams

ASKED = SamplingParams(max_tokens=7, temperature=0.8)
VERSIONS = (0, 1, 2)
RANK = 4


@torch.no_grad()
def move_adapters(engine, version: int) -> None:
    """Other adapters for every version, the same on all ranks."""
    for number, (name, param) in enumerate(engine.module.named_parameters()):
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(1000 * version + number)
            whole = torch.randn(param.shape, generator=generator) * 0.15
            if hasattr(param, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(whole, param.device_mesh, param.placements)
            param.copy_(whole)


def merged_model(engine):
    """Hugging Face's model with the adapters in its weights."""
    model = make_model(0)
    whole = {name: tensor.detach().clone() for name, tensor in engine.per_tensor_params()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(whole[name])
    return model


def worst(model, answers) -> float:
    """How far log-probs are from the model's own."""
    differences = [
        torch.tensor(a.log_probs) - chosen(log_probs_of(model, p, a.token_ids, ASKED.temperature), a.token_ids)
        for a, p in zip(answers, PROMPTS, strict=True)
    ]
    return max(float(difference.abs().max()) for difference in differences)


def run(rank: int, folder: str, results: str, ranks: int, options: dict) -> None:
    """One rank; what it found goes to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{results}/rendezvous", rank=rank, world_size=ranks)
    try:
        found = work(rank, folder, ranks, **options)
    except BaseException:
        found = traceback.format_exc()
    torch.save(found, f"{results}/{rank}.pt")


def work(rank: int, folder: str, ranks: int, adapters: str, split: int, as_server: bool) -> list[dict]:
    from meshrl.models.lora import adapter_rank
    from meshrl.rollout.build import build_rollout
    from meshrl.weights.colocated import HybridEngine, policy_sync, sends_adapters

    engine = fsdp_engine(folder, ranks, lora_rank=RANK, lora_alpha=10)
    config = RolloutConfig(
        name="vllm", dtype="float32", max_model_len=CONTEXT, enforce_eager=True, tensor_model_parallel_size=split,
        as_server=as_server, max_num_seqs=16,
        engine_kwargs=EngineKwargs(vllm={"kv_cache_memory_bytes": 32 << 20, "block_size": 32}),
    )  # fmt: skip
    rollout = build_rollout(
        config, ModelConfig(path=folder), engine.hf_model, load_tokenizer(folder), device=torch.device("cpu"),
        can_share=False, rank_group=contiguous_group(split, 240),
        adapter_rank=adapter_rank(engine.hf_model) if sends_adapters(engine, adapters) else 0,
    )  # fmt: skip
    sync = policy_sync(
        engine, rollout, bucket_megabytes=1, verify=True, delta=False, deadline=240.0, adapters=adapters,
        dtype=torch.float32,
    )  # fmt: skip
    phases = HybridEngine(engine, rollout, sync, device=torch.device("cpu"))
    answers_here = not (as_server and rank % split)
    found, models = [], []
    for version in VERSIONS:
        move_adapters(engine, version)
        moved = phases.to_rollout(version)
        models.append(merged_model(engine))
        size = sum(param.nbytes for param in models[-1].parameters())
        one = {"moved": moved["weight_sync/received_bytes"] + moved["weight_sync/copied_bytes"], "size": size}
        if answers_here:
            answers = rollout.complete([request(prompt, ASKED, number) for number, prompt in enumerate(PROMPTS)])
            assert {v for answer in answers for v in answer.versions} == {version}
            one |= {"right": worst(models[-1], answers), "wrong": worst(models[-2], answers) if version else 1.0}
        found.append(one)
        dist.barrier()
        phases.to_train()
    # The version that the trainer is still at: nothing but the adapters has to come again.
    again = phases.back_to_rollout()
    found[-1]["again"] = again["weight_sync/received_bytes"] + again["weight_sync/copied_bytes"]
    if answers_here:
        answers = rollout.complete([request(prompt, ASKED) for prompt in PROMPTS])
        assert worst(models[-1], answers) < 5e-5
    dist.barrier()
    rollout.close()
    return found


TRIALS = {
    "one rank": (1, {"adapters": "alone", "split": 1, "as_server": False}),
    "cut over two": (2, {"adapters": "alone", "split": 2, "as_server": False}),
    "server": (1, {"adapters": "alone", "split": 1, "as_server": True}),
    "server of two": (2, {"adapters": "alone", "split": 2, "as_server": True}),
    "merged": (1, {"adapters": "merged", "split": 1, "as_server": False}),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "options"), TRIALS.values(), ids=TRIALS)
def test_answers_are_those_of_the_merged_model_and_the_base_travels_once(tmp_path, ranks, options):
    folder = model_folder(tmp_path / "model")
    torch.multiprocessing.spawn(run, args=(str(folder), str(tmp_path), ranks, options), nprocs=ranks)
    ended = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    failed = [one for one in ended if isinstance(one, str)]
    assert not failed, failed[0]
    for found in ended:
        for one in found:
            assert one.get("right", 0.0) < 5e-5
            assert one.get("wrong", 1.0) > 0.05
    moved = [sum(found[version]["moved"] for found in ended) for version in VERSIONS]
    size = ended[0][0]["size"]
    assert moved[0] >= size
    if options["adapters"] == "alone":
        assert moved[1] == moved[2] == sum(found[-1]["again"] for found in ended) < 0.5 * size
    else:
        assert moved[1] == moved[2] == size
