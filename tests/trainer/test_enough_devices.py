"""A run that asks for more GPUs than there are is told so before any worker starts."""

import pytest
import torch

from meshrl.config.keys import ConfigError
from meshrl.config.trainer import TrainerConfig
from meshrl.rollout.build import EngineOptions, open_rollout
from meshrl.trainer.launch import Pool, check_devices


def pools(*counts, names=("trainer", "actor_rollout_ref.rollout", "critic")):
    return [Pool([count], {}, name) for count, name in zip(counts, names, strict=False)]


def gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_fewer_gpus_than_processes(monkeypatch):
    gpus(monkeypatch, 2)
    check_devices(pools(2), TrainerConfig(n_gpus_per_node=2))
    with pytest.raises(ConfigError, match=r"needs 8 GPUs \(trainer\.n_gpus_per_node=8\), but torch sees 2"):
        check_devices(pools(8), TrainerConfig(n_gpus_per_node=8))
    with pytest.raises(ConfigError, match=r"needs 4 GPUs \(.*=2, .*rollout\.n_gpus_per_node=1, critic\.n"):
        check_devices(pools(2, 1, 1), TrainerConfig(n_gpus_per_node=2))
    check_devices(pools(8), TrainerConfig(n_gpus_per_node=8, device="cpu"))
    check_devices(pools(8), TrainerConfig(n_gpus_per_node=8, backend="ray"))


def test_no_gpu(monkeypatch):
    gpus(monkeypatch, 0)
    check_devices(pools(8), TrainerConfig(n_gpus_per_node=8))  # auto: processes on the CPU
    with pytest.raises(ConfigError, match=r"needs 1 GPU \(trainer"):
        check_devices(pools(1), TrainerConfig(n_gpus_per_node=1, device="cuda"))
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        open_rollout("nowhere", EngineOptions(device="cuda"))
