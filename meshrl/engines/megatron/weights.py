"""Weights in both directions: files -> this rank's Megatron parameters, and all ranks' parameters -> whole tensors.

- `load_hf_weights`: reads only the rectangles of the safetensors files that a rank needs.
- `export_hf_weights`: streams whole tensors. Ranks send their pieces of a bucket of tensors. The assembled tensors are
  yielded and dropped before the next bucket.
- `DistCheckpoint`, `read_hf_tensors`: read Megatron-Core's distributed checkpoints.
"""

from __future__ import annotations

import io
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from meshrl.config.model_folder import unread_tensors
from meshrl.data.serialization import inside
from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import ModuleNames, Shape, Slice, describe, hf_tensors
from meshrl.engines.old_state_files import DCP_INDEX, StoredTensor, read_index
from meshrl.models.loading import is_value_head, refuse_misfit
from meshrl.models.saving import tensor_files

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
# Pieces in a buffer start at multiples of this, so that any dtype can be read in place.
ALIGNMENT = 16
FUSED_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<kind>gate|up|down)_proj\.weight")
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def load_hf_weights(
    chunks: Sequence[nn.Module],
    hf_config: Any,
    folder: Path,
    ranks: ParallelRanks,
    *,
    value_head: bool = False,
    override: Mapping[str, Any] | None = None,
) -> None:
    """Load this rank's chunks from a model folder; raise a `ValueError` that names what does not fit.

    `override` holds the fields of `hf_config` that differ from the folder's config.json.
    """
    refuse_misfit(folder, override)
    files = TensorFiles(folder)
    expected = hf_tensors(hf_config, value_head)
    new = {name for name in expected if is_value_head(name) and not files.has(name)}
    if new:
        logger.info("%s has no %s: the value head starts at zero there", folder, " and no ".join(sorted(new)))
    needed = {name: expected[name] for name in expected if name not in new}
    _check_names(folder, files, needed, hf_config, override or {})
    pieces = describe(
        hf_config, ranks, module_names(chunks), vocab_size=_padded_vocab(chunks, ranks), value_head=value_head
    )
    tensors = _local_tensors(chunks)
    _check_parameters(tensors, pieces)
    with torch.no_grad():
        for key in {(piece.chunk, piece.parameter) for piece in pieces if piece.name in VOCABULARY}:
            tensors[key].zero_()  # for the rows that pad the vocabulary
        for piece in pieces:
            if piece.name in new:
                piece.region(tensors[piece.chunk, piece.parameter]).zero_()
                continue
            found = files.shape(piece.name)
            if found != piece.shape:
                raise ValueError(
                    f"'{piece.name}' in '{folder}' has shape {list(found)}, the model needs {list(piece.shape)}"
                )
            if min(piece.size) > 0:
                piece.region(tensors[piece.chunk, piece.parameter]).copy_(
                    files.rectangle(piece.name, piece.start, piece.size)
                )


