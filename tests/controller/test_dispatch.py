"""Dispatch without workers: a plain loop stands in for the ranks."""

import pytest
import torch

from meshrl.controller import Dispatch, Execute, nd_dispatch, register, register_dispatch_mode, update_dispatch_mode
from meshrl.controller.dispatch import MeshEntry, call_spec, check_mesh
from meshrl.data.batch import DataProto


class FakeRanks:
    def __init__(self, world_size, entries=()):
        self.world_size = world_size
        self.entries = list(entries)

    def mesh_entries(self, mesh_name):
        return self.entries


def run(mode, ranks, function, *args, **kwargs):
    """Plan a call, run `function(rank, ...)` for each rank in a loop, collect."""

    @register(mode)
    def method():
        pass

    plan = call_spec(method).plan(ranks, args, kwargs)
    return plan.collect([function(call.rank, *call.args, **call.kwargs) for call in plan.calls])


def batch(rows, **meta):
    names = [f"n{i}" for i in range(rows)]
    return DataProto.from_dict({"x": torch.arange(rows)}, {"name": names}, meta)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_proto_shards_cover_every_row_once_in_order(rows, world_size):
    seen = {}

    def method(rank, data, offset):
        seen[rank] = data.batch["x"].tolist()
        return DataProto.from_dict({"y": data.batch["x"] + offset}, {"name": data.non_tensor_batch["name"]})

    result = run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(world_size), method, batch(rows), offset=10)
    assert result.batch["y"].tolist() == [10 + i for i in range(rows)]
    assert list(result.non_tensor_batch["name"]) == [f"n{i}" for i in range(rows)]
    assert len({len(part) for part in seen.values()}) == 1
    assert [x for part in seen.values() for x in part][:rows] == list(range(rows))


@pytest.mark.parametrize(("rows", "times"), [(5, 3), (8, 3), (3, 2)])
def test_unpadding_follows_a_method_that_repeats_rows(rows, times):
    data = batch(rows)
    result = run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(4), lambda rank, d: d.repeat(times, interleave=True), data)
    assert torch.equal(result.batch["x"], data.batch["x"].repeat_interleave(times))


def test_workers_can_tell_padding_rows_from_samples():
    told = []

    def method(rank, data):
        told.append(data.meta_info.get("padding_rows", 0))
        return data

    result = run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(4), method, batch(5, step=3))
    assert told == [0, 0, 1, 2]  # 5 rows on 4 ranks: 2 2 1+1 0+2
    assert result.meta_info == {"step": 3}
    told.clear()
    run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(4), method, batch(8))
    assert told == [0, 0, 0, 0]


def test_result_whose_padding_cannot_be_told_is_refused():
    with pytest.raises(ValueError, match="5 rows was padded to 8 for 4 shards, and 4 rows came back"):
        run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(4), lambda rank, d: d.slice(0, 1), batch(5))
    kept = run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(4), lambda rank, d: d.slice(0, 1), batch(8))
    assert kept.batch["x"].tolist() == [0, 2, 4, 6]


def test_several_batches_are_cut_alike_and_the_rest_is_broadcast():
    calls = []

    def method(rank, a, flag, *, b):
        calls.append((a.batch["x"].tolist(), flag, b.batch["x"].tolist()))

    result = run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(2), method, batch(3), "flag", b=batch(3))
    assert calls == [([0, 1], "flag", [0, 1]), ([2, 0], "flag", [2, 0])]
    assert result == [None, None]
    with pytest.raises(ValueError, match="argument 0: 3, b: 4"):
        run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(2), method, batch(3), "flag", b=batch(4))


def test_batches_without_rows():
    meta_only = DataProto(meta_info={"step": 1})
    got = []
    run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(3), lambda rank, d: got.append((rank, d.meta_info, len(d))), meta_only)
    assert got == [(0, {"step": 1}, 0), (1, {"step": 1}, 0), (2, {"step": 1}, 0)]
    empty = batch(2).slice(0, 0)
    assert len(run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(3), lambda rank, d: d, empty)) == 0


