"""Offloading on a real GPU: what rests in host memory leaves the device, and the numbers stay the same."""

import pytest
import torch
import torch.distributed as dist

from meshrl.config.engine import EngineConfig, ModelConfig
from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.tools.verify import Trial, differences, run_engine, run_reference, small_config, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trial(folder, param_dtype="fp32", **options):
    engine = EngineConfig()
    engine.fsdp_config.mixed_precision.param_dtype = param_dtype
    for name, value in options.items():
        setattr(engine.fsdp_config, name, value)
    return Trial(ModelConfig(path=str(folder), enable_gradient_checkpointing=False), engine)


@pytest.mark.parametrize("options", [{}, {"param_offload": True, "optimizer_offload": True}, {"offload_policy": True}])
def test_same_numbers_with_offload(tmp_path, options):
    case = trial(write_model(small_config("qwen3"), tmp_path / "model"), **options)
    found = differences([run_engine(case, "cuda:0")], run_reference(case))
    assert max(found.values()) <= 1e-4, found


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_nothing_stays_behind(tmp_path, param_dtype):
    config = small_config("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 512, 2048, 64
    case = trial(write_model(config, tmp_path / "model"), param_dtype)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = FSDPEngine(case.model, case.engine, case.optim, device=torch.device("cuda:0"), total_steps=2)
    engine.initialize()
    size = sum(p.numel() for p in engine.module.parameters())
    if param_dtype == "fp32":  # in bf16 the gradients add up in a buffer that is there already
        for param in engine.module.parameters():
            param.grad = torch.zeros_like(param)
    engine.optimizer_step()
    engine.optimizer_zero_grad()
    whole = torch.cuda.memory_allocated() - before
    engine.to("cpu", model=False)
    without_optimizer = torch.cuda.memory_allocated() - before
    engine.to("cpu")
    without_both = torch.cuda.memory_allocated() - before
    assert whole - without_optimizer >= 8 * size  # two float32 moments at least
    assert without_both < 0.05 * whole
    engine.to("cuda:0")
    assert torch.cuda.memory_allocated() - before == pytest.approx(whole, rel=0.05)
