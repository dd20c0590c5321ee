"""The FSDP engine on every axis, and every pair of axes, against one process running Hugging Face's own model."""

import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import psutil
import pytest
import torch
from megatron_trials import write_small_model
from process_group import ON_GPU, own_device
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForImageTextToText

from meshrl.config.engine import EngineConfig, ModelConfig
from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.models.tiny import make_tiny_seeing_model
from meshrl.tools.verify import (
    FAMILIES,
    SMALL,
    TOLERANCE,
    Trial,
    differences,
    run_engine,
    run_reference,
    small_config,
    write_model,
)

SP, CP = "ulysses_sequence_parallel_size", "context_parallel_size"
LAYOUTS = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "fsdp4": (4, {}),
    "ddp2-fsdp2": (4, {"fsdp_size": 2}),
    "ddp2": (2, {"fsdp_size": 1}),
    "ddp2-sp2": (4, {"fsdp_size": 2, SP: 2}),
    "ddp2-cp2": (4, {"fsdp_size": 2, CP: 2}),
    # Copies within a sequence; shards of two sequences; copies of whole sequences.
    "ddp2-sp4": (4, {"fsdp_size": 2, SP: 4}),
    "ddp3-cp3": (6, {"fsdp_size": 2, CP: 3}),
    "ddp2-fsdp4-sp4": (8, {"fsdp_size": 4, SP: 4}),
    "ddp2-sp2-cp2": (4, {"fsdp_size": 2, SP: 2, CP: 2}),
    "sp2": (2, {SP: 2}),
    "sp4": (4, {SP: 4}),  # with 2 key-value heads
    "cp2": (2, {CP: 2}),
    "cp4": (4, {CP: 4}),
    "fsdp2-sp2": (4, {SP: 2}),
    "fsdp2-cp2": (4, {CP: 2}),
    "sp2-cp2": (4, {SP: 2, CP: 2}),
    "fsdp1": (2, {"strategy": "fsdp"}),
    "fsdp1-hybrid": (4, {"strategy": "fsdp", "fsdp_size": 2}),
    "fsdp1-sp2": (4, {"strategy": "fsdp", SP: 2}),
    "fsdp1-ddp2": (2, {"strategy": "fsdp", "fsdp_size": 1}),
    "fsdp1-ddp2-sp2": (4, {"strategy": "fsdp", "fsdp_size": 2, SP: 2}),
    "fsdp1-cp2": (2, {"strategy": "fsdp", CP: 2}),
}
EXTRAS = {
    "plain": {},
    "offload": {"param_offload": True, "optimizer_offload": True},
    "cpu-policy": {"offload_policy": True},
    "checkpointing": {"checkpointing": True},
    "activations": {"activation_offload": True},
    "lora": {"lora_rank": 4},
    "lora-cpu-policy": {"lora_rank": 4, "offload_policy": True},
    "lora-latent": {"lora_rank": 4, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]},
    "by-size": {"min_num_params": 3000},
    "one-unit": {"disable": True},
    "prefetch": {"forward_prefetch": True, "reshard_after_forward": False},
    "padded": {"use_remove_padding": False},
    # The batches say to which experts most of their tokens go, and are to find out where they would go by themselves.
    "routed": {"routed": True},
    "routed-checkpointing": {"routed": True, "checkpointing": True},
    "routed-padded": {"routed": True, "use_remove_padding": False},
    "frozen-tower": {"freeze_vision_tower": True},
}
# A covering set: what it covers is asserted in test_every_axis_and_pair_is_in_the_grid.
PLAIN = {
    "llama": ("one", "ddp2", "cp4", "fsdp1", "ddp3-cp3", "ddp2-sp2-cp2"),
    "qwen2": ("fsdp2", "sp2", "fsdp2-cp2", "fsdp1-hybrid", "ddp2-sp4", "fsdp1-ddp2-sp2"),
    "qwen3": ("fsdp4", "sp4", "fsdp2-sp2", "fsdp1-sp2", "ddp2-fsdp4-sp4"),
    "qwen3_moe": ("ddp2-fsdp2", "cp2", "sp2-cp2", "fsdp1-ddp2", "fsdp1-cp2", "ddp2-sp2"),
}
GRID = [
    *[(family, layout, "plain") for family, layouts in PLAIN.items() for layout in layouts],
    *[("qwen3", layout, "checkpointing") for layout in ("ddp2-fsdp2", "fsdp1")],
    ("qwen3_moe", "sp2-cp2", "checkpointing"),
    *[("llama", layout, "lora") for layout in ("one", "ddp2-fsdp2", "fsdp1")],
    ("qwen3_moe", "sp2-cp2", "lora"),
    ("qwen2", "fsdp2", "lora"),  # its biases come between a weight and its adapters
    ("qwen3_moe", "ddp2-sp2", "offload"),
    ("qwen3", "ddp2-cp2", "offload"),
    ("qwen2", "ddp2-fsdp2", "cpu-policy"),
    ("llama", "sp2-cp2", "cpu-policy"),
    *[("llama", "fsdp2", extra) for extra in ("activations", "by-size", "one-unit", "prefetch", "lora-cpu-policy")],
    *[("qwen3", layout, "padded") for layout in ("one", "ddp2-fsdp2", "fsdp1")],
    # Weights in buffers, queries and values of unequal sizes.
    ("deepseek_v3", "sp2-cp2", "plain"),
    ("deepseek_yarn", "fsdp2", "checkpointing"),
    ("deepseek_v3", "fsdp2", "lora-latent"),
    *[("qwen3_moe", layout, "routed") for layout in ("sp2-cp2", "fsdp1-sp2")],
    ("deepseek_v3", "fsdp2-sp2", "routed-checkpointing"),
    ("qwen3_moe", "ddp2", "routed-padded"),
    ("many_experts", "sp2", "routed"),  # routes of two bytes, which collectives do not know
    # Images before some prompts; of two ranks with samples of their own one has none.
    *[("qwen3_vl", layout, "plain") for layout in ("ddp2-fsdp2", "sp2-cp2", "fsdp1")],
    *[("qwen3_vl", "fsdp2", extra) for extra in ("checkpointing", "lora", "offload", "frozen-tower")],
    *[("qwen2_5_vl", layout, "plain") for layout in ("fsdp2", "cp2")],
    ("qwen2_5_vl", "fsdp1", "frozen-tower"),
    ("qwen2_vl", "fsdp2-sp2", "plain"),
    ("qwen3_vl_moe", "fsdp2-cp2", "plain"),
    # Layers with a state among those that attend.
    *[("qwen3_5_text", layout, "plain") for layout in ("sp4", "fsdp2-cp2")],
    *[("qwen3_5_text", "fsdp2", extra) for extra in ("lora", "padded")],
    ("qwen3_next", "sp2-cp2", "plain"),
    ("qwen3_next", "ddp2-sp2", "checkpointing"),
    ("olmo_hybrid", "cp2", "plain"),
    ("olmo_hybrid", "fsdp1", "plain"),
]
LATENT = ("deepseek_v3", "deepseek_yarn")
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16
}  # fmt: skip
STATEFUL = {
    "qwen3_5_text": {},
    "qwen3_next": EXPERTS,
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "pad_token_id": None, "eos_token_id": 1},
}
SEEING = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl_moe")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    small = {family: write_model(small_config(family), root / family) for family in FAMILIES}
    many = small_config("qwen3_moe")
    many.num_experts, many.num_hidden_layers = 260, 1
    small["many_experts"] = write_model(many, root / "many_experts")
    small |= {family: write_small_model(family, root / family) for family in LATENT}
    for family, own in STATEFUL.items():
        config = AutoConfig.for_model(family, **(SMALL | LINEAR | own))
        small[family] = write_model(config, root / family)
    return small | {family: write_seeing_model(family, root / family) for family in SEEING}