def test_jagged_fields_are_dispatched():
    rows = [torch.arange(n) for n in (3, 1, 4, 1, 5)]
    data = DataProto.from_dict({"tokens": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
    result = run(Dispatch.DP_COMPUTE_PROTO, FakeRanks(2), lambda rank, d: d, data)
    assert [row.tolist() for row in result.batch["tokens"].unbind()] == [row.tolist() for row in rows]


def mesh_of(**sizes):
    """Entries of every rank, computed coordinate by coordinate; the ranks at 0 of all other axes collect."""
    entries = []
    shape = tuple(sizes.values())
    for rank in range(int(torch.tensor(shape).prod())):
        coordinates = dict(zip(sizes, torch.unravel_index(torch.tensor(rank), shape), strict=True))
        collects = all(int(value) == 0 for axis, value in coordinates.items() if axis != "dp")
        entries.append(MeshEntry(int(coordinates["dp"]), sizes["dp"], collects))
    return entries


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
        {"dp": 3, "tp": 2},
        {"tp": 2, "pp": 3, "dp": 1, "cp": 2},
        {"cp": 2, "dp": 4},
    ],
)
@pytest.mark.parametrize("rows", [5, 12])
def test_nd_dispatch_gives_peers_the_same_shard_and_asks_one_of_them(sizes, rows):
    entries = mesh_of(**sizes)
    seen = {}

    def method(rank, data):
        seen[rank] = data.batch["x"].tolist()
        # a rank that does not collect returns nonsense, which must not show
        factor = 1 if entries[rank].is_collect else 1000
        return DataProto.from_dict({"x": data.batch["x"] * factor})

    result = run(nd_dispatch("m"), FakeRanks(len(entries), entries), method, batch(rows))
    assert result.batch["x"].tolist() == list(range(rows))
    by_dp = [{tuple(seen[r]) for r, e in enumerate(entries) if e.dp_rank == dp} for dp in range(sizes["dp"])]
    assert all(len(shards) == 1 for shards in by_dp)
    assert [x for shards in by_dp for x in next(iter(shards))][:rows] == list(range(rows))


def test_nd_dispatch_packs_a_shard_once_for_its_peers():
    entries = mesh_of(dp=2, tp=3)

    @register(nd_dispatch("m"))
    def method():
        pass

    calls = call_spec(method).plan(FakeRanks(6, entries), (batch(4),), {}).calls
    assert len({id(call.args[0]) for call in calls}) == 2


def test_nd_dispatch_without_padding_refuses_a_remainder():
    entries = mesh_of(dp=2, tp=2)
    with pytest.raises(ValueError, match="5 rows cannot be divided over 2"):
        run(nd_dispatch("m", pad=False), FakeRanks(4, entries), lambda rank, d: d, batch(5))
    assert len(run(nd_dispatch("m", pad=False), FakeRanks(4, entries), lambda rank, d: d, batch(6))) == 6


def test_meshes_on_which_the_ranks_disagree():
    with pytest.raises(ValueError, match=r"disagree.*\[2, 3\]"):
        check_mesh("m", [MeshEntry(0, 2, True), MeshEntry(1, 3, True)])
    with pytest.raises(ValueError, match=r"dp_rank 1 of mesh 'm' must have exactly one .* has \[\]"):
        check_mesh("m", [MeshEntry(0, 2, True), MeshEntry(1, 2, False)])
    with pytest.raises(ValueError, match=r"dp_rank 0 .* has \[0, 1\]"):
        check_mesh("m", [MeshEntry(0, None, True), MeshEntry(0, None, True)])
    with pytest.raises(ValueError, match="rank 1 has dp_rank 2"):
        check_mesh("m", [MeshEntry(0, 2, True), MeshEntry(2, 2, True)])
    assert check_mesh("m", [MeshEntry(1, None, True), MeshEntry(0, None, True)]) == (2, [1, 0])


