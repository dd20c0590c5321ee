"""The block manager against a plain model of itself: who uses which block, and what can be found."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.rollout.embedded.scheduler import BlockManager


def manager(num_blocks: int = 6, block_size: int = 2) -> BlockManager:
    return BlockManager(num_blocks, block_size)


def test_blocks_are_handed_out_once_and_come_back():
    blocks = manager()
    first, second = blocks.allocate(2), blocks.allocate(4)
    assert sorted(first + second) == list(range(6))
    assert blocks.num_free == 0
    blocks.release(first)
    assert sorted(blocks.allocate(2)) == sorted(first)
    blocks.release(second)
    assert blocks.num_free == 4


def test_a_shared_block_comes_back_with_its_last_user():
    blocks = manager()
    mine = blocks.allocate(3)
    blocks.share(mine[:2])
    blocks.release(mine)
    assert blocks.num_free == 4
    blocks.release(mine[:2])
    assert blocks.num_free == 6


def test_giving_back_twice_is_noticed():
    blocks = manager()
    mine = blocks.allocate(1)
    blocks.release(mine)
    with pytest.raises(AssertionError, match="twice"):
        blocks.release(mine)


def test_the_longest_known_prefix_is_found():
    blocks = manager()
    mine = blocks.allocate(3)
    assert blocks.register([1, 2, 3, 4, 5, 6], mine) == [0, 1, 2]
    assert blocks.match([1, 2, 3, 4, 9, 9, 5, 6], 8).blocks == mine[:2]
    assert blocks.match([1, 2, 3, 4, 5, 6], 5).blocks == mine[:2]  # at most five tokens
    assert blocks.match([3, 4], 2).blocks == []  # the same tokens after another prefix
    assert blocks.match([1], 1).blocks == []
    assert blocks.register([1, 2, 3, 4, 5, 6], mine) == []


def test_a_second_copy_is_not_registered_but_its_continuation_is():
    blocks = manager()
    first, second = blocks.allocate(1), blocks.allocate(2)
    blocks.register([1, 2], first)
    assert blocks.register([1, 2, 3, 4], second) == [1]
    assert blocks.match([1, 2, 3, 4], 4).blocks == [first[0], second[1]]


def test_known_blocks_stay_until_their_memory_is_needed_and_the_oldest_tail_goes_first():
    blocks = manager(4)
    old, new = blocks.allocate(2), blocks.allocate(2)
    blocks.register([1, 1, 2, 2], old)
    blocks.register([7, 7, 8, 8], new)
    blocks.release(old)
    blocks.release(new)
    assert blocks.num_free == 4
    assert blocks.match([1, 1, 2, 2], 4).blocks == old
    taken = blocks.allocate(1)
    assert taken == [old[1]]
    assert blocks.match([1, 1, 2, 2], 4).blocks == old[:1]
    assert blocks.match([7, 7, 8, 8], 4).blocks == new


def test_a_block_after_an_evicted_prefix_is_never_mistaken_for_another():
    blocks = manager(2, 1)
    pair = blocks.allocate(2)
    blocks.register([1, 2], pair)
    blocks.release(pair[1:])
    blocks.release(pair[:1])
    other = blocks.allocate(1)  # evicts the longest unused: the second
    assert other == pair[1:]
    blocks.release(other)
    blocks.share(pair[:1])
    assert blocks.match([1, 2], 2).blocks == pair[:1]


def test_flushing_forgets_all_and_loses_nothing():
    blocks = manager()
    used, idle = blocks.allocate(2), blocks.allocate(2)
    blocks.register([1, 2, 3, 4], used)
    blocks.register([5, 6, 7, 8], idle)
    blocks.release(idle)
    blocks.flush()
    assert blocks.match([1, 2, 3, 4], 4).blocks == []
    assert (blocks.num_free, blocks.num_cached) == (4, 0)
    blocks.release(used)
    assert blocks.num_free == 6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("anrf"), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=40))
def test_no_block_is_ever_lost_or_used_for_two_contents(actions):
    """Sequences come (sharing what they find), register and go in any order; contents are kept beside by hand."""
    blocks = BlockManager(8, 2)
    content: dict[int, tuple[int, ...]] = {}
    held: list[tuple[list[int], list[int]]] = []
    for what, tokens in actions:
        if what == "a":
            match = blocks.match(tokens, len(tokens))
            for place, block in enumerate(match.blocks):
                assert content[block] == tuple(tokens[: 2 * (place + 1)])  # the whole prefix
            blocks.share(match.blocks)
            needed = blocks.blocks_for(len(tokens)) - len(match.blocks)
            if needed > blocks.num_free:
                blocks.release(match.blocks)
                continue
            mine = match.blocks + blocks.allocate(needed)
            for place in range(len(match.blocks), len(mine)):
                content[mine[place]] = tuple(tokens[: 2 * (place + 1)])
            held.append((tokens, mine))
        elif what == "n" and held:
            blocks.register(*held[-1])
        elif what == "r" and held:
            blocks.release(held.pop(0)[1])
        elif what == "f":
            blocks.flush()
        users = [block for _, mine in held for block in set(mine)]
        assert blocks.num_free == 8 - len(set(users))
    for _, mine in held:
        blocks.release(mine)
    assert blocks.num_free == 8


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_cache_of_nothing_is_refused(sizes):
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(*sizes)
