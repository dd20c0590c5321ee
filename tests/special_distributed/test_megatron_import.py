"""Megatron-Core's own distributed checkpoints become Hugging Face folders."""

import shutil

import pytest
import torch
from megatron_trials import megatron_trial, write_small_model
from transformers import AutoModelForCausalLM

from meshrl.cli import main
from meshrl.models.saving import tensor_files
from meshrl.trainer.convert import from_megatron

IDS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))


def save(trial, folder):
    """Writes the model by Megatron-Core's own means, its weights changed; returns them under Hugging Face names."""
    from megatron.core import dist_checkpointing

    from meshrl.engines.megatron.megatron_engine import MegatronEngine
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    engine = MegatronEngine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"), total_steps=2)
    engine.initialize()
    state = {}
    for number, chunk in enumerate(engine.model):
        while hasattr(chunk, "module"):
            chunk = chunk.module
        with torch.no_grad():
            for param in chunk.parameters():
                param.mul_(1.25)
        state[f"model{number}"] = chunk.sharded_state_dict()
    dist_checkpointing.save(state, folder)
    leave_parallel_state()
    return True


LAYOUTS = {"qwen3": {"tp": 2}, "llama": {"pp": 2}, "qwen3_moe": {"ep": 2}, "mixtral": {"tp": 2}}


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_folder_is_the_model_that_was_saved(megatron_ranks, tmp_path, family):
    base = write_small_model(family, tmp_path / "base")
    (tmp_path / "dist").mkdir()
    megatron_ranks(2).run(save, megatron_trial(base, LAYOUTS[family]), str(tmp_path / "dist"))
    assert main(["convert", str(tmp_path / "dist"), str(tmp_path / "hf"), "--like", str(base)]) == 0
    expected = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for param in expected.parameters():
            param.mul_(1.25)
        want = expected(IDS).logits
        found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert torch.equal(found(IDS).logits, want)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(base)(IDS).logits, want)
    if family != "qwen3":
        return
    other = write_small_model("llama", tmp_path / "other")
    with pytest.raises(ValueError, match=r"has no parameter|this model needs"):
        from_megatron(tmp_path / "dist", other, tmp_path / "wrong")
    largest = max((tmp_path / "dist").glob("*.distcp"), key=lambda file: file.stat().st_size)
    shutil.copy(largest, tmp_path / "whole.distcp")
    largest.write_bytes(largest.read_bytes()[:-4000])
    with pytest.raises(ValueError, match="truncated"):
        from_megatron(tmp_path / "dist", base, tmp_path / "wrong")
    largest.unlink()
    with pytest.raises(ValueError, match="lacks __"):
        from_megatron(tmp_path / "dist", base, tmp_path / "wrong")
    assert not list(tmp_path.glob("wrong*"))
    assert tensor_files(tmp_path / "hf")


def test_it_needs_a_model_to_be_like(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(b"")
    assert main(["convert", str(tmp_path), str(tmp_path / "hf")]) == 1
    assert "--like" in capsys.readouterr().err
