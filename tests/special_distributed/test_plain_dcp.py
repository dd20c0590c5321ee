"""What either engine saves, plain torch's distributed checkpoints read, to the bit, without meshrl or a pickle."""

import subprocess
import sys
from pathlib import Path

import torch
from megatron_trials import megatron_trial, write_small_model
from test_fsdp_engine import make_trial
from torch.distributed.tensor import DTensor

from meshrl.algorithms import BatchStats
from meshrl.tools.verify import TEMPERATURE, _loss_function

READER = """
import pickle, sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
pickle.load = pickle.loads = pickle.Unpickler = None
for folder in sys.argv[1:]:
    reader = HuggingFaceStorageReader(folder)
    held = reader.read_metadata().state_dict_metadata
    found = {name: torch.full(tensor.size, torch.nan).to(tensor.properties.dtype) for name, tensor in held.items()}
    dcp.load(found, storage_reader=reader)
    names = [name.removeprefix("model.") for name in found if name.startswith("model.")]
    model = {name: torch.full_like(found["model." + name], torch.nan) for name in names}
    dcp.load({"model": model}, storage_reader=HuggingFaceStorageReader(folder))
    assert all(torch.equal(tensor, found["model." + name]) for name, tensor in model.items())
    state = {}
    for name, tensor in found.items():
        if name.startswith("optimizer.state."):
            parameter, _, kind = name.removeprefix("optimizer.state.").rpartition(".")
            state.setdefault(parameter, {})[kind] = tensor
    torch.save({"model": model, "optimizer": {"state": state}}, folder + ".pt")
assert not [name for name in sys.modules if name.startswith("meshrl")]
"""


def train_and_save(trial, strategy, folder):
    """One step; what the engine then holds: weights, and with FSDP the optimizer's moments, put together by torch."""
    if strategy == "megatron":
        from meshrl.engines.megatron.megatron_engine import MegatronEngine as Engine
    else:
        from meshrl.engines.fsdp.fsdp_engine import FSDPEngine as Engine
    engine = Engine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"), total_steps=4)
    engine.initialize()
    batch = trial.batches(61)[0]
    mine = batch.chunk(engine.dp_size)[engine.dp_rank]
    mine.meta_info = {"temperature": TEMPERATURE, "use_dynamic_bsz": True, "max_token_len": 64}
    mine.meta_info["calculate_entropy"] = True
    stats = BatchStats(engine.gradient_ranks, int(batch.batch["response_mask"].sum()), len(batch))
    engine.forward_backward_batch(mine, _loss_function(stats))
    engine.optimizer_step()
    engine.save_checkpoint(Path(folder))
    weights = {name: value.clone() for name, value in engine.per_tensor_params()}
    if strategy == "megatron":
        from meshrl.engines.megatron.parallel_state import leave_parallel_state

        leave_parallel_state()
        return weights, {}
    held = {name: engine.optimizer.state[param] for name, param in engine.hf_model.named_parameters()}
    moments = {name: {k: whole(v) for k, v in state.items()} for name, state in held.items() if state}
    return weights, moments


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_plain_torch_reads_what_both_engines_save(ranks, megatron_ranks, tmp_path):
    folder = write_small_model("qwen3", tmp_path / "qwen3")
    world, trial = make_trial(folder, "fsdp2", "plain")
    by_fsdp = ranks(world).run(train_and_save, trial, "fsdp2", str(tmp_path / "fsdp2"))[0]
    other = megatron_trial(folder, {"tp": 2})
    by_megatron = megatron_ranks(2).run(train_and_save, other, "megatron", str(tmp_path / "megatron"))[0]
    folders = [str(tmp_path / name) for name in ("fsdp2", "megatron")]
    done = subprocess.run([sys.executable, "-I", "-c", READER, *folders], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fsdp, megatron = (torch.load(f"{name}.pt") for name in folders)
    for (weights, _), found in ((by_fsdp, fsdp), (by_megatron, megatron)):
        assert found["model"].keys() == weights.keys()
        assert all(torch.equal(found["model"][name], tensor) for name, tensor in weights.items())
    # Both name alike, and in the same shapes.
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        shapes = [{n: s[kind].shape for n, s in found["optimizer"]["state"].items()} for found in (fsdp, megatron)]
        assert shapes[0] == shapes[1]
    states = fsdp["optimizer"]["state"]
    assert states.keys() == by_fsdp[1].keys()
    for name, state in by_fsdp[1].items():
        assert all(torch.equal(states[name][kind], tensor) for kind, tensor in state.items())
    # After one step both moments follow from the gradient: m = (1 - b1) g, v = (1 - b2) g^2.
    first, second = other.optim.betas
    for state in megatron["optimizer"]["state"].values():
        gradient = state["exp_avg"] / (1 - first)
        torch.testing.assert_close(state["exp_avg_sq"], (1 - second) * gradient**2, rtol=1e-4, atol=1e-12)
        assert state["step"] == 1
        assert gradient.abs().max() > 0