def write_seeing_model(family, folder):
    """One with biases: as they begin, at zero, two steps leave them so small that rounding shows."""
    make_tiny_seeing_model(folder, "abcdefgh", family=family)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for name, param in model.named_parameters():
            if name.endswith(".bias"):
                param.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def references():
    return {}


def make_trial(folder, layout, extra):
    world, axes = LAYOUTS[layout]
    engine = EngineConfig()
    engine.fsdp_config.mixed_precision.param_dtype = "fp32"
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=False)
    for name, value in (axes | EXTRAS[extra]).items():
        if name == "checkpointing":
            model.enable_gradient_checkpointing = value
        elif name == "routed":
            continue
        elif name == "activation_offload":
            model.enable_activation_offload = value
        else:
            owners = (engine, engine.fsdp_config, engine.fsdp_config.wrap_policy, model)
            setattr(next(owner for owner in owners if hasattr(owner, name)), name, value)
    return world, Trial(model, engine, with_routes=EXTRAS[extra].get("routed", False))


def run_here(trial):
    return run_engine(trial, str(own_device()))


@pytest.mark.parametrize(("family", "layout", "extra"), GRID, ids=str)
def test_same_numbers_as_one_process(ranks, folders, references, family, layout, extra):
    world, trial = make_trial(folders[family], layout, extra)
    key = (family, trial.model.lora_rank, trial.with_routes, extra == "frozen-tower")
    if key not in references:
        references[key] = run_reference(trial), run_reference(trial, perturb=1e-3)
    expected, perturbed = references[key]
    outcomes = ranks(world).run(run_here, trial)
    found = differences(outcomes, expected)
    assert max(found.values()) <= TOLERANCE, found
    control = differences(outcomes, perturbed)
    assert min(value for name, value in control.items() if found[name] > 0) > TOLERANCE, control


