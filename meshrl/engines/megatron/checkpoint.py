"""The Megatron engine's state in files that any layout can read: rectangles of tensors under Hugging Face names.

    tensors-<rank>.safetensors      the rectangles a rank writes: those that no rank before it holds
    tensors-<rank>.json             their names, places, and what they are: weights (float32) or a moment of AdamW
    extra-<rank>.pt                 schedule and random states

A rank reads, of all files, only what overlaps its own rectangles. Megatron-Core's own format is not used: it cannot
restore torch's AdamW, nor experts onto another number of expert-parallel ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshrl.engines.extra_state import load_extra, save_extra
from meshrl.engines.megatron.optimizer import ensure_states
from meshrl.engines.megatron.states import MOMENTS, set_state, set_steps, steps_of, stretches, whole_state
from meshrl.engines.megatron.weight_map import Slice, describe
from meshrl.engines.megatron.weights import module_names, piece_owners

if TYPE_CHECKING:
    from meshrl.engines.megatron.engine import MegatronEngine


def save_state(engine: MegatronEngine, folder: Path, contents: Sequence[str]) -> None:
    """Writes what `contents` names; all ranks take part."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    owned = {
        (piece.chunk, piece.parameter, piece.name, piece.start)
        for parts in piece_owners(engine.hf_config, engine.ranks, **_naming(engine)).values()
        for owner, piece in parts
        if owner == rank
    }
    tensors: dict[str, Tensor] = {}
    index: list[dict[str, Any]] = []
    for kind, key, whole in _states(engine, _kinds(engine, contents)):
        for piece in _pieces(engine, key):
            if (piece.chunk, piece.parameter, piece.name, piece.start) in owned:
                entry = f"{len(index)}"
                tensors[entry] = piece.region(whole).to("cpu", copy=True).contiguous()
                index.append(
                    {"kind": kind, "name": piece.name, "start": piece.start, "size": piece.size, "entry": entry}
                )
    save_file(tensors, folder / f"tensors-{rank}.safetensors")
    steps = steps_of(engine.optimizer) if "optimizer" in contents and engine.optim_config is not None else 0
    (folder / f"tensors-{rank}.json").write_text(json.dumps({"steps": steps, "tensors": index}))
    if "extra" in contents:
        save_extra(folder, rank, engine.device, getattr(engine, "learning_rate", None))
    dist.barrier()


@torch.no_grad()
def load_state(engine: MegatronEngine, folder: Path, contents: Sequence[str]) -> None:
    """Reads what `contents` names into the engine, whatever layout wrote it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint at '{folder}'")
    stored = _Stored(folder)
    kinds = _kinds(engine, contents)
    if engine.optim_config is not None:
        ensure_states(engine.optimizer)
        held = stretches(engine.optimizer)
        if "optimizer" in contents:
            set_steps(engine.optimizer, stored.steps)
    for key, param in _parameters(engine).items():
        for kind in kinds:
            value = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
            for piece in _pieces(engine, key):
                stored.fill(kind, piece, piece.region(value))
            if kind == "param":
                param.data.copy_(value)
            if engine.optim_config is not None and isinstance(param, nn.Parameter) and param in held:
                set_state(held[param], kind, value)
    if "extra" in contents:
        load_extra(folder, dist.get_rank(), engine.device, getattr(engine, "learning_rate", None))


def _kinds(engine: MegatronEngine, contents: Sequence[str]) -> list[str]:
    moments = MOMENTS if "optimizer" in contents and engine.optim_config is not None else ()
    return [*(["param"] if "model" in contents else []), *moments]


def _states(engine: MegatronEngine, kinds: Sequence[str]) -> Iterator[tuple[str, tuple[int, str], Tensor]]:
    """Every local tensor of each kind, whole in its parameter's shape, one at a time; collective."""
    held = {}
    if engine.optim_config is not None:
        ensure_states(engine.optimizer)
        held = stretches(engine.optimizer)
    for key, param in _parameters(engine).items():
        for kind in kinds:
            if not isinstance(param, nn.Parameter) or engine.optim_config is None:
                if kind == "param":
                    yield kind, key, param.detach().float()
                continue
            yield kind, key, whole_state(param, held.get(param), kind, _copies(param))


def _copies(param: nn.Parameter) -> dist.ProcessGroup:
    """The ranks that hold the same parameter."""
    if getattr(param, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _parameters(engine: MegatronEngine) -> dict[tuple[int, str], Tensor]:
    """This rank's parameters, and the routers' biases, which are weights too, by chunk and name."""
    found: dict[tuple[int, str], Tensor] = {}
    for number, chunk in enumerate(engine.model):
        while isinstance(inner := getattr(chunk, "module", None), nn.Module):
            chunk = inner
        found |= {(number, name): param for name, param in chunk.named_parameters()}
        found |= {(number, name): b for name, b in chunk.named_buffers() if name.endswith("router.expert_bias")}
    return found


def _naming(engine: MegatronEngine) -> dict[str, Any]:
    return {
        "names": module_names(engine.model),
        "vocab_size": engine.padded_vocab_size,
        "value_head": engine.head == "value",
    }


def _pieces(engine: MegatronEngine, key: tuple[int, str]) -> list[Slice]:
    """The rectangles of Hugging Face tensors that lie in a local parameter."""
    if not hasattr(engine, "_pieces_of"):
        pieces: dict[tuple[int, str], list[Slice]] = {}
        for piece in describe(engine.hf_config, engine.ranks, **_naming(engine)):
            if min(piece.size) > 0:
                pieces.setdefault((piece.chunk, piece.parameter), []).append(piece)
        engine._pieces_of = pieces  # type: ignore[attr-defined]
    return engine._pieces_of.get(key, [])  # type: ignore[attr-defined]


class _Stored:
    """All rectangles of a checkpoint, wherever they lie."""

    def __init__(self, folder: Path):
        self.steps = 0
        self._where: dict[tuple[str, str], list[tuple[Path, dict[str, Any]]]] = {}
        self._open: dict[Path, Any] = {}
        files = sorted(folder.glob("tensors-*.json"))
        if not files:
            raise FileNotFoundError(f"'{folder}' is no checkpoint of strategy=megatron: it has no tensors-*.json")
        for file in files:
            content = json.loads(file.read_text())
            self.steps = max(self.steps, content["steps"])
            for entry in content["tensors"]:
                place = (file.with_suffix(".safetensors"), entry)
                self._where.setdefault((entry["kind"], entry["name"]), []).append(place)

    def fill(self, kind: str, piece: Slice, target: Tensor) -> None:
        """Copies all that is stored of a rectangle into `target`, which has its shape."""
        filled = 0
        for file, entry in self._where.get((kind, piece.name), []):
            low = [max(a, b) for a, b in zip(piece.start, entry["start"], strict=True)]
            ends = zip(piece.start, piece.size, entry["start"], entry["size"], strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            box = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, entry["start"], strict=True))
            own = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, piece.start, strict=True))
            part = self._view(file, entry["entry"])[box]
            target[own] = part.to(target.device)
            filled += part.numel()
        if filled != target.numel():
            raise ValueError(
                f"the checkpoint holds {filled} of {target.numel()} elements of '{piece.name}' "
                f"({kind}, from {list(piece.start)} on): it is of another model, or incomplete"
            )

    def _view(self, file: Path, entry: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(entry)
