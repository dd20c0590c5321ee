"""Prompts with images in the real vLLM: every token's log-prob is that of Transformers' own model."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from contract import CHARACTERS
from PIL import Image
from rich.console import Console
from test_seeing_rollout import PARAMS, asked, check, log_probs_of
from transformers import AutoModelForImageTextToText

from meshrl.config.load import load_config
from meshrl.config.validate import ensure_runnable
from meshrl.models.tiny import make_tiny_seeing_model
from meshrl.rollout.remote import RemoteRollout
from meshrl.rollout.requests import Request
from meshrl.rollout.vllm.arguments import content_parts
from meshrl.rollout.vllm.server import VllmServer
from meshrl.rollout.vllm.vllm_rollout import VllmRollout
from meshrl.trainer.launch import train

EXAMPLE = Path(__file__).parents[2] / "examples/images"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
)

SMALL = {
    "dtype": "float32",
    "max_model_len": 64,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
}


def weights_of(folder, factor=1.0):
    """Of the model in a folder, with those of its tower made larger."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight *= factor if "visual" in name else 1.0
    return model


# Its kernels on CPUs want larger heads than the tiny models have.
HEADS = {"head_dim": 32, "hidden_size": 128, "moe_intermediate_size": 96}


def made_folder(tmp_path, family, alphabet=CHARACTERS):
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    return make_tiny_seeing_model(tmp_path / family, alphabet, family=family, rope_parameters=rotation, **HEADS)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl_moe"])
def rollout(request, tmp_path_factory):
    folder = made_folder(tmp_path_factory.mktemp("vllm"), request.param)
    made = VllmRollout(folder, pad_token_id=0, bucket_bytes=100_000, **SMALL)
    made.folder = folder
    yield made
    made.close()


def test_answers_are_those_of_the_model(rollout, image, tmp_path):
    requests = asked(rollout, image)
    rollout.update_weights(weights_of(rollout.folder).named_parameters(), 0)
    answers = rollout.complete(requests)
    check(rollout.folder, rollout, requests, answers)
    # New weights of the tower alone: what was seen before is looked at again.
    changed = weights_of(rollout.folder, 1.5)
    changed.save_pretrained(tmp_path)
    rollout.update_weights(changed.named_parameters(), 1)
    again = rollout.complete(requests)
    check(tmp_path, rollout, requests, again)
    with pytest.raises(AssertionError):
        check(tmp_path, rollout, requests, answers)


def test_new_weights_in_the_middle_of_an_answer(rollout, image):
    """What comes behind an update was sampled with the new tower's view of the images, and what came before was not."""
    old, new = weights_of(rollout.folder), weights_of(rollout.folder, 1.5)
    rollout.update_weights(old.named_parameters(), 0)
    request = asked(rollout, image)[2]
    found = []
    rollout._enter([request], found.append)
    while sum(len(chunk.token_ids) for chunk in found) < 5:
        rollout._advance()
    rollout.update_weights(new.named_parameters(), 1)
    while not found[-1].finish_reason:
        rollout._advance()
    tokens, log_probs, versions = (
        [one for chunk in found for one in getattr(chunk, name)] for name in ("token_ids", "log_probs", "versions")
    )
    assert set(versions) == {0, 1}
    for version, model in enumerate((old, new)):
        wanted = log_probs_of(model, rollout.sight, request, tokens)
        own = torch.tensor(versions) == version
        torch.testing.assert_close(torch.tensor(log_probs)[own], wanted[own], rtol=1e-5, atol=2e-5)
        assert not torch.allclose(torch.tensor(log_probs)[~own], wanted[~own], atol=1e-4)


def test_what_cannot_be_answered_is_told(rollout, image):
    rollout.update_weights(weights_of(rollout.folder).named_parameters(), 0)
    shown = asked(rollout, image)[1]
    wrong = [
        Request("more", shown.prompt_token_ids, PARAMS, 0, (*shown.images, image(8, 8))),
        Request("broken", shown.prompt_token_ids, PARAMS, 0, (image(8, 8)[:60],)),
        shown,
    ]
    words = ["its images (2) take 2", "cannot be decoded", None]
    for answer, word in zip(rollout.complete(wrong), words, strict=True):
        assert (answer.finish_reason == "error") == (word is not None)
        assert word is None or (answer.error and word in answer.error)