# Every extra with shards and with FSDP1, every axis with some extra.
IN_8_BITS = [
    ("ddp2-fsdp2", "plain"), ("sp2", "checkpointing"), ("cp2", "lora"), ("fsdp2", "lora"),
    ("fsdp1", "plain"), ("fsdp1", "checkpointing"), ("fsdp1", "lora"),
]  # fmt: skip


# Lengths of answers, each another batch: whether a number is rounded up or down hangs on its last digits where it lies
# between two 8-bit floats, and on some processor that happens in some batch. What is wrong is so in every batch.
BATCHES_IN_8_BITS = (13, 12, 11)


@pytest.mark.skipif(ON_GPU, reason="GPUs round to 8 bits from bfloat16 alone, which hides what a layout changes")
@pytest.mark.parametrize(("layout", "extra"), IN_8_BITS)
def test_products_in_8_bits_are_those_of_one_process(ranks, folders, references, layout, extra):
    """To the last digits, as long as these do not decide how a number is rounded: after an update some are."""
    family = "llama" if extra == "lora" else "qwen3"
    world, trial = make_trial(folders[family], layout, extra)
    _, alone = make_trial(folders[family], "one", extra)
    for each in (trial, alone):
        each.engine.fsdp_config.mixed_precision.product_dtype = "fp8"
    for max_response in BATCHES_IN_8_BITS:
        trial, alone = (replace(each, max_response=max_response) for each in (trial, alone))
        key = ("eight", extra, max_response)
        if key not in references:
            references[key] = ranks(1).run(run_here, alone)[0], run_reference(alone)
        expected, unrounded = references[key]
        outcomes = ranks(world).run(run_here, trial)
        found = differences(outcomes, expected)
        if max(found["log-probs"], found["gradients"]) <= TOLERANCE:
            break
    assert max(found["log-probs"], found["gradients"]) <= TOLERANCE, found
    assert max(found.values()) < 0.02, found
    # The control: without rounding it is another model.
    control = differences(outcomes, unrounded)
    assert control["log-probs"] > 1e-3, control
    assert layout == "fsdp1" or control["gradients"] > 0.05, control  # it has none by the weights' names


def refused_on_gpu(trial):
    """What an engine says that is to compute on a GPU; it does so before it looks for one."""
    engine = FSDPEngine(trial.model, trial.engine, None, device=torch.device("cuda"))
    try:
        engine.initialize()
    except ValueError as error:
        return str(error)
    return None


def test_products_in_8_bits_are_refused_where_they_gain_nothing(ranks, folders):
    _, trial = make_trial(folders["qwen3"], "one", "plain")
    mixed = trial.engine.fsdp_config.mixed_precision
    mixed.product_dtype = "fp8"
    assert "not param_dtype=fp32: set bf16" in ranks(1).run(refused_on_gpu, trial)[0]
    mixed.param_dtype = "bf16"
    assert "without compiled layers: set use_torch_compile=true" in ranks(1).run(refused_on_gpu, trial)[0]


