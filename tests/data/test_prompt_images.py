"""Prompts with images: every way in which a row may give them, and what is told of those that do not fit."""

import base64
import io
import json
import pickle

import numpy as np
import pandas
import pytest
from PIL import Image

from meshrl.config.data import DataConfig
from meshrl.config.supervised import SFTDataConfig
from meshrl.data.images import IMAGES
from meshrl.data.prompt_images import PromptImages, check_no_images, encoded
from meshrl.data.prompts import PromptDataset, PromptStream
from meshrl.data.supervised_data import DemonstrationDataset
from meshrl.models.loading import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}>"
)


@pytest.fixture(scope="module")
def tokenizer(seeing_folder):
    loaded = load_tokenizer(seeing_folder("qwen3_vl"))
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture
def finder(seeing_folder, tokenizer):
    return PromptImages(seeing_folder("qwen3_vl"), tokenizer, "images")


@pytest.fixture
def dataset(tmp_path, tokenizer, finder):
    """Writes rows into a parquet file and reads them as a dataset that sees."""

    def make(rows, kind=PromptDataset, images=finder, **settings):
        file = tmp_path / "data.parquet"
        pandas.DataFrame(rows).to_parquet(file)
        config = DataConfig(**({"image_key": "images"} | settings))
        if kind is PromptStream:
            return PromptStream([str(file)], tokenizer, config, len(rows), 0, None, images)
        return PromptDataset([str(file)], tokenizer, config, images=images)

    return make


def row(prompt, *images):
    return {"prompt": prompt, "images": [{"bytes": one, "path": None} for one in images]}


def test_every_image_gets_as_many_tokens_as_it_takes(dataset, image, tokenizer):
    wide, small = image(16, 24, 1), image(8, 8, 2)
    data = dataset([row("<image>a<image>=", wide, small), row("12=")])
    batch = data.batch(np.array([0, 1]))
    texts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(*batch.batch.values(), strict=True)]
    pad = "<|image_pad|>"
    around = ("<|vision_start|>", "<|vision_end|>")
    assert texts == [f"{around[0]}{pad * 6}{around[1]}a{around[0]}{pad}{around[1]}=", "12="]
    assert list(batch.non_tensor_batch[IMAGES]) == [(wide, small), ()]
    assert batch.non_tensor_batch["raw_prompt"][0] == "<image>a<image>="


def test_streamed_rows_are_the_same(dataset, image):
    rows = [row("<image>" * n + "=", *[image(8, 16, seed) for seed in range(n)]) for n in range(4)]
    whole, stream = dataset(rows, shuffle=False), dataset(rows, PromptStream, shuffle=False, streaming=True)
    one = whole.batch(np.arange(4))
    other = stream.batch(next(iter(stream)))
    assert one.batch["input_ids"].tolist() == other.batch["input_ids"].tolist()
    assert list(one.non_tensor_batch[IMAGES]) == list(other.non_tensor_batch[IMAGES])


def test_chat_messages_with_places_or_parts(dataset, image, tokenizer):
    picture = image(8, 16)
    said = [{"role": "user", "content": "a<image>b"}]
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
        }
    ]
    found = [dataset([row(prompt, picture)]).prompts[0].tolist() for prompt in (said, parts)]
    wanted = tokenizer("a<|vision_start|><|image_pad|><|image_pad|><|vision_end|>b>")["input_ids"]
    assert found == [wanted, wanted]


@pytest.mark.parametrize("how", ["bytes", "path", "data URL", "mapping of bytes", "mapping of a path", "PIL"])
def test_an_image_may_come_in_many_ways(image, tmp_path, how):
    made = image(8, 16)
    file = tmp_path / "a.png"
    file.write_bytes(made)
    ways = {
        "bytes": made,
        "path": str(file),
        "data URL": f"data:image/png;base64,{base64.b64encode(made).decode()}",
        "mapping of bytes": {"bytes": made, "path": None},
        "mapping of a path": {"bytes": None, "path": str(file)},
        "PIL": Image.open(file),
    }
    got = encoded(ways[how])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(got))), np.asarray(Image.open(file)))
    assert how == "PIL" or got == made