def test_per_rank_lists_must_have_one_entry_per_rank():
    for mode in (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE):
        assert run(mode, FakeRanks(3), lambda rank, x, y: x + y, [1, 2, 3], y=(10, 20, 30)) == [11, 22, 33]
        with pytest.raises(ValueError, match=r"argument 0 .* 3 ranks, got 2 entries"):
            run(mode, FakeRanks(3), lambda rank, x: x, [1, 2])
        with pytest.raises(ValueError, match=r"y must be a list .* got a int"):
            run(mode, FakeRanks(3), lambda rank, y: y, y=1)


def test_direct_calls_go_to_one_rank_or_to_all():
    assert run(Dispatch.DIRECT_ROLLOUT_METHOD, FakeRanks(3), lambda rank, x: (rank, x), 5, rank=2) == (2, 5)
    assert run(Dispatch.DIRECT_ROLLOUT_METHOD, FakeRanks(2), lambda rank, x: (rank, x), 5) == [(0, 5), (1, 5)]
    with pytest.raises(ValueError, match="rank 3 is not one of the group's 3"):
        run(Dispatch.DIRECT_ROLLOUT_METHOD, FakeRanks(3), lambda rank: rank, rank=3)


def test_user_defined_modes():
    name = register_dispatch_mode("TEST_PAIRS")
    assert name == Dispatch.TEST_PAIRS
    with pytest.raises(ValueError, match="no functions yet"):
        run(name, FakeRanks(2), lambda rank, x: x, 1)

    def dispatch(group, x):
        return ([x + rank for rank in range(group.world_size)],), {}

    update_dispatch_mode(name, dispatch, lambda group, answers: (group.world_size, answers))
    assert run(name, FakeRanks(2), lambda rank, x: x, 10) == (2, [10, 11])
    mode = {"dispatch_fn": dispatch, "collect_fn": lambda group, answers: max(answers)}
    assert run(mode, FakeRanks(4), lambda rank, x: x, 10) == 13


def test_mistakes_in_registering():
    with pytest.raises(ValueError, match=r"unknown dispatch mode 'DP_COMPUT'; known: .*DP_COMPUTE"):
        register("DP_COMPUT")
    with pytest.raises(ValueError, match="dispatch_fn and collect_fn"):
        register({"dispatch_fn": print})
    with pytest.raises(ValueError, match="the rest would be lost"):
        register(Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    with pytest.raises(ValueError, match=r"nd_dispatch\('grid'\) shards its data .* the rest would be lost"):
        register(nd_dispatch("grid"), execute_mode=Execute.RANK_ZERO)
    with pytest.raises(ValueError, match="exists already"):
        register_dispatch_mode("ONE_TO_ALL")
    with pytest.raises(ValueError, match="unknown dispatch mode 'NONE'"):
        update_dispatch_mode("NONE", print, print)
    with pytest.raises(ValueError, match="both dispatch_fn and collect_fn"):
        register_dispatch_mode("TEST_HALF", dispatch_fn=print)


def generator(self):
    yield 1


async def async_generator(self):
    yield 1


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (generator, "generator, a generator: what it yields stays in the worker"),
        (async_generator, "async_generator, a generator"),
        (staticmethod(generator), "staticmethod"),
        (classmethod(generator), "classmethod"),
        (property(generator), "property"),
        (dict, "dict is a class"),
        (3, "needs a method, and got a int"),
    ],
)
def test_what_cannot_answer_a_call_is_refused(method, why):
    with pytest.raises(TypeError, match=why):
        register(Dispatch.ONE_TO_ALL)(method)


def test_a_decorator_without_its_brackets_is_refused():
    with pytest.raises(TypeError, match=r"write @register\(...\) above .*forgotten"):

        class Forgetful:
            @register
            def forgotten(self):
                return 1
