"""Conversion between checkpoints and Hugging Face folders (`meshrl convert`).

Tensors are converted one by one, so at most one file's worth of tensors is in memory.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

import meshrl
from meshrl.config.keys import count
from meshrl.data.serialization import open_tensors, save_tensors
from meshrl.engines.megatron.weight_map import hf_tensors, module_place
from meshrl.engines.megatron.weights import read_hf_tensors
from meshrl.engines.old_state_files import DCP_INDEX, is_before
from meshrl.engines.state_files import INDEX, Rectangle, Snapshot, record_file, write_index, write_snapshot
from meshrl.engines.state_reader import Stored
from meshrl.files import read_json, write_json
from meshrl.models.loading import empty_model, is_value_head, load_model_config, load_tokenizer, torch_dtype
from meshrl.models.lora import ADAPTER, ADAPTER_CONFIG, SCALING_FILE, merged_params
from meshrl.models.names import expert_count
from meshrl.models.saving import (
    SHARD_BYTES,
    as_file_tensors,
    copy_processor,
    new_folder,
    save_configs,
    tensor_files,
    write_shards,
)
from meshrl.trainer.checkpoints import FOLDER, FORMAT, MANIFEST, STATE, CheckpointError, newest_complete, problems_of
from meshrl.trainer.convert_pickles import from_pickles, refuse_pickles
from meshrl.workers.checkpointing import HF_FOLDER

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ROLES = ("actor", "model", "critic")


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: the output path, the number of tensors and their size in bytes."""

    path: Path
    tensors: int
    bytes: int


def convert(arguments: Namespace) -> str:
    """Run `meshrl convert` and return its message. The source decides the direction of the conversion."""
    source, out = Path(arguments.source), Path(arguments.out)
    if arguments.shard_mb is not None and arguments.shard_mb < 1:
        raise ValueError(f"--shard-mb ({arguments.shard_mb}) must be at least 1")
    if arguments.trust_pickle:
        return _without_pickles(arguments, source, out)
    shard_bytes = SHARD_BYTES if arguments.shard_mb is None else arguments.shard_mb << 20
    if arguments.like or ((source / DCP_INDEX).is_file() and not (source.parent / MANIFEST).is_file()):
        if arguments.like is None:
            raise ValueError(
                f"{source} is a distributed checkpoint: name a Hugging Face folder of its model with --like"
            )
        dtype = torch_dtype(arguments.dtype) if arguments.dtype else None
        made = from_megatron(
            source,
            arguments.like,
            out,
            dtype=dtype,
            shard_bytes=shard_bytes,
            overwrite=arguments.overwrite,
        )
    elif (source / "config.json").is_file():
        refuse_pickles(source)
        for name in ("dtype", "adapter", "shard_mb"):
            if getattr(arguments, name):
                raise ValueError(f"--{name.replace('_', '-')} is for checkpoints; {source} is a Hugging Face folder")
        made = from_hf(source, out, role=arguments.role or "actor", overwrite=arguments.overwrite)
    else:
        if source.is_file():
            refuse_pickles(source)
        made = to_hf(
            source,
            out,
            role=arguments.role,
            dtype=torch_dtype(arguments.dtype) if arguments.dtype else None,
            adapter=arguments.adapter,
            shard_bytes=shard_bytes,
            overwrite=arguments.overwrite,
        )
    return f"wrote {made.path}: {count(made.tensors, 'tensor')}, {made.bytes / 1e6:.1f} MB"


def _without_pickles(arguments: Namespace, source: Path, out: Path) -> str:
    for name in ("role", "dtype", "adapter", "like", "shard_mb"):
        if getattr(arguments, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is for another conversion: make plain data of {source} with "
                "--trust-pickle alone, and convert that then"
            )
    if not source.exists():
        raise ValueError(f"there is no {source}")
    place = out if source.is_file() and not out.exists() else _free_place(out, arguments.overwrite, source)
    made, size = from_pickles(source, place)
    return f"wrote {out}, without pickles: {count(made, 'place')} made new, {size / 1e6:.1f} MB in all"


def to_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    role: str | None = None,
    dtype: torch.dtype | None = None,
    adapter: bool = False,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Converted:
    """Write a role of a checkpoint (or of a run's newest checkpoint) as a folder that plain transformers loads.

    Adapters are merged into the weights or, with `adapter`, written alone as a PEFT folder. Without `dtype` the weights
    keep their stored type.
    """
    folder = _role_folder(Path(checkpoint), role)
    out = _free_place(out, overwrite, checkpoint)
    stored = Stored(folder)
    if adapter:
        return _to_peft(folder, stored, out, dtype)
    model = _model_of(folder)
    expected = expected_tensors(model)
    _check_names(folder, stored, expected)
    with new_folder(out) as aside:
        _copy_but_weights(folder / HF_FOLDER, aside)
        if dtype is not None:
            _set_dtype(aside / "config.json", dtype)
        tensors = ((name, t if dtype is None else t.to(dtype)) for name, t in _plain_tensors(folder, stored, expected))
        write_shards(aside, as_file_tensors(tensors, model), shard_bytes, copies=False)
    return _measured(out)


