"""Routes of vLLM's requests, put together from what its steps computed; no vLLM is needed for that."""

import numpy as np

from meshrl.rollout.vllm.expert_routes import RequestRoutes


def rows(*values):
    return np.array(values, np.uint8)[:, None, None]


def test_a_prefix_of_another_request_is_found_also_in_the_same_step():
    routes = RequestRoutes(block_size=2, most_blocks=100)
    prompt = [7, 8, 9, 10, 11]
    routes.begin("b/0", prompt)
    routes.begin("a/0", prompt)
    routes.note([("b/0-77", 4, rows(15)), ("a/0-99", 0, rows(1, 2, 3, 4, 5))])
    for name, token in (("a/0", 1), ("b/0", 2)):
        routes.sampled(name, [token])
    assert routes.end("a/0")[:, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert routes.end("b/0")[:, 0, 0].tolist() == [1, 2, 3, 4, 15]
    routes.begin("c/0", [7, 8, 9, 3, 3])  # alike in the first block alone
    routes.note([("c/0", 2, rows(21, 22, 23))])
    assert routes.end("c/0")[:, 0, 0].tolist() == [1, 2, 21, 22, 23]
    routes.forget_blocks()
    routes.begin("d/0", prompt)
    routes.note([("d/0-1", 4, rows(31))])
    assert routes.end("d/0")[:, 0, 0].tolist() == [255, 255, 255, 255, 31]
    routes.begin("e/0", prompt)
    assert routes.end("e/0") is None


def test_what_is_computed_again_stays_as_it_was():
    routes = RequestRoutes(block_size=2, most_blocks=100)
    routes.begin("a/0", [7, 8])
    routes.note([("a/0-x", 0, rows(1, 2))])
    routes.sampled("a/0", [3])
    routes.note([("a/0-x", 0, rows(101, 102, 103))])
    routes.note([("somebody else", 0, rows(9))])
    assert routes.end("a/0")[:, 0, 0].tolist() == [1, 2, 103]


def test_no_more_blocks_are_kept_than_vllm_has():
    routes = RequestRoutes(block_size=2, most_blocks=3)
    for name, tokens in (("a/0", [1, 1, 2, 2]), ("b/0", [3, 3]), ("c/0", [1, 1, 9])):
        routes.begin(name, tokens)
        found = 2 if name == "c/0" else 0
        routes.note([(f"{name}-x", found, rows(*tokens[found:]))])
        assert routes.end(name)[:, 0, 0].tolist() == tokens
    routes.begin("d/0", [4, 4, 5, 5])  # two more: of those before, the one that was found last stays
    routes.note([("d/0-x", 0, rows(4, 4, 5, 5))])
    assert len(routes._blocks) == 3
    routes.begin("e/0", [1, 1, 7])
    routes.note([("e/0-x", 2, rows(7))])
    assert routes.end("e/0")[:, 0, 0].tolist() == [1, 1, 7]
    routes.begin("f/0", [3, 3, 7])
    routes.note([("f/0-x", 2, rows(7))])
    assert routes.end("f/0")[:, 0, 0].tolist() == [255, 255, 7]


def test_memory_is_that_of_the_tokens():
    routes, step = RequestRoutes(block_size=16, most_blocks=100), np.zeros((256, 4, 8), np.uint8)
    routes.begin("a/0", [1])
    for at in range(1000):
        routes.note([("a/0-x", at, step[3:4])])
        routes.sampled("a/0", [at])
    held = routes._requests["a/0"].room
    assert held.base is None
    assert held.nbytes <= 2 * 1024 * 32
    blocks = list(routes._blocks.values())
    assert len(blocks) == 1000 // 16
    assert all(block.base is None for block in blocks)
