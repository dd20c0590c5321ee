"""A config that asks for a package that is not installed is told so before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.config import ConfigError, PPOConfig, SFTConfig, ensure_runnable, validate_training
from meshrl.config.validate_training import is_installed

MakePPO = Callable[..., PPOConfig]
MakeSFT = Callable[..., SFTConfig]
VLLM = "actor_rollout_ref.rollout.name=vllm"


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that are not installed, for this test."""
    names: set[str] = set()
    monkeypatch.setattr(validate_training, "is_installed", lambda package: package not in names)
    return names


@pytest.mark.parametrize(
    ("override", "package", "extra"),
    [
        (VLLM, "vllm", "vllm"),
        ("actor_rollout_ref.rollout.name=sglang", "sglang", "sglang"),
        ("actor_rollout_ref.rollout.name=sglang", "torch_memory_saver", "sglang"),
        ("trainer.logger=[console,wandb]", "wandb", "wandb"),
        ("actor_rollout_ref.model.lora_rank=8", "peft", "lora"),
    ],
)
def test_what_is_missing_is_named(fine: MakePPO, missing: set[str], override: str, package: str, extra: str) -> None:
    config = fine(override)
    ensure_runnable(config)
    missing.add(package)
    with pytest.raises(ConfigError) as caught:
        ensure_runnable(config)
    (problem,) = caught.value.problems
    assert problem.endswith(f"needs the package {package}: pip install 'meshrl[{extra}]'")
    ensure_runnable(config, check_files=False)


def test_adapters_that_exist_need_the_package_too(fine: MakePPO, missing: set[str], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    config = fine(f"actor_rollout_ref.model.lora_adapter_path={tmp_path}")
    ensure_runnable(config)
    missing.add("peft")
    with pytest.raises(ConfigError, match=r"model\.lora_adapter_path needs the package peft"):
        ensure_runnable(config)


def test_sft_and_clusters(fine: MakePPO, fine_sft: MakeSFT, missing: set[str]) -> None:
    missing |= {"peft", "vllm"}
    with pytest.raises(ConfigError, match=r"model\.lora_rank=4 needs the package peft"):
        ensure_runnable(fine_sft("model.lora_rank=4"))
    ensure_runnable(fine(VLLM, "trainer.backend=ray"))  # its workers may have it


def test_a_package_is_found_without_an_import() -> None:
    assert is_installed("json")
    assert not is_installed("no_such_package_at_all")