def axes_of(layout):
    """Of FSDP2: `data` are ranks with samples of their own, `copies` those with the same shard."""
    world, options = LAYOUTS[layout]
    sp, cp = options.get(SP, 1), options.get(CP, 1)
    shards = options.get("fsdp_size", world)
    sizes = {"data": world // (sp * cp), "shards": shards, "copies": world // shards, "sp": sp, "cp": cp}
    return set() if "strategy" in options else {name for name, size in sizes.items() if size > 1}


AXES = {"data", "shards", "copies", "sp", "cp"}


def test_every_axis_and_pair_is_in_the_grid():
    assert {layout for _, layout, _ in GRID} == set(LAYOUTS)
    assert {extra for _, _, extra in GRID} == set(EXTRAS)
    assert {family for family, _, _ in GRID} == {*FAMILIES, *LATENT, *SEEING, *STATEFUL, "many_experts"}
    assert len(GRID) == len(set(GRID))
    together = {pair for _, layout, _ in GRID for pair in combinations(sorted(axes_of(layout)), 2)}
    assert together == set(combinations(sorted(AXES), 2))
    for family in FAMILIES:
        assert set().union(*(axes_of(layout) for own, layout, _ in GRID if own == family)) == AXES
    for extra in ("plain", "offload", "cpu-policy", "checkpointing", "lora"):
        assert set().union(*(axes_of(layout) for _, layout, own in GRID if own == extra)) == AXES
    # Every family, and every extra that it knows, with FSDP1.
    old = [(family, extra) for family, layout, extra in GRID if "strategy" in LAYOUTS[layout][1]]
    assert {family for family, _ in old} >= set(FAMILIES)
    assert {extra for _, extra in old} == {"plain", "checkpointing", "lora", "padded", "routed", "frozen-tower"}


def elements_held(trial):
    """How many elements of parameters, gradients and moments this rank holds."""
    engine = FSDPEngine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"))
    engine.initialize()
    data = trial.batches(61)[0].chunk(engine.dp_size)[engine.dp_rank]
    data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 1000}
    engine.forward_backward_batch(data, lambda outputs, _: (outputs["log_probs"].sum(), {"one": torch.ones(())}))
    params = list(engine.module.parameters())
    grads = [param.grad for param in params]
    engine.optimizer_step()
    moments = [engine.optimizer.state[param]["exp_avg"] for param in params]

    def count(tensors):
        parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        return sum(part.numel() for part in parts)

    return [count(tensors) for tensors in (params, grads, moments)]


HELD = {
    "sp2": 2, "cp2": 2, "sp2-cp2": 4, "fsdp2-sp2": 4, "fsdp2-cp2": 4, "ddp2-sp2": 2, "ddp2-sp4": 2, "ddp3-cp3": 2,
    "ddp2-fsdp4-sp4": 4, "fsdp1-sp2": 4, "fsdp1-ddp2-sp2": 2,
}  # fmt: skip


@pytest.mark.parametrize("layout", HELD)
def test_every_rank_holds_its_share_of_the_model(ranks, folders, layout):
    """Over ranks that share a sequence, too: parameters, gradients and moments are cut by `fsdp_size` alone."""
    world, trial = make_trial(folders["llama"], layout, "plain")
    sizes = [t.numel() for file in folders["llama"].glob("*.safetensors") for t in load_file(file).values()]
    whole, found = sum(sizes), ranks(world).run(elements_held, trial)
    for kind in range(3):
        held = [counts[kind] for counts in found]
        # Whole rows: not every rank has as many. FSDP1 pads each unit to a multiple of its shards.
        padding = 100 if trial.engine.strategy == "fsdp" else 0
        assert 0 <= sum(held) - whole * world / HELD[layout] <= padding
        assert max(held) <= 1.02 * whole / HELD[layout]


def moved_and_used(trial):
    """Whether FSDP1's parts are where they were moved to, before and after a forward, and of random weights too."""
    engine = FSDPEngine(trial.model, trial.engine, None, device=torch.device("cpu"))
    engine.initialize()
    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(engine.module)]
    before = [handle.flat_param.data_ptr() for handle in handles]
    engine.module.to = lambda device: engine.module._apply(torch.clone)  # stands for the way to another device and back
    engine.sharding.move(torch.device("cpu"))
    moved = [handle.flat_param.data_ptr() for handle in handles]
    data = trial.batches(61)[0].chunk(engine.dp_size)[engine.dp_rank]
    data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 1000}
    engine.forward(data)
    return before, moved, [handle.flat_param.data_ptr() for handle in handles]


@pytest.mark.parametrize("random", [False, True])
def test_fsdp1_goes_on_with_what_was_moved(ranks, folders, random):
    world, trial = make_trial(folders["qwen3"], "fsdp1", "plain")
    trial.model.random_init = random
    for before, moved, after in ranks(world).run(moved_and_used, trial):
        assert moved == after
        assert all(old != new for old, new in zip(before, after, strict=True))


