"""Weights that are no parameters (the bias of DeepSeek-V3's routers): both engines load, send, keep and resume them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_trials import megatron_trial, write_small_model
from safetensors.torch import load_file
from sync_trials import BUCKET, IDS, PlainRollout, blank_lm, fsdp_engine
from transformers import AutoConfig, AutoModelForCausalLM

from meshrl.models.loading import load_model, named_weights, persistent_buffers
from meshrl.models.saving import save_hf_folder
from meshrl.rollout.weight_files import checked, expected_shapes
from meshrl.tools.verify import SMALL, write_model

BIAS = "gate.e_score_correction_bias"
CHANGE = 0.25
SP = "ulysses_sequence_parallel_size"
LAYOUTS = {"ep2": {"tp": 2, "ep": 2, "etp": 1}, "pp2": {"pp": 2}, "sp2": {SP: 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_model("deepseek_v3", tmp_path_factory.mktemp("buffers") / "model", layers=4)


def changed(folder):
    """The model in one process with its biases moved, so that other experts are chosen."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    for buffer in persistent_buffers(model).values():
        buffer[::2] += CHANGE
    return model


def move_biases(engine):
    """The same in an engine of either kind, whole on every rank that has them."""
    for name, bias in engine.module.named_buffers():
        if name.endswith(("expert_bias", BIAS)):
            bias[::2] += CHANGE


def biases_of(engine):
    return torch.cat([b for name, b in engine.module.named_buffers() if name.endswith(("expert_bias", BIAS))])


def engine_of(folder, axes):
    """By FSDP2 where there are no axes or those of sequences alone, else by Megatron."""
    if axes is None or SP in axes:
        return fsdp_engine(folder, **(axes or {}))
    from meshrl.engines.engine_class import engine_class

    trial = megatron_trial(folder, axes, enable_gradient_checkpointing=False)
    engine = engine_class(trial.engine)(trial.model, trial.engine, trial.optim, device=torch.device("cpu"))
    engine.initialize()
    return engine


def leave(axes):
    if axes is not None and SP not in axes:
        from meshrl.engines.megatron.parallel_state import leave_parallel_state

        leave_parallel_state()


def save_and_send(folder: Path, axes: dict | None, out: Path):
    """Moves the biases, writes a checkpoint and a model folder, and syncs into a blank copy; its logits and weights."""
    from meshrl.weights import connect as connecting

    connecting.MEGABYTE = BUCKET  # buckets of a few messages for models this small
    engine = engine_of(folder, axes)
    try:
        move_biases(engine)
        engine.save_checkpoint(out / "checkpoint")
        stream = checked(engine.per_tensor_params(), expected_shapes(engine.hf_model.config))
        save_hf_folder(out / "hf", stream, engine.hf_model, writes=dist.get_rank() == 0)
        copy = engine_of(folder, axes)
        copy.copy_weights_from(engine)
        assert biases_of(copy).equal(biases_of(engine))
        model = blank_lm(folder)
        sync = connecting.connect(engine, connecting.rollout_params(model), bucket_megabytes=1, deadline=40.0)
        sync(PlainRollout(), 1)
        sync.close()
        with torch.no_grad():
            return model(IDS).logits, {name: weight.clone() for name, weight in named_weights(model).items()}
    finally:
        leave(axes)


def resumed(folder: Path, axes: dict | None, checkpoint: Path):
    """All weights after reading a checkpoint, and the biases before."""
    engine = engine_of(folder, axes)
    try:
        before = {name: value.clone() for name, value in engine.per_tensor_params() if name.endswith(BIAS)}
        engine.load_checkpoint(checkpoint)
        return before, {name: value.clone() for name, value in engine.per_tensor_params()}
    finally:
        leave(axes)


