"""A config that is fine, on files that exist, for tests that then break one thing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.config import PPOConfig, SFTConfig, load_config, validate_training

MakeModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs are judged alike wherever the tests run, with vLLM and SGLang or without."""
    monkeypatch.setattr(validate_training, "is_installed", lambda package: True)


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a model folder with a config.json of the given fields, a tokenizer file and one of weights."""

    def make(**fields: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        shape = {"num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 4096, **fields}
        (folder / "config.json").write_text(json.dumps(shape))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
        return folder

    return make


@pytest.fixture
def fine(tmp_path: Path, make_model: MakeModel) -> Callable[..., PPOConfig]:
    """A `PPOConfig` without any problem, plus overrides."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "6 * 7"}\n' * 1024)

    def make(*overrides: str) -> PPOConfig:
        settings = [
            f"data.train_files={data}",
            f"actor_rollout_ref.model.path={make_model()}",
            "reward.name=exact_match",
            *overrides,
        ]
        return load_config("grpo", settings).config

    return make


@pytest.fixture
def fine_sft(tmp_path: Path, make_model: MakeModel) -> Callable[..., SFTConfig]:
    """An `SFTConfig` without any problem, plus overrides."""
    data = tmp_path / "demonstrations.jsonl"
    data.write_text('{"prompt": "6 * 7", "response": "42"}\n' * 256)

    def make(*overrides: str) -> SFTConfig:
        return load_config(
            None, [f"data.train_files={data}", f"model.path={make_model()}", *overrides], SFTConfig
        ).config

    return make
