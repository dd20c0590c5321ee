"""Two ranks of a sharded trainer generate as one real vLLM that is cut over them, or as two replicas of it."""

from __future__ import annotations

import os
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CHARACTERS, CONTEXT, PROMPTS, chosen, log_probs_of, make_model, request
from pool_trials import fsdp_engine, set_weights

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import EngineKwargs, RolloutConfig
from meshrl.models.loading import load_tokenizer
from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.parallel.mesh import contiguous_group
from meshrl.rollout.requests import SamplingParams

RANKS = 2
SEEDS = (3, 4)
ASKED = SamplingParams(max_tokens=7, temperature=0.8, n=2)


def run(rank: int, folder: str, results: str, split: int) -> None:
    """One rank; what it found goes to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{results}/rendezvous", rank=rank, world_size=RANKS)
    try:
        found = work(rank, folder, split)
    except BaseException:
        found = traceback.format_exc()
    torch.save(found, f"{results}/{rank}.pt")


def work(rank: int, folder: str, split: int) -> list[tuple[int, list[list[int]], list[list[float]]]]:
    from meshrl.rollout.build import build_rollout
    from meshrl.weights.colocated import policy_sync
    from meshrl.weights.hybrid import HybridEngine

    model = ModelConfig(path=folder, enable_gradient_checkpointing=False)
    engine = fsdp_engine(folder, RANKS)
    more = {"kv_cache_memory_bytes": 32 << 20, "block_size": 32}
    config = RolloutConfig(
        name="vllm", dtype="float32", max_model_len=CONTEXT, enforce_eager=True, tensor_model_parallel_size=split,
        max_num_seqs=16, engine_kwargs=EngineKwargs(vllm=more),
    )  # fmt: skip
    rollout = build_rollout(
        config, model, engine.hf_model, load_tokenizer(folder), device=torch.device("cpu"), can_share=False,
        tensor_parallel_group=contiguous_group(split, 120),
    )  # fmt: skip
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=False, delta=False, deadline=120.0)
    phases = HybridEngine(engine, rollout, sync, device=torch.device("cpu"))
    found = []
    for version, seed in enumerate(SEEDS):
        set_weights(engine, seed)
        phases.to_rollout(version)
        # Every replica has seeds of its own, and goes its own way.
        first = 100 * (rank // split)
        answers = rollout.complete([request(prompt, ASKED, first + i) for i, prompt in enumerate(PROMPTS)])
        assert {v for answer in answers for v in answer.versions} == {version}
        found.append((version, [a.token_ids for a in answers], [a.log_probs for a in answers]))
        phases.to_train()
    rollout.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's group is as it was
    assert total == RANKS
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("split", [2, 1], ids=["cut", "replicas"])
def test_log_probs_are_exact_after_every_update(tmp_path, split):
    model = make_model(0)
    folder = tmp_path / "model"
    save_hf_folder(folder, model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(folder)
    torch.multiprocessing.spawn(run, args=(str(folder), str(tmp_path), split), nprocs=RANKS)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    failed = [one for one in found if isinstance(one, str)]
    assert not failed, failed[0]
    for version, tokens, log_probs in [*found[0], *found[1]]:
        right, wrong = make_model(SEEDS[version]), make_model(SEEDS[1 - version])
        assert worst(right, tokens, log_probs) < 2e-5
        assert worst(wrong, tokens, log_probs) > 0.1
    assert (found[0] == found[1]) == (split == 2)


def worst(model, tokens, log_probs) -> float:
    """How far log-probs are from the model's own."""
    differences = []
    for number, (answer, given) in enumerate(zip(tokens, log_probs, strict=True)):
        own = chosen(log_probs_of(model, PROMPTS[number // ASKED.n], answer, ASKED.temperature), answer)
        differences.append(float((torch.tensor(given) - own).abs().max()))
    return max(differences)
