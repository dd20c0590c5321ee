"""Layers of pipeline stages against megatron-core's own answer, over every way to split them."""

import itertools

import pytest

from meshrl.parallel.pipeline import PipelineSplit, layer_offsets, parse_layout


@pytest.fixture(scope="module")
def megatron_layers():
    """Asks megatron-core for the layers of every chunk; None where it refuses to build them."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    def ask(num_layers, pp, vpp, split):
        layout = (
            split.layout if isinstance(split.layout, str) or split.layout is None else [list(x) for x in split.layout]
        )
        try:
            config = TransformerConfig(
                num_layers=num_layers,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                pipeline_dtype="float32",
                num_layers_in_first_pipeline_stage=split.first,
                num_layers_in_last_pipeline_stage=split.last,
                account_for_embedding_in_pipeline_split=split.embedding,
                account_for_loss_in_pipeline_split=split.loss,
                pipeline_model_parallel_layout=layout,
            )
            stages = []
            for stage in range(pp):
                parallel_state.set_pipeline_model_parallel_rank(stage)
                parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)
                chunks = []
                for chunk in range(vpp):
                    vp_stage = chunk if vpp > 1 else None
                    start = get_transformer_layer_offset(config, vp_stage, stage)
                    chunks.append(range(start, start + get_num_layers_to_build(config, vp_stage, stage)))
                stages.append(chunks)
            return stages
        except (AssertionError, ValueError, ZeroDivisionError):
            return None

    yield ask
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def ours(num_layers, pp, vpp, split):
    try:
        return layer_offsets(num_layers, pp, vpp, split)
    except ValueError:
        return None


def sizes():
    for pp, vpp in itertools.product((1, 2, 3, 4, 8), (1, 2, 3)):
        if pp > 1 or vpp == 1:
            yield pp, vpp


def splits(pp):
    yield PipelineSplit()
    for embedding, loss in ((True, False), (False, True), (True, True)):
        yield PipelineSplit(embedding=embedding, loss=loss)
    if pp > 1:
        for first, last in itertools.product((None, 1, 2, 3, 4, 6), repeat=2):
            if first or last:
                yield PipelineSplit(first=first, last=last)


def test_every_rank_agrees_with_megatron(megatron_layers):
    agreed, refused = 0, 0
    for pp, vpp in sizes():
        for num_layers in (1, 2, 4, 6, 7, 8, 12, 14, 15, 16, 22, 24, 30, 32):
            for split in splits(pp):
                want, found = megatron_layers(num_layers, pp, vpp, split), ours(num_layers, pp, vpp, split)
                if found is None:
                    refused += 1
                    assert want is None or not covers(want, num_layers), (num_layers, pp, vpp, split, want)
                else:
                    agreed += 1
                    assert found == want, (num_layers, pp, vpp, split)
                    assert covers(found, num_layers)
    # Both outcomes are many: neither side is trivially right.
    assert agreed > 300
    assert refused > 300


def covers(stages, num_layers):
    """Whether the chunks hold every layer once, in the order in which a micro-batch passes them."""
    passed = [layer for chunk in range(len(stages[0])) for stage in stages for layer in stage[chunk]]
    return passed == list(range(num_layers))


@pytest.mark.parametrize(
    ("layout", "layers", "pp", "vpp"),
    [
        ("Ett|ttL", 4, 2, 1),
        ("E|ttt|t|L", 4, 4, 1),
        ("E|ttt|t|L", 4, 2, 2),
        ("Et*3|(tt|)*2,t|tL", 9, 5, 1),
        ("Et|(tt|)*6tL", 14, 4, 2),
        ("Et|(t*2|)*6tL", 14, 2, 4),
        ("E||tt|L", 2, 2, 2),
        ((("embedding", "decoder"), ("decoder", "decoder"), ("decoder",), ("Loss",)), 4, 2, 2),
        ("Ett|tL", 4, 2, 1),
        ("Ett|ttL", 4, 2, 2),
        ("tt|tEtL", 4, 2, 1),
        ("Ett|xtL", 4, 2, 1),
        ("ELtt|tt", 4, 2, 1),
    ],
)
def test_explicit_layouts_agree_with_megatron(megatron_layers, layout, layers, pp, vpp):
    split = PipelineSplit(layout=layout)
    assert ours(layers, pp, vpp, split) == megatron_layers(layers, pp, vpp, split)


def test_layouts_are_written_out():
    assert parse_layout("Et*2|(t|)*2L") == [["embedding", "decoder", "decoder"], ["decoder"], ["decoder"], ["loss"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4), r"10 of 10 layers remain for 4 of 4 pipeline stages"),
        (
            (8, 2, 3),
            r"the 4 layers of pipeline stage 0 must be divisible by virtual_pipeline_model_parallel_size \(3\)",
        ),
        ((8, 1, 2), r"virtual_pipeline_model_parallel_size \(2\) needs pipeline_model_parallel_size > 1"),
        ((8, 2, 2, PipelineSplit(first=2, last=6)), r"takes only one of .*\(2\).*\(6\)"),
        ((8, 2, 1, PipelineSplit(layout="Ett|ttL")), r"lists 4 decoder layers, the model has 8"),
        ((4, 4, 1, PipelineSplit(layout="Ett|ttL")), r"lists 2 chunks.* is 4"),
    ],
)
def test_refusals_say_the_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_offsets(*arguments)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="drop one of the two"):
        PipelineSplit(first=2, loss=True)
    with pytest.raises(ValueError, match="drop the other settings"):
        PipelineSplit(layout="EtL", first=1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PipelineSplit(last=0)
