"""What the training engines ask of a Hugging Face model: answers for the targets of a row of samples."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.data.packing import PackedRow
from meshrl.engines.log_probs import linear_log_probs
from meshrl.models.loading import VALUE_HEAD
from meshrl.parallel.sequence import SequenceShard

# Config fields by which some models change their logits after the output projection.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "final_logits_soft_cap")


def check_no_persistent_buffers(hf_model: PreTrainedModel) -> None:
    """Refuses models that keep state in buffers: loading, sync and saving carry parameters only."""
    params = {name for name, _ in hf_model.named_parameters(remove_duplicate=False)}
    buffers = sorted(hf_model.state_dict().keys() - params)
    if buffers:
        raise ValueError(f"{type(hf_model).__name__} keeps state in buffers, such as '{buffers[0]}': not supported yet")


class PackedModel(nn.Module):
    """A Hugging Face model over one row of samples that answers for its targets only.

    It is the root that gets sharded: embedding, last norm and head are whole inside its forward.
    """

    def __init__(self, hf_model: PreTrainedModel):
        super().__init__()
        check_no_persistent_buffers(hf_model)
        self.hf_model = hf_model

    def forward(
        self, row: PackedRow, shard: SequenceShard | None, temperature: float, with_entropy: bool
    ) -> dict[str, Tensor]:
        """One number a target under each name; ranks that share a sequence compute a part and all get all."""
        if shard is None:
            return self.answer(self._padded(row)[row.predictors], row.targets, temperature, with_entropy)
        hidden = self.hf_model.base_model(
            input_ids=shard.take(row.input_ids)[None],
            position_ids=shard.position_ids,
            use_cache=False,
            attention_context=shard.context,
        ).last_hidden_state[0]
        if shard.parallel.size == 1:
            return self.answer(hidden[row.predictors], row.targets, temperature, with_entropy)
        # Each rank computes the targets that its own tokens predict and puts them at those tokens' places.
        target_at = torch.full((shard.padded_length,), -1, device=hidden.device)
        target_at[row.predictors] = row.targets
        mine = target_at[shard.index]
        places = (mine >= 0).nonzero()[:, 0]

        def spread(values: Tensor) -> Tensor:
            local = values.new_zeros(len(mine)).index_put((places,), values)
            return shard.gather(local)[row.predictors]

        answers = self.answer(hidden[places], mine[places], temperature, with_entropy)
        return {name: spread(values) for name, values in answers.items()}

    def _padded(self, row: PackedRow) -> Tensor:
        """The hidden states of a padded rectangle, by the model's own attention."""
        assert row.attention_mask is not None
        hidden = self.hf_model.base_model(
            input_ids=row.input_ids.view(row.attention_mask.shape),
            attention_mask=row.attention_mask,
            position_ids=(row.attention_mask.cumsum(1) - 1).clamp_(min=0),
            use_cache=False,
        ).last_hidden_state
        return hidden.flatten(0, 1)

    @abstractmethod
    def answer(self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> dict[str, Tensor]:
        """From the hidden states that predict `targets` to the model's outputs, each [targets]."""


class PackedCausalLM(PackedModel):
    """A language model that answers with `log_probs` (and `entropys`) instead of logits."""

    def __init__(self, hf_model: PreTrainedModel):
        changed = [f for f in LOGIT_CHANGES if getattr(hf_model.config, f, None) not in (None, 1, 1.0)]
        if changed:
            raise ValueError(
                f"{type(hf_model).__name__} transforms its logits ({', '.join(changed)}): not supported yet"
            )
        if hf_model.get_output_embeddings() is None:
            raise ValueError(f"{type(hf_model).__name__} has no output projection to compute log-probs with")
        super().__init__(hf_model)

    def answer(self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> dict[str, Tensor]:
        head: Any = self.hf_model.get_output_embeddings()
        log_probs, entropy = linear_log_probs(
            hidden,
            head.weight,
            targets,
            bias=getattr(head, "bias", None),
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return {"log_probs": log_probs} | ({} if entropy is None else {"entropys": entropy})


class PackedValueModel(PackedModel):
    """A model with a head of one number a token: `values` of the states before each target."""

    def answer(self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> dict[str, Tensor]:
        head: Any = getattr(self.hf_model, VALUE_HEAD)
        return {"values": F.linear(hidden, head.weight, head.bias)[:, 0].float()}
