"""Conversion of encoded images (PNG, JPEG, ...) to the patches of pixels that a vision-language model takes.

* `ImageReader`: reads images by the image processor in a model's folder.
* `open_image`, `upright`, `as_png`: decoding and encoding.
* `Seen`: the images of a packed row.

Images are sent encoded and are decoded in the process of the model: the pixels of a photograph are a hundred times as
large as its file.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from meshrl.config.model_folder import PROCESSOR_FILES, has_processor

# The column of a batch with the encoded images of each sample, in the order of their places in the prompt.
IMAGES = "images"
# File formats that are opened. PIL knows others, whose readers start programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# The largest permitted number of pixels, because a file of a few bytes may decode to gigabytes.
MOST_PIXELS = 1 << 26
# The cache size in bytes for the pixels of images, which the next pass over the same samples needs again.
KEPT_BYTES = 512 << 20
_numbers = itertools.count()
Made = TypeVar("Made")


@dataclass(frozen=True)
class Pixels:
    """The patches of one image: `values` `[patches, numbers]`, and their `grid` (time, height, width in patches)."""

    values: Tensor
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Head:
    """The grid of an image that was decoded once, and a `number` that is unique in the process."""

    grid: tuple[int, int, int]
    number: int = field(default_factory=lambda: next(_numbers))


class Newest(Generic[Made]):
    """A thread-safe LRU cache of results per encoded image, limited to `most_bytes` bytes of results."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self._held = most_bytes, 0
        self._found: OrderedDict[bytes, tuple[Made, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, image: bytes) -> Made | None:
        """Return the cached result of an image, or None. The image becomes the most recently used."""
        with self._lock:
            if image not in self._found:
                return None
            self._found.move_to_end(image)
            return self._found[image][0]

    def keep(self, image: bytes, made: Made, size: int) -> Made:
        """Cache a result of `size` bytes and return it.

        If another thread has cached a result of this image, that result is kept and returned.
        """
        with self._lock:
            if image not in self._found:
                self._found[image] = (made, size)
                self._held += size
            kept = self._found[image][0]
            while self._held > self.most_bytes and len(self._found) > 1:
                self._held -= self._found.popitem(last=False)[1][1]
        return kept


class ImageReader:
    """A reader of encoded images for one model, by the image processor in the model's folder, with caches."""

    def __init__(self, folder: str | Path, trust_remote_code: bool = False):
        if not has_processor(folder):
            files = " or ".join(PROCESSOR_FILES)
            raise FileNotFoundError(f"the model at '{folder}' sees images, but has no {files} that says how")
        self.processor = _processor(folder, trust_remote_code)
        if not getattr(self.processor, "do_resize", True):
            raise ValueError(
                f"the image processor at '{folder}' has do_resize=false: images whose sides are no whole squares could "
                "not be read; set it to true"
            )
        self._pixels: Newest[Pixels] = Newest(KEPT_BYTES)
        self._heads: Newest[Head] = Newest(KEPT_BYTES)  # sizes are those of the files, a tenth of their pixels

    def num_tokens(self, image: bytes) -> int:
        """Return the number of prompt tokens of an image. Only the image's header is read.

        Its orientation (EXIF) does not change the number.
        """
        width, height = open_image(image).size
        return int(self.processor.get_number_of_image_patches(height, width, {})) // self.processor.merge_size**2

    def grid(self, image: bytes) -> tuple[int, int, int]:
        """Return the grid of an image (time, rows and columns of patches). Only the image's header is read.

        For an image that was not decoded yet, rows and columns are an estimate: the factors of the exact number of
        tokens that are closest to the image's proportions.
        """
        if (known := self._heads.get(image)) is not None:
            return known.grid
        width, height = open_image(image).size
        merge, squares = self.processor.merge_size, self.num_tokens(image)
        rows = min(
            (rows for rows in range(1, squares + 1) if squares % rows == 0),
            key=lambda rows: abs(math.log(rows * rows / squares * width / height)),
        )
        return 1, rows * merge, squares // rows * merge

    def pixels(self, image: bytes) -> Pixels:
        """Return the image's patches. The patches of the most recent images are cached."""
        if (found := self._pixels.get(image)) is not None:
            return found
        made = self.processor(images=[upright(image)], return_tensors="pt")
        time, height, width = made["image_grid_thw"][0].tolist()
        pixels = Pixels(made["pixel_values"], (time, height, width))
        return self._pixels.keep(image, pixels, pixels.values.nbytes)

    def head(self, image: bytes) -> Head:
        """Return the image's grid and number, which are cached for longer than its patches."""
        found = self._heads.get(image)
        return found or self._heads.keep(image, Head(self.pixels(image).grid), len(image))


@functools.cache
def reader_of(folder: str, trust_remote_code: bool = False) -> ImageReader:
    """Return the reader of a model's folder. All users of the model in a process share the reader and its caches."""
    return ImageReader(folder, trust_remote_code)


def _processor(folder: str | Path, trust_remote_code: bool) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError:  # older versions of Transformers find no processor without torchvision; all families share this
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil.from_pretrained(folder)


def as_png(pixels: np.ndarray) -> bytes:
    """Encode pixels `[height, width, 3]` (uint8) as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def open_image(image: bytes) -> Any:
    """Open an encoded image with PIL without decoding it. Raise `ValueError` if it is not an image or too large."""
    from PIL import Image

    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
    except Exception as error:  # a damaged file may raise any exception, depending on PIL's reader
        raise ValueError(f"{len(image)} bytes that are no image ({error})") from error
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"an image of {width} x {height} pixels is more than is read ({MOST_PIXELS} pixels)")
    return opened


def upright(image: bytes) -> Any:
    """Decode an image with PIL, in RGB and rotated by its EXIF orientation. Raise `ValueError` if that fails."""
    from PIL import ImageOps

    opened = open_image(image)
    try:
        return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # the header was valid, but the rest is damaged
        raise ValueError(f"an image of {len(image)} bytes cannot be decoded ({error})") from error


# The images of a packed row, as inputs of a model.

NOT_AN_IMAGE = -1
# The encoded images of a sample, in the order of their places in the prompt.
Images = tuple[bytes, ...]


@dataclass(frozen=True)
class Seen:
    """The images of a packed row, as inputs of a vision-language model.

    `positions` `[3, tokens]` and `square_of` `[tokens]` describe the row's tokens. They have the rotary positions, and
    the index among the squares of all images (or `NOT_AN_IMAGE`). `pixels` and `grids` describe the row's distinct
    images. `shifts` has a number for each document: positions that its images save. An image takes fewer positions
    than tokens, so that the document ends at a position that is smaller by this number.
    """

    positions: Tensor
    square_of: Tensor
    pixels: Tensor
    grids: Tensor
    shifts: list[int]

    def to(self, device: torch.device) -> Seen:
        """Copy the tensors to a device. Pinned memory lets the host continue without waiting."""
        if device.type == "cpu":
            return self
        names = ("positions", "square_of", "pixels", "grids")
        return replace(self, **{n: getattr(self, n).pin_memory().to(device, non_blocking=True) for n in names})

    def part(self, take: Callable[..., Tensor]) -> Seen:
        """Return the part for a rank, if several ranks share a row. `take` selects the rank's tokens.

        Every rank computes the features of all images.
        """
        positions = take(self.positions.T).T
        return replace(self, positions=positions, square_of=take(self.square_of, NOT_AN_IMAGE))
