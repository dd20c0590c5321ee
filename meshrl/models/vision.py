"""Vision-language models (VLMs): the image tokens of a row, their positions, and their embeddings.

An image is a run of tokens in a prompt, one for each square of patches. The model's vision tower computes a vector for
each square, which replaces the token's embedding. On the first position axis, all tokens of an image have the position
of the first one. Two more axes add their row and column. The text after an image continues after the longer of the
image's sides. So a sample's last position is smaller than its number of tokens (`shifts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from meshrl.config.engine import ModelConfig
from meshrl.config.families import SEEING
from meshrl.config.keys import count
from meshrl.data.images import NOT_AN_IMAGE, Head, ImageReader, Images, Seen, reader_of


def sees(config: PretrainedConfig) -> bool:
    """Return whether the model is a VLM, which takes images."""
    return config.model_type in SEEING


def tower_of(hf_model: PreTrainedModel) -> Any:
    """Return the vision tower, the part of a VLM that encodes images."""
    return hf_model.base_model.visual


def language_model(hf_model: PreTrainedModel) -> Any:
    """Return the decoder: a language model without its head, or the language model inside a VLM."""
    return hf_model.base_model.language_model if sees(hf_model.config) else hf_model.base_model


@dataclass(frozen=True)
class Deep:
    """Deepstack features: vectors that are added to image tokens (at `places`) after each of the first layers."""

    places: Tensor
    vectors: list[Tensor]

    def add_to(self, hidden: Tensor, layer: int) -> None:
        """Add the vectors that belong after a layer to its hidden states, in place."""
        if layer < len(self.vectors):
            hidden.index_add_(0, self.places, self.vectors[layer])


class Sight:
    """The image side of a VLM: reads images, places them among a row's tokens, and embeds them."""

    def __init__(self, config: Any, reader: ImageReader):
        self.reader, self.image_token = reader, int(config.image_token_id)
        vision = config.vision_config
        self.merge = int(vision.spatial_merge_size)
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        self.patch_numbers = channels * vision.temporal_patch_size * vision.patch_size**2

    def problem(self, ids: Sequence[int], images: Images) -> str | None:
        """Return why a prompt and its images do not match, as far as the images' headers show, or None."""
        try:
            wanted = sum(self.reader.num_tokens(image) for image in images)
        except ValueError as error:
            return str(error)
        found = sum(token == self.image_token for token in ids)
        return None if found >= wanted else _too_few(found, len(images), wanted)

    @torch.no_grad()
    def look(
        self, ids: Tensor, lengths: Sequence[int], images: Sequence[Images | None], known: Sequence[int] | None = None
    ) -> Seen | None:
        """Return the images of documents that lie end to end in a row; None if no document has any.

        The first image tokens of a document belong to its images. Later image tokens were sampled and are text. With
        `known`, the first `known[i]` tokens of document i are left out.
        """
        shown = [image for own in images for image in own or ()]
        if not shown:
            return None
        number = {image: at for at, image in enumerate(dict.fromkeys(shown))}
        # [distinct, 2]: rows and columns of squares
        sizes = torch.tensor([self._squares(self.reader.head(image)) for image in number])
        first_square = sizes.prod(1).cumsum(0) - sizes.prod(1)
        which = torch.tensor([number[image] for image in shown])
        counts = torch.tensor([len(own or ()) for own in images])
        document_of_image = torch.repeat_interleave(torch.arange(len(images)), counts)
        wanted = torch.zeros(len(images), dtype=torch.long).index_add_(0, document_of_image, sizes.prod(1)[which])

        extent = torch.tensor(lengths)
        document_of = torch.repeat_interleave(torch.arange(len(lengths)), extent)
        start_of = extent.cumsum(0) - extent
        is_token = ids == self.image_token
        before = is_token.cumsum(0) - is_token.long()  # image tokens to the left, in the whole row
        is_place = is_token & (before - before[start_of][document_of] < wanted[document_of])
        found = torch.zeros_like(wanted).index_add_(0, document_of, is_place.long())
        if not torch.equal(found, wanted):
            at = int((found != wanted).nonzero()[0])
            raise ValueError(_too_few(int(found[at]), int(counts[at]), int(wanted[at])))
        places = is_place.nonzero()[:, 0]
        squares = sizes[which].prod(1)
        image_of = torch.repeat_interleave(torch.arange(len(which)), squares)
        inside = torch.arange(len(places)) - (squares.cumsum(0) - squares)[image_of]
        columns = sizes[which, 1][image_of]
        square_of = torch.full_like(ids, NOT_AN_IMAGE)
        square_of[places] = first_square[which][image_of] + inside

        # All tokens of an image share its first position; the last of them advances by the longer side.
        advance = torch.ones_like(ids)
        advance[places] = 0
        advance[places[squares.cumsum(0) - 1]] = sizes[which].amax(1)
        begin = advance.cumsum(0) - advance
        positions = (begin - begin[start_of][document_of]).repeat(3, 1)
        positions[1, places] += inside // columns
        positions[2, places] += inside % columns
        shifts = (extent - torch.zeros_like(extent).index_add_(0, document_of, advance)).tolist()
        if known is not None:
            is_new = torch.arange(len(ids)) - start_of[document_of] >= torch.tensor(known)[document_of]
            positions, square_of = positions[:, is_new], square_of[is_new]
            # Images that have no tokens left are dropped, and the squares of the other images are renumbered.
            image_at = torch.bucketize(square_of, first_square, right=True) - 1  # NOT_AN_IMAGE for other tokens
            is_left = torch.zeros(len(number), dtype=torch.bool)
            is_left[image_at[image_at >= 0]] = True
            gone = torch.where(is_left, 0, sizes.prod(1)).cumsum(0)
            square_of = torch.where(image_at >= 0, square_of - gone[image_at], square_of)
            number = {image: at for (image, at), stays in zip(number.items(), is_left.tolist(), strict=True) if stays}
        pixels = [self.reader.pixels(image) for image in number]
        values = torch.cat([one.values for one in pixels]) if pixels else torch.empty(0, self.patch_numbers)
        grids = torch.tensor([one.grid for one in pixels], dtype=torch.long).reshape(-1, 3)
        return Seen(positions, square_of, values, grids, shifts)

    def grids(self, column: Iterable[Images | None]) -> list[tuple[int, int, int]]:
        """Return the (time, rows, columns) of patches of the distinct images of some samples."""
        return [self.reader.grid(image) for image in dict.fromkeys(image for own in column for image in own or ())]

    def names(self, ids: np.ndarray, images: Images) -> np.ndarray:
        """Return token ids that distinguish images: all tokens of an image get a negative number of their own."""
        heads = [self.reader.head(image) for image in images]
        times = [math.prod(self._squares(head)) for head in heads]
        named = ids.copy()
        named[(ids == self.image_token).nonzero()[0][: sum(times)]] = np.repeat([-1 - h.number for h in heads], times)
        return named

    def _squares(self, head: Head) -> tuple[int, int]:
        _, height, width = head.grid
        return height // self.merge, width // self.merge

    def inputs(self, hf_model: Any, ids: Tensor, seen: Seen | None, *, always: bool = False) -> dict[str, Any]:
        """Return the inputs of the language model inside `hf_model` for a row of tokens.

        With `always`, the vision tower also runs if there are no images, because other ranks wait for its collectives.
        """
        if seen is None:
            embedded = hf_model.get_input_embeddings()(ids[None])
            return {"inputs_embeds": embedded + self._nothing(hf_model, ids.device) if always else embedded}
        # Embed `ids[None]` instead of viewing an embedded row: code compiled for a view fits no other layer input.
        embedded, deep = self.embedded(hf_model, hf_model.get_input_embeddings()(ids[None]), seen)
        inputs: dict[str, Any] = {"inputs_embeds": embedded}
        if deep is not None:
            inputs["visual_pos_masks"] = (seen.square_of >= 0)[None]
            inputs["deepstack_visual_embeds"] = deep.vectors
        return inputs

    def embedded(self, hf_model: Any, embedded: Tensor, seen: Seen) -> tuple[Tensor, Deep | None]:
        """Return the embeddings `[1, tokens, hidden]` of a row with its images, and the deepstack features if any."""
        if not len(seen.grids):
            return embedded, None
        found = hf_model.base_model.get_image_features(seen.pixels, seen.grids)
        places = (seen.square_of >= 0).nonzero()[:, 0]
        squares = seen.square_of[places]
        vectors = _joined(found.pooler_output)[squares].to(embedded.dtype)
        deep = getattr(found, "deepstack_features", None)
        deeper = Deep(places, [_joined(one)[squares].to(embedded.dtype) for one in deep]) if deep else None
        return embedded.index_put((torch.zeros_like(places), places), vectors), deeper

    def _nothing(self, hf_model: Any, device: torch.device) -> Tensor:
        """Return zero, computed through every weight of the vision tower."""
        pixels = torch.zeros(self.merge**2, self.patch_numbers, device=device)
        found = hf_model.base_model.get_image_features(pixels, torch.tensor([[1, self.merge, self.merge]]).to(device))
        parts = [*found.pooler_output, *(x for one in getattr(found, "deepstack_features", None) or () for x in one)]
        return sum(part.sum() for part in parts) * 0.0


def _too_few(found: int, images: int, wanted: int) -> str:
    return (
        f"a sample has {count(found, 'image token')}, but its images ({images}) take {wanted}: prompt and images do "
        "not belong together, or the prompt was cut"
    )


def _joined(vectors: Tensor | Sequence[Tensor]) -> Tensor:
    """Concatenate the vectors of all images; some versions of Transformers return them image by image."""
    return vectors if isinstance(vectors, Tensor) else torch.cat(list(vectors))


def find_sight(config: PretrainedConfig, model: ModelConfig) -> Sight | None:
    """Return the image side of a VLM, or None for a language model."""
    return Sight(config, reader_of(model.path or "", model.trust_remote_code)) if sees(config) else None