def copied_after_use(trial):
    """The largest difference between an engine that has answered and the trained one whose weights it took since."""
    trained = FSDPEngine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"))
    copy = FSDPEngine(trial.model, trial.engine, None, device=torch.device("cpu"))
    data = trial.batches(61)[0].chunk(trained.dp_size)[trained.dp_rank]
    data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 1000}

    def loss(outputs, _):
        value = outputs["log_probs"].sum()
        return value, {"loss": value}

    for engine in (trained, copy):
        engine.initialize()
        engine.forward(data)
    trained.optimizer_zero_grad()
    trained.forward_backward_batch(data, loss)
    trained.optimizer_step()
    before = copy.forward(data)["log_probs"]
    copy.copy_weights_from(trained)
    after, wanted = copy.forward(data)["log_probs"], trained.forward(data)["log_probs"]
    return float((before - wanted).abs().max()), float((after - wanted).abs().max())


@pytest.mark.parametrize(
    ("layout", "extra", "originals"),
    [("fsdp2", "plain", False), ("fsdp2", "prefetch", False), ("fsdp1", "plain", False), ("fsdp1", "plain", True)],
)
def test_a_reference_is_refreshed_after_it_has_answered(ranks, folders, layout, extra, originals):
    """Also where a forward pass leaves its weights gathered."""
    world, trial = make_trial(folders["llama"], layout, extra)
    trial.engine.fsdp_config.use_orig_params = originals
    for moved, left in ranks(world).run(copied_after_use, trial):
        assert moved > 1e-4
        assert left == 0


def bytes_kept(trial):
    """What flattened parameters hold beside their shards: after a step, after answers alone, and after a move."""
    trained = FSDPEngine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"))
    answers = FSDPEngine(trial.model, trial.engine, None, device=torch.device("cpu"))
    data = trial.batches(61)[0].chunk(trained.dp_size)[trained.dp_rank]
    data.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 1000}
    found = []
    for engine in (trained, answers):
        engine.initialize()
        engine.forward(data)
        if engine is trained:
            engine.forward_backward_batch(
                data, lambda outputs, _: (outputs["log_probs"].sum(), {"one": torch.ones(())})
            )
            engine.optimizer_step()
            engine.optimizer_zero_grad()
        for _ in range(2):
            flat = [h.flat_param for h in engine.sharding._handles()]
            gradients = sum(0 if f.grad is None else f.grad.untyped_storage().nbytes() for f in flat)
            found.append(gradients + sum(f._full_param_padded.untyped_storage().nbytes() for f in flat))
            engine.to("cpu")
    return found


@pytest.mark.parametrize("originals", [False, True])
def test_fsdp1_keeps_neither_gradients_nor_gathered_weights(ranks, folders, originals):
    world, trial = make_trial(folders["llama"], "fsdp1", "plain")
    trial.engine.fsdp_config.use_orig_params = originals
    for found in ranks(world).run(bytes_kept, trial):
        assert found == [0, 0, 0, 0]


def test_micro_batches_really_accumulate(folders):
    _, trial = make_trial(folders["llama"], "one", "plain")
    lengths = trial.batches(61)[0].batch["attention_mask"].sum(1)
    assert lengths.sum() > 2 * trial.tokens_per_micro_batch
    assert len(set(lengths.tolist())) > 3


def peak_while_loading(trial):
    """By how much this rank's memory grew at most while it loaded, and how large its shard is."""
    torch.zeros(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = psutil.Process(os.getpid()).memory_info().rss
    engine = FSDPEngine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"))
    engine.initialize()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    shard = sum(p.to_local().numel() * 4 for p in engine.module.parameters())
    return int(peak.split()[1]) * 1024 - before, shard


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """A model of more than 200 MiB in float32, and that size in bytes."""
    config = small_config("llama")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 1024, 4096, 3
    config.vocab_size, config.head_dim = 8000, 128
    folder = write_model(config, tmp_path_factory.mktemp("large"))
    size = 0
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        size += sum(4 * tensor.numel() for tensor in tensors.values())
        # In another type than the model's, whoever loads all of it also has all of it.
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return folder, size


@pytest.mark.parametrize("extra", ["plain", "lora"])
def test_each_rank_reads_only_its_slices(ranks, large_folder, extra):
    """Loading costs a rank about its shard, not the model: the file is mapped and only the rows needed are read."""
    folder, size = large_folder
    _, trial = make_trial(folder, "fsdp4", extra)
    for grown, shard in ranks(4).run(peak_while_loading, trial):
        assert shard < size / 4 * 1.05
        # the shard and its padded copy, and the mapped pages of the slices
        assert grown < 3 * shard + 32 * 2**20
        assert grown < 0.9 * size
