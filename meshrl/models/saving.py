"""Writing of a model as a Hugging Face folder, tensor by tensor, with at most one shard in memory.

- `save_hf_folder`, `write_shards`, `save_configs`, `copy_processor`: the folder's parts.
- `as_file_tensors`, `other_names`: module parameters as files hold them.
- `tensor_files`: the files of a folder by tensor.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from meshrl.config.model_folder import PROCESSOR_FILES
from meshrl.data.serialization import inside, open_tensors, save_tensors
from meshrl.files import naming, read_json, sync_file, write_json
from meshrl.models.loading import named_weights
from meshrl.models.names import STACK, parts_of

SHARD_BYTES = 4 << 30
TURNED_EXPERTS = ("qwen3_vl_moe",)


def save_hf_folder(
    folder: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    hf_model: PreTrainedModel,
    *,
    writes: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Stream `weights` into safetensors shards beside the model's configs; the folder appears once it is complete.

    Ranks that only help to gather the weights pass `writes=False`: they consume the stream and write no file.
    """
    if not writes:
        for _ in weights:
            pass
        return
    with new_folder(Path(folder)) as aside:
        write_shards(aside, as_file_tensors(weights, hf_model), shard_bytes)
        save_configs(aside, hf_model)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into; on success, it takes the name `folder` and replaces an old folder."""
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with naming(folder):
            yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for file in aside.rglob("*"):
        if file.is_file():
            sync_file(file)
    _put_in_place(aside, folder)


def as_file_tensors(
    weights: Iterable[tuple[str, Tensor]], hf_model: PreTrainedModel, *, turns_squares: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Convert module parameters to the tensors of files.

    Transformers merges experts when it loads a model, but other tools expect each expert as its own tensor. In some
    families, files hold stacked experts transposed. Transformers transposes them when it loads, but not when it saves.
    It decides by the shape, so square matrices stay as they are unless `turns_squares`.
    """
    may_turn = hf_model.config.model_type in TURNED_EXPERTS
    for name, tensor in weights:
        for file, value in revert_weight_conversion(hf_model, {name: tensor}).items():
            if may_turn and STACK.fullmatch(file) and value.shape == tensor.shape:
                is_square = value.shape[1] == value.shape[2]
                value = value if is_square and not turns_squares else value.transpose(1, 2)
            yield file, value


def kind_of(name: str) -> str:
    """Return a weight's name without the numbers of its layer and expert."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def other_names(hf_model: PreTrainedModel) -> dict[str, tuple[str, str]]:
    """Return the kinds of weights that files name differently from `names`, each with both names of one example."""
    weights, family = named_weights(hf_model), str(hf_model.config.model_type)
    found: dict[str, tuple[str, str]] = {}
    owners: dict[str, str] = {}
    for kind, name in {kind_of(name): name for name in weights}.items():
        ours = {part.name: part.shape for part in parts_of(name, tuple(weights[name].shape), family)}
        theirs = {file: tuple(t.shape) for file, t in as_file_tensors([(name, weights[name])], hf_model)}
        if ours != theirs:
            found[kind] = min(ours), min(theirs)
        for file in theirs:
            if owners.setdefault(file, name) != name:
                raise ValueError(
                    f"not supported yet: model_type '{family}' with rollout.name=vllm or sglang: its files hold "
                    f"'{owners[file]}' and '{name}' in one tensor, '{file}'; set rollout.name=embedded or hf"
                )
    return found


def check_cuttable(hf_model: Any) -> None:
    """Raise a `ValueError` for a mixture of experts whose files hold experts in a form that `names` cannot shard."""
    for kind, (ours, theirs) in other_names(hf_model).items():
        if STACK.fullmatch(kind):
            raise ValueError(
                f"not supported yet: model_type '{hf_model.config.model_type}' with rollout.name=vllm or sglang over "
                f"several ranks: its files hold '{theirs}' where '{ours}' would be cut; set "
                "rollout.tensor_model_parallel_size=1, or rollout.name=embedded or hf"
            )


def write_shards(
    folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES, *, copies: bool = True
) -> None:
    """Write a stream of tensors as safetensors shards and, if there are several shards, their index.

    Pass `copies=True` if the stream may reuse a tensor's memory for the next tensor.
    """
    shard: dict[str, Tensor] = {}
    parts: list[list[str]] = []
    held = total = 0

    def flush() -> None:
        nonlocal held
        parts.append(list(shard))
        save_tensors(shard, folder / f"part-{len(parts)}.safetensors")
        shard.clear()
        held = 0

    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            flush()
        shard[name] = tensor.detach().to("cpu", copy=copies).contiguous()
        held, total = held + size, total + size
    flush()
    _name_shards(folder, parts, total)


def save_configs(folder: str | Path, hf_model: PreTrainedModel) -> None:
    """Write config.json and, for a model that generates, its generation config."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(hf_model.config)
    # Other tools select the model's class by this name.
    config.architectures = [type(hf_model).__name__]
    config.save_pretrained(folder)
    if hf_model.can_generate() and hf_model.generation_config is not None:
        # `save_pretrained` raises for settings that loading only warns about, and that must not fail a checkpoint.
        hf_model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def copy_processor(source: str | Path, folder: str | Path) -> None:
    """Copy the image and video processor's files of the model at `source`, if it has any.

    Neither the weights nor the tokenizer contain these settings.
    """
    for name in (*PROCESSOR_FILES, "video_preprocessor_config.json"):
        if (file := Path(source) / name).is_file():
            shutil.copyfile(file, Path(folder) / name)


def _name_shards(folder: Path, parts: list[list[str]], total: int) -> None:
    """Rename the shards to their usual names, now that their number is known, and write the index."""
    if len(parts) == 1:
        (folder / "part-1.safetensors").rename(folder / SINGLE_NAME)
        return
    names: dict[str, str] = {}
    for number, tensors in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / file)
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    write_json(folder / INDEX_NAME, index, indent=2)


def _put_in_place(aside: Path, folder: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


# The safetensors file of each tensor in a model folder.

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a model folder; an empty dict if there are no safetensors."""
    index = folder / INDEX_NAME
    if index.is_file():
        files = read_json(index)["weight_map"]
        paths = {file: inside(folder, file, links_out=True) for file in set(files.values())}
        return {name: paths[file] for name, file in files.items()}
    single = folder / SINGLE_NAME
    if not single.is_file():
        return {}
    with open_tensors(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)
