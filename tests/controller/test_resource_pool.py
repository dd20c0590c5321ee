import pytest

from meshrl.controller import ResourcePool, ResourcePoolManager, Role


def slots_of(pool):
    return [(part.node, slot) for part in pool.parts for slot in part.slots]


def test_sizes_split_in_rank_order_across_nodes():
    pool = ResourcePool([3, 5], use_gpu=False)
    first, second, third = pool.split([2, 3, 3])
    assert (first.process_on_nodes, second.process_on_nodes, third.process_on_nodes) == ([2], [1, 2], [3])
    assert slots_of(first) + slots_of(second) + slots_of(third) == slots_of(pool)


def test_ratios_split_every_node():
    parts = ResourcePool([8, 4], use_gpu=False).split([0.25, 0.75])
    assert [part.process_on_nodes for part in parts] == [[2, 1], [6, 3]]
    assert sorted(slots_of(parts[0]) + slots_of(parts[1])) == slots_of(ResourcePool([8, 4]))


def test_split_parts_split_and_merge_again():
    pool = ResourcePool([4, 4], use_gpu=False)
    left, right = pool.split([0.5, 0.5])
    assert left.process_on_nodes == [2, 2]
    a, b = left.split([1, 3])
    assert slots_of(b) == [(0, 1), (1, 0), (1, 1)]
    merged = ResourcePool.merge([a, b, right])
    assert merged.process_on_nodes == [4, 4]
    assert sorted(slots_of(merged)) == slots_of(pool)
    assert all(part.origin is pool for part in merged.parts)


def test_merge_of_different_pools_keeps_their_nodes():
    a, b = ResourcePool([2], use_gpu=False), ResourcePool([3], use_gpu=False)
    merged = ResourcePool.merge([a, b])
    assert merged.process_on_nodes == [2, 3]
    assert [part.origin for part in merged.parts] == [a, b]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResourcePool([]), "at least one process"),
        (lambda: ResourcePool([2, 0]), r"\[2, 0\]"),
        (lambda: ResourcePool([4]).split([1, 2]), "sum to 3, but the pool holds 4"),
        (lambda: ResourcePool([4]).split([0.5, 0.25]), "sum to 0.75"),
        (lambda: ResourcePool([3]).split([0.5, 0.5]), "1.5, not a whole number"),
        (lambda: ResourcePool([4]).split([4, -1]), "positive"),
        (lambda: ResourcePool.merge([]), "at least one pool"),
        (lambda: ResourcePool.merge([ResourcePool([1]), ResourcePool([1], use_gpu=False)]), "agree"),
    ],
)
def test_mistakes_name_the_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_merging_a_slot_twice_is_refused():
    pool = ResourcePool([2])
    with pytest.raises(ValueError, match="share slots"):
        ResourcePool.merge([pool, pool.split([1, 1])[0]])


def manager(use_gpu=True):
    spec = {"main": [8, 8, 8, 8], "critic": [8, 8], "reward": [8]}
    mapping = {Role.ActorRollout: "main", "critic": "critic", Role.RewardModel: "reward"}
    return ResourcePoolManager(spec, mapping, use_gpu=use_gpu)


def test_manager_maps_roles_to_pools():
    found = manager()
    assert found.get_resource_pool(Role.ActorRollout).world_size == 32
    assert found.get_resource_pool("actor_rollout") is found.get_resource_pool(Role.ActorRollout)
    assert found.get_resource_pool(Role.Critic).process_on_nodes == [8, 8]
    assert found.get_resource_pool("critic").first_device == 32
    with pytest.raises(ValueError, match="'ref' has no pool; mapped roles: actor_rollout, critic, reward_model"):
        found.get_resource_pool(Role.RefPolicy)
    with pytest.raises(ValueError, match="'mian', which is not one of: main"):
        ResourcePoolManager({"main": [1]}, {"actor": "mian"})


def test_manager_checks_what_the_cluster_has():
    manager().check_available([8] * 7)
    with pytest.raises(
        ValueError, match=r"ask for 56 GPUs \(main 8\+8\+8\+8, critic 8\+8, reward 8\).*48 GPUs on 6 node"
    ):
        manager().check_available([8] * 6)
    with pytest.raises(ValueError, match="no node has 8 of them free together"):
        manager().check_available([4] * 14)
    ResourcePoolManager({"a": [3], "b": [5], "c": [4, 4]}, {}).check_available([8, 8])
    with pytest.raises(ValueError, match="no node has 3"):
        ResourcePoolManager({"a": [3], "b": [6], "c": [6]}, {}).check_available([8, 8])
    manager(use_gpu=False).check_available()  # processes share a machine's cores
