"""Hugging Face files -> every rank's Megatron parameters -> Hugging Face tensors, without processes.

What each rank must hold is built here once more with plain tensor operations on whole weights.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import (
    ModuleNames,
    describe,
    hf_tensors,
    is_sparse_layer,
    padded_vocab_size,
)
from meshrl.engines.megatron.weights import export_hf_weights, load_hf_weights, module_names, piece_owners
from meshrl.parallel.pipeline import PipelineSplit

LAYERS, HIDDEN, HEADS, GROUPS, DIM, WIDTH, EXPERTS, VOCAB = 8, 16, 8, 2, 6, 24, 4, 37
BASE = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS = {
    "llama": LlamaConfig(**BASE, head_dim=DIM),
    "mistral": MistralConfig(**BASE, head_dim=DIM),
    "qwen2": Qwen2Config(**BASE | {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    "qwen3": Qwen3Config(**BASE | {"tie_word_embeddings": True}, head_dim=DIM),
    "qwen2_moe": Qwen2MoeConfig(**BASE, **MOE, shared_expert_intermediate_size=12),
    "qwen3_moe": Qwen3MoeConfig(**BASE, **MOE, head_dim=DIM, mlp_only_layers=[0, 5]),
    "mixtral": MixtralConfig(**BASE, num_local_experts=EXPERTS, head_dim=DIM),
    "deepseek_v3": DeepseekV3Config(
        **BASE | {"num_key_value_heads": HEADS},
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        moe_intermediate_size=8,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=10,
        first_k_dense_replace=3,
    ),
}
UNEVEN = [[0, 1, 2], [3, 4, 5, 6, 7]]
# Ranks, sizes, and the layers of [stage][chunk] where they are not simply even.
LAYOUTS = {
    "one": ({}, None),
    "tp2": ({"tp": 2}, None),
    "tp4": ({"tp": 4}, None),
    "pp4": ({"pp": 4}, None),
    "pp2_vpp2": ({"pp": 2, "vpp": 2}, None),
    "pp4_vpp2": ({"pp": 4, "vpp": 2}, None),
    "uneven": ({"pp": 2, "split": PipelineSplit(first=3)}, [[UNEVEN[0]], [UNEVEN[1]]]),
    "layout": (
        {"pp": 2, "vpp": 2, "split": PipelineSplit(layout="Ett|t|tttt|tL")},
        [[[0, 1], [3, 4, 5, 6]], [[2], [7]]],
    ),
    "dp2": ({"world_size": 2}, None),
    "ep2": ({"world_size": 2, "ep": 2}, None),
    "ep4_tp2": ({"world_size": 4, "ep": 4, "tp": 2, "etp": 1}, None),
    "etp2": ({"world_size": 4, "ep": 2, "etp": 2}, None),
    "tp2_pp2_cp2": ({"world_size": 8, "tp": 2, "pp": 2, "cp": 2}, None),
    "tp2_pp2_vpp2_ep2": ({"world_size": 8, "tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1}, None),
    "everything": ({"world_size": 16, "tp": 2, "pp": 2, "vpp": 2, "cp": 2, "ep": 2, "etp": 2}, None),
}


def ranks_of(sizes):
    sizes = dict(sizes)
    world = sizes.pop("world_size", None) or sizes.get("tp", 1) * sizes.get("pp", 1)
    return ParallelRanks(0, world, **sizes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(0)
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_config(config)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.normal_()
        model.save_pretrained(found[name])
    return found


def module_of(tensors):
    """Nested modules with these parameters; the expert bias is a buffer, as in Megatron."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        if leaf == "expert_bias":
            owner.register_buffer(leaf, tensor)
        else:
            owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def expected_chunks(config, weights, ranks, names, layers):
    """What a rank must hold, by whole-tensor operations: pack, then chunk."""
    tp, r = ranks.tp, ranks.rank % ranks.tp
    inside = ranks.rank % (ranks.world_size // ranks.pp)
    stage = ranks.rank // (ranks.world_size // ranks.pp)
    er, ep_rank = inside % ranks.etp, inside // ranks.etp % ranks.ep
    latent, te = config.model_type == "deepseek_v3", names.transformer_engine
    padded = padded_vocab_size(VOCAB, tp)

    def vocabulary(tensor):
        return torch.cat([tensor, tensor.new_zeros(padded - VOCAB, HIDDEN)]).chunk(tp)[r]

    def mlp(prefix, theirs, index, parts, letters=("gate_proj", "up_proj", "down_proj"), suffix="weight"):
        gate, up, down = (weights[f"{theirs}{letter}.weight"] for letter in letters)
        return {
            f"{prefix}linear_fc1.{suffix}": torch.cat([gate.chunk(parts)[index], up.chunk(parts)[index]]),
            f"{prefix}linear_fc2.{suffix}": down.chunk(parts, 1)[index],
        }

    chunks = []
    for v in range(ranks.vpp):
        out = {}
        if stage == 0 and v == 0:
            out["embedding.word_embeddings.weight"] = vocabulary(weights["model.embed_tokens.weight"])
        for local, layer in enumerate(layers[stage][v]):
            ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
            sparse = is_sparse_layer(config, layer)
            norm = "self_attention.linear_qkv.layer_norm_weight" if te and not latent else "input_layernorm.weight"
            out[ours + norm] = weights[theirs + "input_layernorm.weight"]
            norm = "mlp.linear_fc1.layer_norm_weight" if te and not sparse else "pre_mlp_layernorm.weight"
            out[ours + norm] = weights[theirs + "post_attention_layernorm.weight"]
            a, b = ours + "self_attention.", theirs + "self_attn."
            out[a + "linear_proj.weight"] = weights[b + "o_proj.weight"].chunk(tp, 1)[r]
            if latent:
                for kind, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
                    out[f"{a}linear_{kind}_down_proj.weight"] = weights[f"{b}{down}.weight"]
                    norm = f"linear_{kind}_up_proj.layer_norm_weight" if te else f"{kind}_layernorm.weight"
                    out[a + norm] = weights[f"{b}{kind}_a_layernorm.weight"]
                    out[f"{a}linear_{kind}_up_proj.weight"] = weights[f"{b}{kind}_b_proj.weight"].chunk(tp)[r]
            else:
                g = config.num_key_value_heads
                for kind in ["weight", "bias"] if "qwen2" in config.model_type else ["weight"]:
                    q, k, v_ = (weights[f"{b}{x}_proj.{kind}"] for x in "qkv")
                    packed = torch.cat([x.reshape(g, -1, *x.shape[1:]) for x in (q, k, v_)], 1).flatten(0, 1)
                    out[f"{a}linear_qkv.{kind}"] = packed.chunk(tp)[r]
            if "qwen3" in config.model_type:
                out[a + "q_layernorm.weight"] = weights[b + "q_norm.weight"]
                out[a + "k_layernorm.weight"] = weights[b + "k_norm.weight"]
            if not sparse:
                out |= mlp(ours + "mlp.", theirs + "mlp.", r, tp)
                continue
            mixtral = config.model_type == "mixtral"
            m = theirs + ("block_sparse_moe." if mixtral else "mlp.")
            out[ours + "mlp.router.weight"] = weights[m + "gate.weight"]
            if latent:
                out[ours + "mlp.router.expert_bias"] = weights[m + "gate.e_score_correction_bias"]
                out |= mlp(ours + "mlp.shared_experts.", m + "shared_experts.", r, tp)
            if config.model_type == "qwen2_moe":
                out |= mlp(ours + "mlp.shared_experts.", m + "shared_expert.", r, tp)
                out[ours + "mlp.shared_experts.gate_weight"] = weights[m + "shared_expert_gate.weight"]
            held = EXPERTS // ranks.ep
            letters = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
            one = [mlp("", f"{m}experts.{ep_rank * held + e}.", er, ranks.etp, letters) for e in range(held)]
            for e, expert in enumerate(one):
                for kind, tensor in expert.items():
                    if names.experts == "sequential":
                        out[f"{ours}mlp.experts.local_experts.{e}.{kind}"] = tensor
                    elif names.experts == "te_grouped":
                        out[f"{ours}mlp.experts.{kind}{e}"] = tensor
            if names.experts == "grouped":
                first = torch.stack([expert["linear_fc1.weight"].t() for expert in one])
                second = torch.stack([expert["linear_fc2.weight"].t() for expert in one])
                out[ours + "mlp.experts.weight1"] = first.reshape(HIDDEN, -1)
                out[ours + "mlp.experts.weight2"] = second.reshape(-1, HIDDEN)
        if stage == ranks.pp - 1 and v == ranks.vpp - 1:
            out["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
            if not config.tie_word_embeddings:
                out["output_layer.weight"] = vocabulary(weights["lm_head.weight"])
            elif ranks.pp > 1:
                out["output_layer.weight"] = vocabulary(weights["model.embed_tokens.weight"])
        chunks.append({name: tensor.contiguous() for name, tensor in out.items()})
    return chunks


def even_layers(ranks):
    return torch.arange(LAYERS).view(ranks.vpp, ranks.pp, -1).transpose(0, 1).tolist()


def load_rank(config, folder, ranks, chunks):
    modules = [module_of({name: torch.full_like(t, float("nan")) for name, t in chunk.items()}) for chunk in chunks]
    for module in modules:
        module.vocab_size = padded_vocab_size(VOCAB, ranks.tp)
    load_hf_weights(modules, config, folder, ranks)
    return modules


def tensors_of(module):
    return dict(module.named_parameters()) | dict(module.named_buffers())


def cases():
    for family in CONFIGS:
        sparse = "moe" in family or family in ("mixtral", "deepseek_v3")
        for layout in LAYOUTS:
            if "ep" not in layout or sparse:
                yield pytest.param(family, layout, ModuleNames(), id=f"{family}-{layout}")
        layout = "tp2_pp2_vpp2_ep2" if sparse else "tp2_pp2_cp2"
        for experts in ("sequential", "te_grouped") if sparse else ("sequential",):
            yield pytest.param(family, layout, ModuleNames(True, experts), id=f"{family}-te-{experts}")
        if sparse:
            yield pytest.param(family, "etp2", ModuleNames(False, "grouped"), id=f"{family}-grouped")


@pytest.mark.parametrize(("family", "layout", "names"), cases())
def test_round_trip_is_exact_on_every_rank(folders, family, layout, names):
    config, ranks = CONFIGS[family], ranks_of(LAYOUTS[layout][0])
    weights = load_file(folders[family] / "model.safetensors")
    layers = LAYOUTS[layout][1] or even_layers(ranks)
    loaded = []
    for rank in range(ranks.world_size):
        there = ranks.at(rank)
        chunks = expected_chunks(config, weights, there, names, layers)
        modules = load_rank(config, folders[family], there, chunks)
        if any(chunk for chunk in layers[there.pp_rank]):
            assert module_names(modules).transformer_engine == names.transformer_engine
        for module, chunk in zip(modules, chunks, strict=True):
            found = tensors_of(module)
            assert found.keys() == chunk.keys()
            for name, tensor in chunk.items():
                assert torch.equal(found[name], tensor), (rank, name)
        loaded.append([tensors_of(module) for module in modules])
    owners = piece_owners(config, ranks, names)
    assert owners.keys() == weights.keys()
    for name, pieces in owners.items():
        out = torch.full_like(weights[name], float("nan"))
        for rank, piece in pieces:
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            out[box] = piece.region(loaded[rank][piece.chunk][piece.parameter])
        assert torch.equal(out, weights[name]), name


def test_names_and_shapes_are_those_of_transformers(folders):
    for family, config in CONFIGS.items():
        weights = load_file(folders[family] / "model.safetensors")
        assert hf_tensors(config) == {name: tuple(weights[name].shape) for name in hf_tensors(config)}
        assert hf_tensors(config).keys() == weights.keys()


def test_export_from_one_rank_streams_in_small_buckets(folders):
    config, ranks = CONFIGS["qwen3_moe"], ParallelRanks()
    weights = load_file(folders["qwen3_moe"] / "model.safetensors")
    modules = load_rank(
        config,
        folders["qwen3_moe"],
        ranks,
        expected_chunks(config, weights, ranks, ModuleNames(), even_layers(ranks)),
    )
    for size in (1, 1 << 20):
        out = dict(export_hf_weights(modules, config, ranks, bucket_bytes=size))
        assert list(out) == list(hf_tensors(config))
        assert all(torch.equal(out[name], weights[name]) for name in weights)


def test_a_rank_of_nothing_but_padding_is_zero(folders):
    config = LlamaConfig(**BASE | {"vocab_size": 5}, head_dim=DIM)
    ranks = ParallelRanks(3, 4, tp=4)
    pieces = [p for p in describe(config, ranks) if p.parameter == "embedding.word_embeddings.weight"]
    assert padded_vocab_size(5, 4) == 8
    assert [(p.start, p.size, p.parameter_shape) for p in pieces] == [((5, 0), (0, HIDDEN), (2, HIDDEN))]
    assert padded_vocab_size(VOCAB, 2, 64) == 128


def test_reads_only_the_slices_a_rank_needs(folders):
    config = CONFIGS["qwen3_moe"]
    sizes = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
    for rank in range(4):
        ranks = ParallelRanks(rank, 4, **sizes)
        read = sum(torch.Size(piece.size).numel() for piece in describe(config, ranks))
        held = {(p.chunk, p.parameter): torch.Size(p.parameter_shape).numel() for p in describe(config, ranks)}
        padding = HIDDEN * (padded_vocab_size(VOCAB, 2) - VOCAB) if ranks.tp_rank == 1 else 0
        assert read == sum(held.values()) - padding


def test_stacked_experts_in_the_files_are_read_too(folders, tmp_path):
    config, ranks = CONFIGS["qwen3_moe"], ParallelRanks(3, 4, tp=2, pp=2, ep=2, etp=1)
    weights = load_file(folders["qwen3_moe"] / "model.safetensors")
    stacked = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in range(LAYERS):
        if is_sparse_layer(config, layer):
            experts = f"model.layers.{layer}.mlp.experts."
            kinds = {
                k: [weights[f"{experts}{e}.{k}_proj.weight"] for e in range(EXPERTS)] for k in ("gate", "up", "down")
            }
            stacked[experts + "gate_up_proj"] = torch.cat([torch.stack(kinds["gate"]), torch.stack(kinds["up"])], 1)
            stacked[experts + "down_proj"] = torch.stack(kinds["down"])
    save_file(stacked, tmp_path / "model.safetensors")
    chunks = expected_chunks(config, weights, ranks, ModuleNames(), even_layers(ranks))
    for module, chunk in zip(load_rank(config, tmp_path, ranks, chunks), chunks, strict=True):
        for name, tensor in tensors_of(module).items():
            assert torch.equal(tensor, chunk[name]), name


def damaged(weights, folder, **changes):
    """A model folder of two files, with tensors changed, added or (None) left out."""
    tensors = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, None),
        ({"model.layers.1.self_attn.k_norm.weight": None}, r"lacks 1 .*'model.layers.1.self_attn.k_norm.weight' \[6\]"),
        (
            {"model.layers.1.mlp.odd.weight": torch.zeros(3, 2)},
            r"does not know.*'model.layers.1.mlp.odd.weight' \[3, 2\]",
        ),
        ({"model.norm.weight": torch.zeros(17)}, r"'model.norm.weight'.* has shape \[17\], the model needs \[16\]"),
    ],
    ids=["whole", "tied_head", "missing", "extra", "misshapen"],
)
def test_a_wrong_tensor_is_named(folders, tmp_path, changes, message):
    config, ranks = CONFIGS["qwen3"], ParallelRanks()
    weights = load_file(folders["qwen3"] / "model.safetensors")
    damaged(weights, tmp_path, **changes)
    chunks = expected_chunks(config, weights, ranks, ModuleNames(), even_layers(ranks))
    if message is None:
        load_rank(config, tmp_path, ranks, chunks)
    else:
        with pytest.raises(ValueError, match=message):
            load_rank(config, tmp_path, ranks, chunks)


