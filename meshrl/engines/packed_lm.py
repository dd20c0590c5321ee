"""What the training engines ask of a Hugging Face model: answers for the targets of a row of samples."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.data.packing import PackedRow
from meshrl.data.seen import Seen
from meshrl.engines.log_probs import linear_log_probs, linear_sum_pi_squared
from meshrl.models.families import body_of, logit_scaling_of
from meshrl.models.loading import VALUE_HEAD
from meshrl.models.sight import Sight
from meshrl.parallel.attention import AttentionContext, hand_contexts_down
from meshrl.parallel.packable import check_layers, longest_fixed_rotation
from meshrl.parallel.prefix_tree import PrefixTree
from meshrl.parallel.recurrence import enter_recurrences
from meshrl.parallel.sequence import SequenceShard

# A row runs as a tree of its prefixes where that leaves at most this share of its tokens.
MOST_NODES = 0.9


@dataclass(frozen=True)
class Wanted:
    """What a model is asked for beside log-probs (or values)."""

    temperature: float
    entropy: bool
    sum_pi_squared: bool


class PackedModel(nn.Module):
    """A Hugging Face model over one row of samples that answers for its targets only.

    It is the root that gets sharded: embedding, last norm and head are whole inside its forward. With a `sight` it
    takes rows with images; `looks_always`: its tower runs for rows without any, too.
    """

    def __init__(self, hf_model: PreTrainedModel, sight: Sight | None = None, looks_always: bool = False):
        super().__init__()
        self.hf_model, self.sight, self.looks_always = hf_model, sight, looks_always
        # With dropout, equal prefixes get unequal states: each place draws its own.
        self.drops_out = any(isinstance(m, nn.Dropout) and m.p > 0 for m in hf_model.base_model.modules())
        self.has_states = enter_recurrences(hf_model)
        hand_contexts_down(hf_model)
        self.longest = longest_fixed_rotation(hf_model)
        self._is_checked = False

    def forward(
        self,
        row: PackedRow,
        shard: SequenceShard | None,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool = False,
        shares_prefixes: bool = True,
    ) -> dict[str, Tensor]:
        """One number a target under each name; ranks that share a sequence compute a part and all get all.

        Equal prefixes of several samples may be computed once, unless they are told to differ (`shares_prefixes`).
        """
        wanted = Wanted(temperature, with_entropy, with_sum_pi_squared)
        self._check_lengths(row)
        if shard is None:
            return self.answer(self._padded(row)[row.predictors], row.targets, wanted)
        tree = self._tree(row, shard) if shares_prefixes else None
        if tree is not None:
            hidden = self._packed(row.input_ids[tree.place_of], tree.position_ids, tree)
            predictors = hidden.index_select(0, tree.node_of[row.predictors])
            return self.answer(predictors, row.targets, wanted)
        seen = None if row.seen is None else row.seen.part(shard.take)
        hidden = self._packed(shard.take(row.input_ids), self._positions(shard, seen), shard.context, seen)
        if shard.parallel.size == 1:
            return self.answer(hidden[row.predictors], row.targets, wanted)
        # Each rank computes the targets that its own tokens predict and puts them at those tokens' places.
        target_at = torch.full((shard.padded_length,), -1, device=hidden.device)
        target_at[row.predictors] = row.targets
        mine = target_at[shard.index]
        places = (mine >= 0).nonzero()[:, 0]

        def spread(values: Tensor) -> Tensor:
            local = values.new_zeros(len(mine)).index_put((places,), values)
            return shard.gather(local)[row.predictors]

        answers = self.answer(hidden[places], mine[places], wanted)
        return {name: spread(values) for name, values in answers.items()}

    def _positions(self, shard: SequenceShard, seen: Seen | None) -> Tensor:
        """Of a row's tokens: on three axes where the model sees, also without images. Layers compile for one kind."""
        if seen is not None:
            return seen.positions[:, None]
        return shard.position_ids if self.sight is None else shard.position_ids.expand(3, 1, -1)

    def _tree(self, row: PackedRow, shard: SequenceShard) -> PrefixTree | None:
        """The row's distinct prefixes, where computing each once saves enough to pay for finding them."""
        on_host = row.input_ids.device.type == "cpu"
        if not on_host or shard.parallel.size > 1 or len(row.predictors) == 0 or (self.drops_out and self.training):
            return None
        # Equal tokens may stand for different images; and a state goes one way, not into several branches.
        if self.sight is not None or self.has_states:
            return None
        tree = PrefixTree.of(row.input_ids, row.lengths, row.predictors)
        return tree if tree.num_nodes <= MOST_NODES * len(row.input_ids) else None

    def _packed(
        self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext, seen: Seen | None = None
    ) -> Tensor:
        """The hidden states [tokens, dim] of a row of tokens."""
        model: Any = body_of(self.hf_model)
        inputs: dict[str, Any] = {"input_ids": input_ids[None]}
        if self.sight is not None:
            inputs = self.sight.inputs(self.hf_model, input_ids, seen, always=self.looks_always)
            model = model.language_model
        out = model(position_ids=position_ids, use_cache=False, attention_context=context, **inputs)
        if not self._is_checked:
            check_layers(self.hf_model)
            self._is_checked = True
        return out.last_hidden_state[0]

    def _check_lengths(self, row: PackedRow) -> None:
        longest = max(row.lengths, default=0)
        if self.longest is not None and longest > self.longest:
            raise ValueError(
                f"a sample has {longest} tokens: beyond {self.longest} the rotary embedding of "
                f"{type(self.hf_model).__name__} depends on the longest sample of a micro-batch. Take shorter samples, "
                "or a rope_type whose angles are fixed (model.override_config.rope_parameters)"
            )

    def _padded(self, row: PackedRow) -> Tensor:
        """The hidden states of a padded rectangle, by the model's own attention."""
        assert row.attention_mask is not None
        hidden = body_of(self.hf_model)(
            input_ids=row.input_ids.view(row.attention_mask.shape),
            attention_mask=row.attention_mask,
            position_ids=(row.attention_mask.cumsum(1) - 1).clamp_(min=0),
            use_cache=False,
        ).last_hidden_state
        return hidden.flatten(0, 1)

    @abstractmethod
    def answer(self, hidden: Tensor, targets: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        """From the hidden states that predict `targets` to the model's outputs, each [targets]."""


class PackedCausalLM(PackedModel):
    """A language model that answers with `log_probs` (and `entropys`) instead of logits."""

    def __init__(
        self,
        hf_model: PreTrainedModel,
        keep_logits_bytes: int = 0,
        sight: Sight | None = None,
        looks_always: bool = False,
    ):
        if hf_model.get_output_embeddings() is None:
            raise ValueError(f"{type(hf_model).__name__} has no output projection to compute log-probs with")
        super().__init__(hf_model, sight, looks_always)
        self.keep_logits_bytes = keep_logits_bytes
        self.scaling = logit_scaling_of(hf_model.config)

    def answer(self, hidden: Tensor, targets: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        head: Any = self.hf_model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        log_probs, entropy = linear_log_probs(
            hidden,
            head.weight,
            targets,
            bias=bias,
            temperature=wanted.temperature,
            with_entropy=wanted.entropy,
            keep_bytes=self.keep_logits_bytes,
            scaling=self.scaling,
        )
        answers = {"log_probs": log_probs} | ({} if entropy is None else {"entropys": entropy})
        if wanted.sum_pi_squared:
            answers["sum_pi_squared"] = linear_sum_pi_squared(
                hidden, head.weight, bias=bias, temperature=wanted.temperature, scaling=self.scaling
            )
        return answers


class PackedValueModel(PackedModel):
    """A model with a head of one number a token: `values` of the states before each target."""

    def answer(self, hidden: Tensor, targets: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        head: Any = getattr(self.hf_model, VALUE_HEAD)
        return {"values": F.linear(hidden, head.weight, head.bias)[:, 0].float()}
