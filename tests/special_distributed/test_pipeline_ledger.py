"""A pipeline's time in the ledger: forward and backward of all micro-batches, the rest are waits for other stages."""

import numpy as np
import torch
from transformers import Qwen3Config

LENGTHS = [9, 4, 17, 6, 12, 5, 8, 3]


def book(folder, pp, forward_only):
    """On each stage: one mini-batch as a worker's call; its page."""
    from meshrl.config.engine import EngineConfig
    from meshrl.config.model import ModelConfig
    from meshrl.config.optim import OptimConfig
    from meshrl.data.proto import DataProto
    from meshrl.engines.megatron.engine import MegatronEngine
    from meshrl.engines.megatron.parallel_state import leave_parallel_state
    from meshrl.telemetry.ledger import Ledger

    config = EngineConfig(strategy="megatron")
    config.megatron.pipeline_model_parallel_size = pp
    config.megatron.dtype = "fp32"
    model = ModelConfig(path=folder, random_init=True, enable_gradient_checkpointing=False)
    engine = MegatronEngine(model, config, OptimConfig(), device=torch.device("cpu"))
    engine.initialize()
    lengths = np.array(LENGTHS)
    mask = torch.from_numpy(np.arange(lengths.max())[None] >= lengths.max() - lengths[:, None]).long()
    tensors = {"input_ids": mask * 3, "attention_mask": mask, "response_mask": mask[:, -2:]}
    meta = {"use_dynamic_bsz": False, "micro_batch_size": 2}
    data = DataProto.from_dict(tensors=tensors, meta_info=meta)
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


def test_stages_book_their_micro_batches_and_their_waits(megatron_ranks, tmp_path):
    from meshrl.telemetry.accounts import seconds_by_name
    from meshrl.telemetry.flops import ModelShape

    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_hidden_layers=4,
        vocab_size=11,
    )
    config.save_pretrained(tmp_path)
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
