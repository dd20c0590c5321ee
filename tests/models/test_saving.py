"""What we write as a Hugging Face folder, plain transformers reads back."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl.models.saving import save_hf_folder

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
