"""A sharded trainer in processes of its own that feeds an engine here: what the tests of all engines share.

Imports no engine: its processes would take as long to start as the engine itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from contract import CHARACTERS, PROMPTS, chosen, log_probs_of, make_model

from meshrl.config.engine import EngineConfig, FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer

TRAINERS = 2
# Of the weights of version 0 and version 1.
SEEDS = (3, 4)
DEADLINE = 120.0
# Several parts even of a model this small.
BUCKET = 1 << 15


def fsdp_engine(folder: str, ranks: int, **model: Any) -> Any:
    """A trainer sharded over ranks, in float32; `model` holds more of its model's settings."""
    from meshrl.engines.fsdp.fsdp_engine import FSDPEngine

    precision = MixedPrecisionConfig(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32")
    engine = FSDPEngine(
        ModelConfig(path=folder, enable_gradient_checkpointing=False, **model),
        EngineConfig(fsdp_config=FSDPConfig(fsdp_size=ranks, model_dtype="fp32", mixed_precision=precision)),
        OptimConfig(lr=1e-3),
        device=torch.device("cpu"),
    )
    engine.initialize()
    return engine


@torch.no_grad()
def set_weights(engine: Any, seed: int, make: Callable[[int], Any] = make_model) -> None:
    """Gives a sharded trainer the weights of `make(seed)`."""
    from torch.distributed.tensor import distribute_tensor

    wanted = dict(make(seed).named_parameters())
    for name, parameter in engine.hf_model.named_parameters():
        parameter.copy_(distribute_tensor(wanted[name], parameter.device_mesh, parameter.placements))


def train(rank: int, folder: str, results: str, address: str) -> None:
    """One rank of the trainer: every version, as soon as the rollout takes it."""
    from meshrl.weights.disaggregated import PoolGroup, connect_trainer

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(TRAINERS), "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{results}/rendezvous", rank=rank, world_size=TRAINERS)
    engine = fsdp_engine(folder, TRAINERS)
    group = PoolGroup.join(address, rank, TRAINERS + 1, DEADLINE)
    with patch("meshrl.weights.disaggregated.MEGABYTE", BUCKET):
        sync = connect_trainer(engine, group, 1, bucket_megabytes=1, deadline=DEADLINE)
    for version, seed in enumerate(SEEDS):
        set_weights(engine, seed)
        sync(None, version)
    sync.close()


def model_folder(folder: Path) -> Path:
    """A model of other weights than any version has, with its tokenizer."""
    model = make_model(0)
    save_hf_folder(folder, model.named_parameters(), model)
    char_tokenizer(CHARACTERS).save_pretrained(folder)
    return folder


@contextmanager
def fed_by_trainers(rollout: Any, folder: Path, results: Path) -> Iterator[Any]:
    """Gives the rollout's end of the sync; the trainers' processes are over in the end."""
    from meshrl.models.loading import empty_model
    from meshrl.weights.disaggregated import MeetingPoint, PoolGroup, connect_rollout

    point = MeetingPoint()
    spawned: Any = torch.multiprocessing.spawn(
        train, args=(str(folder), str(results), point.address), nprocs=TRAINERS, join=False
    )
    try:
        model = empty_model(folder, "sdpa", dtype=torch.float32)
        group = PoolGroup.join(point.address, TRAINERS, TRAINERS + 1, DEADLINE)
        with patch("meshrl.weights.disaggregated.MEGABYTE", BUCKET):
            sync = connect_rollout(rollout, group, TRAINERS, model=model, device=torch.device("cpu"))
        assert len(sync.sync.parts) > 3
        yield sync
        sync.close()
        while not spawned.join(DEADLINE):
            pass
    finally:
        for process in spawned.processes:
            process.kill()


def check_versions(answers: Any, temperature: float, expected: set[int]) -> None:
    """Every token's log-prob is that of the weights of its own version, and of no other."""
    models = [make_model(seed) for seed in SEEDS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        given, versions = torch.tensor(answer.log_probs), torch.tensor(answer.versions)
        assert set(answer.versions) == expected
        assert answer.versions == sorted(answer.versions)
        for version, model in enumerate(models):
            own = chosen(log_probs_of(model, prompt, answer.token_ids, temperature), answer.token_ids)
            far, mine = (given - own).abs(), versions == version
            assert far[mine].max() < 2e-5 if mine.any() else version not in expected
            # Under the other version, or with weights that stayed as they were, they would not be the same.
            assert mine.all() or far[~mine].max() > 0.1