def _role_folder(path: Path, role: str | None) -> Path:
    """Return the folder of a role in `path`, which is a run's folder, a checkpoint or a role's folder itself."""
    if (path / FOLDER).is_dir():
        found = newest_complete(path / FOLDER)
        if found is None:
            raise CheckpointError(f"there are no checkpoints in {path / FOLDER}")
        path = found.path
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    if (path / INDEX).is_file() or is_before(path):
        path, role = path.parent, path.name
    if problems := problems_of(path):
        raise CheckpointError(f"the checkpoint {path} cannot be used: {'; '.join(problems[:3])}")
    there = [name for name in ROLES if (path / name).is_dir()]
    chosen = role or next(iter(there), "")
    if chosen not in there:
        raise CheckpointError(f"{path} has no {role or 'role'}, only {', '.join(there) or 'nothing'}")
    return path / chosen


def _free_place(
    to: str | Path, overwrite: bool, *read: str | Path, made: tuple[str, ...] = ("config.json", "adapter_config.json")
) -> Path:
    """Return the path to write to, if nothing is there or `overwrite` may replace what is there.

    Only an earlier output is replaced, which is recognised by one of the files `made`.
    """
    out = Path(to).resolve()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return out
    if not overwrite:
        raise ValueError(f"{out} is there already: choose another place, or --overwrite")
    for source in read:
        if Path(source).resolve().is_relative_to(out):
            raise ValueError(f"{out} holds what is read, {source}: choose another place")
    if not any((out / name).is_file() for name in made):
        raise ValueError(
            f"{out} is nothing that this would write (it has no {' or '.join(made)}): choose another place"
        )
    return out


def _model_of(folder: Path) -> PreTrainedModel:
    """Return the role's model without allocated weights, for its names and shapes."""
    config = read_json(folder / HF_FOLDER / "config.json")
    is_value = any("Classification" in name for name in config.get("architectures") or [])
    return empty_model(folder / HF_FOLDER, "eager", "value" if is_value else "lm")


def expected_tensors(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a model's folder.

    The names are those of the modules. Parameters are included, tied parameters once, and persistent buffers.
    """
    own = {name: tuple(param.shape) for name, param in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own.keys()
    kept = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
    return own | kept


def _check_names(folder: Path, stored: Stored, expected: dict[str, tuple[int, ...]]) -> None:
    """Check that the checkpoint has exactly the model's tensors, in their shapes."""
    found = {
        name.replace(".base_layer.", "."): stored.shapes["param", name]
        for name in stored.names()
        if ".lora_" not in name
    }
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or extra:
        words = [f"lacks {count(len(missing), 'tensor')}, first of all '{min(missing)}'"] if missing else []
        words += [f"has {len(extra)} that the model does not know, first of all '{min(extra)}'"] if extra else []
        raise ValueError(f"{folder} is not of the model in its config.json: it {' and '.join(words)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{folder} is not of the model in its config.json: '{name}' is {list(found[name])}, not {list(shape)}"
            )


def _plain_tensors(folder: Path, stored: Stored, names: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's own tensors in the order of `names`, with adapters merged into them."""
    scaling_file = folder / SCALING_FILE
    if not scaling_file.is_file():
        for name in names:
            yield name, stored.whole(name)
        return

    def with_adapters() -> Iterator[tuple[str, Tensor]]:
        held = set(stored.names())
        for name in names:
            module, _, leaf = name.rpartition(".")
            base = f"{module}.base_layer.{leaf}"
            yield (base, stored.whole(base)) if base in held else (name, stored.whole(name))
            for part in ("lora_A", "lora_B"):
                matrix = f"{module}.{part}.{ADAPTER}.weight"
                if leaf == "weight" and matrix in held:
                    yield matrix, stored.whole(matrix)

    yield from merged_params(with_adapters(), read_json(scaling_file))


def _to_peft(folder: Path, stored: Stored, out: Path, dtype: torch.dtype | None) -> Converted:
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{folder} was trained without adapters: it has no {ADAPTER_CONFIG}")
    if heads := [name for name in stored.names() if is_value_head(name)]:
        raise ValueError(f"{folder} has trained more than adapters ({heads[0]}): convert it as a whole model, merged")
    names = [name for name in stored.names() if ".lora_" in name]
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": stored.whole(name, dtype=dtype) for name in names
    }
    with new_folder(out) as aside:
        shutil.copy(folder / ADAPTER_CONFIG, aside / ADAPTER_CONFIG)
        save_tensors(tensors, aside / ADAPTER_WEIGHTS)
    return Converted(out, len(tensors), sum(t.numel() * t.element_size() for t in tensors.values()))


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    content = read_json(config)
    content.pop("torch_dtype", None)
    content["dtype"] = str(dtype).removeprefix("torch.")
    write_json(config, content, indent=2)


def _measured(out: Path) -> Converted:
    """Read the written folder and measure it; every tensor that the index names must be in its file."""
    total = held = 0
    files = tensor_files(out)
    for file in sorted(set(files.values())):
        with open_tensors(file) as tensors:
            held += len(list(tensors.keys()))
        total += file.stat().st_size
    if held != len(files):
        raise ValueError(f"{out}: the index names {len(files)} tensors, the files hold {held}")
    return Converted(out, held, total)


def from_megatron(
    folder: str | Path,
    like: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Converted:
    """Write a Megatron-Core distributed checkpoint as a Hugging Face folder, with configs and tokenizer of `like`."""
    out, like = _free_place(out, overwrite, folder, like), Path(like)
    hf_config = load_model_config(like)
    expected = hf_tensors(hf_config)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        left = set(expected)
        for name, tensor in read_hf_tensors(Path(folder), hf_config):
            left.remove(name)
            yield name, tensor if dtype is None else tensor.to(dtype)
        if left:
            raise ValueError(
                f"'{folder}' lacks {count(len(left), 'tensor')} of the model in '{like}', as '{min(left)}'"
            )

    with new_folder(out) as aside:
        _copy_but_weights(like, aside)
        if dtype is not None:
            _set_dtype(aside / "config.json", dtype)
        write_shards(aside, tensors(), shard_bytes, copies=False)
    return _measured(out)


def _copy_but_weights(folder: Path, target: Path) -> None:
    """Copy all files of a folder except weights: configs, tokenizer and chat template."""
    for file in folder.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".index.json", ".bin", ".pt")):
            shutil.copy(file, target / file.name)


