"""How tensor- and expert-parallel rollouts place a model: cut by columns and rows, heads kept whole, experts spread.

Two forms of the same cut: `separate`, every parameter of the Hugging Face module for itself, and `packed`, as vLLM has
them: queries, keys and values, gate and up, and the experts of a layer in one parameter each. An engine that cuts whole
tensors itself gets them with nothing but its own part filled in (`windows`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshrl.models.key_map import Shape, is_of_tower, matrix, module_name
from meshrl.models.sizes import expert_count, head_dim, of_text
from meshrl.weights.placement import Placement, PlacementBuilder, replicas

FORMS = ("separate", "packed")
EXPERT = re.compile(r"(?P<block>.+\.)experts\.(?P<number>\d+)\.(?P<kind>\w+)\.weight")
FIRST, SECOND, LAST = {"gate_proj", "w1"}, {"up_proj", "w3"}, {"down_proj", "w2"}
BY_ROWS = {"q_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"}
BY_KV_HEADS = {"k_proj", "v_proj"}
BY_COLS = {"o_proj", "down_proj"}
VOCABULARY = {"embed_tokens", "lm_head"}
# vLLM pads the vocabulary to multiples of this before it cuts it.
PACKED_VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class RolloutLayout:
    """`dp` copies of `tp` ranks, tp fastest. `ep`: the experts are not cut but spread over this many ranks (0: cut).

    `form`: see `FORMS`. `vocab_multiple`: the vocabulary is padded to a multiple of this before it is cut (0: by form).
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
        """How rollouts whose ranks share a model so (`rollout.parallel`) place it over so many ranks."""
        return cls(tp=parallel.tp, dp=ranks // parallel.tp, ep=parallel.ep, form=form)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "dp": self.dp, "ep": self.ep}
        named = "".join(f" {axis}{size}" for axis, size in sizes.items() if size > 1)
        return f"rollout {self.form}{named or ' 1 rank'}"


def rollout(tensors: Mapping[str, Shape], hf_config: Any, layout: RolloutLayout) -> Placement:
    """The placement of a rollout for tensors by the names of Hugging Face's files (one for each expert's matrix)."""
    return _Rollout(tensors, hf_config, layout).build()


def windows(params: Mapping[str, Shape], hf_config: Any, layout: RolloutLayout, model_type: str = "") -> Placement:
    """The same cut where each rank has memory for whole parameters of a Hugging Face module: its part at its place.

    A tensor that is not known to be cut is there whole.
    """
    whole = replicas(params, 1, model_type)
    cut = rollout(whole.tensors, hf_config, layout)
    slices = cut.slices.copy()
    home = whole.slices[slices["tensor"]]  # one for each tensor, in their order
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
        # Fields of all slices of cut tensors, one row a tensor.
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
        """The parameter that holds a tensor, and where in it."""
        if self.layout.form == "separate" or module == packed:
            return self._parameter(name), 0
        return self._parameter(name.replace(f".{module}.", f".{packed}.")), offset

    def _parameter(self, name: str) -> int:
        return self.builder.parameter(name if self.layout.form == "packed" else module_name(name))

    def _query_rows(self) -> int:
        return self.heads // self.tp * self.dim

    def _kv_rows(self, name: str, rows: int) -> int:
        """Rows of whole heads: a share of them, or one head that several ranks hold."""
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
        """Notes that each rank holds `rows` x `cols` of a tensor, at its own place along one dim."""
        tensor = self.builder.tensor(name, shape)
        height, width = matrix(shape)
        kind = 0 if whole else 1 + kv + 2 * by_cols
        self.cut_rows.append((tensor, height, width, rows, cols, parameter, offset, kind))

    def _flush(self) -> None:
        """All noted tensors times all ranks at once."""
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
        """A projection of one expert, cut over tp ranks or whole on the ep ranks that serve it."""
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
