"""The planner's bytes of parameters, gradients and optimizer on each rank, against the memory of real engines."""

import math

import pytest
import torch
from megatron_trials import layers_for, megatron_trial, write_small_model
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.engines.engine_class import engine_class
from meshrl.models.tiny import make_tiny_seeing_model
from meshrl.tools.plan.models import find_model
from meshrl.tools.plan.roles import fsdp_states, fsdp_units, megatron_states
from meshrl.tools.verify import SEED, SMALL, Trial, write_model

SP, CP = "ulysses_sequence_parallel_size", "context_parallel_size"
# Sizes that no number of ranks divides: 61 rows of vocabulary, 70 wide, 101 inside.
UNEVEN = SMALL | {"hidden_size": 70, "intermediate_size": 101, "num_attention_heads": 6, "num_key_value_heads": 6}
FSDP = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "fsdp4": (4, {}),
    "hybrid": (4, {"fsdp_size": 2}),
    "ddp2": (2, {"fsdp_size": 1}),
    "fsdp2-sp2": (4, {SP: 2}),
    "sp2": (2, {SP: 2}),
    "sp2-cp2": (4, {SP: 2, CP: 2}),
    "hybrid-sp2": (4, {SP: 2, "fsdp_size": 2}),
    "hybrid-sp2-cp2": (4, {SP: 2, CP: 2, "fsdp_size": 2}),
    "lora": (2, {"lora_rank": 3}),
    "lora-one": (1, {"lora_rank": 3}),
    "one-bf16": (1, {"param_dtype": "bf16"}),
    "one-bf16-lora": (1, {"param_dtype": "bf16", "lora_rank": 3}),
    "one-bf16-sums": (1, {"param_dtype": "bf16", "reduce_dtype": "bf16"}),
    "by-size": (2, {"min_num_params": 3000}),
    "kept-bf16": (2, {"model_dtype": "bf16", "param_dtype": "bf16"}),
}
SEEING = {
    "fsdp2": (2, "qwen3_vl", {}),
    "one-bf16": (1, "qwen2_5_vl", {"param_dtype": "bf16"}),
    "one-bf16-frozen": (1, "qwen3_vl", {"param_dtype": "bf16", "freeze_vision_tower": True}),
    "frozen": (2, "qwen2_5_vl", {"freeze_vision_tower": True}),
    "lora": (2, "qwen3_vl", {"lora_rank": 3}),
    "experts": (2, "qwen3_vl_moe", {}),
}
MEGATRON = {
    "one": (1, "qwen2", {}),
    "tp2": (2, "qwen2", {"tp": 2}),
    "pp2": (2, "qwen3", {"pp": 2}),  # a tied embedding on two stages
    "pp2-vpp2": (2, "qwen3", {"pp": 2, "vpp": 2}),
    "dp2": (2, "llama", {}),
    "dp2-whole": (2, "llama", {"distopt": False}),
    "ep2": (2, "qwen3_moe", {"ep": 2}),
    "tp2-pp2": (4, "qwen3", {"tp": 2, "pp": 2}),
    "pp2-dp2": (4, "qwen3", {"pp": 2}),
    "ep2-dp2": (4, "qwen3_moe", {"ep": 2}),
    "tp2-pp2-ep2": (4, "mixtral", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    "latent-tp2-ep2": (2, "deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}),
    "latent-pp2-dp2": (4, "deepseek_yarn", {"pp": 2}),
}


def memory(tensors):
    """Bytes of the distinct memory under tensors."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def moments(optimizer):
    parts = [getattr(part, "optimizer", part) for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    for part in parts:
        for state in part.state.values():
            yield from (value for name, value in state.items() if name not in ("step", "remainder"))
            if "remainder" in state:
                yield state["remainder"]


def measured(trial):
    """Bytes of this rank's parameters, gradients and optimizer after a step of the real engine."""
    engine = engine_class(trial.engine)(
        trial.model, trial.engine, OptimConfig(lr=1e-3), device=torch.device("cpu"), total_steps=2, seed=SEED
    )
    engine.initialize()
    sight = getattr(engine, "sight", None)
    batch = trial.batches(61 if sight is None else 20, sight=sight)[0]
    mine = batch.chunk(engine.dp_size)[engine.dp_rank]
    mine.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 64}

    def loss_function(output, data):
        loss = output["log_probs"].sum()
        return loss, {"loss": loss.detach()}

    engine.optimizer_zero_grad()
    engine.forward_backward_batch(mine, loss_function)
    params = list(engine.module.parameters())
    if trial.engine.strategy == "megatron":
        buffers = [b for chunk in engine.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        grads = memory(buffer.grad_data for buffer in buffers)
    elif hasattr(engine.optimizer, "flat"):
        grads = memory([engine.optimizer.flat["grad"]])
    else:
        grads = memory(p.grad for p in params if p.grad is not None)
    engine.optimizer_step()
    return memory(params), grads, memory(moments(engine.optimizer))


def run_measured(trial):
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    try:
        return measured(trial)
    finally:
        leave_parallel_state()


def as_tuple(states):
    return states.params, states.grads, states.optimizer


@pytest.fixture(scope="session")
def uneven(tmp_path_factory):
    config = AutoConfig.for_model("qwen3", **UNEVEN, head_dim=14, tie_word_embeddings=False)
    return write_model(config, tmp_path_factory.mktemp("uneven") / "model")


def planned_and_measured(ranks, folder, world, settings):
    """Every rank's bytes as planned and as they are, and the planned units."""
    engine = EngineConfig()
    engine.fsdp_config.mixed_precision.param_dtype = "fp32"
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=False)
    for name, value in settings.items():
        owners = (engine, engine.fsdp_config, engine.fsdp_config.mixed_precision, engine.fsdp_config.wrap_policy, model)
        setattr(next(owner for owner in owners if hasattr(owner, name)), name, value)
    units = fsdp_units(find_model(model).modules, engine, trains=True)
    expected = [as_tuple(states) for states in fsdp_states(units, engine, world)]
    return expected, ranks(world).run(measured, Trial(model, engine)), units


@pytest.mark.parametrize("case", SEEING)
def test_states_of_models_that_see_are_exact(ranks, tmp_path, case):
    world, family, settings = SEEING[case]
    folder = make_tiny_seeing_model(tmp_path, "abcdefghijklmnopqrstuvwxyz", family=family)
    expected, found, units = planned_and_measured(ranks, folder, world, settings)
    assert found == expected
    looking = [unit for unit in units if any(".visual." in param.name for param in unit.params)]
    assert len(looking) > 1  # its blocks, and what is left of it, with the root


@pytest.mark.parametrize("case", FSDP)
def test_fsdp_states_are_exact(ranks, uneven, case):
    world, settings = FSDP[case]
    expected, found, units = planned_and_measured(ranks, uneven, world, settings)
    assert found == expected
    # A rank that held everything would be seen at once.
    whole = sum(unit.numel() for unit in units) * 4
    assert all((states[0] < whole) == (settings.get("fsdp_size", world) > 1 or "bf16" in case) for states in expected)


@pytest.mark.parametrize("case", MEGATRON)
def test_megatron_states_are_exact(megatron_ranks, tmp_path, case):
    world, family, axes = MEGATRON[case]
    trial = megatron_trial(write_small_model(family, tmp_path / family, layers_for(axes)), axes)
    planned = find_model(trial.model)
    expected = [as_tuple(megatron_states(planned.config, trial.engine, rank, world)) for rank in range(world)]
    assert megatron_ranks(world).run(run_measured, trial, timeout=120) == expected
    assert math.prod(expected[0]) > 0