@pytest.mark.parametrize(("writer", "reader"), [("ep2", "fsdp2"), ("fsdp2", "pp2"), ("sp2", "sp2")])
def test_sync_checkpoint_and_folder_carry_them(megatron_ranks, folder, tmp_path, writer, reader):
    reference = changed(folder)
    expected = named_weights(reference)
    biases = [name for name in expected if name.endswith(BIAS)]
    assert len(biases) == 3
    for logits, weights in megatron_ranks(2).run(save_and_send, folder, LAYOUTS.get(writer), tmp_path):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        with torch.no_grad():
            torch.testing.assert_close(logits, reference(IDS).logits, rtol=1e-5, atol=1e-5)
    # They matter: without the change other experts would have been chosen.
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        assert (plain(IDS).logits - logits).abs().max() > 1e-3

    written = load_model(tmp_path / "hf", "eager")
    assert all(torch.equal(weight, expected[name]) for name, weight in named_weights(written).items())
    for before, after in megatron_ranks(2).run(resumed, folder, LAYOUTS.get(reader), tmp_path / "checkpoint"):
        assert after.keys() == expected.keys()
        assert all(torch.equal(after[name], expected[name]) for name in expected)
        assert not any(torch.equal(before[name], expected[name]) for name in biases)


def bf16_biases(folder: Path):
    """Of a model in bfloat16, filled after sharding."""
    from meshrl.config.engine import EngineConfig, FSDPConfig, MixedPrecisionConfig, ModelConfig
    from meshrl.engines.fsdp.fsdp_engine import FSDPEngine

    precision = MixedPrecisionConfig(param_dtype="bf16", reduce_dtype="bf16", buffer_dtype="bf16")
    config = EngineConfig(fsdp_config=FSDPConfig(model_dtype="bf16", mixed_precision=precision))
    engine = FSDPEngine(ModelConfig(path=str(folder)), config, None, device=torch.device("cpu"))
    engine.initialize()
    return {name: value.clone() for name, value in engine.per_tensor_params() if name.endswith(BIAS)}


def test_half_precision_does_not_round_them(megatron_ranks, folder):
    weights = load_file(folder / "model.safetensors")
    for found in megatron_ranks(2).run(bf16_biases, folder):
        assert len(found) == 3
        for name, bias in found.items():
            assert torch.equal(bias, weights[name])
            assert not torch.equal(bias.bfloat16().float(), bias)


def fsdp1(folder: Path):
    with pytest.raises(
        ValueError, match=r"3 buffers, such as '.*e_score_correction_bias', which strategy=fsdp does not"
    ):
        fsdp_engine(folder, strategy="fsdp")


def test_refused_where_they_would_be_lost(megatron_ranks, folder):
    megatron_ranks(2).run(fsdp1, folder)


def sent_to_bf16(folder: Path):
    """The weights of a rollout's module in bfloat16 after a sync."""
    from meshrl.models.loading import load_model_config, new_causal_lm
    from meshrl.weights.connect import connect, rollout_params

    engine = fsdp_engine(folder)
    module = new_causal_lm(load_model_config(folder), "eager", torch.bfloat16)
    sync = connect(engine, rollout_params(module), deadline=40.0)
    sync(PlainRollout(), 1)
    sync.close()
    return {name: weight.clone() for name, weight in named_weights(module).items()}


def test_a_rollout_in_half_precision_chooses_the_same_experts(megatron_ranks, folder):
    """Parameters are rounded there, the bias of a router is not."""
    weights = named_weights(load_model(folder, "eager"))
    for found in megatron_ranks(2).run(sent_to_bf16, folder):
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(found[name], weight if name.endswith(BIAS) else weight.bfloat16())


@pytest.fixture(scope="module")
def scalars(tmp_path_factory):
    """A model whose activations have buffers of a single number, without a shape."""
    config = AutoConfig.for_model("apertus", **SMALL, pad_token_id=0)
    folder = write_model(config, tmp_path_factory.mktemp("scalars") / "model")
    assert any(not buffer.dim() for buffer in persistent_buffers(load_model(folder, "eager")).values())
    return folder


def filled(folder: Path):
    engine = fsdp_engine(folder)
    return {name: value.clone() for name, value in engine.per_tensor_params()}


@pytest.mark.parametrize("run", [filled, sent_to_bf16])
def test_numbers_without_a_shape(megatron_ranks, scalars, run):
    weights = named_weights(load_model(scalars, "eager"))
    for found in megatron_ranks(2).run(run, scalars):
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            assert found[name].dtype == torch.float32 or weight.dim()
            assert torch.equal(found[name], weight.to(found[name].dtype))
