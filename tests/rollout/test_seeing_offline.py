"""`meshrl generate` and `meshrl serve` with a model that sees."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import httpx
import pandas
import pytest
from rich.console import Console

from meshrl.models.loading import load_tokenizer
from meshrl.models.tiny import make_tiny_seeing_model
from meshrl.rollout.build import EngineOptions, open_rollout
from meshrl.rollout.requests import Request, SamplingParams
from meshrl.serving.app import build_app
from meshrl.serving.offline import Job, generate
from meshrl.serving.service import Service
from meshrl.serving.settings import Settings

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}>"
)
QUIET = Console(file=io.StringIO())
SMALL = EngineOptions(max_num_seqs=8)
GREEDY = SamplingParams(5, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_tiny_seeing_model(tmp_path_factory.mktemp("served") / "tiny", "0123456789abc=>")
    tokenizer = load_tokenizer(made)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def opened(folder):
    made = open_rollout(folder, SMALL)
    yield made
    made.rollout.close()


def answer(opened, text, images):
    """The rollout's own answer to a prompt that is written out token by token."""
    ids = opened.tokenizer(text)["input_ids"]
    stops = opened.stop_token_ids
    params = SamplingParams(5, temperature=0.0, stop_token_ids=stops)
    return opened.rollout.complete([Request("a", tuple(ids), params, 0, images)])[0]


def written(opened, image):
    return "<|vision_start|>" + "<|image_pad|>" * opened.images.reader.num_tokens(image) + "<|vision_end|>"


def test_rows_with_images(folder, opened, image, tmp_path):
    pictures = [image(8, 24, 1), image(16, 16, 2), image(8, 8, 3)]
    rows = [
        {"prompt": "a<image>=", "shown": [{"bytes": pictures[0], "path": None}]},
        {"prompt": "<image>1<image>", "shown": [{"bytes": one, "path": None} for one in pictures[1:]]},
        {"prompt": "12=", "shown": None},
        {"prompt": "<image>", "shown": None},
        {"prompt": "<image>", "shown": [{"bytes": b"hello", "path": None}]},
        {"prompt": "<image>", "shown": [{"bytes": image(40, 40)[:2000], "path": None}]},
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "in.parquet")
    job = Job(str(folder), tmp_path / "in.parquet", tmp_path / "out.jsonl", GREEDY, image_key="shown", token_ids=True)
    assert "3 failed" in generate(job, SMALL, QUIET)
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [
        f"a{written(opened, pictures[0])}=",
        f"{written(opened, pictures[1])}1{written(opened, pictures[2])}",
        "12=",
    ]
    shown = [tuple(pictures[:1]), tuple(pictures[1:]), ()]
    for row, text, images in zip(out, texts, shown, strict=False):
        wanted = answer(opened, text, images)
        assert row["response_token_ids"] == [wanted.token_ids]
        assert row["response_log_probs"][0] == pytest.approx(wanted.log_probs, abs=1e-5)
    assert [row["error"] is None for row in out] == [True, True, True, False, False, False]
    assert "1 place for images (<image>), but there are 0 in 'shown'" in out[3]["error"]
    assert "5 bytes that are no image" in out[4]["error"]
    assert "cannot be decoded" in out[5]["error"]
    # What was written can be read again, images and all.
    again = tmp_path / "again.jsonl"
    again.write_text("".join(json.dumps({"prompt": r["prompt"], "shown": r["shown"]}) + "\n" for r in out))
    second = Job(str(folder), again, tmp_path / "second.parquet", GREEDY, image_key="shown", token_ids=True)
    generate(second, SMALL, QUIET)
    tokens = pandas.read_parquet(tmp_path / "second.parquet")["response_token_ids"]
    assert [[list(one) for one in row] for row in tokens] == [row["response_token_ids"] for row in out]


def test_a_job_is_another_with_other_images(folder, image, tmp_path):
    def fingerprint(seed, key="shown"):
        rows = [{"prompt": "<image>", "shown": [image(8, 8, seed)]}]
        return Job(str(folder), tmp_path, tmp_path, GREEDY, image_key=key).fingerprint(rows, SMALL)

    assert fingerprint(1) == fingerprint(1) != fingerprint(2)
    assert fingerprint(1, None) == fingerprint(2, None) != fingerprint(1)


def test_other_engines_and_other_models_are_refused(folder, tiny_model_folder):
    with pytest.raises(ValueError, match=r"the hf engine cannot generate with a qwen3_vl model: .* sees images"):
        open_rollout(folder, EngineOptions(engine="hf"))
    with pytest.raises(ValueError, match=r"images in 'shown': the model at .* \(qwen3\) does not see any"):
        open_rollout(tiny_model_folder, SMALL, "shown")


def url(image):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}


def ask(opened, content, **fields):
    """The answer of a server around the rollout."""
    service = Service(opened, Settings(name="tiny", max_request_bytes=1 << 20))
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 5}

    async def post():
        transport = httpx.ASGITransport(app=build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", json=body | fields)

    return asyncio.run(post())


def test_chat_with_images(opened, image):
    first, second = image(8, 24, 1), image(16, 16, 2)
    parts = [{"type": "text", "text": "a"}, url(first), url(second), {"type": "text", "text": "="}]
    response = ask(opened, parts, return_token_ids=True)
    assert response.status_code == 200, response.text
    wanted = answer(opened, f"a{written(opened, first)}{written(opened, second)}=>", (first, second))
    choice = response.json()["choices"][0]
    assert choice["token_ids"] == wanted.token_ids
    assert response.json()["usage"]["prompt_tokens"] == len("a=>") + 4 + 3 + 4
    other = ask(opened, [parts[0], url(second), url(first), parts[3]], logprobs=True).json()
    same = ask(opened, parts, logprobs=True).json()
    numbers = [[one["logprob"] for one in got["choices"][0]["logprobs"]["content"]] for got in (same, other)]
    assert numbers[0] == pytest.approx(wanted.log_probs[: len(numbers[0])], abs=1e-5)
    assert numbers[0] != pytest.approx(numbers[1], abs=1e-5)
    assert ask(opened, "12=").status_code == 200  # text alone, as ever


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "http://169.254.0.1/a.png"}}, "must come as a data URL"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "must come as a data URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "is not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, "5 bytes that are no image"),
        ({"type": "image_url", "image_url": "x"}, "only parts of text and image_url are served here"),
        ({"type": "input_audio"}, "only parts of text and image_url are served here"),
        ({"type": "text", "text": "<|image_pad|>"}, "has 1 place for images"),
    ],
)
def test_what_is_no_image_is_refused(opened, part, words):
    response = ask(opened, [part])
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_broken_image_does_not_end_the_server(opened, image):
    whole = image(40, 40)
    response = ask(opened, [url(whole[: len(whole) // 2])])
    assert response.status_code == 400
    assert "cannot be decoded" in response.text
    assert ask(opened, [url(image(8, 8))]).status_code == 200


def test_a_model_that_does_not_see_says_so(tiny_model_folder, image, monkeypatch):
    made = open_rollout(tiny_model_folder, SMALL)
    made.tokenizer.chat_template = TEMPLATE
    try:
        response = ask(made, [url(image(8, 8))])
    finally:
        made.rollout.close()
    assert response.status_code == 400
    assert "this model does not see images" in response.json()["error"]["message"]