def test_a_wrong_parameter_is_named(folders):
    config, ranks = CONFIGS["qwen3"], ParallelRanks(0, 2, tp=2)
    weights = load_file(folders["qwen3"] / "model.safetensors")
    (chunk,) = expected_chunks(config, weights, ranks, ModuleNames(), even_layers(ranks))
    name = "decoder.layers.2.self_attention.linear_qkv.weight"
    with pytest.raises(ValueError, match=rf"no parameter '{name}' \[36, 16\]"):
        load_rank(config, folders["qwen3"], ranks, [{k: v for k, v in chunk.items() if k != name}])
    with pytest.raises(ValueError, match=rf"'{name}' of chunk 0 has shape \[72, 16\].*gives \[36, 16\]"):
        load_rank(config, folders["qwen3"], ranks, [chunk | {name: torch.zeros(72, 16)}])
    with pytest.raises(ValueError, match=r"'decoder.odd' \[2\] of chunk 0 comes from no"):
        load_rank(config, folders["qwen3"], ranks, [chunk | {"decoder.odd": torch.zeros(2)}])


def test_a_critic_has_a_value_head_instead_of_the_language_models(folders, tmp_path):
    config, ranks = CONFIGS["llama"], ParallelRanks(1, 2, pp=2)
    weights = load_file(folders["llama"] / "model.safetensors")
    (chunk,) = expected_chunks(config, weights, ranks, ModuleNames(), even_layers(ranks))
    head = {"output_layer.weight": torch.full((1, HIDDEN), 3.0), "output_layer.bias": torch.full((1,), 3.0)}
    module = module_of(chunk | head)
    load_hf_weights([module], config, folders["llama"], ranks, value_head=True)
    assert not module.output_layer.weight.any()
    assert not module.output_layer.bias.any()
    score = torch.randn(1, HIDDEN)
    save_file(weights | {"score.weight": score}, tmp_path / "model.safetensors")
    load_hf_weights([module], config, tmp_path, ranks, value_head=True)
    assert torch.equal(module.output_layer.weight, score)
    assert torch.equal(module.decoder.final_layernorm.weight, weights["model.norm.weight"])
    names = hf_tensors(config, value_head=True)
    assert names.keys() - weights.keys() == {"score.weight", "score.bias"}
    assert weights.keys() - names.keys() == {"lm_head.weight"}


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(ValueError, match="model_type 'gemma2'"):
        describe(type("Config", (), {"model_type": "gemma2"})(), ParallelRanks())
    with pytest.raises(ValueError, match="attention_bias"):
        describe(LlamaConfig(**BASE, attention_bias=True), ParallelRanks())
    with pytest.raises(ValueError, match=r"q_proj.weight.*must be divisible by 7"):
        describe(CONFIGS["llama"], ParallelRanks(0, 7, tp=7))
    with pytest.raises(ValueError, match=r"4 experts must be divisible by expert_model_parallel_size \(3\)"):
        describe(CONFIGS["mixtral"], ParallelRanks(0, 3, ep=3))
