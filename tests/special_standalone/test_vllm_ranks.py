"""Two ranks of a sharded trainer generate as one real vLLM that is cut over them, or as two replicas of it."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import (
    CHARACTERS,
    CONTEXT,
    PROMPTS,
    chosen,
    log_probs_of,
    make_experts_model,
    make_model,
    request,
)
from pool_trials import fsdp_engine, set_weights

from meshrl.config.engine import ModelConfig
from meshrl.config.rollout import EngineKwargs, RolloutConfig
from meshrl.models.loading import load_tokenizer
from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.parallel.mesh import contiguous_group
from meshrl.rollout.requests import SamplingParams

RANKS = 2
SEEDS = (3, 4)
ASKED = SamplingParams(max_tokens=7, temperature=0.8, n=2)
# What vLLM rounds the vocabulary up to.
VOCABULARY_STEP = 64


@dataclass(frozen=True)
class Trial:
    """A model over `split` ranks. vLLM's kernel for experts on CPUs cannot run with spread ones: `answers` is false."""

    experts: bool = False
    split: int = RANKS
    spread: int = 1
    answers: bool = True

    def model(self, seed: int):
        return (make_experts_model if self.experts else make_model)(seed)


@dataclass
class Found:
    """What one rank has after a sync."""

    version: int
    tokens: list[list[int]]
    log_probs: list[list[float]]
    moved: dict[str, float]
    params: dict[str, torch.Tensor]


def run(rank: int, folder: str, results: str, trial: Trial) -> None:
    """One rank; what it found goes to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{results}/rendezvous", rank=rank, world_size=RANKS)
    try:
        found = work(rank, folder, trial)
    except BaseException:
        found = traceback.format_exc()
    torch.save(found, f"{results}/{rank}.pt")


def work(rank: int, folder: str, trial: Trial) -> list[Found]:
    """Syncs and answers of two versions; before them the parameters as vLLM itself reads them from the folder."""
    from meshrl.rollout.build import build_rollout
    from meshrl.weights.colocated import HybridEngine, policy_sync

    model = ModelConfig(path=folder, enable_gradient_checkpointing=False)
    engine = fsdp_engine(folder, RANKS)
    more = {"kv_cache_memory_bytes": 32 << 20, "block_size": 32}
    config = RolloutConfig(
        name="vllm", dtype="float32", max_model_len=CONTEXT, enforce_eager=True, load_format="auto",
        tensor_model_parallel_size=trial.split, expert_parallel_size=trial.spread, max_num_seqs=16,
        engine_kwargs=EngineKwargs(vllm=more),
    )  # fmt: skip
    rollout = build_rollout(
        config, model, engine.hf_model, load_tokenizer(folder), device=torch.device("cpu"), can_share=False,
        rank_group=contiguous_group(trial.split, 120),
    )  # fmt: skip
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=True, delta=False, deadline=120.0)
    phases = HybridEngine(engine, rollout, sync, device=torch.device("cpu"))
    found = [Found(-1, [], [], {}, params_of(rollout))]
    for version, seed in enumerate(SEEDS):
        set_weights(engine, seed, trial.model)
        moved = phases.to_rollout(version)
        found.append(Found(version, [], [], moved, params_of(rollout)))
        if trial.answers:
            # Every replica has seeds of its own, and goes its own way.
            first = 100 * (rank // trial.split)
            answers = rollout.complete([request(prompt, ASKED, first + i) for i, prompt in enumerate(PROMPTS)])
            assert {v for answer in answers for v in answer.versions} == {version}
            found[-1].tokens, found[-1].log_probs = [a.token_ids for a in answers], [a.log_probs for a in answers]
        phases.to_train()
    rollout.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's group is as it was
    assert total == RANKS
    return found


def params_of(rollout) -> dict[str, torch.Tensor]:
    """vLLM's own parameters on this rank; on CPUs those of linear layers are packed away."""
    (found,) = rollout.engine.collective_rpc(lambda worker: dict(worker.get_model().named_parameters()))
    return {name: param.detach().clone() for name, param in found.items()}


def results_of(tmp_path, trial: Trial) -> list[list[Found]]:
    """Both ranks of a trial, whose folder has the weights of the last version."""
    model = trial.model(SEEDS[-1])
    folder = tmp_path / "model"
    save_hf_folder(folder, model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(folder)
    torch.multiprocessing.spawn(run, args=(str(folder), str(tmp_path), trial), nprocs=RANKS)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    failed = [one for one in found if isinstance(one, str)]
    assert not failed, failed[0]
    return found


TRIALS = {
    "cut": Trial(),
    "replicas": Trial(split=1),
    "experts cut": Trial(experts=True),
    "experts spread": Trial(experts=True, spread=RANKS, answers=False),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_exact_after_every_update_and_no_rank_receives_more_than_it_keeps(tmp_path, trial):
    found = results_of(tmp_path, trial)
    for rank, (loaded, *versions) in enumerate(found):
        for one in versions:
            right, wrong = trial.model(SEEDS[one.version]), trial.model(SEEDS[1 - one.version])
            if trial.answers:
                assert worst(right, one.tokens, one.log_probs) < 2e-5
                assert worst(wrong, one.tokens, one.log_probs) > 0.1
            part = bytes_of_part(right, rank, trial)
            arrived = one.moved["weight_sync/received_bytes"] + one.moved["weight_sync/copied_bytes"]
            assert part == arrived
            # FSDP's rows are already here: half of everything, of which a half is kept where the model is cut.
            assert 0 < one.moved["weight_sync/received_bytes"] < part
        # As if vLLM had read the last version from files.
        assert same(versions[-1].params, loaded.params)
        assert not same(versions[0].params, loaded.params)
    if trial.answers:
        tokens = [[one.tokens for one in versions] for _, *versions in found]
        assert (tokens[0] == tokens[1]) == (trial.split == RANKS)


def bytes_of_part(model, rank: int, trial: Trial) -> int:
    """What a rank keeps: whole norms and router, its rows of the vocabulary, and its share of everything else."""
    total = 0
    for name, param in model.named_parameters():
        if trial.split == 1 or "norm" in name or name.endswith("mlp.gate.weight"):
            total += param.nbytes
        elif "embed_tokens" in name or "lm_head" in name:
            step = -(-len(param) // VOCABULARY_STEP) * VOCABULARY_STEP // trial.split
            total += param[rank * step : (rank + 1) * step].nbytes
        else:
            total += param.nbytes // trial.split
    return total


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(param, theirs[name]) for name, param in ours.items())


def worst(model, tokens, log_probs) -> float:
    """How far log-probs are from the model's own."""
    differences = []
    for number, (answer, given) in enumerate(zip(tokens, log_probs, strict=True)):
        own = chosen(log_probs_of(model, PROMPTS[number // ASKED.n], answer, ASKED.temperature), answer)
        differences.append(float((torch.tensor(given) - own).abs().max()))
    return max(differences)