def test_a_photograph_given_by_pil_is_turned_as_well():
    """And one that no PNG could hold becomes RGB."""
    turned = Image.new("CMYK", (16, 32))
    turned.getexif()[0x0112] = 6
    file = io.BytesIO()
    turned.save(file, "JPEG", exif=turned.getexif())
    assert Image.open(io.BytesIO(encoded(Image.open(io.BytesIO(file.getvalue()))))).size == (32, 16)


def test_tables_give_lists_as_arrays_and_parts_all_keys(dataset, finder, image, tokenizer):
    picture = image(8, 8)
    shown = np.empty(1, dtype=object)
    shown[0] = {"bytes": picture, "path": None}
    assert finder.of({"images": shown}, 0) == (picture,)
    with pytest.raises(ValueError, match="does not see any"):
        check_no_images([{"images": shown}], "images")
    parts = [{"type": "image", "text": None, "image": "x"}, {"type": "text", "text": "a", "image": None}]
    (message,) = finder.with_places([{"role": "user", "content": parts}])
    assert message["content"] == [{"type": "image", "image": "x"}, {"type": "text", "text": "a"}]


def test_a_long_text_that_is_no_path_is_told_shortly():
    with pytest.raises(ValueError, match="there is no image to read at") as error:
        encoded("iVBORw0KGgo" * 2000)
    assert len(str(error.value)) < 400
    assert encoded("data:image/png;charset=utf-8;base64,aGVsbG8=") == b"hello"


def test_one_image_needs_no_list(tmp_path, tokenizer, finder, image):
    (tmp_path / "a.png").write_bytes(image(8, 8))
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "<image>", "images": str(tmp_path / "a.png")}) + "\n")
    data = PromptDataset([str(file)], tokenizer, DataConfig(image_key="images"), images=finder)
    assert len(data.batch(np.array([0])).non_tensor_batch[IMAGES][0]) == 1


def first_batch(dataset, rows, kind, **settings):
    data = dataset(rows, kind, streaming=kind is PromptStream, **settings)
    return data.batch(next(iter(data)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda image: row("<image><image>", image(8, 8)), "has 2 places for images (<image>), but there are 1 in"),
        (lambda image: row("a", image(8, 8)), "has 0 places for images (<image>), but there are 1 in 'images'"),
        (lambda image: row("<image>", b"hello"), "'images': 5 bytes that are no image"),
        (lambda image: {"prompt": "<image>", "images": ["nowhere.png"]}, "nowhere.png"),
        (lambda image: {"prompt": "<image>", "images": ["data:image/png;base64,@@"]}, "is not base64"),
        (lambda image: {"prompt": "<image>", "images": [7]}, "an image must be bytes, a path, a data URL"),
    ],
    ids=["too few", "no place", "no image", "no file", "no base64", "a number"],
)
def test_what_does_not_fit_is_told_with_its_row(dataset, image, wrong, words):
    given = wrong(image)
    rows = [given, given]
    for kind in (PromptDataset, PromptStream):
        with pytest.raises(ValueError, match=r"data.parquet', row \d: ") as error:
            first_batch(dataset, rows, kind)
        assert words in str(error.value)


def test_a_long_prompt_with_images_is_never_cut(dataset, image):
    big = row("<image>=", image(32, 32))
    with pytest.raises(ValueError, match=r"has 19 tokens, more than data.max_prompt_length=8, and one with images"):
        dataset([big], max_prompt_length=8, truncation="left")
    kept = dataset([big, row("1=")], max_prompt_length=8, filter_overlong_prompts=True)
    assert (len(kept), kept.dropped) == (1, 1)


