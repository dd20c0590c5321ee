"""Operations from the modules of a config, against what torch counts while models run."""

import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2MoeConfig, Qwen3Config
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshrl.balance import flops_workload
from meshrl.config.engine import ModelConfig
from meshrl.config.families import SEEING
from meshrl.data.batch import DataProto
from meshrl.data.images import IMAGES, as_png
from meshrl.engines.training_engine import Engine
from meshrl.models.vision import find_sight, tower_of
from meshrl.parallel.linear_attention import DeltaRule
from meshrl.telemetry.flops import COUNTED, ModelShape, utilisation, utilisation_metrics
from meshrl.telemetry.hardware import known_peak
from meshrl.telemetry.time_ledger import Ledger
from meshrl.workers.generation import Answering

LENGTH = 40
WITH_STATES = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"}
COMPOSITE = {"qwen3_5", "qwen3_5_moe"}  # their language model is a type of its own
PLAIN = sorted(COUNTED - WITH_STATES - COMPOSITE - {*SEEING})


@pytest.fixture
def pairs_counted():
    """Attention that multiplies nothing, and notes the operations of the pairs that its mask leaves."""
    noted = []

    def attend(module, query, key, value, attention_mask, **options):
        kept = attention_mask[0, 0, :, : key.shape[2]]
        pairs = int(kept.sum() if kept.dtype == torch.bool else (kept > -1).sum())
        heads, size = query.shape[1], query.shape[3] + value.shape[3]
        noted.append(2 * heads * size * pairs)
        return torch.zeros(query.shape[0], query.shape[2], heads, value.shape[3]), None

    ALL_ATTENTION_FUNCTIONS.register("pairs_counted", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("pairs_counted", eager_mask)
    yield noted
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        functions._global_mapping.pop("pairs_counted")


def counted(run):
    """Operations of matrix products, those of attention among them, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def all_pairs(shape):
    """Plain attention computes every pair and masks some afterwards."""
    return 4 * shape.attention_width * LENGTH * LENGTH * len(shape.windows)


@pytest.mark.parametrize("family", PLAIN)
def test_a_forward_of_every_family_is_what_torch_counts(pairs_counted, tiny_config, family):
    """Feed-forwards with a gate and without, grouped and latent attention, windows, routed and shared experts."""
    config = tiny_config(family)
    shape = ModelShape.of(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="pairs_counted").eval()
    if "experts" in str(model):
        model.set_experts_implementation("eager")  # which visits no more experts than are chosen
    products = counted(lambda: model(torch.arange(LENGTH)[None] % 48, use_cache=False))
    assert len(pairs_counted) == config.num_hidden_layers
    assert shape.forward(np.array([LENGTH])) == pytest.approx(products + sum(pairs_counted), rel=1e-6)
    values = ModelShape.of(config, values=True)
    assert values.head_weights == config.hidden_size
    assert values.linear_weights == shape.linear_weights


# Their configs have other names for the sizes.
OTHER_NAMES = {"gpt2", "gpt_bigcode", "opt"}


@pytest.mark.parametrize("family", sorted({*PLAIN} | WITH_STATES))
def test_the_workload_of_balancing_is_that_of_the_modules(tiny_config, family):
    """It is computed from fields of a config alone, and takes all layers for ones that look all the way back."""
    config = CONFIG_MAPPING[family](num_hidden_layers=4) if family in WITH_STATES else tiny_config(family)
    if family in OTHER_NAMES:
        with pytest.raises(ValueError, match="has no intermediate_size, which workload 'flops' needs"):
            flops_workload(config)
        return
    shape = ModelShape.of(config)
    shape = replace(shape, windows=(None,) * len(shape.windows))
    for length in (4, 60, 4000):
        lengths = np.array([length])
        assert flops_workload(config)(lengths)[0] == pytest.approx(shape.forward(lengths), rel=0.1)


@pytest.mark.parametrize("family", sorted(COMPOSITE))
def test_the_language_model_alone_is_loaded_of_these(family):
    config = CONFIG_MAPPING[family](text_config={"num_hidden_layers": 4, "hidden_size": 64})
    assert ModelShape.of(config) == ModelShape.of(config.text_config)


def test_families_whose_names_hide_much_are_among_them():
    assert {"apertus", "nemotron", "deepseek_v3", "gpt_oss", "qwen2_moe", "gemma2", *SEEING, *WITH_STATES} <= COUNTED


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_training_is_three_forwards(make_lm, family):
    model = make_lm(family, attention="eager").train()
    ids = torch.arange(LENGTH)[None] % 40
    shape = ModelShape.of(model.config)
    linear = 2 * LENGTH * (shape.linear_weights + shape.head_weights)
    attention = shape.forward(np.array([LENGTH])) - linear
    assert shape.training(np.array([LENGTH])) == 3 * (linear + attention)
    assert 3 * (linear + all_pairs(shape)) == counted(lambda: model(ids).logits.sum().backward())


GRIDS = [(1, 4, 4), (1, 8, 16), (1, 10, 6), (1, 22, 14)]


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("grids", [GRIDS[:1], GRIDS[2:3], GRIDS], ids=["small", "odd", "several"])
def test_a_look_at_images_is_what_torch_counts(seeing_folder, family, grids):
    model = AutoModelForImageTextToText.from_pretrained(seeing_folder(family), attn_implementation="eager").eval()
    tower, vision = ModelShape.of(model.config).tower, model.config.vision_config
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    patches = sum(rows * columns for _, rows, columns in grids)
    pixels = torch.zeros(patches, channels * vision.temporal_patch_size * vision.patch_size**2)
    with torch.no_grad():
        found = counted(lambda: model.base_model.get_image_features(pixels, torch.tensor(grids)))
    assert tower.forward(grids) == pytest.approx(found, rel=0.02)
    assert ModelShape.of(model.config).windows == (None,) * model.config.get_text_config().num_hidden_layers


def test_cached_tokens_cost_only_what_looks_at_them():
    shape = ModelShape.of(Qwen3Config(num_hidden_layers=3))
    lengths, starts = np.array([9, 30, 4]), np.array([5, 8, 3])
    whole = shape.forward(lengths, 0)
    assert shape.forward(lengths, 0, starts) == pytest.approx(whole - shape.forward(starts, 0))
    assert shape.forward(lengths, 7) - whole == 2 * shape.head_weights * 7


def test_packed_documents_add_up_and_differ_from_one_long_one():
    shape = ModelShape.of(Qwen3Config(num_hidden_layers=2))
    apart = shape.forward(np.array([100, 28]))
    assert apart == pytest.approx(shape.forward(np.array([100])) + shape.forward(np.array([28])))
    assert apart < shape.forward(np.array([128]))


def test_sparse_layers_shared_experts_and_values():
    config = Qwen2MoeConfig(
        num_hidden_layers=3, decoder_sparse_step=2, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[]
    )
    hidden = config.hidden_size
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * hidden * (hidden // config.num_attention_heads) * heads
    dense = 3 * hidden * config.intermediate_size
    width = 2 * config.moe_intermediate_size + config.shared_expert_intermediate_size
    sparse = 3 * hidden * width + hidden * 8 + hidden
    shape = ModelShape.of(config, values=True)
    assert shape.linear_weights == 3 * attention + 2 * dense + sparse
    assert shape.head_weights == hidden


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"])
def test_layers_with_a_state(make_lm, family):
    """Their weights by the model's own modules; the state itself by what torch counts of a token's step."""
    model = make_lm(family)
    shape = ModelShape.of(model.config)
    assert shape.windows == (None,)
    layers = model.base_model.layers
    owners = (torch.nn.Linear, torch.nn.Conv1d)
    weights = sum(m.weight.numel() for layer in layers for m in layer.modules() if isinstance(m, owners))
    if family in ("qwen3_next", "qwen3_5_moe"):  # of four experts a token meets two, and a router of four
        weights += len(layers) * (2 * 3 * 32 * 16 + 32 * 4)
    mixers = [m for m in model.modules() if hasattr(m, "A_log")]
    rule = DeltaRule(mixers[0].conv1d.weight[:, 0], 2, 4, 6, 10)
    row = torch.randn(1, len(rule.conv)), torch.randn(1, 4), torch.randn(1, 4)
    read_twice = counted(lambda: rule.step(*row, rule.no_states(1, row[0])))
    assert 2 * shape.linear_weights == 2 * weights + len(mixers) * read_twice * 3 // 2  # and written once


def share_of(act):
    """The operations that a call notes."""
    ledger = Ledger()
    with ledger.serving("act"):
        act()
    return ledger.take().counts["flops/act"]


def photograph(height, width, seed=0):
    return as_png(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_an_engine_counts_its_images_once(seeing_folder, monkeypatch, trained, adapters):
    """Four samples of two images: with a gradient three looks at each, or two where only inputs have one."""
    folder = seeing_folder("qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    tower_of(model).requires_grad_(trained)
    sight = find_sight(model.config, ModelConfig(path=str(folder)))
    engine = SimpleNamespace(
        _shape=None, _is_measured=False, hf_model=model, head="lm", has_adapters=adapters, dp_size=1, sight=sight
    )
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    images = [photograph(32, 48), photograph(64, 16, seed=1)]
    mask = torch.ones(4, 9, dtype=torch.long)
    data = DataProto.from_dict(
        {"attention_mask": mask, "response_mask": mask[:, :3]}, {IMAGES: [tuple(images[:1]), tuple(images)] * 2}
    )
    bare = DataProto.from_dict(dict(data.batch.items()))
    shape = ModelShape.of(model.config)
    grids = [sight.reader.grid(image) for image in images]
    assert grids == [(1, 8, 12), (1, 16, 4)] == [sight.reader.pixels(image).grid for image in images]
    looks = shape.tower.forward(grids)
    for forward_only, times in ((True, 1), (False, 1 if not trained else 2 if adapters else 3)):
        text, both = (share_of(partial(Engine.count_flops, engine, batch, forward_only)) for batch in (bare, data))
        assert both - text == pytest.approx(times * looks)


def test_a_rollout_counts_its_images_once(seeing_folder):
    folder = seeing_folder("qwen3_vl")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    shape, sight = ModelShape.of(model.config), find_sight(model.config, ModelConfig(path=str(folder)))
    config = SimpleNamespace(is_elsewhere=True, replica_size=1)
    answering = SimpleNamespace(shape=shape, sight=sight, config=config)
    ids = torch.ones(3, 10, dtype=torch.long)
    output = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": ids, "responses": ids[:, 6:], "response_mask": ids[:, 6:]}
    )
    one, other = photograph(32, 48), photograph(64, 16, seed=1)
    images = np.fromiter([(one,), (one,), (other,)], dtype=object)
    found = share_of(lambda: Answering._count(answering, output, images))
    # Two prompts, though they are the same tokens; of each answer all tokens but the last are looked at.
    lengths, starts = np.array([9, 9, 9]), np.array([6, 6, 6])
    text = shape.forward(np.array([6, 6]), 0) + shape.forward(lengths, 12, starts)
    assert found == pytest.approx(text + shape.tower.forward([(1, 8, 12), (1, 16, 4)]))


def test_an_engine_says_once_that_it_counts_nothing(monkeypatch, caplog):
    engine = SimpleNamespace(
        _shape=None, _is_measured=False, hf_model=SimpleNamespace(config=CONFIG_MAPPING["mamba"]()), head="lm"
    )
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    ledger = Ledger()
    with caplog.at_level(logging.WARNING), ledger.serving("act"):
        for _ in range(3):
            Engine.count_flops(engine, DataProto(), True)
    assert [record.getMessage() for record in caplog.records] == [
        "the operations of model_type 'mamba' are not counted: perf/tflops/* and mfu/* are left out"
    ]
    assert "flops/act" not in ledger.take().counts


@pytest.mark.parametrize("family", ["mamba", "jetmoe", "llama4_text", "deepseek_v32", "recurrent_gemma", "bert"])
def test_families_that_are_not_known_have_no_number(family):
    assert ModelShape.of(CONFIG_MAPPING[family]()) is None


def test_a_config_of_somebodys_own_has_no_number():
    assert ModelShape.of(SimpleNamespace(model_type="mine", hidden_size=8, num_hidden_layers=2)) is None


def test_peaks_and_utilisation():
    assert known_peak("NVIDIA H200") == 989e12
    assert known_peak("NVIDIA GeForce RTX 4090") is None
    assert utilisation(1e12, 2.0, 4, 1e12) == pytest.approx(0.125)
    with pytest.raises(ValueError, match="above 0"):
        utilisation(1.0, 0.0, 1, 1.0)


def test_phases_last_as_long_as_on_their_slowest_rank():
    generated = {"flops/generate_sequences": 1e12}
    counts = {
        ("actor_rollout_ref", 0): generated | {"flops/update_actor": 3e12, "seconds/update_actor": 1.0},
        ("actor_rollout_ref", 1): generated | {"flops/update_actor": 5e12, "seconds/update_actor": 2.0},
    }
    booked = {key: {"generate": 0.5, "prefill": 1.5, "sync": 9.0} for key in counts}
    found = utilisation_metrics(counts, booked, peak=8e12)
    assert found["perf/tflops/update_actor"] == pytest.approx(8 / (2 * 2))
    assert found["mfu/update_actor"] == pytest.approx(8 / (2 * 2 * 8))
    assert found["mfu/gen"] == pytest.approx(2 / (2 * 2 * 8))
    assert not [name for name in utilisation_metrics(counts, booked, None) if name.startswith("mfu")]
