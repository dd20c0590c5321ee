"""Models that see: positions and logits are those of Transformers' own model, which pads and looks at each sample."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from meshrl.config.engine import ModelConfig
from meshrl.data.images import NOT_AN_IMAGE, ImageReader
from meshrl.models.loading import load_model_config
from meshrl.models.vision import find_sight, language_model, sees, tower_of

START, END = 11, 12  # any tokens may stand around an image
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl_moe")


@pytest.fixture(params=FAMILIES)
def folder(request, seeing_folder):
    return seeing_folder(request.param)


def sight_of(folder):
    return find_sight(AutoConfig.from_pretrained(folder), ModelConfig(path=str(folder)))


def with_images(sight, *parts):
    """Token ids of texts (lists) and images (bytes), and the images."""
    ids, images = [], []
    for part in parts:
        if isinstance(part, bytes):
            ids += [START, *[sight.image_token] * sight.reader.num_tokens(part), END]
            images.append(part)
        else:
            ids += part
    return ids, tuple(images)


@pytest.fixture
def scene(folder, image):
    """A sight, and documents of unequal lengths: none, one, two adjacent and three images, the same one twice."""
    sight = sight_of(folder)
    wide, high, square = image(16, 40, 1), image(32, 8, 2), image(24, 24, 3)
    documents = [
        with_images(sight, [5, 6, 7]),
        with_images(sight, [5], wide, [6, 7, 8]),
        with_images(sight, high, square, [9]),
        with_images(sight, [3, 4], square, [5, 6], wide, square, [7, 8, 9, 10]),
    ]
    return sight, documents


def hf_positions(model, sight, ids, images):
    """Transformers' own positions of a sample."""
    kinds = (torch.tensor([ids]) == sight.image_token).int()
    grids = torch.tensor([sight.reader.pixels(one).grid for one in images])
    made = model.model.get_rope_index(
        torch.tensor([ids]), mm_token_type_ids=kinds, image_grid_thw=grids if images else None
    )
    return made[0][:, 0], int(made[1].item())


def test_positions_and_squares_are_those_of_transformers(folder, scene):
    sight, documents = scene
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert sees(model.config)
    ids = torch.tensor([token for own, _ in documents for token in own])
    lengths = [len(own) for own, _ in documents]
    seen = sight.look(ids, lengths, [images for _, images in documents])
    for (own, images), positions, squares, shift in zip(
        documents, seen.positions.split(lengths, 1), seen.square_of.split(lengths), seen.shifts, strict=True
    ):
        wanted, delta = hf_positions(model, sight, own, images)
        assert positions.tolist() == wanted.tolist()
        assert shift == -delta
        assert (squares != NOT_AN_IMAGE).tolist() == [token == sight.image_token for token in own]
    # The square that three documents share is looked at once.
    assert len(seen.grids) == 3
    assert len(seen.pixels) == sum(len(sight.reader.pixels(one).values) for one in {*documents[3][1], *documents[2][1]})


def logits_of_row(model, sight, documents):
    """Logits of documents that lie in one row, each reading only itself."""
    found = []
    for own, images in documents:
        ids = torch.tensor(own)
        seen = sight.look(ids, [len(own)], [images])
        positions = torch.arange(len(own)).repeat(3, 1) if seen is None else seen.positions
        inputs = sight.inputs(model, ids, seen)
        hidden = language_model(model)(**inputs, position_ids=positions[:, None]).last_hidden_state
        found.append(model.lm_head(hidden)[0])
    return found


def hf_logits(model, sight, own, images):
    """Transformers' own forward of a sample with its pixels."""
    ids = torch.tensor([own])
    pixels = [sight.reader.pixels(one) for one in images]
    given = {}
    if images:
        given = {
            "pixel_values": torch.cat([one.values for one in pixels]),
            "image_grid_thw": torch.tensor([one.grid for one in pixels]),
            "mm_token_type_ids": (ids == sight.image_token).int(),
        }
    return model(input_ids=ids, **given, use_cache=False).logits[0]


@torch.no_grad()
def test_logits_are_those_of_transformers(folder, scene, image):
    sight, documents = scene
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")
    for (own, images), ours in zip(documents, logits_of_row(model, sight, documents), strict=True):
        torch.testing.assert_close(ours, hf_logits(model, sight, own, images), rtol=1e-5, atol=1e-5)
    # The control: other images of the same size change what follows them, and nothing before.
    own, _ = documents[1]
    (other,) = logits_of_row(model, sight, [(own, (image(16, 40, 7),))])
    (same,) = logits_of_row(model, sight, [documents[1]])
    assert torch.equal(other[:2], same[:2])
    assert (other[-1] - same[-1]).abs().max() > 1e-4


def test_what_does_not_belong_together_is_refused(scene, image):
    sight, documents = scene
    own, images = documents[1]
    ids = torch.tensor(own)
    assert sight.look(ids, [len(own)], [()]) is None  # image tokens without images are text
    with pytest.raises(ValueError, match=r"a sample has 10 image tokens, but its images \(2\) take 14"):
        sight.look(ids, [len(own)], [(*images, image(32, 8))])
    with pytest.raises(ValueError, match=r"a sample has 3 image tokens, but its images \(1\) take 10.*prompt was cut"):
        sight.look(ids[:5], [5], [images])


