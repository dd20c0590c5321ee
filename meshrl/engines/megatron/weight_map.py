"""The map between Hugging Face tensors and Megatron parameters: which rectangle of which tensor lies where on which
rank.

It is a pure description, computed from the model's config and a rank's position, without process group or Megatron.
Loading, exporting and weight-sync plans all use it. A parameter is a sequence of runs along one dim. Each run is a
stretch of one Hugging Face tensor. The runs are cut into equal parts over tensor-parallel ranks. Queries, keys and
values are packed by query group. Gate and up projections are cut separately and lie one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from meshrl.config.families import facts_of, unmapped
from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.models.names import expert_count, head_dim

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModuleNames:
    """The parts of the parameter names that Megatron's module spec decides: TransformerEngine's fused norms, and the
    experts.

    `experts`: `sequential` (a module per expert), `te_grouped` (one module with a weight per expert), `grouped` (one
    weight for all experts).
    """

    transformer_engine: bool = False
    experts: str = "sequential"


class Slice(NamedTuple):
    """The rectangle `[start, start + size)` of a Hugging Face tensor, and its place in a local parameter."""

    name: str
    shape: Shape
    start: Shape
    size: Shape
    chunk: int
    parameter: str
    parameter_shape: Shape
    offset: Shape
    # The memory layout of one weight for all experts, whatever the parameter's shape. It has one leading dim more than
    # the rectangle.
    view: Shape | None = None
    transposed: bool = False

    def region(self, parameter: Tensor) -> Tensor:
        """Return the part of the local parameter that holds this rectangle, as a view in the rectangle's shape."""
        place = parameter if self.view is None else parameter.view(self.view)[self.offset[0]]
        offset = self.offset if self.view is None else self.offset[1:]
        for dim, (start, size) in enumerate(
            zip(offset, self.size[::-1] if self.transposed else self.size, strict=True)
        ):
            place = place.narrow(dim, start, size)
        return place.t() if self.transposed else place


class HfTensor(NamedTuple):
    name: str
    shape: Shape


class Run(NamedTuple):
    """The indices [start, stop) of a tensor along the dim that is cut."""

    tensor: HfTensor
    start: int
    stop: int


def describe(
    hf_config: Any,
    ranks: ParallelRanks,
    names: ModuleNames | None = None,
    *,
    vocab_size: int | None = None,
    value_head: bool = False,
) -> list[Slice]:
    """Return all slices of a rank, in the order of the Hugging Face model.

    `vocab_size` is Megatron's padded size (`padded_vocab_size` by default). With `value_head` the output layer is a
    critic's `score` instead of the language model's head.
    """
    check_family(hf_config)
    padded = vocab_size or padded_vocab_size(hf_config.vocab_size, ranks.tp)
    slices: list[Slice] = []
    for chunk in range(ranks.vpp):
        rank = _RankChunk(hf_config, ranks, names or ModuleNames(), chunk, padded, value_head)
        slices += rank.slices()
    return slices


