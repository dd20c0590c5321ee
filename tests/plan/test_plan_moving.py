"""Bytes that operations move, against counts by hand."""

import torch

from meshrl.config.engine import ModelConfig
from meshrl.tools.plan.models import find_model
from meshrl.tools.plan.trace import Cut, LayerSettings, Mover, small_model, trace_moves


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_reads_and_writes_are_counted_and_views_are_not():
    x = meta(300, 500)
    with Mover() as found:
        y = (x * 2).view(500, 300)[3:]
        y.float()
    read = 300 * 500 * 2
    assert found.between == 2 * read + 497 * 300 * (2 + 4)
    assert (found.thin, found.operations) == (0, 2)


def test_products_count_only_where_they_are_thin():
    x, wide, narrow = meta(1024, 512), meta(512, 768), meta(512, 32)
    with Mover() as found:
        _ = x @ wide
        _ = x @ narrow
    assert found.between == 0
    assert found.thin == 2 * (1024 * 512 + 512 * 32 + 1024 * 32)


def layer_moves(tokens, **fields):
    model = find_model(ModelConfig(path="Qwen3-0.6B", **fields))
    return trace_moves(small_model(model, 1, Cut()), 0, LayerSettings(tokens=tokens, dtype=torch.bfloat16))


def test_a_layer_moves_in_proportion_to_its_tokens():
    short, long = layer_moves(1024), layer_moves(4096)
    for one, four in ((short.forward, long.forward), (short.backward, long.backward)):
        assert one.operations == four.operations > 20
        assert 3.9 < four.between / one.between <= 4.0  # gradients of norms' weights do not grow
    assert short.of_pass(trains=False, again=False) == short.forward
    twice = short.of_pass(trains=True, again=True)
    assert twice.between == 2 * short.forward.between + short.backward.between


def test_adapters_add_thin_products():
    plain, adapted = layer_moves(1024), layer_moves(1024, lora_rank=8)
    assert plain.forward.thin == 0
    rows = 1024 * 2
    # Seven linears: each reads its input for the first product and writes its output from the second.
    hidden, heads, inner = 1024, 2048, 3072
    least = rows * (3 * hidden + (heads + 2 * 1024) + heads + hidden + 2 * hidden + 2 * inner + inner + hidden)
    assert least < adapted.forward.thin < 1.2 * least
