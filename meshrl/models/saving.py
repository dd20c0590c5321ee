"""Writing a model as a Hugging Face folder, tensor by tensor: at most one shard is held in memory."""

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
    """Streams `weights` into safetensors shards beside the model's configs; the folder appears when it is complete.

    Ranks that only help to gather the weights pass `writes=False`: they consume the stream and keep nothing.
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
    """Gives a folder to write into, which takes this name, and the place of what was there, only if all goes well."""
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
    """As files have them: Transformers joins experts when it loads, other tools know them one by one.

    Of some families, files have rows and columns of stacked experts the other way round. Transformers turns them when
    it loads, but not when it saves; it tells by the shape, so that in files squares stay as they are.
    """
    may_turn = hf_model.config.model_type in TURNED_EXPERTS
    for name, tensor in weights:
        for file, value in revert_weight_conversion(hf_model, {name: tensor}).items():
            if may_turn and STACK.fullmatch(file) and value.shape == tensor.shape:
                is_square = value.shape[1] == value.shape[2]
                value = value if is_square and not turns_squares else value.transpose(1, 2)
            yield file, value


def kind_of(name: str) -> str:
    """A weight's name without the numbers of its layer and expert."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def other_names(hf_model: PreTrainedModel) -> dict[str, tuple[str, str]]:
    """Kinds of weights that files name otherwise than `names` does, each with both names of one of them."""
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
    """Refuses a mixture of experts whose files hold them in another form than `names` knows, and cuts."""
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
    """Writes a stream of tensors as safetensors shards and, for more than one, their index.

    `copies`: the stream may use a tensor's memory again for the next one.
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
    """Writes config.json and, for a model that generates, its generation config."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(hf_model.config)
    # Other tools choose the model's class by this name.
    config.architectures = [type(hf_model).__name__]
    config.save_pretrained(folder)
    if hf_model.can_generate() and hf_model.generation_config is not None:
        # `save_pretrained` refuses what loading only warns of, and no checkpoint may fail for that.
        hf_model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def copy_processor(source: str | Path, folder: str | Path) -> None:
    """Copies what says how images are read, which no weight and no tokenizer tells, if the model at `source` has it."""
    for name in (*PROCESSOR_FILES, "video_preprocessor_config.json"):
        if (file := Path(source) / name).is_file():
            shutil.copyfile(file, Path(folder) / name)


def _name_shards(folder: Path, parts: list[list[str]], total: int) -> None:
    """Gives the shards their usual names, now that their number is known, and writes the index."""
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


# Which of a model folder's safetensors files holds which tensor.

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a model folder; empty where there are no safetensors."""
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
