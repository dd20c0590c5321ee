"""Which ranks share samples and which share weights, as numbers: no process is started."""

import numpy as np
import pytest

from meshrl.parallel.mesh import DATA_AXES, SEQUENCE_AXES, Layout, sample_layout, shard_layout

WORLDS = [(8, -1, 1, 1), (8, 4, 1, 2), (8, 2, 2, 2), (8, 2, 1, 4), (6, 2, 3, 1), (64, 32, 1, 4), (64, -1, 2, 4)]


@pytest.mark.parametrize(("world", "fsdp_size", "cp", "sp"), WORLDS)
def test_ranks_of_a_sequence_and_shards_of_a_copy_are_neighbours(world, fsdp_size, cp, sp):
    samples, shards = sample_layout(world, cp, sp), shard_layout(world, fsdp_size)
    # The row-major meshes of (data, sequence) and of (copies, shards), as verl makes them.
    blocks = np.arange(world).reshape(-1, cp * sp)
    assert samples.groups(*SEQUENCE_AXES) == blocks.tolist()
    assert samples.groups(*DATA_AXES) == blocks.T.tolist()
    cut = np.arange(world).reshape(-1, world if fsdp_size == -1 else fsdp_size)
    assert shards.groups("fsdp") == cut.tolist()
    assert shards.groups("ddp") == cut.T.tolist()
    assert samples.world_size == shards.world_size == world


def test_64_ranks_of_sequences_of_4_and_copies_of_32():
    samples, shards = sample_layout(64, sp=4), shard_layout(64, 32)
    assert samples.size("dp") == 16
    assert shards.groups("fsdp") == [list(range(32)), list(range(32, 64))]
    # Ranks of one sequence hold different shards.
    assert all(len({shards.index(rank, "fsdp") for rank in group}) == 4 for group in samples.groups("sp"))


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"n_gpus \(6\) .* \(2 \* 2 = 4\)"):
        sample_layout(6, 2, 2)
    for size in (3, 16, 0):
        with pytest.raises(ValueError, match=rf"n_gpus \(8\) must be divisible by fsdp_size \({size}\)"):
            shard_layout(8, size)


def test_a_layout_prints_its_groups():
    assert str(shard_layout(4, 2)) == "ddp 2 * fsdp 2 = 4 ranks\nddp: [0, 2] [1, 3]\nfsdp: [0, 1] [2, 3]"
    with pytest.raises(ValueError, match="axis tp must have at least one rank"):
        Layout.of({"tp": 0})
