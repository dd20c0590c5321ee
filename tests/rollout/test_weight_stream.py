"""Streams of weights: checked, cut into buckets, and laid down in shared files."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import AutoConfig, Qwen3Config

from meshrl.rollout.in_process_rollout import FairLock
from meshrl.rollout.weight_files import (
    FileWeights,
    SharedFile,
    as_one_segment,
    buckets,
    checked,
    expected_shapes,
    read_tensors,
)


def named(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.arange(size, dtype=dtype)) for i, size in enumerate(sizes)]


def test_a_right_stream_passes_unchanged():
    stream = named(3, 1, 4)
    assert list(checked(iter(stream), {"w0": [3], "w1": (1,), "w2": torch.Size([4])})) == stream


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (named(3), "1 parameters were never sent, such as 'w1'"),
        ([*named(3, 1), ("more", torch.ones(1))], "no parameter 'more'"),
        ([*named(3, 1), *named(3)], "'w0', or got it twice"),
        (named(3, 2), r"'w1' has shape \[1\] here, but was sent as \[2\]"),
        ([], "2 parameters were never sent"),
    ],
)
def test_wrong_streams_are_named(stream, message):
    with pytest.raises(ValueError, match=message):
        list(checked(stream, {"w0": [3], "w1": [1]}))


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(1, [[0], [1], [2], [3]]), (16, [[0, 1], [2], [3]]), (32, [[0, 1, 2], [3]]), (99, [[0, 1, 2, 3]])],
)
def test_buckets_hold_neighbours_up_to_their_limit(limit, wanted):
    found = [[int(name[1:]) for name, _ in bucket] for bucket in buckets(named(3, 1, 4, 5), limit)]
    assert found == wanted


def test_buckets_take_no_more_from_the_stream_than_they_need():
    taken = []

    def stream():
        for item in named(4, 4, 4):
            taken.append(item[0])
            yield item

    next(buckets(stream(), 16))
    assert taken == ["w0", "w1"]


def test_expected_shapes_name_tied_weights_once():
    config = Qwen3Config(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    shapes = expected_shapes(config)
    assert shapes["model.embed_tokens.weight"] == [20, 8]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [4, 8]
    assert "lm_head.weight" not in shapes
    config.tie_word_embeddings = False
    assert expected_shapes(config)["lm_head.weight"] == [20, 8]


def test_another_process_reads_what_was_written_last(tmp_path):
    file = SharedFile(tmp_path / "weights")
    file.write(named(1000))
    mixed = [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.tensor(2.5)),
        ("d", torch.ones(0, 4)),
    ]
    entries = file.write(mixed)
    for (name, tensor), (other, read) in zip(mixed, read_tensors(file.path, entries), strict=True):
        assert name == other
        assert torch.equal(tensor, read)
        assert tensor.dtype == read.dtype
    code = (
        "from meshrl.rollout.weight_files import read_tensors\n"
        f"print([float(t.float().sum()) for _, t in read_tensors({file.path!r}, {entries!r})])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert eval(out) == pytest.approx([float(t.float().sum()) for _, t in mixed])


def test_a_shared_file_grows(tmp_path):
    file = SharedFile(tmp_path / "weights")
    for sizes in ((2,), (100, 3), (5,)):
        entries = file.write(named(*sizes))
        assert [len(t) for _, t in read_tensors(file.path, entries)] == list(sizes)


def test_a_fair_lock_lets_those_who_wait_in():
    lock, order, stop = FairLock(), [], threading.Event()

    def stepper() -> None:
        while not stop.is_set():
            with lock, lock:  # reentrant
                order.append("step")
                time.sleep(0.002)

    thread = threading.Thread(target=stepper, daemon=True)
    thread.start()
    for _ in range(20):
        with lock:
            order.append("visit")
    stop.set()
    thread.join(10)
    visits = [i for i, what in enumerate(order) if what == "visit"]
    # Between two visits the stepper usually gets one turn, not many; a busy machine may delay a visit before it asks.
    assert sorted(b - a for a, b in itertools.pairwise(visits))[len(visits) // 2] <= 3
    with pytest.raises(RuntimeError, match="thread that holds it"):
        lock.release()


def test_a_condition_on_a_fair_lock_gives_it_up_wholly():
    lock = FairLock()
    condition = threading.Condition(lock)  # type: ignore[arg-type]
    seen = []

    def waiter() -> None:
        with lock, condition:
            seen.append("waits")
            condition.wait(10)
            seen.append("woken")

    thread = threading.Thread(target=waiter, daemon=True)
    thread.start()
    while not seen:
        pass
    with condition:
        condition.notify_all()
    thread.join(10)
    assert seen == ["waits", "woken"]


def test_one_segment_holds_copies_of_all_types():
    sent = [
        ("a", torch.randn(3, 5).t()),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.tensor(4)),
        ("d", torch.empty(0)),
    ]
    shared = as_one_segment(sent)
    assert [name for name, _ in shared] == ["a", "b", "c", "d"]
    for (_, tensor), (_, copy) in zip(sent, shared, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert copy.is_shared()
    assert len({copy.untyped_storage().data_ptr() for _, copy in shared}) == 1
    shared[0][1].zero_()
    assert sent[0][1].abs().sum() > 0
    assert torch.equal(shared[1][1], sent[1][1])


def test_experts_get_the_names_of_files():
    gate_up, down, norm = torch.randn(3, 8, 5), torch.randn(3, 5, 4), torch.randn(5)
    stream = [("model.layers.2.mlp.experts.gate_up_proj", gate_up), ("model.layers.2.mlp.experts.down_proj", down)]
    sizes = {"hidden_size": 4, "num_hidden_layers": 3, "num_local_experts": 3, "intermediate_size": 4, "vocab_size": 8}
    config = AutoConfig.for_model("mixtral", **sizes, num_attention_heads=1, num_key_value_heads=1)
    found = dict(FileWeights(config).renamed([*stream, ("model.norm.weight", norm)]))
    block = "model.layers.2.block_sparse_moe.experts"
    expected = {"model.norm.weight": norm}
    for number in range(3):
        expected |= {
            f"{block}.{number}.w1.weight": gate_up[number, :4],
            f"{block}.{number}.w3.weight": gate_up[number, 4:],
        }
        expected[f"{block}.{number}.w2.weight"] = down[number]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name])
        assert tensor.untyped_storage().data_ptr() == expected[name].untyped_storage().data_ptr()  # nothing is copied
