"""A packed micro-batch as the ranks of a Megatron layout share it.

Under context parallelism each document is padded to a multiple of 2 * cp, and a row ends with a document of padding. So
the row's tokens divide evenly over the ranks that share them. Padding comes after a document's own tokens, so causal
attention never sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from meshrl.data.packing import PackedRow
from meshrl.engines.megatron.modules import PackedDocuments
from meshrl.engines.megatron.zigzag import ZigZag
from meshrl.parallel.attention import PackedSequences


@dataclass(frozen=True)
class RowSharing:
    """The ranks over which a row's tokens are split: `cp` by chunks of documents, `tp` under sequence parallelism."""

    cp: int = 1
    cp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None
    tp: int = 1

    @property
    def document_unit(self) -> int:
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def row_unit(self) -> int:
        return self.cp * lcm(2, self.tp) if self.cp > 1 else self.tp


@dataclass(frozen=True)
class Question:
    """The request to the last stage: the log-probs of `targets`, which the tokens at the indices `places` predict."""

    places: Tensor
    targets: Tensor
    temperature: float
    with_entropy: bool


class SharedRow:
    """This rank's tokens of a packed row, and the gather of its outputs into one number per target of the row."""

    def __init__(self, row: PackedRow, sharing: RowSharing, device: torch.device, cu_seqlens_on: torch.device):
        self.row, self.sharing, self.device = row, sharing, device
        unit = sharing.document_unit
        lengths = [-(-length // unit) * unit for length in row.lengths]
        if missing := -sum(lengths) % sharing.row_unit:
            lengths.append(missing)
        self.documents = PackedSequences.of(lengths, device)
        self.zigzag = ZigZag(self.documents, sharing.cp, sharing.cp_rank) if sharing.cp > 1 else None
        self._cu_seqlens = self.documents.cu_seqlens.to(cu_seqlens_on)

    @cached_property
    def place_of(self) -> Tensor:
        """The index in the padded row of each token of the packed row, int64 `[tokens]`."""
        own = torch.tensor(self.row.lengths)
        padded = torch.tensor(self.documents.lengths[: len(own)])
        shift = (padded.cumsum(0) - padded) - (own.cumsum(0) - own)
        return (torch.arange(int(own.sum())) + shift.repeat_interleave(own)).to(self.device)

    def take(self, values: Tensor, fill: int | bool = 0) -> Tensor:
        """Return this rank's part `[local, ...]` of a row's values `[tokens, ...]`; padding gets `fill`."""
        whole = (self.documents.num_tokens, *values.shape[1:])
        padded = values.new_full(whole, fill).index_copy(0, self.place_of, values)
        return padded if self.zigzag is None else padded[self.zigzag.index]

    @cached_property
    def input_ids(self) -> Tensor:
        """The token ids of this rank, int64 `[1, local]`."""
        return self.take(self.row.input_ids)[None]

    @cached_property
    def position_ids(self) -> Tensor:
        """The positions of this rank's tokens in their documents, int64 `[1, local]`."""
        positions = self.documents.position_ids
        return positions if self.zigzag is None else positions[:, self.zigzag.index]

    @cached_property
    def padding(self) -> Tensor:
        """The padding mask of this rank's tokens, `[1, local]`: True at padding."""
        real = torch.zeros(len(self.row.input_ids), dtype=torch.bool, device=self.device)
        return self.take(real, True)[None]

    @cached_property
    def packed(self) -> PackedDocuments:
        """The description of the row in the form that Megatron's layers take."""
        longest = self.documents.max_length
        return PackedDocuments(
            qkv_format="thd",
            cu_seqlens_q=self._cu_seqlens,
            cu_seqlens_kv=self._cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            documents=self.documents,
            zigzag=self.zigzag,
        )

    @cached_property
    def _local_targets(self) -> Tensor:
        """The target that each of this rank's tokens predicts, or -1, int64 `[local]`."""
        target_at = torch.full_like(self.row.input_ids, -1)
        target_at[self.row.predictors] = self.row.targets
        return self.take(target_at, -1)

    def question(self, temperature: float, with_entropy: bool) -> Question:
        """Return the request for the targets that this rank's tokens predict."""
        if self.zigzag is None:
            return Question(self.place_of[self.row.predictors], self.row.targets, temperature, with_entropy)
        places = (self._local_targets >= 0).nonzero()[:, 0]
        return Question(places, self._local_targets[places], temperature, with_entropy)

    def answers(self, values: Tensor, places: Tensor) -> Tensor:
        """Return one value per target of the row, from the values that all ranks sharing the row computed at `places`.

        Differentiable under the contract that all these ranks compute the same loss. Each rank then takes its own
        tokens' part of the gradient, and the gradients of the parameters are summed over these ranks.
        """
        if self.zigzag is None:
            return values
        local = values.new_zeros(len(self._local_targets)).index_put((places,), values)
        row = gather_from_sequence_parallel_region(
            local, tensor_parallel_output_grad=False, group=self.sharing.cp_group
        )
        return row[self.zigzag.order][self.place_of[self.row.predictors]]
