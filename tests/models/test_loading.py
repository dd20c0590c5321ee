"""Models and tokenizers from folders, and clear words where something is missing."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from meshrl.config.families import SEEING
from meshrl.config.model_folder import misfit_problems, stored_tensors, type_problem
from meshrl.models.loading import (
    empty_causal_lm,
    empty_model,
    load_model,
    load_model_config,
    load_tokenizer,
    new_causal_lm,
    stop_token_ids,
    torch_dtype,
)
from meshrl.parallel.attention import ATTENTION_NAME, PackedSequences
from meshrl.telemetry.flops import COUNTED

# Families whose attention has sinks, which torch's own function does not take.
NO_SDPA = {"gpt_oss"}


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


def change_json(file, **fields):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | fields))


def test_damaged_files_are_named(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=rf"{weights} has {len(whole) - 100} of {len(whole)} bytes"):
        load_model(folder, "sdpa")
    weights.write_bytes(whole)
    for name, load in (("tokenizer.json", load_tokenizer), ("config.json", load_model_config)):
        (folder / name).write_text('{"a": ')
        with pytest.raises(ValueError, match=rf"{folder / name} is not valid JSON"):
            load(folder)


def test_a_model_to_be_filled_has_no_quantized_weights(folder):
    """Numbers in FP8 come with scales beside them: read by slices as they are, they would be other weights."""
    change_json(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ValueError, match=r"quant_method=fp8.*bfloat16"):
        empty_model(folder, "sdpa")


def test_a_second_model_of_a_config_leaves_the_first_ones_attention_alone(tiny_model_folder):
    """Layers read it from the config at every call: packed documents would see each other."""
    first = load_model(tiny_model_folder, ATTENTION_NAME)
    for make in (new_causal_lm, empty_causal_lm):
        second = make(first.config, "sdpa")
        assert second.config._attn_implementation == "sdpa"
        assert first.config._attn_implementation == ATTENTION_NAME


def test_the_loaded_model_is_the_saved_one_with_our_attention(tiny_model_folder):
    ours = load_model(tiny_model_folder, ATTENTION_NAME)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    assert ours.config._attn_implementation == ATTENTION_NAME
    assert ours.dtype == torch.float32
    wanted = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        assert torch.equal(param, wanted.pop(name)), name
    assert not wanted
    assert ours.lm_head.weight is ours.model.embed_tokens.weight  # tied, and so not missing
    ids, packed = torch.arange(5)[None], PackedSequences.of([5], "cpu")
    with torch.no_grad():
        logits = ours(ids, position_ids=packed.position_ids, use_cache=False, attention_context=packed).logits
        torch.testing.assert_close(logits, theirs(ids).logits)


def test_the_type_is_the_one_asked_for(tiny_model_folder):
    model = load_model(str(tiny_model_folder), "sdpa", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("bf16", torch.bfloat16), ("float32", torch.float32), ("fp32", torch.float32), ("fp16", torch.half)],
)
def test_words_for_types(word, dtype):
    assert torch_dtype(word) == dtype


def test_an_unknown_type_is_named():
    with pytest.raises(ValueError, match="unknown dtype 'float8': use one of fp32, float32, bf16"):
        torch_dtype("float8")


def test_overrides_reach_the_config_and_unknown_ones_are_refused(tiny_model_folder):
    config = load_model_config(tiny_model_folder, {"rms_norm_eps": 0.5, "attention_dropout": 0.0})
    assert config.rms_norm_eps == 0.5
    assert load_model_config(tiny_model_folder).rms_norm_eps != 0.5
    assert load_model(tiny_model_folder, "sdpa", override={"rms_norm_eps": 0.5}).model.norm.variance_epsilon == 0.5
    with pytest.raises(ValueError, match=r"model.override_config.rms_eps: Qwen3Config has no field 'rms_eps'"):
        load_model_config(tiny_model_folder, {"rms_eps": 0.5})


def test_no_model_there(tmp_path):
    for path in (tmp_path, tmp_path / "none", "Some/Model"):
        with pytest.raises(FileNotFoundError, match=r"no model at '.*': expected a folder with config.json"):
            load_model(path, "sdpa")


def test_missing_weights_are_an_error_and_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    lost = [name for name in weights if "q_norm" in name]
    save_file({n: w for n, w in weights.items() if n not in lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks {len(lost)} weights, first of all '{sorted(lost)[0]}'"):
        load_model(folder, "sdpa")


def test_a_new_value_head_is_not_reported_and_what_else_does_not_match_is(folder):
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    source = logging.getLogger("transformers.modeling_utils")
    source.addHandler(handler)
    try:
        head = load_model(folder, "sdpa", head="value").get_parameter("score.weight")
        assert not head.any()
        assert heard == []
        tensors = load_file(folder / "model.safetensors")
        stray = "model.vision_tower.stray.weight"
        save_file(tensors | {stray: torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
        load_model(folder, "sdpa", head="value")
        assert stray in heard.pop()
        load_model(folder, "sdpa")
        assert stray in heard.pop()
    finally:
        source.removeHandler(handler)


FAMILIES = sorted(COUNTED - {"qwen3_5", "qwen3_5_moe", *SEEING})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_of_a_family_fits(tiny_config, tmp_path, family):
    """Stacked or single experts, fused matrices, tied heads and buffers: nothing of it is unread, lost or misshapen."""
    with torch.random.fork_rng():
        saved = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    assert misfit_problems(tmp_path, {}) == []
    loaded = dict(load_model(tmp_path, "sdpa" if family not in NO_SDPA else "eager").named_parameters())
    assert all(torch.equal(loaded[name], param.float()) for name, param in saved.named_parameters())
    assert type_problem(stored_tensors(tmp_path) | {"model.layers.0.x.weight": {"dtype": "I8", "shape": [2]}})


def test_an_override_that_asks_for_more_layers_than_there_are(tiny_model_folder):
    with pytest.raises(ValueError, match=r"lacks \d+ weights, first of all 'model.layers.2"):
        load_model(tiny_model_folder, "sdpa", override={"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})


def test_new_models_are_random_and_of_the_asked_type():
    config = Qwen3Config(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4
    )
    config.num_key_value_heads = 2
    torch.manual_seed(0)
    first = new_causal_lm(config, ATTENTION_NAME, torch.bfloat16)
    second = new_causal_lm(config, ATTENTION_NAME)
    assert first.dtype == torch.bfloat16
    assert second.dtype == torch.float32
    assert not torch.equal(first.model.embed_tokens.weight.float(), second.model.embed_tokens.weight)


def test_a_tokenizer_gets_a_padding_token(folder):
    assert load_tokenizer(folder).pad_token == "<pad>"
    change_json(folder / "tokenizer_config.json", pad_token=None)
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_a_tokenizer_without_an_end_is_refused(folder):
    change_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("eos", "wanted"), [(None, [1]), (1, [1]), (5, [1, 5]), ([9, 5], [1, 5, 9]), ([], [1]), (0, [0, 1])]
)
def test_stop_tokens_are_those_of_tokenizer_and_generation_config(folder, eos, wanted):
    (folder / "generation_config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    assert stop_token_ids(folder, load_tokenizer(folder)) == wanted


def test_stop_tokens_without_a_generation_config(folder):
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert stop_token_ids(folder, load_tokenizer(folder)) == [1]
