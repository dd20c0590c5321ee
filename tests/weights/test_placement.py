"""Placements against plain slicing of whole tensors, and against Megatron's own map."""

import numpy as np
import pytest
import torch
from layouts import LATENT, MOE, QWEN2, QWEN3, fsdp1, fsdp2, megatron, module_params, random_tensors, tp

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import ModuleNames, describe, hf_tensors
from meshrl.models.names import convert_weight_keys
from meshrl.weights.placement import PlacementBuilder, RolloutLayout, Shards, local_tensors, replicas, rollout, windows


def whole_params(config, tensors):
    """Module parameters from the files' tensors, by stacking."""
    found = {}
    for name, shape in module_params(config).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensors[name]
            continue
        block, kind = name.rsplit(".", 1)
        names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        found[name] = torch.stack(
            [torch.cat([tensors[f"{block}.{e}.{n}.weight"] for n in names]) for e in range(shape[0])]
        )
    return found


@pytest.mark.parametrize("config", [QWEN2, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize(("world", "size"), [(3, -1), (4, 2), (5, -1)])
def test_fsdp2_is_torch_chunk(config, world, size):
    tensors = random_tensors(hf_tensors(config))
    side = fsdp2(config, world, size)
    shards = world if size == -1 else size
    for rank in range(world):
        local = local_tensors(side, rank, tensors)
        for name, param in whole_params(config, tensors).items():
            chunks = torch.chunk(param, shards)
            place = rank % shards
            if place < len(chunks):
                assert torch.equal(local[name], chunks[place].flatten())
            else:
                assert name not in local


@pytest.mark.parametrize("alignment", [1, 4])
def test_fsdp1_is_a_cut_of_the_flat_parameter(alignment):
    tensors = random_tensors(hf_tensors(MOE))
    params = whole_params(MOE, tensors)
    side = fsdp1(MOE, 3, alignment=alignment)
    units: dict = {}
    for name, param in params.items():
        unit = name.split(".")[2] if ".layers." in name else "root"
        flat = units.get(unit, torch.empty(0))
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % alignment))
        units[unit] = torch.cat([flat, param.flatten()])
    for unit, flat in units.items():
        step = -(-len(flat) // 3)
        for rank in range(3):
            expected = flat[rank * step : (rank + 1) * step]
            found = local_tensors(side, rank, tensors)[f"{unit}._flat_param"]
            # Padding at the end of a shard belongs to no tensor.
            assert torch.equal(found, expected[: len(found)])
            assert not expected[len(found) :].any()


@pytest.mark.parametrize("experts", ["sequential", "te_grouped", "grouped"])
@pytest.mark.parametrize("config", [QWEN2, QWEN3, MOE, LATENT], ids=lambda c: c.model_type)
def test_megatron_is_its_own_map(config, experts):
    tensors = random_tensors(hf_tensors(config))
    axes = {"tp": 2, "pp": 2, "vpp": 2} | ({"ep": 2, "etp": 1} if config in (MOE, LATENT) else {})
    side = megatron(config, 8, experts, **axes)
    for rank in (0, 3, 6):
        local = local_tensors(side, rank, tensors)
        ranks = ParallelRanks(rank=rank, world_size=8, **axes)
        for piece in describe(config, ranks, ModuleNames(experts=experts)):
            if not min(piece.size):
                continue
            flat = local[f"{piece.chunk}/{piece.parameter}"]
            memory = torch.nn.functional.pad(flat, (0, int(np.prod(piece.parameter_shape)) - len(flat)))
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            assert torch.equal(piece.region(memory.view(piece.parameter_shape)), tensors[piece.name][box])


def test_packed_rollout_is_built_by_hand():
    tensors = random_tensors(hf_tensors(QWEN2))
    side = tp(QWEN2, 2, form="packed")
    layer = "model.layers.1."
    for rank in range(2):
        local = local_tensors(side, rank, tensors)
        parts = [tensors[f"{layer}self_attn.{n}_proj.weight"].chunk(2)[rank] for n in "qkv"]
        assert torch.equal(local[f"{layer}self_attn.qkv_proj.weight"], torch.cat(parts).flatten())
        bias = [tensors[f"{layer}self_attn.{n}_proj.bias"].chunk(2)[rank] for n in "qkv"]
        assert torch.equal(local[f"{layer}self_attn.qkv_proj.bias"], torch.cat(bias))
        gate_up = [tensors[f"{layer}mlp.{n}_proj.weight"].chunk(2)[rank] for n in ("gate", "up")]
        assert torch.equal(local[f"{layer}mlp.gate_up_proj.weight"], torch.cat(gate_up).flatten())
        down = tensors[f"{layer}mlp.down_proj.weight"].chunk(2, 1)[rank]
        assert torch.equal(local[f"{layer}mlp.down_proj.weight"], down.flatten())
        # 41 tokens, padded to 64: 32 on the first rank and 9 on the second.
        rows = tensors["model.embed_tokens.weight"][rank * 32 : rank * 32 + 32]
        assert torch.equal(local["model.embed_tokens.weight"], rows.flatten())
        assert torch.equal(local["model.norm.weight"], tensors["model.norm.weight"])


def test_key_value_heads_are_kept_whole_on_more_ranks_than_heads():
    tensors = random_tensors(hf_tensors(QWEN2))
    side = tp(QWEN2, 4)
    heads = tensors["model.layers.0.self_attn.k_proj.weight"].split(4)
    for rank in range(4):
        found = local_tensors(side, rank, tensors)["model.layers.0.self_attn.k_proj.weight"]
        assert torch.equal(found, heads[rank // 2].flatten())


@pytest.mark.parametrize("form", ["separate", "packed"])
def test_experts_cut_and_spread(form):
    tensors = random_tensors(hf_tensors(MOE))
    stacks = whole_params(MOE, tensors)
    first, last = ("w13_weight", "w2_weight") if form == "packed" else ("gate_up_proj", "down_proj")
    block = "model.layers.2.mlp.experts."
    gate_up, down = stacks[block + "gate_up_proj"], stacks[block + "down_proj"]
    for rank in range(2):
        cut = local_tensors(tp(MOE, 2, form=form), rank, tensors)
        halves = [half.chunk(2, 1)[rank] for half in gate_up.chunk(2, 1)]
        assert torch.equal(cut[block + first], torch.cat(halves, 1).flatten())
        assert torch.equal(cut[block + last], down.chunk(2, 2)[rank].flatten())
        spread = local_tensors(tp(MOE, 2, ep=2, form=form), rank, tensors)
        assert torch.equal(spread[block + first], gate_up.chunk(2)[rank].flatten())
        assert torch.equal(spread[block + last], down.chunk(2)[rank].flatten())


def test_names_of_files_and_modules():
    table = convert_weight_keys(
        {"model.layers.0.mlp.experts.gate_up_proj": (2, 6, 4), "model.layers.0.mlp.gate.weight": (2, 4)}, "mixtral"
    )
    block = "model.layers.0.block_sparse_moe."
    parts = table["model.layers.0.mlp.experts.gate_up_proj"]
    assert [(p.name, p.shape, p.offset) for p in parts] == [
        (f"{block}experts.0.w1.weight", (3, 4), 0),
        (f"{block}experts.0.w3.weight", (3, 4), 12),
        (f"{block}experts.1.w1.weight", (3, 4), 24),
        (f"{block}experts.1.w3.weight", (3, 4), 36),
    ]
    assert table["model.layers.0.mlp.gate.weight"][0].name == f"{block}gate.weight"


def test_wrong_sizes_are_refused_in_numbers():
    with pytest.raises(ValueError, match=r"4 attention heads must be divisible by .* \(3\)"):
        tp(QWEN2, 3)
    with pytest.raises(ValueError, match=r"4 experts must be divisible by the rollout's ep \(3\)"):
        tp(MOE, 1, 3, ep=3)
    with pytest.raises(ValueError, match="unknown form 'woven'"):
        RolloutLayout(form="woven")
    builder = PlacementBuilder("two shapes", 1)
    builder.tensor("w", (2, 3))
    with pytest.raises(ValueError, match=r"'w' has shape \[2, 3\] and \[3, 2\]"):
        builder.tensor("w", (3, 2))


def test_shards_must_be_there_and_in_one_piece():
    side = replicas({"w": (4, 6)}, 1)
    with pytest.raises(ValueError, match="has no parameter 'w'"):
        Shards(side, 0, {})
    with pytest.raises(ValueError, match="has 20 elements"):
        Shards(side, 0, {"w": torch.zeros(4, 5)})
    with pytest.raises(ValueError, match="with gaps"):
        Shards(side, 0, {"w": torch.zeros(6, 4).t()})


@pytest.mark.parametrize(("size", "spread"), [(2, 0), (4, 0), (2, 2), (4, 4)])
@pytest.mark.parametrize("config", [QWEN2, QWEN3, MOE, LATENT], ids=lambda c: c.model_type)
def test_windows_are_the_packed_parts_at_their_places_in_whole_parameters(config, size, spread):
    tensors = random_tensors(hf_tensors(config))
    params = whole_params(config, tensors)
    layout = RolloutLayout(tp=size, dp=2, ep=spread if config in (MOE, LATENT) else 0, form="packed")
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    side = windows(shapes, config, layout, config.model_type)
    packed = rollout(side.tensors, config, layout)
    fields = ["rank", "tensor", "row", "rows", "col", "cols"]
    assert np.array_equal(side.slices[fields], packed.slices[fields])
    filled = packed.elements_of_ranks()
    for rank in range(2 * size):
        blank = {name: torch.full_like(param, torch.nan) for name, param in params.items()}
        here, there = Shards(side, rank, params), Shards(side, rank, blank)
        for piece in side.of_rank(rank):
            there.region(piece).copy_(here.region(piece))
        assert sum(int((~part.isnan()).sum()) for part in blank.values()) == filled[rank]
        for name, part in blank.items():
            assert torch.equal(part[~part.isnan()], params[name][~part.isnan()])
    # What one rank lacks others have.
    assert filled[:size].sum() >= packed.elements() > filled.max()
