"""Weights for an update: from a model folder on the server's machine, or from an uploaded safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshrl.rollout.opened import folder_weights
from meshrl.rollout.server.errors import ApiError
from meshrl.rollout.server.service import Service


def from_folder(path: str, service: Service) -> Mapping[str, Tensor]:
    """The weights of the model folder at `path`."""
    try:
        if not (Path(path) / "config.json").is_file():
            raise FileNotFoundError("there is no config.json")
        weights = _read(sorted(Path(path).glob("*.safetensors")), service)
        return weights if set(weights) == set(service.shapes) else _by_transformers(path, service)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ApiError(400, f"no weights could be read from '{path}': {error}", "path") from error


def from_file(path: str, service: Service) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return _read([path], service)
    except (SafetensorError, OSError, ValueError) as error:
        raise ApiError(400, f"the body is not a safetensors file: {error}") from error


def _read(files: Iterable[str | Path], service: Service) -> dict[str, Tensor]:
    """All tensors but those that only repeat a tied weight."""
    weights: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name not in service.tied:
                    weights[name] = file.get_tensor(name).to(service.opened.dtype)
    return weights


def _by_transformers(path: str, service: Service) -> dict[str, Tensor]:
    """For files that name or cut their tensors in another way than the model does."""
    # While transformers builds a model, torch's default dtype is another one for all threads: nothing may be generated.
    service.rollout.pause("keep")
    try:
        return folder_weights(path, service.opened.dtype, service.opened.trust_remote_code)
    finally:
        if not service.slots.is_shut:  # by now: somebody may have paused or resumed meanwhile
            service.rollout.resume()