def export_hf_weights(
    chunks: Sequence[nn.Module],
    hf_config: Any,
    ranks: ParallelRanks,
    *,
    value_head: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor whole under its Hugging Face name, on every rank of `group` (by default the world).

    All ranks must take part until the end. At most one bucket of tensors is held in addition to the parameters.
    """
    tensors = _local_tensors(chunks)
    names, dtypes, padded = _agree(chunks, hf_config, ranks, tensors, value_head, group)
    owners = piece_owners(hf_config, ranks, names, vocab_size=padded, value_head=value_head)
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, shape in hf_tensors(hf_config, value_head).items():
        whole = torch.empty(shape, dtype=dtypes[_kind(name)], device=device)
        size = whole.numel() * whole.element_size()
        if bucket and held + size > bucket_bytes:
            yield from _filled(bucket, owners, tensors, ranks, group)
            bucket, held = {}, 0
        bucket[name] = whole
        held += size
    yield from _filled(bucket, owners, tensors, ranks, group)


def piece_owners(
    hf_config: Any,
    ranks: ParallelRanks,
    names: ModuleNames | None = None,
    *,
    vocab_size: int | None = None,
    value_head: bool = False,
) -> dict[str, list[tuple[int, Slice]]]:
    """Return, for every tensor, disjoint pieces that cover it, each with the first rank that holds the piece.

    A pure function: it needs neither weights nor communication.
    """
    pieces: dict[str, dict[tuple[Shape, Shape], tuple[int, Slice]]] = defaultdict(dict)
    for rank in range(ranks.world_size):
        there = ranks.at(rank)
        if (there.dp_rank or there.cp_rank) and there.edp_rank:
            continue  # another rank holds the same tensors
        for piece in describe(hf_config, there, names, vocab_size=vocab_size, value_head=value_head):
            if min(piece.size) > 0:
                pieces[piece.name].setdefault((piece.start, piece.size), (rank, piece))
    for name, shape in hf_tensors(hf_config, value_head).items():
        covered = sum(_numel(piece.size) for _, piece in pieces[name].values())
        if covered != _numel(shape):
            raise ValueError(f"the ranks hold {covered} of the {_numel(shape)} elements of '{name}' {list(shape)}")
    return {name: list(parts.values()) for name, parts in pieces.items()}


def module_names(chunks: Sequence[nn.Module]) -> ModuleNames:
    """Derive from the chunks' parameters which naming Megatron's module spec has used."""
    names = [name for _, name in _local_tensors(chunks)]
    experts = "sequential"
    if any(".experts.weight1" in name for name in names):
        experts = "grouped"
    elif any(".experts.linear_fc1.weight" in name for name in names):
        experts = "te_grouped"
    return ModuleNames(any(name.endswith("layer_norm_weight") for name in names), experts)


class TensorFiles:
    """The safetensors of a model folder: names, shapes and rectangles. A file is opened at first use."""

    def __init__(self, folder: Path):
        self._files = tensor_files(Path(folder))
        self._open: dict[Path, Any] = {}
        if not self._files:
            raise ValueError(f"no safetensors in '{folder}'")
        self.fused = {name for name in self._files if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))}

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def has(self, name: str) -> bool:
        return name in self._files or self._fused(name) is not None

    def shape(self, name: str) -> Shape:
        if (fused := self._fused(name)) is None:
            return tuple(self._view(name).get_shape())
        _, rows, columns = self._view(fused[0]).get_shape()
        return (rows // 2 if fused[0].endswith("gate_up_proj") else rows, columns)

    def rectangle(self, name: str, start: Shape, size: Shape) -> Tensor:
        """Return the rectangle `[start, start + size)` of a tensor."""
        box = tuple(slice(begin, begin + length) for begin, length in zip(start, size, strict=True))
        fused = self._fused(name)
        if fused is None:
            return self._view(name)[box]
        file_name, expert, is_up = fused
        first = self.shape(name)[0] if is_up else 0
        rows = slice(box[0].start + first, box[0].stop + first)
        return self._view(file_name)[expert : expert + 1, rows, box[1]][0]

    def _fused(self, name: str) -> tuple[str, int, bool] | None:
        """Return where one expert's tensor lies if the file stacks all experts, otherwise None.

        The location is the name of the stack, the number of the expert, and whether the tensor is the second half
        (`up`).
        """
        match = None if name in self._files else FUSED_EXPERT.fullmatch(name)
        if match is None:
            return None
        stack = f"{match['experts']}.{'down_proj' if match['kind'] == 'down' else 'gate_up_proj'}"
        return (stack, int(match["number"]), match["kind"] == "up") if stack in self.fused else None

    def _view(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)


def _check_names(
    folder: Path, files: TensorFiles, expected: dict[str, Shape], hf_config: Any, override: Mapping[str, Any]
) -> None:
    if missing := [name for name in expected if not files.has(name)]:
        raise ValueError(
            f"'{folder}' lacks {len(missing)} tensors, first of all '{missing[0]}' {list(expected[missing[0]])}"
        )
    if extra := unread_tensors(files.names - expected.keys() - files.fused, hf_config.to_dict(), (), override):
        raise ValueError(
            f"'{folder}' has {len(extra)} tensors that the model does not know, first of all '{extra[0]}' "
            f"{list(files.shape(extra[0]))}"
        )


def _check_parameters(tensors: dict[tuple[int, str], Tensor], pieces: Sequence[Slice]) -> None:
    """Raise a `ValueError` unless chunks and description have the same parameters with the same shapes."""
    described = {(piece.chunk, piece.parameter): piece for piece in pieces}
    for key, piece in described.items():
        if key not in tensors:
            raise ValueError(
                f"chunk {key[0]} has no parameter '{key[1]}' {list(piece.parameter_shape)} for '{piece.name}' "
                f"{list(piece.shape)}"
            )
        if (shape := tuple(tensors[key].shape)) != piece.parameter_shape:
            raise ValueError(
                f"parameter '{key[1]}' of chunk {key[0]} has shape {list(shape)}, but '{piece.name}' "
                f"{list(piece.shape)} gives {list(piece.parameter_shape)} on this rank"
            )
    for key, tensor in tensors.items():
        if key not in described:
            raise ValueError(
                f"parameter '{key[1]}' {list(tensor.shape)} of chunk {key[0]} comes from no Hugging Face tensor"
            )


def _local_tensors(chunks: Sequence[nn.Module]) -> dict[tuple[int, str], Tensor]:
    """Return all parameters, and the only kind of buffer that is a weight: the router's expert bias."""
    tensors: dict[tuple[int, str], Tensor] = {}
    for number, chunk in enumerate(chunks):
        module = _unwrapped(chunk)
        for name, parameter in module.named_parameters():
            tensors[number, name] = parameter.data
        for name, buffer in module.named_buffers():
            if name.endswith("router.expert_bias"):
                # The wrapper for half precision rounds the bias; the router restores float32 only when it runs.
                buffer.data = buffer.data.float()
                tensors[number, name] = buffer.data
    return tensors


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside Megatron's DDP and mixed-precision wrappers."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def _padded_vocab(chunks: Sequence[nn.Module], ranks: ParallelRanks) -> int | None:
    for (_, name), tensor in _local_tensors(chunks).items():
        if name == "embedding.word_embeddings.weight":
            return tensor.shape[0] * ranks.tp
    size = getattr(_unwrapped(chunks[0]), "vocab_size", None)
    return None if size is None else int(size)


def _agree(
    chunks: Sequence[nn.Module],
    hf_config: Any,
    ranks: ParallelRanks,
    tensors: dict[tuple[int, str], Tensor],
    value_head: bool,
    group: dist.ProcessGroup | None,
) -> tuple[ModuleNames, dict[str, torch.dtype], int | None]:
    """Gather from all ranks what a single rank cannot derive: module names, dtypes and the padded vocabulary size."""
    names, padded = module_names(chunks), _padded_vocab(chunks, ranks)
    dtypes = {
        _kind(piece.name): tensors[piece.chunk, piece.parameter].dtype
        for piece in describe(hf_config, ranks, names, vocab_size=padded, value_head=value_head)
    }
    if ranks.world_size == 1:
        return names, dtypes, padded
    answers: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(answers, (names, dtypes, padded), group=group)
    experts = next((found.experts for found, _, _ in answers if found.experts != "sequential"), "sequential")
    agreed = ModuleNames(any(found.transformer_engine for found, _, _ in answers), experts)
    for _, found, _ in answers:
        dtypes |= found
    return agreed, dtypes, next((size for _, _, size in answers if size is not None), None)


def _kind(name: str) -> str:
    """Return a tensor's name without the numbers of layer and expert."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _filled(
    bucket: dict[str, Tensor],
    owners: dict[str, list[tuple[int, Slice]]],
    tensors: dict[tuple[int, str], Tensor],
    ranks: ParallelRanks,
    group: dist.ProcessGroup | None,
) -> Iterator[tuple[str, Tensor]]:
    """Fill a bucket's tensors, with one broadcast per rank that owns a part of the bucket, and yield them."""
    by_owner: dict[int, list[Slice]] = defaultdict(list)
    for name in bucket:
        for rank, piece in owners[name]:
            by_owner[rank].append(piece)
    for rank, pieces in sorted(by_owner.items()):
        if ranks.world_size == 1:
            for piece in pieces:
                _box(bucket[piece.name], piece).copy_(piece.region(tensors[piece.chunk, piece.parameter]))
            continue
        places = _places(bucket, pieces)
        device = bucket[pieces[0].name].device
        buffer = torch.empty(places[-1], dtype=torch.uint8, device=device)
        views = [
            buffer[begin : begin + _numel(piece.size) * bucket[piece.name].element_size()]
            .view(bucket[piece.name].dtype)
            .view(piece.size)
            for begin, piece in zip(places, pieces, strict=False)
        ]
        if rank == ranks.rank:
            for view, piece in zip(views, pieces, strict=True):
                view.copy_(piece.region(tensors[piece.chunk, piece.parameter]))
        dist.broadcast(buffer, src=rank if group is None else dist.get_global_rank(group, rank), group=group)
        for view, piece in zip(views, pieces, strict=True):
            _box(bucket[piece.name], piece).copy_(view)
    for name in list(bucket):
        yield name, bucket.pop(name)


def _places(bucket: dict[str, Tensor], pieces: Sequence[Slice]) -> list[int]:
    """Return the offset of each piece in the buffer, in bytes, followed by the buffer's length."""
    places = [0]
    for piece in pieces:
        size = _numel(piece.size) * bucket[piece.name].element_size()
        places.append(places[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return places


def _box(whole: Tensor, piece: Slice) -> Tensor:
    for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def _numel(size: Shape) -> int:
    return torch.Size(size).numel()


# Reading Megatron-Core's distributed checkpoints (`torch_dist`), whatever layout wrote them, as Hugging Face tensors.
#
# They hold every parameter with the shape it has in the model of one rank, in chunks. Layers that are all alike, and
# experts, are stacked along leading dims. Only the chunks that are needed are read. The index is a pickle, read by an
# unpickler that allows only values (`meshrl.engines.old_state_files`). Tensors are read with `weights_only`.

EMBEDDING = "embedding.word_embeddings.weight"
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# Norms that TransformerEngine fuses into the following layer; a checkpoint may have either name.
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class DistCheckpoint:
    """A reader of a distributed checkpoint's parameters, one at a time."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        if not (self.folder / DCP_INDEX).is_file():
            raise ValueError(f"'{folder}' is no distributed checkpoint: it has no {DCP_INDEX}")
        self.index = read_index(self.folder / DCP_INDEX)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter by its name in the model of a single rank."""
        for key, place in _keys_and_places(name):
            if held := self.index.tensors.get(key):
                return self._read(key, held, place)
        raise ValueError(f"'{self.folder}' has no parameter '{name}'")

    def _read(self, key: str, held: StoredTensor, place: tuple[int, ...]) -> Tensor:
        """Return one parameter of a stored tensor; `place` is its index along the leading (stacked) dims."""
        whole = torch.empty(held.size[len(place) :], dtype=held.dtype)
        filled = 0
        for begins, sizes in held.chunks:
            within = [at - begin for at, begin in zip(place, begins, strict=False)]
            if any(not 0 <= at < size for at, size in zip(within, sizes, strict=False)):
                continue
            part = self._chunk(key, begins)[tuple(within)]
            box = tuple(slice(b, b + n) for b, n in zip(begins[len(place) :], sizes[len(place) :], strict=True))
            whole[box] = part
            filled += part.numel()
        if filled != whole.numel():
            raise ValueError(f"'{self.folder}' holds {filled} of {whole.numel()} elements of '{key}'")
        return whole

    def _chunk(self, key: str, offsets: tuple[int, ...]) -> Tensor:
        info = self.index.places[key, offsets]
        file = inside(self.folder, info.file)
        if not file.is_file():
            raise ValueError(f"'{self.folder}' lacks {info.file}, which holds '{key}'")
        with file.open("rb") as stream:
            stream.seek(info.offset)
            content = stream.read(info.length)
        if len(content) != info.length:
            raise ValueError(f"'{file}' is truncated: '{key}' ends behind its end")
        tensor: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return tensor


def _keys_and_places(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield where a parameter may lie: a key of the checkpoint, and the index along its leading dims."""
    match = LAYER.fullmatch(name)
    if match is None:
        yield name, ()
        return
    layer, rest = int(match[1]), match[2]
    expert: tuple[int, ...] = ()
    if inner := EXPERT.fullmatch(rest):
        rest, expert = f"mlp.experts.experts.{inner[2]}", (int(inner[1]),)
    for words in (rest, FUSED.get(rest, rest)):
        yield f"decoder.layers.{layer}.{words}", expert
        yield f"decoder.layers.{words}", (layer, *expert)


def read_hf_tensors(folder: Path, hf_config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the Hugging Face model from a distributed checkpoint, one Megatron parameter at a time."""
    checkpoint = DistCheckpoint(folder)
    padded = len(checkpoint.parameter(EMBEDDING))
    slices = describe(hf_config, ParallelRanks(), ModuleNames(), vocab_size=padded)
    for name, group in groupby(slices, key=lambda piece: piece.parameter):
        parameter = checkpoint.parameter(name)
        found: dict[str, Tensor] = {}
        for piece in group:
            if tuple(parameter.shape) != piece.parameter_shape:
                raise ValueError(
                    f"'{name}' is {list(parameter.shape)} in '{folder}', this model needs {list(piece.parameter_shape)}"
                )
            target = found.setdefault(piece.name, parameter.new_empty(piece.shape))
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            target[box] = piece.region(parameter)
        yield from found.items()
