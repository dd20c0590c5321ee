"""What Megatron-Core's schedules really do, recorded in real processes: complete, and with exactly the known bubble.

The ledger books the same: forward and backward of all micro-batches, the rest are waits for other stages.
"""

import itertools

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from meshrl.parallel.pipeline import bubble, ideal_bubble, replay
from meshrl.telemetry.flops import ModelShape
from meshrl.telemetry.pipeline_timeline import PipelineTimeline
from meshrl.telemetry.time_ledger import seconds_by_name

LENGTHS = [9, 4, 17, 6, 12, 5, 8, 3]


def write_config(folder, layers):
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_hidden_layers=layers,
        vocab_size=11,
    )
    config.save_pretrained(folder)
    return config


def engine_and_batch(folder, pp, vpp, micro_batch_size):
    """On each stage: its engine, and the mini-batch that all of them take."""
    from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
    from meshrl.data.batch import DataProto
    from meshrl.engines.megatron.megatron_engine import MegatronEngine

    config = EngineConfig(strategy="megatron")
    config.megatron.pipeline_model_parallel_size = pp
    config.megatron.virtual_pipeline_model_parallel_size = vpp if vpp > 1 else None
    config.megatron.dtype = "fp32"
    model = ModelConfig(path=folder, random_init=True, enable_gradient_checkpointing=False)
    engine = MegatronEngine(model, config, OptimConfig(), device=torch.device("cpu"))
    engine.initialize()
    lengths = np.array(LENGTHS)
    mask = torch.from_numpy(np.arange(lengths.max())[None] >= lengths.max() - lengths[:, None]).long()
    tensors = {"input_ids": mask * 3, "attention_mask": mask, "response_mask": mask[:, -2:]}
    meta = {"use_dynamic_bsz": False, "micro_batch_size": micro_batch_size}
    return engine, DataProto.from_dict(tensors=tensors, meta_info=meta)


def record(folder, pp, vpp, micro_batch_size, forward_only=False):
    """On each stage: one mini-batch through the engine; its spans."""
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    engine, data = engine_and_batch(folder, pp, vpp, micro_batch_size)
    engine.optimizer_zero_grad()
    timeline = PipelineTimeline()
    with timeline.attached(engine.model):
        engine.forward_backward_batch(data, loss, forward_only=forward_only)
    leave_parallel_state()
    return timeline.spans


def book(folder, pp, forward_only):
    """On each stage: one mini-batch as a worker's call; its page."""
    from meshrl.engines.megatron.parallel_state import leave_parallel_state
    from meshrl.telemetry.time_ledger import Ledger

    engine, data = engine_and_batch(folder, pp, 1, 2)
    ledger = Ledger()
    ledger.traces = True
    with ledger.serving("update_actor", "log_prob" if forward_only else "other"):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss, forward_only=forward_only)
    leave_parallel_state()
    return ledger.take(), engine.model[0].config.timers


def loss(outputs, data):
    total = -outputs["log_probs"].sum()
    return total, {"loss": total.detach()}


@pytest.mark.parametrize(("pp", "vpp", "size"), [(1, 1, 2), (2, 1, 2), (2, 1, 1), (2, 2, 2), (4, 1, 1), (4, 2, 1)])
def test_recorded_order_has_the_known_bubble(megatron_ranks, tmp_path, pp, vpp, size):
    write_config(tmp_path, pp * vpp)
    stages = megatron_ranks(pp).run(record, str(tmp_path), pp, vpp, size)
    count = len(LENGTHS) // size
    every = set(itertools.product(("forward", "backward"), range(vpp), range(count)))
    for spans in stages:
        done = [(s.kind, s.chunk, s.micro_batch) for s in spans if s.kind != "wait"]
        assert len(done) == len(every)
        assert set(done) == every
        compute = [s for s in spans if s.kind != "wait"]
        assert all(a.end <= b.start for a, b in itertools.pairwise(compute))
        assert all(s.work > 0 and s.end > s.start for s in compute)
    replayed = replay(stages, work=lambda stage, s: 2.0 if s.kind == "backward" else 1.0)
    assert bubble(replayed) == pytest.approx(ideal_bubble(pp, vpp, count))
    # A stage with twice the work must show, or the replay would not see work at all.
    slow = replay(stages, work=lambda stage, s: 1.0 + (stage == 0))
    assert pp == 1 or bubble(slow) > ideal_bubble(pp, vpp, count) + 0.02


def test_answers_alone_are_forwards(megatron_ranks, tmp_path):
    write_config(tmp_path, 4)
    stages = megatron_ranks(2).run(record, str(tmp_path), 2, 1, 2, forward_only=True)
    for spans in stages:
        assert [s.micro_batch for s in spans if s.kind == "forward"] == [0, 1, 2, 3]
        assert not [s for s in spans if s.kind == "backward"]
    assert bubble(replay(stages, work=lambda stage, s: 1.0)) == pytest.approx(1 / 5)


def test_stages_book_their_micro_batches_and_their_waits(megatron_ranks, tmp_path):
    config = write_config(tmp_path, 4)
    ranks = megatron_ranks(2)
    stages = ranks.run(book, str(tmp_path), 2, False)
    for page, timers in stages:
        assert timers is None
        seconds = seconds_by_name(page.segments())
        assert {"update_forward", "update_backward", "update_optimizer", "wait_peers", "other"} <= set(seconds)
        spans = [span for span in page.spans if span.track == "pipeline chunk 0" and span.name != "wait"]
        assert sorted(span.name for span in spans) == [f"{k} {m}" for k in ("backward", "forward") for m in range(4)]
        for kind in ("forward", "backward"):
            own = [span for span in spans if span.name.startswith(kind)]
            inside = sum(span.end - span.start for span in own)
            assert seconds[f"update_{kind}"] >= 0.5 * inside  # backward also sums gradients over the ranks
            assert all(page.begin <= span.start < span.end <= page.until for span in own)
    # Both stages together count the whole model once.
    assert sum(page.counts["flops/update_actor"] for page, _ in stages) == ModelShape.of(config).training(
        np.array(LENGTHS), 2 * len(LENGTHS)
    )
    for page, _ in ranks.run(book, str(tmp_path), 2, True):
        seconds = seconds_by_name(page.segments())
        assert "log_prob" in seconds
        assert not {"update_forward", "update_backward"} & set(seconds)
