"""What a schedule's timers record, and what is made of it."""

import json

import pytest
import torch

from meshrl.telemetry.pipeline_timeline import PipelineTimeline, Span, draw_gantt, write_chrome_trace


class Clock:
    def __init__(self, step):
        self.seconds, self.step = 0.0, step

    def __call__(self):
        self.seconds += self.step
        return self.seconds


def run_schedule(timeline):
    """As Megatron does: two forwards, a receive, then the backwards in another order."""
    weight = torch.ones(3, requires_grad=True)
    outputs = {}
    timeline("forward-backward", log_level=1).start(barrier=False)
    for chunk, micro_batch in ((0, 5), (1, 7)):
        timeline("forward-compute", log_level=2).start()
        outputs[chunk] = weight * 2
        timeline.watch(outputs[chunk], chunk, micro_batch)
        timeline("forward-compute").stop()
    timeline("backward-recv", log_level=2).start()
    timeline("backward-recv").stop()
    for chunk in (1, 0):
        timeline("backward-compute", log_level=2).start()
        outputs[chunk].sum().backward()
        timeline("backward-compute").stop()
    timeline("forward-backward").stop()


def test_spans_are_named_by_the_forward_step():
    timeline = PipelineTimeline(clock=Clock(1.0), busy=Clock(0.25))
    run_schedule(timeline)
    found = [(s.kind, s.chunk, s.micro_batch) for s in timeline.spans]
    assert found == [("forward", 0, 5), ("forward", 1, 7), ("wait", -1, -1), ("backward", 1, 7), ("backward", 0, 5)]
    assert [(s.start, s.end) for s in timeline.spans] == [(2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert {s.work for s in timeline.spans if s.kind != "wait"} == {0.25}
    timeline.clear()
    run_schedule(timeline)
    assert [s.start for s in timeline.spans] == [2, 4, 6, 8, 10]


def test_without_gradients_only_forwards_are_named():
    timeline = PipelineTimeline()
    with torch.no_grad():
        timeline("forward-compute").start()
        timeline.watch(torch.ones(2), 0, 0)
        timeline("forward-compute").stop()
    assert [s.kind for s in timeline.spans] == ["forward"]


def test_a_forward_without_a_name_is_an_error():
    timeline = PipelineTimeline()
    timeline("forward-compute").start()
    with pytest.raises(ValueError, match="call watch"):
        timeline("forward-compute").stop()


def test_the_clock_waits_for_the_device():
    calls = []
    timeline = PipelineTimeline(synchronize=lambda: calls.append(1))
    run_schedule(timeline)
    assert len(calls) == 12


def test_attached_chunks_name_their_own_spans():
    chunks = [torch.nn.Linear(2, 2) for _ in range(2)]
    config = type("Config", (), {"timers": None})()
    for chunk in chunks:
        chunk.config = config
    timeline = PipelineTimeline()

    def forward(chunk):
        config.timers("forward-compute").start()
        output = chunks[chunk](torch.ones(1, 2))
        config.timers("forward-compute").stop()
        return output

    with timeline.attached(chunks):
        outputs = [forward(chunk) for chunk in (0, 0, 1, 1)]
        for number in (3, 0):
            config.timers("backward-compute").start()
            outputs[number].sum().backward()
            config.timers("backward-compute").stop()
    assert config.timers is None
    chunks[0](torch.ones(1, 2))
    names = [(s.kind, s.chunk, s.micro_batch) for s in timeline.spans]
    assert names[:4] == [("forward", 0, 0), ("forward", 0, 1), ("forward", 1, 0), ("forward", 1, 1)]
    assert names[4:] == [("backward", 1, 1), ("backward", 0, 0)]


STAGES = [
    [Span("forward", 0, 0, 0.0, 0.5, 0.4), Span("wait", -1, -1, 0.5, 1.5), Span("backward", 0, 0, 1.5, 2.5, 0.9)],
    [Span("forward", 1, 0, 0.5, 1.0, 0.4), Span("backward", 1, 0, 1.0, 1.5, 0.5)],
]


def test_chrome_trace_holds_every_span(tmp_path):
    write_chrome_trace(STAGES, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in spans] == [
        (0, 0, "forward 0", 0.0, 5e5),
        (0, 0, "wait", 5e5, 1e6),
        (0, 0, "backward 0", 1.5e6, 1e6),
        (1, 1, "forward 0", 5e5, 5e5),
        (1, 1, "backward 0", 1e6, 5e5),
    ]


def test_gantt_draws_every_stage(tmp_path):
    draw_gantt({"one": STAGES, "two": STAGES[:1]}, tmp_path / "gantt.png")
    data = (tmp_path / "gantt.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 5000