def from_hf(folder: str | Path, out: str | Path, *, role: str = "actor", overwrite: bool = False) -> Converted:
    """Make a checkpoint from the weights of a Hugging Face folder, without optimizer state, at step 0.

    A run starts from it with `trainer.resume_mode=resume_path`.
    """
    source, out = Path(folder), _free_place(out, overwrite, folder, made=(MANIFEST,))
    if not (source / "config.json").is_file():
        raise ValueError(f"no model at '{source}': expected a folder with config.json")
    model = empty_model(source, "eager", "value" if role == "critic" else "lm")
    expected = expected_tensors(model)
    with new_folder(out) as aside:
        part = write_snapshot(Snapshot(_rectangles(source, model)), aside / role, 0)
        files = [write_index(aside / role, [part.entries])]
        stored = Stored(aside / role)
        _check_names(source, stored, expected)
        for name, shape in expected.items():
            stored.check(name, shape)
        save_configs(aside / role / HF_FOLDER, model)
        if (source / "tokenizer_config.json").is_file():
            load_tokenizer(source).save_pretrained(aside / role / HF_FOLDER)
        copy_processor(source, aside / role / HF_FOLDER)
        files += [file for file in (aside / role / HF_FOLDER).iterdir() if file.is_file()]
        state = aside / STATE
        content = {"step": 0, "state": None, "contents": {role: ["model"]}, "ranks": {role: 1}, "config": {}}
        write_json(state, content)
        records = [asdict(record) for record in part.records(aside)]
        records += [asdict(record_file(file, aside)) for file in (*files, state)]
        manifest = {"format": FORMAT, "meshrl": meshrl.__version__, "step": 0, "files": records}
        write_json(aside / MANIFEST, manifest)
    return Converted(out, len(expected), sum(record["size"] for record in records))


def _rectangles(folder: Path, model: PreTrainedModel) -> Iterator[Rectangle]:
    """Yield the folder's tensors under the modules' names, file by file.

    The tensor of a single expert becomes a slice of its layer's stacked experts.
    """
    files = tensor_files(folder)
    if not files:
        raise ValueError(f"'{folder}' has no safetensors")
    known = expected_tensors(model)
    tied = {name for name in files if name == "lm_head.weight" and name not in known}
    for file in dict.fromkeys(files.values()):
        if not file.is_file():
            raise ValueError(f"'{folder}' lacks {file.name}, which its index names")
        opened = open_tensors(file)
        for name in opened.keys():
            if name in tied or files.get(name) != file:
                continue
            tensor = opened.get_tensor(name)
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise ValueError(
                    f"'{name}' in '{folder}' is {tensor.dtype}: weights must be 16 or 32 bits, not quantized"
                )
            place = Rectangle("param", name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
            if name not in known:
                module, shape, start = module_place(name, place.shape, place.start, expert_count(model.config))
                stacked = tensor[None] if len(shape) > tensor.dim() else tensor
                place = replace(place, name=module, shape=shape, start=start, tensor=stacked)
            yield place
