"""What the training engines ask of a Hugging Face causal language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.data.packing import PackedRow
from meshrl.engines.log_probs import linear_log_probs
from meshrl.parallel.sequence import SequenceShard

# Config fields by which some models change their logits after the output projection.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "final_logits_soft_cap")


def check_no_persistent_buffers(hf_model: PreTrainedModel) -> None:
    """Refuses models that keep state in buffers: loading, sync and saving carry parameters only."""
    params = {name for name, _ in hf_model.named_parameters(remove_duplicate=False)}
    buffers = sorted(hf_model.state_dict().keys() - params)
    if buffers:
        raise ValueError(f"{type(hf_model).__name__} keeps state in buffers, such as '{buffers[0]}': not supported yet")


class PackedCausalLM(nn.Module):
    """A causal language model over one packed row that answers with log-probs instead of logits.

    It is the root that gets sharded: embedding, last norm and output projection are whole inside its forward.
    """

    def __init__(self, hf_model: PreTrainedModel):
        super().__init__()
        changed = [f for f in LOGIT_CHANGES if getattr(hf_model.config, f, None) not in (None, 1, 1.0)]
        if changed:
            raise ValueError(
                f"{type(hf_model).__name__} transforms its logits ({', '.join(changed)}): not supported yet"
            )
        check_no_persistent_buffers(hf_model)
        self.hf_model = hf_model

    def forward(
        self, row: PackedRow, shard: SequenceShard, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropy) of the row's targets; ranks that share a sequence compute a part and all get all."""
        hidden = self.hf_model.base_model(
            input_ids=shard.take(row.input_ids)[None],
            position_ids=shard.position_ids,
            use_cache=False,
            attention_context=shard.context,
        ).last_hidden_state[0]
        head = self.hf_model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(self.hf_model).__name__} has no output projection to compute log-probs with")
        if shard.parallel.size == 1:
            return self._log_probs(hidden[row.predictors], head, row.targets, temperature, with_entropy)
        # Each rank computes the targets that its own tokens predict and puts them at those tokens' places.
        target_at = torch.full((shard.padded_length,), -1, device=hidden.device)
        target_at[row.predictors] = row.targets
        mine = target_at[shard.index]
        places = (mine >= 0).nonzero()[:, 0]
        log_probs, entropy = self._log_probs(hidden[places], head, mine[places], temperature, with_entropy)

        def spread(values: Tensor) -> Tensor:
            local = values.new_zeros(len(mine)).index_put((places,), values)
            return shard.gather(local)[row.predictors]

        return spread(log_probs), None if entropy is None else spread(entropy)

    @staticmethod
    def _log_probs(
        hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return linear_log_probs(
            hidden,
            head.weight,  # type: ignore[arg-type]
            targets,
            bias=getattr(head, "bias", None),
            temperature=temperature,
            with_entropy=with_entropy,
        )
