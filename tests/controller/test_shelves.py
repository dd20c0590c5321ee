"""Copies in the memory of several nodes: whichever node is lost, every file is left somewhere."""

import pytest

from meshrl.controller.peer_memory import LAST, Shelf, places_of


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_lost_node_leaves_a_copy_of_every_file(count):
    ring = tuple(f"node{number}" for number in range(count))
    held = {node: {rank for rank in ring if node in places_of(rank, ring)} for node in ring}
    for lost in ring:
        left = set().union(*(held[node] for node in ring if node != lost))
        assert left == set(ring)
    # Two neighbours at once are too many: the second has the first one's copies.
    left = set().union(*(held[node] for node in ring if node not in ring[:2]))
    assert ring[0] not in left


def test_a_shelf_keeps_the_newest_whole_step_and_what_is_being_copied(tmp_path):
    shelf = Shelf()
    shelf.add(3, "actor/a", 0, b"old")
    shelf.complete(3, {LAST: b"3"})
    shelf.add(4, "actor/a", 0, b"half of a try that was killed")
    for at, block in ((0, b"ab"), (2, b"c"), (3, b"")):
        shelf.add(4, "actor/a", at, block)
    shelf.add(4, "actor/empty", 0, b"")
    assert shelf.names() == {3: ["actor/a", LAST], 4: ["actor/a", "actor/empty"]}
    shelf.complete(4, {LAST: b"4"})
    assert shelf.names() == {4: ["actor/a", "actor/empty", LAST]}
    assert shelf.read(4, LAST) == b"4"
    shelf.write(4, ["actor/a", LAST], str(tmp_path))
    assert (tmp_path / "actor" / "a").read_bytes() == b"abc"
    assert (tmp_path / LAST).read_bytes() == b"4"
