"""Placements: which rank holds which rectangle of which tensor, and where in its memory.

Weight-sync plans are made from two placements. A placement follows from sizes alone, without process group or device.
Every tensor is treated as a matrix: a vector is a column, and further dims are joined to the columns. A slice is a
rectangle of a tensor in one local parameter, with an offset and two strides, all in elements. So slices describe
shards, packed and stacked parameters, and transposed and flattened ones alike.

- `replicas`, `fsdp2`, `fsdp1` and `megatron` are placements of trainers, `rollout` and `windows` of rollouts.
- `Shards` is one rank's local parameters with their slices.
"""

from __future__ import annotations

import base64
import copy
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import ModuleNames, describe
from meshrl.engines.megatron.weight_map import Slice as MegatronSlice
from meshrl.models.names import (
    Part,
    Shape,
    convert_weight_keys,
    expert_count,
    head_dim,
    is_of_tower,
    matrix,
    module_name,
    of_text,
)
from meshrl.parallel.mesh import Layout
from meshrl.weights.rectangles import ranges

FIELDS = ("rank", "tensor", "row", "rows", "col", "cols", "parameter", "offset", "row_stride", "col_stride")
SLICE = np.dtype([(name, np.int64) for name in FIELDS])


@dataclass(frozen=True)
class Placement:
    """A model over the ranks of one side. `slices` has one record (see `FIELDS`) for each rectangle of each rank."""

    title: str
    world_size: int
    tensors: dict[str, Shape]
    parameters: tuple[str, ...]
    slices: np.ndarray

    def of_rank(self, rank: int) -> np.ndarray:
        """Return the records of the slices that a rank holds."""
        return self.slices[self.slices["rank"] == rank]

    def to_json(self) -> dict[str, Any]:
        """Return the placement as plain JSON data for another process."""
        fields = {name: getattr(self, name) for name in ("title", "world_size", "tensors", "parameters")}
        return fields | {"slices": base64.b64encode(zlib.compress(self.slices.tobytes(), 1)).decode()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Placement:
        """Rebuild a placement from the data of `to_json`, also after a round trip through text."""
        return cls(
            fields["title"],
            fields["world_size"],
            {name: tuple(shape) for name, shape in fields["tensors"].items()},
            tuple(fields["parameters"]),
            np.frombuffer(zlib.decompress(base64.b64decode(fields["slices"])), SLICE),
        )

    def only(self, names: Iterable[str]) -> Placement:
        """Return the same placement of the named tensors alone. Parameters keep their numbers."""
        wanted = set(names)
        kept = np.array([place for place, name in enumerate(self.tensors) if name in wanted], np.int64)
        known = list(self.tensors)
        # Slices are sorted by tensor.
        start, end = (np.searchsorted(self.slices["tensor"], kept, side) for side in ("left", "right"))
        slices = self.slices[ranges(start, end - start)]
        slices["tensor"] = np.repeat(np.arange(len(kept)), end - start)
        tensors = {known[place]: self.tensors[known[place]] for place in kept.tolist()}
        return replace(self, tensors=tensors, slices=slices)

    def elements(self) -> int:
        """Return the number of elements of all tensors, each counted once."""
        return sum(rows * cols for rows, cols in map(matrix, self.tensors.values()))

    def elements_of_ranks(self) -> np.ndarray:
        """Return the number of elements that each rank holds, `[world_size]`."""
        size = self.slices["rows"] * self.slices["cols"]
        return np.bincount(self.slices["rank"], weights=size, minlength=self.world_size).astype(np.int64)


class PlacementBuilder:
    """A collector of slices. The numbers given may be arrays that broadcast against each other."""

    def __init__(self, title: str, world_size: int):
        self.title, self.world_size = title, world_size
        self.tensors: dict[str, Shape] = {}
        self._tensor_ids: dict[str, int] = {}
        self._parameter_ids: dict[str, int] = {}
        self._single: list[tuple[int, ...]] = []
        self._arrays: list[np.ndarray] = []

    def tensor(self, name: str, shape: Shape) -> int:
        """Return the number of a tensor, and raise a ValueError if the name came with another shape before."""
        known = self.tensors.setdefault(name, shape)
        if known != shape:
            raise ValueError(f"{self.title}: '{name}' has shape {list(known)} and {list(shape)}")
        return self._tensor_ids.setdefault(name, len(self._tensor_ids))

    def parameter(self, name: str) -> int:
        return self._parameter_ids.setdefault(name, len(self._parameter_ids))

    def add(self, *numbers: int) -> None:
        """Add one slice, its numbers in the order of `FIELDS`; an empty rectangle is left out."""
        if numbers[3] > 0 and numbers[5] > 0:
            self._single.append(numbers)

    def add_arrays(self, **numbers: Any) -> None:
        """Add many slices by field name; empty rectangles are left out."""
        shape = np.broadcast_shapes(*(np.shape(value) for value in numbers.values()))
        made = np.empty(shape, SLICE)
        for name in FIELDS:
            made[name] = numbers[name]
        self._arrays.append(made[(made["rows"] > 0) & (made["cols"] > 0)].reshape(-1))

    def build(self) -> Placement:
        single = np.array(self._single, SLICE) if self._single else np.empty(0, SLICE)
        slices = np.concatenate([single, *self._arrays])
        slices = slices[np.argsort(slices["tensor"], kind="stable")]
        return Placement(self.title, self.world_size, self.tensors, tuple(self._parameter_ids), slices)


def replicas(params: Mapping[str, Shape], world_size: int, model_type: str = "", title: str = "") -> Placement:
    """Return the placement in which every rank holds the whole model as a Hugging Face module."""
    builder = PlacementBuilder(title or f"{world_size} whole copies", world_size)
    ranks = np.arange(world_size)
    for name, parts in convert_weight_keys(params, model_type).items():
        parameter = builder.parameter(name)
        for part in parts:
            rows, cols = matrix(part.shape)
            builder.add_arrays(
                rank=ranks, tensor=builder.tensor(part.name, part.shape), row=0, rows=rows, col=0, cols=cols,
                parameter=parameter, offset=part.offset, row_stride=part.row_stride, col_stride=part.col_stride,
            )  # fmt: skip
    return builder.build()


def fsdp2(params: Mapping[str, Shape], layout: Layout, model_type: str = "") -> Placement:
    """Return the FSDP2 placement of a `shard_layout`: rows of every parameter over the axis `fsdp`.

    The rows are cut in equal steps, rounded up. Ranks that differ along `ddp` hold the same rows (HSDP).
    """
    builder = PlacementBuilder(f"FSDP2 {_sizes(layout)}", layout.world_size)
    place = np.array([layout.index(rank, "fsdp") for rank in range(layout.world_size)])
    for name, parts in convert_weight_keys(params, model_type).items():
        shape = params[name]
        rows, cols = matrix(shape)
        step = -(-rows // layout.size("fsdp"))
        low = np.minimum(place * step, rows) * cols
        high = np.minimum((place + 1) * step, rows) * cols
        _add_ranges(builder, builder.parameter(name), parts, low, high)
    return builder.build()


def fsdp1(
    units: Mapping[str, Mapping[str, Shape]], layout: Layout, model_type: str = "", *, alignment: int = 1
) -> Placement:
    """Return the FSDP1 placement: each unit's parameters end to end in one flat parameter, cut into equal parts.

    `units` maps the name of a unit's flat parameter to its parameters in order. Every parameter starts at a multiple of
    `alignment` elements (torch pads to 16 bytes if `use_orig_params` is set).
    """
    builder = PlacementBuilder(f"FSDP1 {_sizes(layout)}", layout.world_size)
    place = np.array([layout.index(rank, "fsdp") for rank in range(layout.world_size)])
    shards = layout.size("fsdp")
    for unit, params in units.items():
        parts: list[Part] = []
        end = 0
        for name, inner in convert_weight_keys(params, model_type).items():
            rows, cols = matrix(params[name])
            end = -(-end // alignment) * alignment
            parts += [Part(p.name, p.shape, p.offset + end, p.row_stride, p.col_stride) for p in inner]
            end += rows * cols
        step = -(-end // shards)
        _add_ranges(builder, builder.parameter(unit), parts, place * step, (place + 1) * step)
    return builder.build()


def megatron(
    hf_config: Any,
    ranks: ParallelRanks,
    names: ModuleNames | None = None,
    *,
    vocab_size: int | None = None,
    value_head: bool = False,
) -> Placement:
    """Return a Megatron placement, from the engine's own description. Parameters are called `<chunk>/<name>`."""
    sizes = {axis: getattr(ranks, axis) for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")}
    sizes["etp"] = 1 if ranks.etp == ranks.tp and ranks.ep == 1 else ranks.etp
    title = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    builder = PlacementBuilder(f"Megatron {title}".strip(), ranks.world_size)
    known: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for rank in range(ranks.world_size):
        there = ranks.at(rank)
        key = (there.pp_rank, there.tp_rank, there.ep_rank, there.etp_rank)
        if key not in known:
            pieces = describe(hf_config, there, names, vocab_size=vocab_size, value_head=value_head)
            known[key] = [_megatron_numbers(builder, piece) for piece in pieces]
        for numbers in known[key]:
            builder.add(rank, *numbers)
    return builder.build()


def _megatron_numbers(builder: PlacementBuilder, piece: MegatronSlice) -> tuple[int, ...]:
    rows, cols = matrix(piece.size)
    row, col = piece.start[0], piece.start[1] if len(piece.start) > 1 else 0
    memory = piece.view or piece.parameter_shape
    strides = [1] * len(memory)
    for dim in range(len(memory) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * memory[dim + 1]
    offset = sum(place * stride for place, stride in zip(piece.offset, strides, strict=True))
    row_stride, col_stride = (strides[-2:][0], 1) if len(piece.size) > 1 else (1, 1)
    if piece.transposed:
        row_stride, col_stride = col_stride, row_stride
    parameter = builder.parameter(f"{piece.chunk}/{piece.parameter}")
    tensor = builder.tensor(piece.name, piece.shape)
    return tensor, row, rows, col, cols, parameter, offset, row_stride, col_stride


def _add_ranges(
    builder: PlacementBuilder, parameter: int, parts: Sequence[Part], low: np.ndarray, high: np.ndarray
) -> None:
    """Add the slices of ranks that hold elements [low, high) of a flat parameter.

    Each range becomes whole rows, and parts of rows at both ends.
    """
    tensor = np.array([builder.tensor(part.name, part.shape) for part in parts])
    size = np.array([matrix(part.shape) for part in parts])
    start = np.array([part.offset for part in parts])
    cols = size[:, 1]
    ranks = np.arange(builder.world_size)[:, None]
    low, high = low[:, None], high[:, None]
    # The range within each part, counted in the part's own elements.
    first = np.clip(low - start, 0, size[:, 0] * cols)
    last = np.clip(high - start, 0, size[:, 0] * cols)
    full, end = -(-first // cols), last // cols
    # Part of the first row, whole rows, and part of the last row. The first and the last may be the same row.
    head = np.where(first % cols > 0, np.minimum(last, full * cols) - first, 0)
    tail = np.where((last % cols > 0) & (end >= full), last % cols, 0)
    pieces: Iterable[tuple[Any, Any, Any, Any, Any]] = (
        (first // cols, np.minimum(head, 1), first % cols, head, first),
        (full, np.maximum(end - full, 0), 0, cols, full * cols),
        (end, np.minimum(tail, 1), 0, tail, end * cols),
    )
    for row, rows, col, width, begin in pieces:
        builder.add_arrays(
            rank=ranks, tensor=tensor, row=row, rows=rows, col=col, cols=width, parameter=parameter,
            offset=start + begin - low, row_stride=cols, col_stride=1,
        )  # fmt: skip


def _sizes(layout: Layout) -> str:
    return " ".join(f"{name}{size}" for name, size in layout.axes if size > 1) or "1 rank"


# The placement of tensor- and expert-parallel rollouts: matrices are cut by columns or rows, heads are kept whole,
# experts are spread over ranks or cut.
#
# The same cut has two forms. `separate` keeps every parameter of the Hugging Face module on its own. `packed` is vLLM's
# form: one parameter each for queries, keys and values, for gate and up, and for the experts of a layer. An engine that
# cuts whole tensors itself gets tensors in which only its own shard is filled in (`windows`).

FORMS = ("separate", "packed")
EXPERT = re.compile(r"(?P<block>.+\.)experts\.(?P<number>\d+)\.(?P<kind>\w+)\.weight")
FIRST, SECOND, LAST = {"gate_proj", "w1"}, {"up_proj", "w3"}, {"down_proj", "w2"}
BY_ROWS = {"q_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"}
BY_KV_HEADS = {"k_proj", "v_proj"}
BY_COLS = {"o_proj", "down_proj"}
VOCABULARY = {"embed_tokens", "lm_head"}
# vLLM pads the vocabulary to a multiple of this number before it cuts the vocabulary.
PACKED_VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class RolloutLayout:
    """`dp` copies of `tp` ranks, with tp varying fastest.

    With `ep` above 0, whole experts are spread over this many ranks; with 0 the experts are cut. `form`: see `FORMS`.
    The vocabulary is padded to a multiple of `vocab_multiple` before it is cut (0: by form).
    """

    tp: int = 1
    dp: int = 1
    ep: int = 0
    form: str = "separate"
    vocab_multiple: int = 0

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"unknown form '{self.form}' of rollout parameters: use one of {', '.join(FORMS)}")
        if self.tp < 1 or self.dp < 1 or self.ep < 0:
            raise ValueError(f"rollout sizes must be at least 1, got tp {self.tp}, dp {self.dp}, ep {self.ep}")
        if self.ep and self.world_size % self.ep:
            raise ValueError(f"the rollout's {self.world_size} ranks must be divisible by its ep ({self.ep})")

    @classmethod
    def of(cls, parallel: Any, ranks: int, form: str = "separate") -> RolloutLayout:
        """Return the layout over `ranks` ranks of rollouts that share a model over ranks as `parallel` describes."""
        return cls(tp=parallel.tp, dp=ranks // parallel.tp, ep=parallel.ep, form=form)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "dp": self.dp, "ep": self.ep}
        named = "".join(f" {axis}{size}" for axis, size in sizes.items() if size > 1)
        return f"rollout {self.form}{named or ' 1 rank'}"


def rollout(tensors: Mapping[str, Shape], hf_config: Any, layout: RolloutLayout) -> Placement:
    """Return a rollout's placement of tensors that are named as in Hugging Face's files.

    Each matrix of each expert is a tensor of its own.
    """
    return _Rollout(tensors, hf_config, layout).build()


def windows(params: Mapping[str, Shape], hf_config: Any, layout: RolloutLayout, model_type: str = "") -> Placement:
    """Return the placement of `rollout` for ranks that have memory for whole Hugging Face parameters.

    Each rank's shard lies at its place in the whole parameter. Tensors without a known cut are held whole.
    """
    whole = replicas(params, 1, model_type)
    cut = rollout(whole.tensors, hf_config, layout)
    slices = cut.slices.copy()
    home = whole.slices[slices["tensor"]]  # `whole` has one slice for each tensor, in order
    for field in ("parameter", "row_stride", "col_stride"):
        slices[field] = home[field]
    slices["offset"] = home["offset"] + slices["row"] * home["row_stride"] + slices["col"] * home["col_stride"]
    return Placement(f"{layout}, in whole parameters", layout.world_size, cut.tensors, whole.parameters, slices)


class _Rollout:
    def __init__(self, tensors: Mapping[str, Shape], hf_config: Any, layout: RolloutLayout):
        self.tensors, self.layout, self.tp = tensors, layout, layout.tp
        self.builder = PlacementBuilder(str(layout), layout.world_size)
        hf_config = of_text(hf_config)
        self.experts = expert_count(hf_config)
        self.dim = head_dim(hf_config)
        self.heads = hf_config.num_attention_heads
        self.kv_heads = getattr(hf_config, "num_key_value_heads", None) or self.heads
        if self.heads % self.tp:
            raise ValueError(
                f"the model's {self.heads} attention heads must be divisible by tensor_model_parallel_size ({self.tp})"
            )
        self.place = np.arange(layout.world_size) % layout.tp
        # The cuts recorded by `_cut`, one row for each tensor.
        self.cut_rows: list[tuple[int, ...]] = []

    def build(self) -> Placement:
        for name, shape in self.tensors.items():
            expert = EXPERT.fullmatch(name)
            if expert is not None:
                self._expert(name, shape, expert)
            else:
                self._plain(name, shape)
        self._flush()
        return self.builder.build()

    def _plain(self, name: str, shape: Shape) -> None:
        module = name.rsplit(".", 2)[-2] if name.count(".") else name
        rows, cols = matrix(shape)
        is_bias = name.endswith(".bias")
        if is_of_tower(name):
            self._cut(name, shape, rows, cols, self._parameter(name), 0, whole=True)
        elif module in VOCABULARY:
            self._vocabulary(name, shape)
        elif module in BY_KV_HEADS:
            held = self._kv_rows(name, rows)
            before = self._query_rows() + (held if module == "v_proj" else 0)
            self._cut(name, shape, held, cols, *self._packed(name, module, "qkv_proj", before * cols), kv=True)
        elif module in BY_ROWS:
            part = self._divided(name, rows)
            home = "qkv_proj" if module == "q_proj" and self._packs_queries(name) else "gate_up_proj"
            if module in ("q_b_proj", "kv_b_proj") or (module == "q_proj" and home != "qkv_proj"):
                home = module
            before = part if module == "up_proj" else 0
            self._cut(name, shape, part, cols, *self._packed(name, module, home, before * cols))
        elif module in BY_COLS and not is_bias:
            self._cut(name, shape, rows, self._divided(name, cols), self._parameter(name), 0, by_cols=True)
        elif module in ("q_a_proj", "kv_a_proj_with_mqa") and self._packs_latent(name):
            before = 0 if module == "q_a_proj" else self._size(name.replace(module, "q_a_proj"))[0]
            self._cut(
                name, shape, rows, cols, *self._packed(name, module, "fused_qkv_a_proj", before * cols), whole=True
            )
        else:
            self._cut(name, shape, rows, cols, self._parameter(name), 0, whole=True)

    def _size(self, name: str) -> tuple[int, int]:
        return matrix(self.tensors[name])

    def _packs_queries(self, name: str) -> bool:
        return name.replace(".q_proj.", ".k_proj.") in self.tensors

    def _packs_latent(self, name: str) -> bool:
        return self.layout.form == "packed" and name.replace("kv_a_proj_with_mqa", "q_a_proj") in self.tensors

    def _packed(self, name: str, module: str, packed: str, offset: int) -> tuple[int, int]:
        """Return the parameter that holds a tensor, and the tensor's offset in it."""
        if self.layout.form == "separate" or module == packed:
            return self._parameter(name), 0
        return self._parameter(name.replace(f".{module}.", f".{packed}.")), offset

    def _parameter(self, name: str) -> int:
        return self.builder.parameter(name if self.layout.form == "packed" else module_name(name))

    def _query_rows(self) -> int:
        return self.heads // self.tp * self.dim

    def _kv_rows(self, name: str, rows: int) -> int:
        """Return the rows of key-value heads on a rank: a share of the heads, or one head that several ranks hold."""
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise ValueError(
                f"'{name}' {list(self.tensors[name])}: tensor_model_parallel_size ({self.tp}) must divide the "
                f"{self.kv_heads} key-value heads or be a multiple of them"
            )
        return rows // self.kv_heads * max(1, self.kv_heads // self.tp)

    def _divided(self, name: str, size: int) -> int:
        if size % self.tp:
            raise ValueError(
                f"'{name}' {list(self.tensors[name])}: {size} must be divisible by tensor_model_parallel_size "
                f"({self.tp})"
            )
        return size // self.tp

    def _vocabulary(self, name: str, shape: Shape) -> None:
        rows, cols = matrix(shape)
        multiple = self.layout.vocab_multiple or (PACKED_VOCAB_MULTIPLE if self.layout.form == "packed" else 1)
        padded = -(-rows // multiple) * multiple
        self._cut(name, shape, -(-padded // self.tp), cols, self._parameter(name), 0)

    def _cut(
        self, name: str, shape: Shape, rows: int, cols: int, parameter: int, offset: int,
        *, kv: bool = False, by_cols: bool = False, whole: bool = False,
    ) -> None:  # fmt: skip
        """Record that each rank holds `rows` x `cols` of a tensor, at its own place along one dim."""
        tensor = self.builder.tensor(name, shape)
        height, width = matrix(shape)
        kind = 0 if whole else 1 + kv + 2 * by_cols
        self.cut_rows.append((tensor, height, width, rows, cols, parameter, offset, kind))

    def _flush(self) -> None:
        """Add the slices of all recorded tensors for all ranks at once."""
        if not self.cut_rows:
            return
        tensor, height, width, rows, cols, parameter, offset, kind = np.array(self.cut_rows).T[:, :, None]
        kv_place = self.place * self.kv_heads // self.tp if self.kv_heads < self.tp else self.place
        along = np.where(kind == 2, kv_place, self.place)
        row = np.where((kind == 1) | (kind == 2), along * rows, 0)
        col = np.where(kind == 3, along * cols, 0)
        self.builder.add_arrays(
            rank=np.arange(self.layout.world_size), tensor=tensor,
            row=row, rows=np.clip(height - row, 0, rows), col=col, cols=np.clip(width - col, 0, cols),
            parameter=parameter, offset=offset, row_stride=cols, col_stride=1,
        )  # fmt: skip

    def _expert(self, name: str, shape: Shape, match: re.Match[str]) -> None:
        """Add a projection of one expert, cut over tp ranks or whole on the ep ranks that serve the expert."""
        number, kind = int(match["number"]), match["kind"]
        rows, cols = matrix(shape)
        spread = self.layout.ep
        parts = 1 if spread else self.tp
        if spread and self.experts % spread:
            raise ValueError(f"the model's {self.experts} experts must be divisible by the rollout's ep ({spread})")
        held = self.experts // (spread or 1)
        local = number % held if spread else number
        by_cols = kind in LAST
        length = cols if by_cols else rows
        if length % parts:
            raise ValueError(f"'{name}' {list(shape)}: {length} must be divisible by {parts} tensor-parallel ranks")
        part = length // parts
        part_rows, part_cols = (rows, part) if by_cols else (part, cols)
        stack = ("w2_weight" if by_cols else "w13_weight") if self.layout.form == "packed" else (
            "down_proj" if by_cols else "gate_up_proj"
        )  # fmt: skip
        parameter = self._parameter(f"{match['block']}experts.{stack}")
        height = part_rows * (1 if by_cols else 2)
        offset = (local * height + (part_rows if kind in SECOND else 0)) * part_cols
        if not spread:
            self._cut(name, shape, part_rows, part_cols, parameter, offset, by_cols=by_cols)
            return
        ranks = np.arange(self.layout.world_size)
        self.builder.add_arrays(
            rank=ranks[ranks % spread == number // held], tensor=self.builder.tensor(name, shape), row=0, rows=rows,
            col=0, cols=cols, parameter=parameter, offset=offset, row_stride=cols, col_stride=1,
        )  # fmt: skip


# One rank's shard of a model: its local parameters, and the rectangles in them.


class Shards:
    """The local parameters of one rank of a placement, by the placement's names."""

    def __init__(self, placement: Placement, rank: int, tensors: Mapping[str, Tensor]):
        self.placement, self.rank, self.tensors = placement, rank, tensors
        held = placement.of_rank(rank)
        ends = held["offset"] + (held["rows"] - 1) * held["row_stride"] + (held["cols"] - 1) * held["col_stride"] + 1
        for number in np.unique(held["parameter"]).tolist():
            name = placement.parameters[number]
            if name not in tensors:
                raise ValueError(f"'{placement.title}': rank {rank} has no parameter '{name}'")
            needed = int(ends[held["parameter"] == number].max())
            found = tensors[name]
            if found.numel() < needed or not found.is_contiguous():
                raise ValueError(
                    f"'{placement.title}': parameter '{name}' of rank {rank} has {found.numel()} elements "
                    f"{'in one piece' if found.is_contiguous() else 'with gaps'}, but its slices need {needed} in one "
                    "piece"
                )

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters, taken from the first."""
        return next(iter(self.tensors.values())).device

    def region(self, held: np.ndarray, box: np.ndarray | None = None) -> Tensor:
        """Return the rectangle `box` (by default all) of a slice, as a view `[rows, cols]` of the local parameter."""
        tensor = self.tensors[self.placement.parameters[held["parameter"]]]
        offset = int(held["offset"])
        if box is None:
            box = held
        else:
            offset += int(box["row"] - held["row"]) * int(held["row_stride"])
            offset += int(box["col"] - held["col"]) * int(held["col_stride"])
        return torch.as_strided(
            tensor,
            (int(box["rows"]), int(box["cols"])),
            (int(held["row_stride"]), int(held["col_stride"])),
            tensor.storage_offset() + offset,
        )

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Shards:
        """Return the same shards over other tensors, which are not checked."""
        made = copy.copy(self)
        made.tensors = tensors
        return made


def local_tensors(placement: Placement, rank: int, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut whole tensors into a rank's local parameters, as flat tensors: for tests, benchmarks and replicas."""
    held = placement.of_rank(rank)
    names = list(placement.tensors)
    ends = held["offset"] + (held["rows"] - 1) * held["row_stride"] + (held["cols"] - 1) * held["col_stride"] + 1
    made: dict[str, Tensor] = {}
    for number in np.unique(held["parameter"]).tolist():
        mine = held["parameter"] == number
        like = whole[names[held["tensor"][mine][0]]]
        made[placement.parameters[number]] = like.new_zeros(int(ends[mine].max()))
    shards = Shards(placement, rank, made)
    for piece in held:
        tensor = whole[names[piece["tensor"]]]
        matrix = tensor.reshape(len(tensor) if tensor.dim() else 1, -1)
        rows, cols = (slice(int(piece[n]), int(piece[n] + piece[n + "s"])) for n in ("row", "col"))
        shards.region(piece).copy_(matrix[rows, cols])
    return made
