"""Routes of samples: into a row and back, recorded and replayed by every family's router, and what is refused."""

import numpy as np
import pytest
import torch

from meshrl.agents.loop import Trajectory
from meshrl.agents.messages import Sample
from meshrl.data.batch import object_array
from meshrl.data.packing import keep_padding, pack
from meshrl.engines.batching import column_in_batch_order
from meshrl.models.moe_routing import Routers, fitted, packed_routes, route_dtype, unpacked_routes
from meshrl.rollout.base import routes_column
from meshrl.rollout.requests import Chunk, Completion

LENGTHS = (3, 7, 5)
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "deepseek_v3"]


def batch_of(lengths):
    mask = torch.zeros(len(lengths), 12, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, 5 - min(length - 1, 5) : 5 + length - min(length - 1, 5)] = 1
    return torch.arange(mask.numel()).view(mask.shape), mask, mask[:, 5:]


def numbered(lengths):
    """Routes that say of which sample and token they are."""
    return object_array(
        [np.array([[[sample, token]] for token in range(length)], np.uint8) for sample, length in enumerate(lengths)]
    )


@pytest.mark.parametrize("make_row", [pack, keep_padding])
def test_into_a_row_and_back(make_row):
    row = make_row(*batch_of(LENGTHS))
    column = numbered(LENGTHS)
    packed = packed_routes(column, row)
    assert len(packed) == len(row.input_ids)
    # The tokens of the batch are numbered: each route is that of its own token.
    firsts = [int(mask.argmax()) for mask in batch_of(LENGTHS)[1]]
    for token, (sample, place) in zip(row.input_ids.tolist(), packed[:, 0].tolist(), strict=True):
        if sample == 255:
            assert not batch_of(LENGTHS)[1].flatten()[token]
        else:
            assert token == 12 * sample + firsts[sample] + place
    for found, expected in zip(unpacked_routes(packed, row), column, strict=True):
        assert (found == expected).all()


def test_a_wrong_number_of_tokens_is_told():
    column = numbered(LENGTHS)
    column[1] = column[1][:-1]
    with pytest.raises(ValueError, match="sample 1 has 7 tokens, but routes of 6"):
        packed_routes(column, pack(*batch_of(LENGTHS)))


def test_samples_without_routes_have_unknown_ones():
    column = numbered(LENGTHS)
    column[1] = None
    row = pack(*batch_of(LENGTHS))
    packed = packed_routes(column, row)
    found = unpacked_routes(packed, row)
    assert (found[0] == column[0]).all()
    assert found[1].shape == (7, 1, 2)
    assert (found[1] == 255).all()
    assert packed_routes(np.full(3, None, object), row) is None


def test_micro_batches_come_back_in_the_order_of_the_batch():
    column = numbered((2, 3, 4))
    places, parts = [np.array([2, 0]), None, np.array([1])], [[column[2], column[0]], [column[1]], [column[1]]]
    found = column_in_batch_order(places, parts)
    assert [len(routes) for routes in found] == [2, 3, 4]


def test_fitted_and_types():
    routes = np.ones((4, 2, 3), route_dtype(255))
    assert routes.dtype == np.uint8
    assert route_dtype(256) == np.int16
    assert (fitted(routes, 3) == 1).all()
    longer = fitted(routes, 6)
    assert longer.shape == (6, 2, 3)
    assert (longer[4:] == 255).all()


def test_a_column_of_samples_of_which_some_have_none():
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    assert routes_column([None, None], mask) == {}
    (column,) = routes_column([None, np.ones((1, 2, 1), np.uint8)], mask).values()
    assert column[0] is None
    assert len(column[1]) == 2
    assert column[1][:, 0, 0].tolist() == [1, 255]


def test_answers_and_conversations_keep_what_was_known_first():
    """A turn's prompt holds all turns before it; where weights changed meanwhile, those keep the routes they had."""
    answer = Completion("a", 0)
    answer.add(Chunk("a", 0, [5], [0.0], [1]))
    assert answer.routes is None
    answer.add(Chunk("a", 0, [6], [0.0], [1], "stop", routes=np.full((3, 1, 1), 1, np.uint8)))
    trajectory = Trajectory(Sample(0, (1, 2), 0, (), None, {}), [1, 2], [])
    trajectory.add_sampled(answer)
    trajectory.add_given([7, 8])
    trajectory.add_sampled(Completion("b", 0, [9], [0.0], [2], "stop", routes=np.full((6, 1, 1), 2, np.uint8)))
    assert trajectory.routes[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_routes_give_the_same_numbers_and_others_do_not(make_lm, family):
    model = make_lm(family, "eager")
    routers = Routers(model)
    layers = model.config.num_hidden_layers - (1 if family == "deepseek_v3" else 0)
    ids = torch.randint(2, 41, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids).logits
        with routers.routing(records=True):
            assert model(ids).logits.equal(plain)
            routes = routers.recorded()
        assert routes.shape == (18, layers, 2)
        with routers.routing():
            routers.replay(routes)
            assert model(ids).logits.equal(plain)
            assert routers.choice.metrics(torch.device("cpu")) == {"actor/routes_changed": 0.0}
            changed = routes.clone()
            changed[4] = (routes[4] + 1) % routers.num_experts
            routers.replay(changed)
            moved = (model(ids).logits - plain).abs().amax(-1)[0]
            # What comes before sees nothing of it but the rounding of products with one row more or less.
            assert moved[:4].max() < 1e-5
            assert moved[4] > 1e-4
            assert routers.choice.metrics(torch.device("cpu"))["actor/routes_changed"] > 0
            routers.replay(torch.full_like(routes, 255))
            assert model(ids).logits.equal(plain)
            assert routers.choice.metrics(torch.device("cpu")) == {}
        assert model(ids).logits.equal(plain)  # nothing stays


def test_routers_learn_under_replay(make_lm):
    model = make_lm("qwen3_moe", "eager", num_experts=6).train()
    routers = Routers(model)
    ids = torch.arange(2, 8)[None]
    with routers.routing():
        routers.replay(torch.tensor([[[0, 1], [4, 5]]]).expand(6, -1, -1).to(torch.uint8))
        model(ids).logits.sum().backward()
    for layer in model.model.layers:
        gradient = layer.mlp.gate.weight.grad
        assert gradient.abs().sum() > 0
    used = model.model.layers[0].mlp.experts.down_proj.grad.abs().sum((1, 2)) > 0
    assert used.tolist() == [True, True, False, False, False, False]


def test_what_is_refused(make_lm):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no routers"):
        Routers(make_lm("llama", "eager"))
    model = make_lm("qwen3_moe", "eager", num_experts=6)
    routers = Routers(model)
    with routers.routing():
        with pytest.raises(ValueError, match="routes through 3 layers were given to a model with 2 of experts"):
            routers.replay(torch.zeros(4, 3, 2, dtype=torch.uint8))
        routers.replay(torch.zeros(4, 2, 2, dtype=torch.uint8))
        with pytest.raises(ValueError, match="routes of 4 tokens to 2 experts each were given to a router that sees 5"):
            model(torch.arange(5)[None])
    other = make_lm("qwen3_moe", "eager", num_experts=6)
    gate = other.model.layers[1].mlp.gate
    gate.forward = lambda x: (None, torch.ones(x.shape[0], 2) / 2, torch.zeros(x.shape[0], 2, dtype=torch.long))
    routers = Routers(other)
    with routers.routing(records=True), pytest.raises(ValueError, match="does not choose by a top-k over its 6"):
        other(torch.arange(5)[None])
