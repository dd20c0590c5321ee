"""The planner's bytes on each axis, against the bytes of every collective that real engines call."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.engines.engine_class import engine_class
from meshrl.telemetry.hardware import parse_cluster
from meshrl.tools.plan.models import find_model
from meshrl.tools.plan.roles import Role
from meshrl.tools.plan.timing import pass_traffic
from meshrl.tools.verify import SEED, SMALL, Trial, write_model

SP = "ulysses_sequence_parallel_size"
CASES = {
    "fsdp2": (2, {}),
    "fsdp4": (4, {}),
    "kept-after-forward": (2, {"reshard_after_forward": False}),
    "hybrid": (4, {"fsdp_size": 2}),
    "ddp2": (2, {"fsdp_size": 1}),
    "sp2": (2, {SP: 2}),
    "sp4-few-kv-heads": (4, {SP: 4}),
    "fsdp2-sp2": (4, {SP: 2}),
    "hybrid-sp2": (4, {SP: 2, "fsdp_size": 2}),
    "copies-sp2": (2, {SP: 2, "fsdp_size": 1}),
    "sp2-checkpointing": (2, {SP: 2, "enable_gradient_checkpointing": True}),
    "lora": (2, {"lora_rank": 3}),
    "sums-in-bf16": (2, {"reduce_dtype": "bf16", "param_dtype": "bf16"}),
}
KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "scatter",
    "allreduce_": "reduce",
    "alltoall_base_": "swap",
}


class Wire(TorchDispatchMode):
    """Adds up what this rank would send in each kind of collective over rings of `size` ranks."""

    def __init__(self):
        super().__init__()
        self.sent = dict.fromkeys(KINDS.values(), 0.0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace == "c10d" and name in KINDS:
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            whole = max(t.numel() * t.element_size() for t in tensors)
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            ring = (group.size() - 1) / group.size()
            # Numbers, such as the count of micro-batches, are no traffic.
            if whole > 64:
                self.sent[KINDS[name]] += whole * ring * (2 if name == "allreduce_" else 1)
        return func(*args, **(kwargs or {}))


def measured(trial):
    """Bytes that this rank sends in one micro-batch, by kind of collective, when it trains and when it answers; and
    the tokens it had."""
    engine = engine_class(trial.engine)(
        trial.model, trial.engine, OptimConfig(lr=1e-3), device=torch.device("cpu"), total_steps=2, seed=SEED
    )
    engine.initialize()
    batch = trial.batches(61)[0]
    mine = batch.chunk(engine.dp_size)[engine.dp_rank]
    mine.meta_info = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 10_000}

    def loss_function(output, data):
        loss = output["log_probs"].sum()
        return loss, {"loss": loss.detach()}

    with Wire() as training:
        engine.forward_backward_batch(mine, loss_function)  # first: it leaves no weights gathered
    with Wire() as answering:
        engine.forward(mine)
    tokens = int(mine.batch["attention_mask"].sum())
    size = engine.sequence.size
    return {True: training.sent, False: answering.sent}, -(-tokens // size)


@pytest.fixture(scope="session")
def uneven(tmp_path_factory):
    # 61 rows of vocabulary and 101 inside: no number of ranks divides them.
    config = AutoConfig.for_model("qwen3", **(SMALL | {"intermediate_size": 101}), head_dim=8)
    return write_model(config, tmp_path_factory.mktemp("uneven") / "model")


@pytest.mark.parametrize("case", CASES)
def test_bytes_on_every_axis(ranks, uneven, case):
    world, settings = CASES[case]
    engine = EngineConfig()
    engine.fsdp_config.mixed_precision.param_dtype = "fp32"
    model = ModelConfig(path=str(uneven), enable_gradient_checkpointing=False)
    for name, value in settings.items():
        owners = (engine, engine.fsdp_config, engine.fsdp_config.mixed_precision, model)
        setattr(next(owner for owner in owners if hasattr(owner, name)), name, value)
    role = Role("actor", find_model(model), model, engine, world)
    found = ranks(world).run(measured, Trial(model, engine))
    for trains, (sent_by, tokens) in product((True, False), found):
        sent = sent_by[trains]
        planned = pass_traffic(role, tokens, trains, parse_cluster(f"{world}xCPU"))
        by_axis = {traffic.axis: traffic.sent for traffic in planned}
        assert sent["gather"] == pytest.approx(by_axis.get("fsdp", 0), rel=1e-9)
        assert sent["scatter"] == pytest.approx(by_axis.get("fsdp grads", 0), rel=1e-9)
        assert sent["reduce"] == pytest.approx(by_axis.get("copies", 0), rel=1e-9)
        assert sent["swap"] == pytest.approx(by_axis.get("sp", 0), rel=1e-9)
        # Nothing of this may hold because nothing was seen.
        assert (sent["swap"] > 0) == (SP in settings)
        assert (sent["scatter"] > 0) == (trains and settings.get("fsdp_size", world) > 1)
        assert (sent["reduce"] > 0) == (trains and settings.get("fsdp_size", world) < world)