def odd_images(image):
    """A transparent one, and one that its camera turned."""
    plain = Image.open(io.BytesIO(image(16, 24, 3)))
    transparent, turned = io.BytesIO(), io.BytesIO()
    plain.convert("RGBA").save(transparent, "PNG")
    seen = Image.open(io.BytesIO(transparent.getvalue()))
    seen.putalpha(100)
    transparent = io.BytesIO()
    seen.save(transparent, "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    plain.save(turned, "JPEG", exif=exif)
    return transparent.getvalue(), turned.getvalue()


def test_the_server_takes_images(tmp_path, image):
    """Also where it has cut the model over two ranks of its own."""
    folder = made_folder(tmp_path, "qwen3_vl")
    client = VllmServer(folder, arguments=SMALL | {"tensor_parallel_size": 2})
    rollout = RemoteRollout(client, pad_token_id=0, bucket_bytes=100_000)
    rollout.sight = client._sight
    try:
        changed = weights_of(folder, 1.5)
        changed.save_pretrained(tmp_path / "changed")
        requests = asked(rollout, image)
        for number, odd in enumerate(odd_images(image)):
            places = [rollout.sight.image_token] * rollout.sight.reader.num_tokens(odd)
            requests.append(Request(f"odd{number}", (11, *places, 12, 7), PARAMS, number, (odd,)))
        for version, (path, model) in enumerate(((folder, weights_of(folder)), (tmp_path / "changed", changed))):
            rollout.update_weights(model.named_parameters(), version)
            check(path, rollout, requests, rollout.complete(requests))
        broken = replace(requests[1], images=(b"no image",))
        (answer,) = rollout.complete([broken])
        assert "no image" in answer.error
    finally:
        rollout.close()


def test_a_run_in_which_images_come_in_the_middle_of_conversations(tmp_path, image):
    """vLLM generates in the trainer's process: its log-probs are the trainer's, of prompts and later turns alike."""
    urls = [content_parts((image(16, 8 * size, size),))[0]["url"] for size in (1, 2, 3) * 4]
    rows = [{"prompt": "<image>?", "images": [url], "ground_truth": "r", "data_source": "noise"} for url in urls]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = made_folder(tmp_path, "qwen3_vl", "rgby?")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rollout = "actor_rollout_ref.rollout"
    own = [
        f"data.train_files=[{tmp_path / 'train.jsonl'}]", "data.val_files=[]", "data.train_batch_size=6",
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        f"{rollout}.name=vllm", f"{rollout}.n=4", f"{rollout}.max_model_len=64", f"{rollout}.enforce_eager=true",
        f"{rollout}.engine_kwargs.vllm={{kv_cache_memory_bytes: 33554432, block_size: 32}}",
        f"{rollout}.multi_turn.environment={EXAMPLE / 'later.py'}:ShownLater",
        "trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1",
        "trainer.device=cpu", "trainer.logger=[file]", "trainer.n_gpus_per_node=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    config = load_config(str(EXAMPLE / "later.yaml"), own).config
    ensure_runnable(config)
    path = train(config, console=Console(quiet=True))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["training/rollout_log_prob_diff_max"] < 1e-4 for row in rows)
    assert any(row["agent/ended_by/environment"] > 0.1 for row in rows)


def test_routes_of_equal_tokens_with_other_images_are_others(tmp_path, image):
    """The first block is the same but for its image: a later sample finds its own in the cache, and its own routes."""
    folder = made_folder(tmp_path, "qwen3_vl_moe")
    rollout = VllmRollout(folder, pad_token_id=0, records_routes=True, **SMALL)
    try:
        rollout.update_weights(weights_of(folder).named_parameters(), 0)
        shown = [image(40, 48, seed) for seed in (1, 2)]
        ids = (11, *[rollout.sight.image_token] * rollout.sight.reader.num_tokens(shown[0]), 12, 7, 8, 9)
        asked = [Request(f"r{at}", ids, PARAMS, at, (shown[which],)) for at, which in enumerate((0, 1, 0))]
        first, other, again = (rollout.complete([request])[0].routes[: len(ids)] for request in asked)
    finally:
        rollout.close()
    assert (first >= 0).all()
    np.testing.assert_array_equal(again, first)
    assert (other != first).any()