def test_rows_with_images_for_a_model_that_sees_none(dataset, image):
    for kind in (PromptDataset, PromptStream):
        with pytest.raises(ValueError, match=r"it has images \('images', data.image_key\), but the model does not see"):
            first_batch(dataset, [row("1=", image(8, 8))], kind, images=None)
    assert len(dataset([row("1=", image(8, 8))], images=None, image_key=None)) == 1  # asked not to look


def test_a_finder_without_a_column_says_so(seeing_folder, tokenizer, dataset, image):
    blind = PromptImages(seeing_folder("qwen3_vl"), tokenizer, None)
    with pytest.raises(ValueError, match=r"there are 0 in the row, since no column of images is named \(image_key\)"):
        dataset([row("<image>", image(8, 8))], images=blind, image_key=None)


def test_batches_with_images_travel(dataset, image):
    batch = dataset([row("<image>", image(8, 8)), row("1")]).batch(np.array([0, 1]))
    back = pickle.loads(pickle.dumps(batch))
    assert list(back.non_tensor_batch[IMAGES]) == list(batch.non_tensor_batch[IMAGES])
    assert list(back.chunk(2)[1].non_tensor_batch[IMAGES]) == [()]


@pytest.fixture
def demonstrations(tmp_path, tokenizer, finder):
    """Writes rows and reads them as demonstrations for a model that sees."""

    def make(rows, images=finder, **settings):
        file = tmp_path / "demos.parquet"
        pandas.DataFrame(rows).to_parquet(file)
        return DemonstrationDataset([str(file)], tokenizer, SFTDataConfig(shuffle=False, **settings), images=images)

    return make


def test_demonstrations_with_images(demonstrations, image, tokenizer):
    wide, small = image(16, 24, 1), image(8, 8, 2)
    data = demonstrations([row("<image>a<image>=", wide, small) | {"response": "12"}, row("1=") | {"response": "0"}])
    batch = data.batch(np.array([1, 0]))
    mask = batch.batch["attention_mask"].bool()
    pad, start, end = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
    texts = [tokenizer.decode(ids[own]) for ids, own in zip(batch.batch["input_ids"], mask, strict=True)]
    assert texts == ["1=0<eos>", f"{start}{pad * 6}{end}a{start}{pad}{end}=12<eos>"]
    learnt = [
        tokenizer.decode(ids[own.bool()])
        for ids, own in zip(batch.batch["input_ids"], batch.batch["response_mask"], strict=True)
    ]
    assert learnt == ["0<eos>", "12<eos>"]
    assert list(batch.non_tensor_batch[IMAGES]) == [(), (wide, small)]


def test_conversations_with_images(demonstrations, image, tokenizer):
    talk = [
        {"role": "user", "content": "<image>a"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "b<image>"},
        {"role": "assistant", "content": "2"},
    ]
    whole = tokenizer.chat_template
    # One that says who speaks: what an answer is must be told apart from what is asked.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}>{% endif %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    try:
        rows = [{"talk": talk, "images": row("", image(8, 16, 1), image(16, 16, 2))["images"]}]
        data = demonstrations(rows, messages_key="talk")
    finally:
        tokenizer.chat_template = whole
    ids, learn = data.sequences[0]
    assert tokenizer.decode(ids[learn]) == "12"
    places = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).nonzero()[0]
    assert places.tolist() == [1, 2, 9, 10, 11, 12]


def test_demonstrations_that_do_not_fit(demonstrations, image):
    shown = row("<image>=", image(32, 32)) | {"response": "1"}
    with pytest.raises(
        ValueError, match=r"demos.parquet', row 1: the demonstration has 21 tokens, .* with images cannot"
    ):
        demonstrations([shown], max_length=8, truncation="left")
    with pytest.raises(ValueError, match=r"row 1: it has images \('images', data.image_key\), but the model does not"):
        demonstrations([shown], images=None)
    with pytest.raises(ValueError, match=r"row 1: the prompt has 1 place for images"):
        demonstrations([shown | {"images": None}])
