"""Which parameters learn beside adapters, and which adapters are taken."""

import pytest
import torch

from meshrl.config.engine import ModelConfig
from meshrl.models.loading import empty_model, load_model
from meshrl.models.lora import add_adapters
from meshrl.tools.verify import small_config, write_model

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")


def test_the_head_of_a_value_model_learns_by_itself(tmp_path):
    write_model(small_config("qwen3"), tmp_path)
    model = load_model(str(tmp_path), "sdpa", "value")
    add_adapters(model, ModelConfig(path=str(tmp_path), lora_rank=4))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"score.weight", "score.bias"}
    assert not any("score" in name and "lora_" in name for name, _ in model.named_parameters())
    values = model(torch.arange(1, 9)[None]).logits
    assert not values.any()  # a new head says 0 of everything
    values.sum().backward()
    assert model.score.weight.grad.any()


def test_of_a_language_model_only_adapters_learn(tmp_path):
    write_model(small_config("qwen3"), tmp_path)
    model = load_model(str(tmp_path), "sdpa", "lm")
    add_adapters(model, ModelConfig(path=str(tmp_path), lora_rank=4))
    assert all("lora_" in name for name, param in model.named_parameters() if param.requires_grad)


def test_modules_are_excluded_by_the_last_part_or_by_a_pattern(tmp_path):
    write_model(small_config("qwen3"), tmp_path)

    def with_adapters(**settings):
        model = load_model(str(tmp_path), "sdpa", "lm")
        add_adapters(model, ModelConfig(path=str(tmp_path), lora_rank=4, **settings))
        return {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}

    every = with_adapters()
    assert any(name.endswith(".o_proj") for name in every)
    assert with_adapters(exclude_modules=["o_proj"]) == {n for n in every if not n.endswith(".o_proj")}
    kept = with_adapters(exclude_modules=[r".*layers\.0\..*", "down_proj"])
    assert kept == {n for n in every if ".layers.0." not in n and not n.endswith(".down_proj")}
    assert kept < every
    named = with_adapters(target_modules=["q_proj", "k_proj"], exclude_modules=["k_proj"])
    assert {name.rpartition(".")[2] for name in named} == {"q_proj"}


@pytest.fixture
def folder(tmp_path):
    return write_model(small_config("qwen3"), tmp_path / "model")


def write_adapter(folder, config):
    """A peft folder beside a model's, with values that differ from first ones."""
    model = peft.get_peft_model(load_model(str(folder), "sdpa"), config)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data.fill_(0.5)
    model.save_pretrained(folder.parent / "adapter")
    return folder.parent / "adapter"


def with_adapter(folder, adapter):
    model = load_model(str(folder), "sdpa")
    add_adapters(model, ModelConfig(path=str(folder), lora_adapter_path=str(adapter)))
    return model


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_B.default.bias.*lora_bias"),
        ({"modules_to_save": ["norm"]}, "norm.modules_to_save.default.weight.*modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules.*model.embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules.*the head"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_adapters_that_cannot_be_merged_are_refused(folder, config, named):
    """The rollout would generate without them."""
    adapter = write_adapter(folder, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"]} | config))
    with pytest.raises(ValueError, match=named):
        with_adapter(folder, adapter)


def test_adapters_of_another_kind_are_refused(folder):
    adapter = write_adapter(folder, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="peft_type IA3: only LORA"):
        with_adapter(folder, adapter)


def test_adapters_of_a_model_without_memory_have_their_values(folder):
    adapter = write_adapter(folder, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model = empty_model(str(folder), "sdpa", dtype=torch.bfloat16)
    add_adapters(model, ModelConfig(path=str(folder), lora_adapter_path=str(adapter)))
    adapters = {name: param for name, param in model.named_parameters() if ".lora_" in name}
    assert all((param == 0.5).all() and param.dtype == torch.bfloat16 for param in adapters.values())
    assert all(param.is_meta for name, param in model.named_parameters() if name not in adapters)
    assert all(param.requires_grad == (name in adapters) for name, param in model.named_parameters())


def test_a_stored_adapter_must_fit_the_model(folder):
    adapter = write_adapter(folder, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    loaded = [p for name, p in with_adapter(folder, adapter).named_parameters() if ".lora_" in name]
    count = len(loaded)
    assert all((param == 0.5).all() for param in loaded)

    file = adapter / "adapter_model.safetensors"
    tensors = safetensors.load_file(file)
    safetensors.save_file({n.replace("model.layers", "language_model.layers"): t for n, t in tensors.items()}, file)
    with pytest.raises(ValueError, match=f"{count} of the model's .* missing and {count} of its {count} are unexpec"):
        with_adapter(folder, adapter)
    safetensors.save_file({n: t for n, t in tensors.items() if ".layers.0." in n}, file)
    with pytest.raises(ValueError, match=r"missing and 0 of its 2 .*'model.layers.1.self_attn.q_proj.lora_A"):
        with_adapter(folder, adapter)
