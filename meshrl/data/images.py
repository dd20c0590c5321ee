"""From an encoded image (PNG, JPEG, ...) to what a model takes: patches of pixels, in rows and columns.

Images travel encoded and become pixels where a model is: as pixels a photograph is a hundred times as large.
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
# Kinds of files that are opened: PIL knows others whose readers start programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# A file of a few bytes may stand for gigabytes of pixels.
MOST_PIXELS = 1 << 26
# Pixels of images that are kept for the next pass over the same samples.
KEPT_BYTES = 512 << 20
_numbers = itertools.count()
Made = TypeVar("Made")


@dataclass(frozen=True)
class Pixels:
    """One image: `values` [patches, numbers], and its patches by time, height and width."""

    values: Tensor
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Head:
    """What is known of an image that was read once. No other one has its `number`."""

    grid: tuple[int, int, int]
    number: int = field(default_factory=lambda: next(_numbers))


class Newest(Generic[Made]):
    """What was made of the images that were asked for last, as long as it is not more than so many bytes."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self._held = most_bytes, 0
        self._found: OrderedDict[bytes, tuple[Made, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, image: bytes) -> Made | None:
        """What is kept of an image."""
        with self._lock:
            if image not in self._found:
                return None
            self._found.move_to_end(image)
            return self._found[image][0]

    def keep(self, image: bytes, made: Made, size: int) -> Made:
        """Keeps it, unless another thread was quicker; gives what is kept."""
        with self._lock:
            if image not in self._found:
                self._found[image] = (made, size)
                self._held += size
            kept = self._found[image][0]
            while self._held > self.most_bytes and len(self._found) > 1:
                self._held -= self._found.popitem(last=False)[1][1]
        return kept


class ImageReader:
    """Reads images as the model in a folder wants them."""

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
        self._heads: Newest[Head] = Newest(KEPT_BYTES)  # counted by the files, which are a tenth of their pixels

    def num_tokens(self, image: bytes) -> int:
        """How many tokens of a prompt an image takes, whichever way up. Only its head is read."""
        width, height = open_image(image).size
        return int(self.processor.get_number_of_image_patches(height, width, {})) // self.processor.merge_size**2

    def grid(self, image: bytes) -> tuple[int, int, int]:
        """Pictures in time, rows and columns of patches, without reading more than the head of the image.

        Of an image that was not read yet, rows and columns are those next to its proportions.
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
        """The image's patches; those of the last images are kept."""
        if (found := self._pixels.get(image)) is not None:
            return found
        made = self.processor(images=[upright(image)], return_tensors="pt")
        time, height, width = made["image_grid_thw"][0].tolist()
        pixels = Pixels(made["pixel_values"], (time, height, width))
        return self._pixels.keep(image, pixels, pixels.values.nbytes)

    def head(self, image: bytes) -> Head:
        """The image's size and number, which are kept for longer than its patches."""
        found = self._heads.get(image)
        return found or self._heads.keep(image, Head(self.pixels(image).grid), len(image))


@functools.cache
def reader_of(folder: str, trust_remote_code: bool = False) -> ImageReader:
    """The reader of a model's folder: all that a process has of this model share what it keeps."""
    return ImageReader(folder, trust_remote_code)


def _processor(folder: str | Path, trust_remote_code: bool) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError:  # older versions of Transformers choose none without torchvision; all families share this one
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil.from_pretrained(folder)


def as_png(pixels: np.ndarray) -> bytes:
    """Pixels [height, width, 3] of 8 bits as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def open_image(image: bytes) -> Any:
    """A PIL image as it was stored, not decoded yet; a `ValueError` for what is no image, or too large a one."""
    from PIL import Image

    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
    except Exception as error:  # what a damaged file may do is up to each reader
        raise ValueError(f"{len(image)} bytes that are no image ({error})") from error
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"an image of {width} x {height} pixels is more than is read ({MOST_PIXELS} pixels)")
    return opened


def upright(image: bytes) -> Any:
    """A decoded PIL image in RGB, the way up that it is shown."""
    from PIL import ImageOps

    opened = open_image(image)
    try:
        return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # its head was whole
        raise ValueError(f"an image of {len(image)} bytes cannot be decoded ({error})") from error


# The images of a packed row, as a model takes them.

NOT_AN_IMAGE = -1
# Of a sample, encoded, in the order of their places.
Images = tuple[bytes, ...]


@dataclass(frozen=True)
class Seen:
    """The images of a packed row.

    `positions` [3, tokens] and `square_of` [tokens] (which of the squares of all images, or `NOT_AN_IMAGE`) are of the
    row's tokens; `pixels` and `grids` of its distinct images. `shifts`: how many positions each document ends earlier.
    """

    positions: Tensor
    square_of: Tensor
    pixels: Tensor
    grids: Tensor
    shifts: list[int]

    def to(self, device: torch.device) -> Seen:
        """On a device; from the host through pinned memory, so that nothing waits."""
        if device.type == "cpu":
            return self
        names = ("positions", "square_of", "pixels", "grids")
        return replace(self, **{n: getattr(self, n).pin_memory().to(device, non_blocking=True) for n in names})

    def part(self, take: Callable[..., Tensor]) -> Seen:
        """For a rank's tokens of a row that several ranks share, which it takes; all of them look at all images."""
        positions = take(self.positions.T).T
        return replace(self, positions=positions, square_of=take(self.square_of, NOT_AN_IMAGE))
