"""A rank's place in a Megatron layout against megatron-core's own groups."""

import itertools

import pytest

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.parallel.pipeline import PipelineSplit


def layouts():
    for tp, pp, cp, ep, etp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2)):
        for world in (tp * pp * cp, 2 * tp * pp * cp, 4 * tp * pp * cp):
            if world % (etp * ep * pp) == 0 and world <= 32:
                yield ParallelRanks(0, world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)


def place(groups, rank):
    """The index of a rank inside its group."""
    (group,) = [group for group in groups if rank in group]
    return group.index(rank)


def test_every_rank_stands_where_megatron_puts_it():
    pytest.importorskip("megatron.core")
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    count = 0
    for ranks in layouts():
        dense = RankGenerator(tp=ranks.tp, ep=1, dp=ranks.dp, pp=ranks.pp, cp=ranks.cp, order=order)
        expert = RankGenerator(tp=ranks.etp, ep=ranks.ep, dp=ranks.edp, pp=ranks.pp, cp=1, order=order)
        for rank in range(ranks.world_size):
            there = ranks.at(rank)
            assert there.tp_rank == place(dense.get_ranks("tp"), rank)
            assert there.cp_rank == place(dense.get_ranks("cp"), rank)
            assert there.dp_rank == place(dense.get_ranks("dp"), rank)
            assert there.pp_rank == place(dense.get_ranks("pp"), rank)
            assert there.etp_rank == place(expert.get_ranks("tp"), rank)
            assert there.ep_rank == place(expert.get_ranks("ep"), rank)
            assert there.edp_rank == place(expert.get_ranks("dp"), rank)
        assert sorted(ranks.layout.groups("tp")) == sorted(dense.get_ranks("tp"))
        assert sorted(ranks.layout.groups("pp")) == sorted(dense.get_ranks("pp"))
        assert sum(ranks.at(rank).is_collect for rank in range(ranks.world_size)) == ranks.dp
        count += 1
    assert count > 50


def test_chunks_of_a_rank():
    ranks = ParallelRanks(1, 2, pp=2, vpp=2, split=PipelineSplit(layout="Et|tt|t|L"))
    assert [ranks.layers(4, chunk) for chunk in (0, 1)] == [range(1, 3), range(4, 4)]
    assert [ranks.has_embedding(chunk) for chunk in (0, 1)] == [False, False]
    assert [ranks.has_output(chunk) for chunk in (0, 1)] == [False, True]
    assert ranks.at(0).has_embedding(0)
    assert not ranks.at(0).has_embedding(1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 8, "tp": 3}, r"n_gpus \(8\) must be divisible by .* \(3 \* 1 \* 1 = 3\)"),
        ({"world_size": 8, "pp": 2, "ep": 8}, r"n_gpus \(8\) must be divisible by .* \(1 \* 8 \* 2 = 16\)"),
        ({"world_size": 2, "rank": 2}, "rank 2 is outside a world of 2"),
        ({"cp": 0}, "axis cp must have at least one rank, got 0"),
    ],
)
def test_impossible_layouts_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelRanks(**sizes)
