"""Prompts with images in the embedded rollout: every token's log-prob is that of Transformers' own model."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from meshrl.config.engine import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.data.batch import DataProto
from meshrl.data.images import IMAGES
from meshrl.models.loading import load_model, load_tokenizer
from meshrl.models.vision import find_sight
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.rollout.build import build_rollout
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import Request, SamplingParams

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl_moe")
PARAMS = SamplingParams(12)


@pytest.fixture(params=FAMILIES)
def folder(request, seeing_folder):
    return seeing_folder(request.param)


def made(folder, device="cpu", dtype=torch.float32, **settings):
    model = load_model(folder, ATTENTION_NAME, dtype=dtype).to(device)
    sight = find_sight(model.config, ModelConfig(path=str(folder)))
    settings = {"block_size": 4, "max_model_len": 64} | settings
    rollout = EmbeddedRollout(model, pad_token_id=0, shares_weights=True, sight=sight, **settings)
    rollout.update_weights([], 3)
    return rollout


def asked(rollout, image, params=PARAMS):
    """Requests of unequal lengths with none to three images, some of them the same."""
    sizes = [(), ((8, 8),), ((16, 24), (8, 16)), ((24, 8),), ((8, 24), (16, 8), (8, 8)), ()]
    requests = []
    for number, own in enumerate(sizes):
        images = tuple(image(*size, seed=number + at) for at, size in enumerate(own))
        ids = [5 + number]
        for one in images:
            ids += [11, *[rollout.sight.image_token] * rollout.sight.reader.num_tokens(one), 12]
        requests.append(Request(f"r{number}", (*ids, 7, 8, 9)[: 63 - params.max_tokens], params, number, images))
    return requests


@torch.no_grad()
def log_probs_of(reference, sight, request, tokens):
    """Those that Transformers' own model gives the tokens of an answer, from all of it at once."""
    ids = torch.tensor([[*request.prompt_token_ids, *tokens]])
    given = {}
    if request.images:
        pixels = [sight.reader.pixels(one) for one in request.images]
        kinds = torch.zeros_like(ids, dtype=torch.int)  # what was sampled is text, whatever token it is
        size = len(request.prompt_token_ids)
        kinds[:, :size] = ids[:, :size] == sight.image_token
        given = {
            "pixel_values": torch.cat([one.values for one in pixels]),
            "image_grid_thw": torch.tensor([one.grid for one in pixels]),
            "mm_token_type_ids": kinds,
        }
    logits = reference(input_ids=ids, **given, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def check(folder, rollout, requests, answers, atol=2e-5):
    reference = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")
    of = {request.request_id: request for request in requests}
    for answer in answers:
        assert answer.error is None
        if rollout.sight.image_token in answer.token_ids:
            continue  # Transformers would look for an image
        wanted = log_probs_of(reference, rollout.sight, of[answer.request_id], answer.token_ids)
        torch.testing.assert_close(torch.tensor(answer.log_probs), wanted, rtol=1e-5, atol=atol)


SETTINGS = (
    {},
    {"max_num_seqs": 2},
    {"max_num_batched_tokens": 7},
    {"num_blocks": 18},
    {"enable_prefix_caching": False},
)


# The other two look and read as these do, less windows and experts.
IN_EVERY_WAY = ("qwen2_5_vl", "qwen3_vl_moe")


@pytest.mark.parametrize(
    ("folder", "settings"),
    [(family, how) for family in FAMILIES for how in (SETTINGS if family in IN_EVERY_WAY else SETTINGS[:1])],
    ids=str,
    indirect=["folder"],
)
def test_answers_are_those_of_the_model(folder, image, settings):
    rollout = made(folder, **settings)
    requests = asked(rollout, image)
    answers = rollout.complete(requests)
    check(folder, rollout, requests, answers)
    assert rollout.blocks.num_free == rollout.blocks.num_blocks
    if "num_blocks" in settings:
        assert rollout.stats()["preemptions"] > 0
    # Equal seeds, equal tokens, whatever runs beside.
    alone = [rollout.complete([request])[0] for request in requests]
    assert [one.token_ids for one in alone] == [one.token_ids for one in answers]


def test_the_control_other_images_give_other_log_probs(folder, image):
    rollout = made(folder)
    requests = asked(rollout, image)
    shown = requests[2]
    other = Request(
        "other", shown.prompt_token_ids, PARAMS, shown.seed, tuple(image(*s, 99) for s in ((16, 24), (8, 16)))
    )
    first, second = rollout.complete([shown, other])
    with pytest.raises(AssertionError):
        check(folder, rollout, [Request("r2", shown.prompt_token_ids, PARAMS, 0, other.images)], [first])
    check(folder, rollout, [shown, other], [first, second])


def test_several_answers_to_one_prompt(folder, image):
    rollout = made(folder)
    requests = asked(rollout, image, SamplingParams(6, n=3))
    answers = rollout.complete(requests)
    assert len(answers) == 18
    check(folder, rollout, requests, answers)


def batch_of(requests, n=1):
    width = max(len(request.prompt_token_ids) for request in requests)
    ids, mask = torch.zeros(len(requests), width, dtype=torch.long), torch.zeros(len(requests), width, dtype=torch.long)
    for row, request in enumerate(requests):
        size = len(request.prompt_token_ids)
        ids[row, width - size :] = torch.tensor(request.prompt_token_ids)
        mask[row, width - size :] = 1
    images = np.empty(len(requests), dtype=object)
    images[:] = [request.images for request in requests]
    tensors = {"input_ids": ids, "attention_mask": mask, "seeds": torch.arange(len(requests))}
    return DataProto.from_dict(tensors=tensors, non_tensors={IMAGES: images}).repeat(n)


def test_a_batch_for_training(folder, image):
    rollout = made(folder)
    requests = asked(rollout, image)
    # The same tokens for two images of one size: neighbours that must not be taken for one prompt.
    twins = [Request(f"twin{n}", requests[1].prompt_token_ids, PARAMS, 0, (image(8, 8, 50 + n),)) for n in range(2)]
    requests = [*requests, *twins]
    output = rollout.generate_sequences(batch_of(requests, 2), PARAMS)
    reference = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")
    for row, (tokens, log_probs) in enumerate(
        zip(output.batch["responses"], output.batch["rollout_log_probs"], strict=True)
    ):
        if (tokens == rollout.sight.image_token).any():
            continue
        wanted = log_probs_of(reference, rollout.sight, requests[row // 2], tokens.tolist())
        torch.testing.assert_close(log_probs, wanted, rtol=1e-5, atol=2e-5)


def test_what_cannot_be_answered_is_told(seeing_folder, image, make_lm):
    rollout = made(seeing_folder("qwen3_vl"))
    shown = asked(rollout, image)[1]
    broken = image(8, 8)[:60]
    wrong = [
        Request("more", shown.prompt_token_ids, PARAMS, 0, (*shown.images, image(8, 8))),
        Request("other size", shown.prompt_token_ids, PARAMS, 0, (image(16, 16),)),
        Request("broken", shown.prompt_token_ids, PARAMS, 0, (broken,)),
        Request("text", shown.prompt_token_ids, PARAMS, 0, (b"hello",)),
        shown,
    ]
    answers = rollout.complete(wrong)
    words = ["its images (2) take 2", "its images (1) take 4", "cannot be decoded", "5 bytes that are no image", None]
    for answer, word in zip(answers, words, strict=True):
        assert (answer.finish_reason == "error") == (word is not None)
        assert word is None or (answer.error and word in answer.error)
    with pytest.raises(ValueError, match=r"its images \(2\) take 2"):
        rollout.generate_sequences(batch_of(wrong[:1]), PARAMS)
    blind = EmbeddedRollout(make_lm("qwen3"), pad_token_id=0, shares_weights=True)
    blind.update_weights([], 0)
    (answer,) = blind.complete([Request("a", (3, 4), PARAMS, 0, shown.images)])
    assert "does not see any" in answer.error


def test_answers_that_are_asked_for_one_by_one_share_their_prompt(seeing_folder, image):
    """As a run does that trains on answers as they end: a request for each."""
    folder = seeing_folder("qwen3_vl")
    rollout = made(folder)
    first, second = asked(rollout, image)[1:3]
    requests = [
        Request(f"{at}", r.prompt_token_ids, PARAMS, at, r.images) for at, r in enumerate([first] * 4 + [second] * 2)
    ]
    answers = list(rollout.as_they_end(requests))
    # In blocks of four, the last token aside.
    assert rollout.stats()["cached_prompt_tokens"] == 3 * 4 + len(second.prompt_token_ids) // 4 * 4 - 4
    check(folder, rollout, requests, answers)


def images_looked_at(rollout, run):
    """What `run` gives, and how many images the tower got."""
    counts = []
    look = rollout.hf_model.base_model.get_image_features
    rollout.hf_model.base_model.get_image_features = lambda pixels, grids: (
        counts.append(len(grids)) or look(pixels, grids)
    )
    try:
        return run(), sum(counts)
    finally:
        rollout.hf_model.base_model.get_image_features = look


@pytest.mark.parametrize("store", [512 << 20, 1])
def test_a_conversation_goes_on_from_the_cache(folder, image, monkeypatch, store):
    """Later turns with images of their own: what came before is neither computed nor looked at again.

    Nor is it where the store of pixels has forgotten it.
    """
    rollout = made(folder)
    sight = rollout.sight
    monkeypatch.setattr(sight.reader._pixels, "most_bytes", store)
    prompts = [r for r in asked(rollout, image, SamplingParams(5)) if r.images]
    first, looked = images_looked_at(rollout, lambda: rollout.complete(prompts))
    assert looked == 7
    later = []
    for request, answer in zip(prompts, first, strict=True):
        said = [token if token != sight.image_token else 1 for token in answer.token_ids]
        more = image(8, 16, seed=70 + len(later)) if len(later) % 2 == 0 else None
        given = () if more is None else (11, *[sight.image_token] * sight.reader.num_tokens(more), 12)
        ids = (*request.prompt_token_ids, *said, *given, 9)
        images = request.images if more is None else (*request.images, more)
        later.append(Request(f"later-{request.request_id}", ids, PARAMS, request.seed, images))
    before = rollout.stats()["cached_prompt_tokens"]
    second, looked = images_looked_at(rollout, lambda: rollout.complete(later))
    check(folder, rollout, later, second)
    assert looked == 2, "two of the later turns have an image of their own"
    found = rollout.stats()["cached_prompt_tokens"] - before
    assert found >= sum((len(request.prompt_token_ids) - 1) // 4 * 4 for request in prompts)


def test_the_control_a_prefix_with_another_image_is_another(folder, image):
    """The same tokens behind an other image of the same size find nothing in the cache but what came before it."""
    rollout = made(folder)
    shown = asked(rollout, image)[2]
    rollout.complete([shown])
    before = rollout.stats()["cached_prompt_tokens"]
    other = Request("other", shown.prompt_token_ids, PARAMS, 0, (shown.images[0], image(8, 16, seed=99)))
    (answer,), looked = images_looked_at(rollout, lambda: rollout.complete([other]))
    check(folder, rollout, [other], [answer])
    assert (looked, rollout.stats()["cached_prompt_tokens"] - before) == (1, 8)


def test_new_weights_reach_what_looks(seeing_folder, image):
    """After an update of the tower alone, what was seen before is looked at again."""
    folder = seeing_folder("qwen3_vl")
    rollout = made(folder)
    rollout.shares_weights = False
    requests = asked(rollout, image)
    before = rollout.complete(requests)
    model = load_model(folder, ATTENTION_NAME)
    weights = dict(model.named_parameters())
    changed = {name: weight.detach() * (1.5 if "visual" in name else 1.0) for name, weight in weights.items()}
    rollout.update_weights(changed.items(), 4)
    after = rollout.complete(requests)
    for request, one, other in zip(requests, before, after, strict=True):
        assert (one.log_probs == other.log_probs) == (not request.images)


def test_it_is_built_from_a_config(seeing_folder, image):
    folder = seeing_folder("qwen3_vl")
    config = RolloutConfig(name="embedded", dtype="float32", max_model_len=64)
    model = load_model(folder, ATTENTION_NAME)
    rollout = build_rollout(
        config, ModelConfig(path=str(folder)), model, load_tokenizer(folder), device=torch.device("cpu"), can_share=True
    )
    rollout.update_weights([], 0)
    requests = asked(rollout, image)
    check(folder, rollout, requests, rollout.complete(requests))