def hf_tensors(hf_config: Any, value_head: bool = False) -> dict[str, Shape]:
    """Return every tensor of the Hugging Face model with its shape, in the model's order."""
    return {piece.name: piece.shape for piece in describe(hf_config, ParallelRanks(), value_head=value_head)}


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 1) -> int:
    """Return the vocabulary size that Megatron builds: the next multiple of `tp * multiple`."""
    step = tp * multiple
    return -(-vocab_size // step) * step


def check_family(hf_config: Any) -> None:
    """Raise a `ValueError` for models that this map, or Megatron-Core, cannot express."""
    if problems := unmapped(facts_of(hf_config)):
        raise ValueError(problems[0])


def is_sparse_layer(hf_config: Any, layer: int) -> bool:
    """Return whether this layer of the model has experts.

    By the config, these are all layers, all but some, every n-th layer, or all layers after the first ones.
    """
    if not expert_count(hf_config):
        return False
    if hf_config.model_type == "deepseek_v3":
        return layer >= hf_config.first_k_dense_replace
    if hf_config.model_type in ("qwen2_moe", "qwen3_moe"):
        step = hf_config.decoder_sparse_step
        return layer not in (hf_config.mlp_only_layers or []) and step > 0 and (layer + 1) % step == 0
    return True


def cut(runs: Sequence[Run], index: int, parts: int, total: int | None = None) -> list[Run]:
    """Return the `index`-th of `parts` equal parts of runs laid end to end.

    After the runs, padding fills up to `total`.
    """
    length = sum(run.stop - run.start for run in runs)
    total = total or length
    if total % parts:
        raise ValueError(
            f"'{runs[0].tensor.name}' {list(runs[0].tensor.shape)}: {total} rows or columns (with those packed beside "
            f"them) must be divisible by {parts} tensor-parallel ranks"
        )
    if parts == 1:
        return list(runs)
    low, high = total // parts * index, total // parts * (index + 1)
    kept: list[Run] = []
    place = 0
    for run in runs:
        size = run.stop - run.start
        start, stop = max(low - place, 0), min(high - place, size)
        if start < stop:
            kept.append(Run(run.tensor, run.start + start, run.start + stop))
        place += size
    return kept


def whole(tensor: HfTensor, dim: int = 0) -> Run:
    return Run(tensor, 0, tensor.shape[dim])


class _RankChunk:
    """The slices of one model chunk of one rank."""

    def __init__(
        self, config: Any, ranks: ParallelRanks, names: ModuleNames, chunk: int, padded_vocab: int, value_head: bool
    ):
        self.config, self.ranks, self.names, self.chunk = config, ranks, names, chunk
        self.padded_vocab, self.value_head = padded_vocab, value_head
        self.tp, self.tp_rank = ranks.tp, ranks.tp_rank
        self.ep_rank, self.etp, self.etp_rank = ranks.ep_rank, ranks.etp, ranks.etp_rank

    def slices(self) -> Iterator[Slice]:
        tied = self.config.tie_word_embeddings and not self.value_head
        embedding = HfTensor("model.embed_tokens.weight", (self.config.vocab_size, self.config.hidden_size))
        if self.ranks.has_embedding(self.chunk):
            yield from self._vocabulary("embedding.word_embeddings.weight", embedding)
        for local, layer in enumerate(self.ranks.layers(self.config.num_hidden_layers, self.chunk)):
            yield from self._layer(layer, f"decoder.layers.{local}.", f"model.layers.{layer}.")
        if not self.ranks.has_output(self.chunk):
            return
        yield self._replicated("decoder.final_layernorm.weight", "model.norm.weight", self.config.hidden_size)
        if self.value_head:
            yield self._replicated("output_layer.weight", "score.weight", 1, self.config.hidden_size)
            yield self._replicated("output_layer.bias", "score.bias", 1)
        elif not tied:
            yield from self._vocabulary("output_layer.weight", HfTensor("lm_head.weight", embedding.shape))
        elif not self.ranks.has_embedding(self.chunk):
            # A tied head on another stage than the embedding is a copy of the embedding.
            yield from self._vocabulary("output_layer.weight", embedding)

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Slice]:
        latent, fused = self.config.model_type == "deepseek_v3", self.names.transformer_engine
        sparse = is_sparse_layer(self.config, layer)
        hidden = self.config.hidden_size
        norm = "self_attention.linear_qkv.layer_norm_weight" if fused and not latent else "input_layernorm.weight"
        yield self._replicated(ours + norm, theirs + "input_layernorm.weight", hidden)
        attention = self._latent_attention if latent else self._attention
        yield from attention(ours + "self_attention.", theirs + "self_attn.")
        norm = "mlp.linear_fc1.layer_norm_weight" if fused and not sparse else "pre_mlp_layernorm.weight"
        yield self._replicated(ours + norm, theirs + "post_attention_layernorm.weight", hidden)
        if sparse:
            yield from self._experts(ours + "mlp.", theirs)
        else:
            width = self.config.intermediate_size
            yield from self._mlp(ours + "mlp.", _mlp_tensors(theirs + "mlp.", hidden, width), self.tp_rank, self.tp)

    def _attention(self, ours: str, theirs: str) -> Iterator[Slice]:
        config, dim = self.config, head_dim(self.config)
        groups = config.num_key_value_heads
        wide = config.num_attention_heads // groups * dim
        sizes = {"q_proj": groups * wide, "k_proj": groups * dim, "v_proj": groups * dim}
        kinds: dict[str, Shape] = {"weight": (config.hidden_size,)}
        if config.model_type in ("qwen2", "qwen2_moe") and getattr(config, "qkv_bias", True):
            kinds["bias"] = ()
        for kind, rest in kinds.items():
            query, key, value = (HfTensor(f"{theirs}{n}.{kind}", (size, *rest)) for n, size in sizes.items())
            packed: list[Run] = []
            for group in range(groups):
                packed.append(Run(query, group * wide, (group + 1) * wide))
                packed += [Run(tensor, group * dim, (group + 1) * dim) for tensor in (key, value)]
            yield from self._placed(f"{ours}linear_qkv.{kind}", cut(packed, self.tp_rank, self.tp))
        if config.model_type in ("qwen3", "qwen3_moe"):
            for letter in "qk":
                yield self._replicated(f"{ours}{letter}_layernorm.weight", f"{theirs}{letter}_norm.weight", dim)
        output = HfTensor(theirs + "o_proj.weight", (config.hidden_size, groups * wide))
        yield from self._columns(ours + "linear_proj.weight", output, self.tp_rank, self.tp)

    def _latent_attention(self, ours: str, theirs: str) -> Iterator[Slice]:
        config, heads, fused = self.config, self.config.num_attention_heads, self.names.transformer_engine
        query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        down = {"kv": ("kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim)}
        up = {"kv": (config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))}
        if config.q_lora_rank is None:
            query = HfTensor(theirs + "q_proj.weight", (heads * query_dim, config.hidden_size))
            yield from self._rows(ours + "linear_q_proj.weight", query)
        else:
            down = {"q": ("q_a_proj", config.q_lora_rank)} | down
            up = {"q": (config.q_lora_rank, heads * query_dim)} | up
        for letters, (name, size) in down.items():
            rank, outputs = up[letters]
            tensor = HfTensor(f"{theirs}{name}.weight", (size, config.hidden_size))
            yield from self._placed(f"{ours}linear_{letters}_down_proj.weight", [whole(tensor)])
            norm = f"linear_{letters}_up_proj.layer_norm_weight" if fused else f"{letters}_layernorm.weight"
            yield self._replicated(ours + norm, f"{theirs}{letters}_a_layernorm.weight", rank)
            yield from self._rows(
                f"{ours}linear_{letters}_up_proj.weight", HfTensor(f"{theirs}{letters}_b_proj.weight", (outputs, rank))
            )
        output = HfTensor(theirs + "o_proj.weight", (config.hidden_size, heads * config.v_head_dim))
        yield from self._columns(ours + "linear_proj.weight", output, self.tp_rank, self.tp)

    def _experts(self, ours: str, theirs: str) -> Iterator[Slice]:
        config, hidden, experts = self.config, self.config.hidden_size, expert_count(self.config)
        mixtral = config.model_type == "mixtral"
        theirs += "block_sparse_moe." if mixtral else "mlp."
        width = config.intermediate_size if mixtral else config.moe_intermediate_size
        yield self._replicated(ours + "router.weight", theirs + "gate.weight", experts, hidden)
        if config.model_type == "deepseek_v3":
            yield self._replicated(ours + "router.expert_bias", theirs + "gate.e_score_correction_bias", experts)
        if experts % self.ranks.ep:
            raise ValueError(
                f"the model's {experts} experts must be divisible by expert_model_parallel_size ({self.ranks.ep})"
            )
        held = experts // self.ranks.ep
        for local in range(held):
            prefix = f"{theirs}experts.{self.ep_rank * held + local}."
            tensors = _mlp_tensors(prefix, hidden, width, ("w1", "w3", "w2") if mixtral else None)
            yield from self._expert(ours + "experts.", tensors, local, held)
        if config.model_type == "qwen2_moe":
            shared = _mlp_tensors(theirs + "shared_expert.", hidden, config.shared_expert_intermediate_size)
            yield from self._mlp(ours + "shared_experts.", shared, self.tp_rank, self.tp)
            yield self._replicated(ours + "shared_experts.gate_weight", theirs + "shared_expert_gate.weight", 1, hidden)
        if config.model_type == "deepseek_v3":
            shared = _mlp_tensors(theirs + "shared_experts.", hidden, width * config.n_shared_experts)
            yield from self._mlp(ours + "shared_experts.", shared, self.tp_rank, self.tp)

    def _expert(self, ours: str, tensors: Sequence[HfTensor], local: int, held: int) -> Iterator[Slice]:
        index, parts = self.etp_rank, self.etp
        if self.names.experts == "sequential":
            yield from self._mlp(f"{ours}local_experts.{local}.", tensors, index, parts)
        elif self.names.experts == "te_grouped":
            yield from self._mlp(ours, tensors, index, parts, suffix=f"weight{local}")
        else:
            yield from self._grouped(ours, tensors, local, held)

    def _grouped(self, ours: str, tensors: Sequence[HfTensor], local: int, held: int) -> Iterator[Slice]:
        """Yield the slices of an expert in one weight for all experts, transposed.

        The memory layouts are `[expert, hidden, gate | up]` and `[expert, width, hidden]`.
        """
        gate, up, down = tensors
        part = gate.shape[0] // self.etp
        hidden = gate.shape[1]
        for number, tensor in enumerate((gate, up)):
            for run in cut([whole(tensor)], self.etp_rank, self.etp):
                yield Slice(
                    tensor.name, tensor.shape, (run.start, 0), (part, hidden), self.chunk, ours + "weight1",
                    (hidden, held * 2 * part), (local, 0, number * part), (held, hidden, 2 * part), True,
                )  # fmt: skip
        for run in cut([whole(down, 1)], self.etp_rank, self.etp):
            yield Slice(
                down.name, down.shape, (0, run.start), (hidden, part), self.chunk, ours + "weight2",
                (held * part, hidden), (local, 0, 0), (held, part, hidden), True,
            )  # fmt: skip

    def _mlp(
        self, ours: str, tensors: Sequence[HfTensor], index: int, parts: int, suffix: str = "weight"
    ) -> Iterator[Slice]:
        gate, up, down = tensors
        runs = cut([whole(gate)], index, parts) + cut([whole(up)], index, parts)
        yield from self._placed(f"{ours}linear_fc1.{suffix}", runs)
        yield from self._columns(f"{ours}linear_fc2.{suffix}", down, index, parts)

    def _vocabulary(self, ours: str, tensor: HfTensor) -> Iterator[Slice]:
        runs = cut([whole(tensor)], self.tp_rank, self.tp, self.padded_vocab)
        # A rank may hold only padding; an empty run still names the parameter.
        runs = runs or [Run(tensor, tensor.shape[0], tensor.shape[0])]
        yield from self._placed(ours, runs, length=self.padded_vocab // self.tp)

    def _rows(self, ours: str, tensor: HfTensor) -> Iterator[Slice]:
        yield from self._placed(ours, cut([whole(tensor)], self.tp_rank, self.tp))

    def _columns(self, ours: str, tensor: HfTensor, index: int, parts: int) -> Iterator[Slice]:
        yield from self._placed(ours, cut([whole(tensor, 1)], index, parts), dim=1)

    def _replicated(self, ours: str, theirs: str, *shape: int) -> Slice:
        (piece,) = self._placed(ours, [whole(HfTensor(theirs, shape))])
        return piece

    def _placed(self, parameter: str, runs: Sequence[Run], dim: int = 0, length: int | None = None) -> Iterator[Slice]:
        """Yield the slices of runs laid end to end along `dim` of a parameter.

        The parameter may be longer than the runs together.
        """
        length = length or sum(run.stop - run.start for run in runs)
        place = 0
        for (name, shape), start, stop in runs:
            before, behind = (0,) * dim, (0,) * (len(shape) - dim - 1)
            yield Slice(
                name=name,
                shape=shape,
                start=(*before, start, *behind),
                size=_with(shape, dim, stop - start),
                chunk=self.chunk,
                parameter=parameter,
                parameter_shape=_with(shape, dim, length),
                offset=(*before, place, *behind),
            )
            place += stop - start


def _mlp_tensors(
    prefix: str, hidden: int, width: int, names: tuple[str, str, str] | None = None
) -> tuple[HfTensor, HfTensor, HfTensor]:
    """Return the gate, up and down projections of an MLP."""
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    return (
        HfTensor(f"{prefix}{gate}.weight", (width, hidden)),
        HfTensor(f"{prefix}{up}.weight", (width, hidden)),
        HfTensor(f"{prefix}{down}.weight", (hidden, width)),
    )


def _with(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])


# From the names in Hugging Face's files to the names of its modules, which hold all experts of a layer in one tensor.

EXPERT = re.compile(r"(?P<layer>.*)\.(mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\.(?P<kind>\w+)\.weight")
# The stack that a file's tensor belongs to, and whether the tensor is the second half.
STACKS = {
    "gate_proj": ("gate_up_proj", False),
    "up_proj": ("gate_up_proj", True),
    "down_proj": ("down_proj", False),
    "w1": ("gate_up_proj", False),
    "w3": ("gate_up_proj", True),
    "w2": ("down_proj", False),
}


def as_module_params(weights: Iterator[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Rename a stream of file tensors to module parameters; an expert's tensors wait until their stack is complete."""
    stacks: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, tensor in weights:
        match = EXPERT.fullmatch(name)
        if match is None:
            yield name.replace(".block_sparse_moe.", ".mlp."), tensor
            continue
        kind, second = STACKS[match["kind"]]
        stack = f"{match['layer']}.mlp.experts.{kind}"
        rows = len(tensor) * (2 if kind == "gate_up_proj" else 1)
        if stack not in stacks:
            stacks[stack] = tensor.new_empty((experts, rows, *tensor.shape[1:]))
            missing[stack] = experts * rows // len(tensor)
        first = len(tensor) if second else 0
        stacks[stack][int(match["number"]), first : first + len(tensor)] = tensor
        missing[stack] -= 1
        if missing[stack] == 0:
            yield stack, stacks.pop(stack)
    assert not stacks, f"the experts of {sorted(stacks)} are not complete"


def module_place(name: str, shape: Shape, start: Shape, experts: int) -> tuple[str, Shape, Shape]:
    """Return the module tensor that holds a file's tensor, its shape, and the index of the file tensor's `start` in it.

    An expert's tensor is one slice of a stack, which has one more dim.
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return name.replace(".block_sparse_moe.", ".mlp."), shape, start
    kind, second = STACKS[match["kind"]]
    rows = shape[0] * (2 if kind == "gate_up_proj" else 1)
    place = (int(match["number"]), start[0] + (shape[0] if second else 0), *start[1:])
    return f"{match['layer']}.mlp.experts.{kind}", (experts, rows, *shape[1:]), place
