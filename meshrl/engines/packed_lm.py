"""What the training engines ask of a Hugging Face causal language model."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.engines.log_probs import linear_log_probs
from meshrl.parallel.packed import PackedSequences

# Config fields by which some models change their logits after the output projection.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "final_logits_soft_cap")


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
        self.hf_model = hf_model

    def forward(
        self,
        input_ids: Tensor,
        packed: PackedSequences,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropy) of `targets`, each predicted at the position of the packed row given by `rows`."""
        hidden = self.hf_model.base_model(
            input_ids=input_ids[None],
            position_ids=packed.position_ids,
            use_cache=False,
            attention_context=packed,
        ).last_hidden_state[0]
        head = self.hf_model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(self.hf_model).__name__} has no output projection to compute log-probs with")
        return linear_log_probs(
            hidden[rows],
            head.weight,
            targets,
            bias=getattr(head, "bias", None),
            temperature=temperature,
            with_entropy=with_entropy,
        )
