"""The embedded rollout with images on a GPU: log-probs against Transformers' own model in float32 on a CPU."""

from dataclasses import replace

import pytest
import torch
from test_seeing_rollout import FAMILIES, asked, batch_of, check, made

from meshrl.rollout.requests import Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PARAMS = SamplingParams(20)


@pytest.fixture(params=FAMILIES)
def folder(request, seeing_folder):
    return seeing_folder(request.param)


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 16}, {"max_num_batched_tokens": 24}], ids=str)
def test_answers_are_those_of_the_model(folder, image, settings):
    """Prompts of none to three images, which decode by recorded steps; some are computed again."""
    rollout = made(folder, "cuda", **({"block_size": 16} | settings))
    requests = asked(rollout, image, PARAMS)
    answers = rollout.complete(requests)
    check(folder, rollout, requests, answers, 1e-4)
    alone = [rollout.complete([request])[0] for request in requests]
    for one, beside in zip(alone, answers, strict=True):
        assert one.token_ids == beside.token_ids


def test_a_batch_for_training(folder, image):
    rollout = made(folder, "cuda", block_size=16)
    requests = asked(rollout, image, PARAMS)
    output = rollout.generate_sequences(batch_of(requests, 2), PARAMS)
    again = rollout.generate_sequences(batch_of(requests, 2), PARAMS)
    assert torch.equal(output.batch["responses"], again.batch["responses"])


WAYS = {
    "bf16": ({}, 0.05),
    "weights in 8 bits": ({"quantization": "fp8"}, 0.3),
    "keys in 8 bits": ({"kv_cache_dtype": "fp8"}, 0.3),
}


@pytest.mark.parametrize("way", WAYS)
def test_rounded_numbers_stay_near(seeing_folder, image, way):
    settings, tolerance = WAYS[way]
    folder = seeing_folder("qwen3_vl")
    rollout = made(folder, "cuda", torch.bfloat16, block_size=16, **settings)
    requests = asked(rollout, image, PARAMS)
    check(folder, rollout, requests, rollout.complete(requests), tolerance)


def test_a_conversation_goes_on_from_the_cache(folder, image):
    """A later turn with an image of its own; the blocks that are found end inside the first image, or behind it."""
    rollout = made(folder, "cuda", block_size=16, max_model_len=128)
    sight = rollout.sight

    def tokens_of(one):
        return (11, *[sight.image_token] * sight.reader.num_tokens(one), 12)

    first = [image(32, 40, seed) for seed in range(3)]
    asked_first = [
        Request(f"a{at}", (*tokens_of(one), *range(5, 5 + 7 * at)), SamplingParams(8), at, (one,))
        for at, one in enumerate(first)
    ]
    said = rollout.complete(asked_first)
    check(folder, rollout, asked_first, said, 1e-4)
    later = []
    for request, answer in zip(asked_first, said, strict=True):
        own = [token if token != sight.image_token else 1 for token in answer.token_ids]
        shown = image(24, 16, 9)
        ids = (*request.prompt_token_ids, *own, *tokens_of(shown), 7)
        later.append(Request(f"b{request.seed}", ids, PARAMS, request.seed, (*request.images, shown)))
    before = rollout.stats()["cached_prompt_tokens"]
    check(folder, rollout, later, rollout.complete(later), 1e-4)
    assert rollout.stats()["cached_prompt_tokens"] - before >= 16 * (1 + 1 + 2)
    same = [replace(r, request_id=f"c{r.seed}", prompt_token_ids=(*r.prompt_token_ids, 8)) for r in later]
    check(folder, rollout, same, rollout.complete(same), 1e-4)  # all images are in the cache, or in its last block
