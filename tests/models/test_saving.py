"""What we write as a Hugging Face folder, plain transformers reads back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from meshrl.models.loading import named_weights
from meshrl.models.saving import as_file_tensors, other_names, save_configs, save_hf_folder
from meshrl.rollout.weight_files import FileWeights
from meshrl.weights.connect import connect_stream
from meshrl.weights.placement import RolloutLayout

IDS = torch.arange(12).view(2, 6) + 2


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_plain_transformers_reads_it_back(make_lm, tmp_path, family, shard_bytes):
    model = make_lm(family, attention="eager")
    save_hf_folder(tmp_path / "model", model.named_parameters(), model, shard_bytes=shard_bytes)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    shards = list((tmp_path / "model").glob("*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 20_000)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == (len(shards) > 1)


def test_a_generation_config_is_written_as_it_was_read(make_lm, tmp_path):
    """Loading only warns of values without effect; transformers itself refuses to save them."""
    model, odd = make_lm("llama"), {"temperature": 0.9, "top_p": 0.6}
    model.generation_config.update(**odd)
    with pytest.raises(ValueError, match="do_sample"):
        model.generation_config.save_pretrained(tmp_path)
    save_configs(tmp_path, model)
    assert odd.items() <= json.loads((tmp_path / "generation_config.json").read_text()).items()


def test_a_failed_save_leaves_the_old_folder(make_lm, tmp_path):
    model = make_lm("llama")
    save_hf_folder(tmp_path / "model", model.named_parameters(), model)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    def broken():
        yield next(model.named_parameters())
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_hf_folder(tmp_path / "model", broken(), model)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_a_rank_that_only_helps_writes_nothing(make_lm, tmp_path):
    model = make_lm("llama")
    seen = []

    def stream():
        for name, value in model.named_parameters():
            seen.append(name)
            yield name, value

    save_hf_folder(tmp_path / "model", stream(), model, writes=False)
    assert len(seen) == len(list(model.parameters()))
    assert not (tmp_path / "model").exists()


def of_family(family):
    config = AutoConfig.for_model(family)
    config.num_hidden_layers = 2
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


FAMILIES = ["mixtral", "qwen3_moe", "glm4_moe", "minimax", "minimax_m2", "gpt_neox"]
OTHER_EXPERTS = ["gpt_oss", "llama4_text", "phimoe", "granitemoe"]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_EXPERTS, "ernie4_5_moe", "exaone_moe"])
def test_other_engines_get_weights_by_the_names_of_files(family):
    model = of_family(family)
    weights = list(named_weights(model).items())
    sent, written = dict(FileWeights(model.config).renamed(weights)), dict(as_file_tensors(weights, model))
    assert {name: t.shape for name, t in sent.items()} == {name: t.shape for name, t in written.items()}


@pytest.mark.parametrize("family", OTHER_EXPERTS)
def test_experts_in_another_form_are_not_cut(family):
    with pytest.raises(ValueError, match=rf"model_type '{family}' with rollout.name=vllm.*hold 'model\.layers"):
        connect_stream(None, of_family(family), layout=RolloutLayout(tp=2))


def test_several_weights_in_one_tensor_of_the_files_are_refused():
    with pytest.raises(ValueError, match=r"'hrm_text' .*q_proj.*_proj.* in one tensor, .*gqkv_proj"):
        other_names(of_family("hrm_text"))


def test_stacked_experts_of_a_model_that_sees_lie_as_its_makers_files_have_them(tmp_path):
    """Rows and columns the other way round than in memory: Transformers turns them when it loads, others expect it."""
    from transformers import AutoModelForImageTextToText

    from meshrl.models.tiny import make_tiny_seeing_model

    folder = make_tiny_seeing_model(tmp_path / "model", "abc", family="qwen3_vl_moe", hidden_size=96)
    files = load_file(folder / "model.safetensors")
    experts = "model.language_model.layers.1.mlp.experts."
    assert files[experts + "gate_up_proj"].shape == (4, 96, 2 * 64)
    assert files[experts + "down_proj"].shape == (4, 64, 96)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    for name, weight in model.named_parameters():
        stored = files.get(name)
        assert stored is not None
        assert torch.equal(weight, stored.transpose(1, 2) if ".experts." in name else stored)


def test_engines_get_square_experts_the_same_way_round_as_others():
    """In files Transformers could not tell; an engine that takes a stream never looks at the shape."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 3, "num_experts_per_tok": 2}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    sizes |= {"vocab_size": 50, "head_dim": 32}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=sizes, vision_config=vision)
    stream = FileWeights(config)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    weight = torch.arange(3 * 64 * 64.0).reshape(3, 64, 64)
    ((sent, value),) = stream.renamed([(name, weight)])
    assert sent == name
    assert torch.equal(value, weight.transpose(1, 2))
    ((_, kept),) = as_file_tensors([(name, weight)], stream._model)
    assert torch.equal(kept, weight)