def test_an_image_token_that_was_sampled_is_text(scene):
    sight, documents = scene
    own, images = documents[1]
    more = [*own, sight.image_token, 5, sight.image_token]
    seen = sight.look(torch.tensor(more), [len(more)], [images])
    assert seen.square_of[-3:].tolist() == [NOT_AN_IMAGE] * 3
    alone = sight.look(torch.tensor(own), [len(own)], [images])
    assert torch.equal(seen.positions[:, : len(own)], alone.positions)
    last = int(alone.positions[0, -1])
    assert seen.positions[:, -3:].tolist() == [[last + 1, last + 2, last + 3]] * 3


def test_nothing_to_see_still_reaches_every_weight_of_the_tower(folder, scene):
    sight, documents = scene
    model = AutoModelForImageTextToText.from_pretrained(folder)
    ids = torch.tensor(documents[0][0])
    plain, always = (sight.inputs(model, ids, None, always=always)["inputs_embeds"] for always in (False, True))
    assert torch.equal(plain, always)
    always.sum().backward()
    missing = [name for name, weight in tower_of(model).named_parameters() if weight.grad is None]
    assert missing == []


def test_pixels_are_kept_up_to_a_limit(seeing_folder, image):
    reader = ImageReader(seeing_folder("qwen3_vl"))
    calls = []
    processor = reader.processor
    reader.processor = lambda **given: calls.append(1) or processor(**given)
    first, second = image(16, 16, 1), image(16, 16, 2)
    size = reader.pixels(first).values.nbytes
    reader._pixels.most_bytes = size
    reader.pixels(first)
    assert len(calls) == 1
    reader.pixels(second)
    reader.pixels(second)
    assert len(calls) == 2
    reader.pixels(first)
    assert len(calls) == 3
    number = reader.head(first).number
    reader.pixels(second)
    assert reader.head(first).number == number
    assert len(calls) == 4  # what is known of it stays
    assert reader.head(first).number == number != reader.head(second).number
    # What is known of it may be forgotten earlier than its pixels: it is another one then.
    reader._heads.most_bytes = 1
    assert reader.head(image(16, 16, 3)).grid == reader.head(first).grid
    assert reader.head(first).number != number


def test_what_is_no_image_is_told(seeing_folder, image, tmp_path):
    reader = ImageReader(seeing_folder("qwen3_vl"))
    with pytest.raises(ValueError, match="5 bytes that are no image"):
        reader.num_tokens(b"hello")
    whole = image(40, 40)
    with pytest.raises(ValueError, match=r"an image of \d+ bytes cannot be decoded"):
        reader.pixels(whole[: len(whole) // 2])
    with pytest.raises(FileNotFoundError, match=r"has no preprocessor_config.json or processor_config.json"):
        ImageReader(tmp_path)


def test_a_photograph_is_seen_the_way_up_that_it_is_shown(seeing_folder):
    """A camera that was turned writes its pixels as they came, and a note."""
    reader = ImageReader(seeing_folder("qwen3_vl"))
    shown = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 16, 3), dtype=np.uint8))
    plain, turned = io.BytesIO(), io.BytesIO()
    shown.save(plain, "PNG")
    note = Image.Exif()
    note[0x0112] = 6  # to be turned right by 90 degrees
    shown.transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=note)
    assert reader.num_tokens(turned.getvalue()) == reader.num_tokens(plain.getvalue()) == 10
    one, other = reader.pixels(turned.getvalue()), reader.pixels(plain.getvalue())
    assert one.grid == other.grid == (1, 10, 4)
    assert torch.equal(one.values, other.values)


def file_of(picture, kind, **options):
    """A PIL image as a file."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def test_only_files_of_known_kinds_and_sizes_are_opened(seeing_folder):
    """Others' readers start programs, and a few bytes may stand for gigabytes."""
    reader = ImageReader(seeing_folder("qwen3_vl"))
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    for wrong in (eps, file_of(Image.new("RGB", (8, 8)), "PPM")):
        with pytest.raises(ValueError, match="that are no image"):
            reader.num_tokens(wrong)
    bomb = file_of(Image.new("1", (8200, 8200)), "PNG")
    assert len(bomb) < 20_000
    for read in (reader.num_tokens, reader.pixels):
        with pytest.raises(ValueError, match="an image of 8200 x 8200 pixels is more than is read"):
            read(bomb)


def test_what_a_process_has_of_a_model_shares_one_reader(seeing_folder):
    folder = seeing_folder("qwen3_vl")
    assert sight_of(folder).reader is sight_of(folder).reader


def test_a_processor_that_does_not_fit_images_in_is_refused(seeing_folder, tmp_path):
    for file in seeing_folder("qwen3_vl").iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    how = json.loads((seeing_folder("qwen3_vl") / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how | {"do_resize": False}))
    with pytest.raises(ValueError, match="do_resize=false"):
        ImageReader(tmp_path)


def test_what_is_overridden_may_be_the_language_models(seeing_folder):
    config = load_model_config(seeing_folder("qwen3_vl"), {"rms_norm_eps": 0.5})
    assert config.text_config.rms_norm_eps == 0.5
    with pytest.raises(ValueError, match="has no field 'nothing'"):
        load_model_config(seeing_folder("qwen3_vl"), {"nothing": 1})


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 23), (64, 8), (200, 200)])
def test_the_count_of_tokens_is_that_of_the_pixels(seeing_folder, image, height, width):
    reader = ImageReader(seeing_folder("qwen3_vl"))
    made = image(height, width)
    _, rows, columns = reader.pixels(made).grid
    assert reader.num_tokens(made) * reader.processor.merge_size**2 == rows * columns
