"""The packed model of the training engines: a Hugging Face model over a row of samples, and its outputs per target.

- `PackedCausalLM`, `PackedValueModel`: log-probs and entropies, or values.
- `linear_log_probs`, `linear_sum_pi_squared`: outputs from hidden states, without `tokens × vocabulary` in float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl.config.families import UNSCALED, LogitScaling
from meshrl.data.images import Seen
from meshrl.data.packing import PackedRow
from meshrl.models.loading import VALUE_HEAD, body_of, logit_scaling_of
from meshrl.models.vision import Sight
from meshrl.parallel.attention import AttentionContext, check_layers, hand_contexts_down, longest_fixed_rotation
from meshrl.parallel.linear_attention import enter_recurrences
from meshrl.parallel.prefix_tree import PrefixTree
from meshrl.parallel.sequence import SequenceShard

# A row runs as a tree of its prefixes if the tree has at most this share of the row's tokens.
MOST_NODES = 0.9


@dataclass(frozen=True)
class Wanted:
    """The temperature of a forward, and the outputs that it computes in addition to log-probs (or values)."""

    temperature: float
    entropy: bool
    sum_pi_squared: bool


class PackedModel(nn.Module):
    """A Hugging Face model over one row of samples, which returns outputs for the targets only.

    It is the root that is sharded: embedding, last norm and head are whole inside its forward. With a `sight` it
    accepts rows with images. With `looks_always`, its vision tower also runs for rows without images.
    """

    def __init__(self, hf_model: PreTrainedModel, sight: Sight | None = None, looks_always: bool = False):
        super().__init__()
        self.hf_model, self.sight, self.looks_always = hf_model, sight, looks_always
        # With dropout, equal prefixes get different states, because each token draws its own mask.
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
        """Return one number per target under each output's name.

        Ranks that share a sequence compute a part each, and all of them get the whole result. Equal prefixes of several
        samples may be computed once, unless `shares_prefixes` is False.
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
        # Each rank computes the targets that its own tokens predict and puts the results at these tokens' indices.
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
        """Return the positions of the row's tokens: `[1, local]`, or `[3, 1, local]` for a VLM.

        A VLM has three axes also without images, so that layers are compiled for one shape only.
        """
        if seen is not None:
            return seen.positions[:, None]
        return shard.position_ids if self.sight is None else shard.position_ids.expand(3, 1, -1)

    def _tree(self, row: PackedRow, shard: SequenceShard) -> PrefixTree | None:
        """Return the row's tree of distinct prefixes if sharing is possible and saves enough tokens, otherwise None."""
        on_host = row.input_ids.device.type == "cpu"
        if not on_host or shard.parallel.size > 1 or len(row.predictors) == 0 or (self.drops_out and self.training):
            return None
        # Equal tokens may stand for different images, and a recurrent state cannot follow several branches.
        if self.sight is not None or self.has_states:
            return None
        tree = PrefixTree.of(row.input_ids, row.lengths, row.predictors)
        return tree if tree.num_nodes <= MOST_NODES * len(row.input_ids) else None

    def _packed(
        self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext, seen: Seen | None = None
    ) -> Tensor:
        """Return the hidden states `[tokens, dim]` of a row of tokens."""
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
        """Return the hidden states `[batch * length, dim]` of a padded rectangle, by the model's own attention."""
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
        """Compute the model's outputs, each `[targets]`, from the hidden states that predict `targets`."""


class PackedCausalLM(PackedModel):
    """A language model that returns `log_probs` (and `entropys`) instead of logits."""

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
    """A model whose head gives one number per token: `values` of the states before each target."""

    def answer(self, hidden: Tensor, targets: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        head: Any = getattr(self.hf_model, VALUE_HEAD)
        return {"values": F.linear(hidden, head.weight, head.bias)[:, 0].float()}


# From hidden states to log-probs and entropy, without ever holding `tokens × vocabulary` in float32.
#
# The output projection, the soft-max and their gradients run over chunks of tokens. The forward pass keeps two numbers
# per token and, up to a limit, the logits in their 16-bit type. Beyond the limit, the backward pass computes each
# chunk's logits again, which trades one more matrix product for the memory.

# The largest number of logits in a chunk. On a GPU a chunk must be large enough to keep the matrix units busy.
CHUNK_ELEMENTS = 1 << 25
CHUNK_ELEMENTS_ON_GPU = 1 << 29


def tokens_per_chunk(vocab_size: int, on_gpu: bool = False) -> int:
    """Return how many tokens' logits fit into a chunk."""
    return max(1, (CHUNK_ELEMENTS_ON_GPU if on_gpu else CHUNK_ELEMENTS) // vocab_size)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    keep_bytes: int = 0,
    scaling: LogitScaling = UNSCALED,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of `targets` and entropies, for logits `scaled(hidden @ weight.T + bias) / temperature`.

    `scaling` is the logit scaling and soft cap of the model's family. Both results are float32 `[tokens]` and
    differentiable in hidden, weight and bias. Logits of a 16-bit type that take at most `keep_bytes` bytes are kept for
    the backward pass; otherwise they are computed again.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden must be [tokens, dim] and targets [tokens], got {tuple(hidden.shape)} and {tuple(targets.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to compute log-probs, got {temperature}")
    divisor, limit = _divisor_and_limit(temperature, scaling)
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, bias, targets, divisor, limit, with_entropy, keep_bytes)
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def linear_sum_pi_squared(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scaling: LogitScaling = UNSCALED,
) -> Tensor:
    """Compute the sum over the vocabulary of p^2, float32 `[tokens]`, for the logits of `linear_log_probs`."""
    divisor, limit = _divisor_and_limit(temperature, scaling)
    sums = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    step = tokens_per_chunk(weight.shape[0], hidden.is_cuda)
    for i in range(0, hidden.shape[0], step):
        logits = tempered(F.linear(hidden[i : i + step], weight, bias), divisor, limit)
        sums[i : i + step] = logits.log_softmax(-1).mul_(2).exp_().sum(-1)
    return sums


def _divisor_and_limit(temperature: float, scaling: LogitScaling) -> tuple[float, float | None]:
    """Return the divisor of the head's output, and the soft cap after the division; both include the temperature."""
    return temperature / scaling.factor, None if scaling.cap is None else scaling.cap / temperature


def tempered(logits: Tensor, divisor: float, limit: float | None) -> Tensor:
    """Return a new float32 tensor of the logits, divided by `divisor` and then soft-capped."""
    logits = logits.float() / divisor
    return logits if limit is None else logits.div_(limit).tanh_().mul_(limit)


def chunk_outputs(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, limit: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp, the target's log-prob and the entropy of each row of logits.

    The entropy is an empty tensor unless `with_entropy`.
    """
    logits = tempered(logits, temperature, limit)
    log_sum = logits.logsumexp(-1)
    log_prob = logits.gather(-1, targets[:, None])[:, 0] - log_sum
    if not with_entropy:
        return log_sum, log_prob, log_sum[:0]
    # Not log-sum minus mean logit: that difference of large numbers loses digits.
    log_p = logits - log_sum[:, None]
    return log_sum, log_prob, -(log_p.exp() * log_p).sum(-1)


def chunk_gradient(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    limit: float | None = None,
) -> Tensor:
    """Return the gradient with respect to the logits, in the logits' type.

    A target may lie outside the columns of this rank.
    """
    scaled = tempered(logits, temperature, limit)
    log_p = scaled - log_sum[:, None]
    probs = log_p.exp()
    grad = torch.zeros_like(probs)
    if grad_log_prob is not None:
        columns = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
        is_target = columns == targets[:, None].int()
        grad = (is_target.float() - probs) * grad_log_prob[:, None]
    if grad_entropy is not None:
        # d entropy / d logit = -p (log p + entropy)
        grad = grad - probs * (log_p + entropy[:, None]) * grad_entropy[:, None]
    if limit is not None:
        grad = grad * (1 - (scaled / limit).square())
    return (grad / temperature).to(logits.dtype)


def chunk_functions(on_gpu: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `chunk_outputs` and `chunk_gradient`, or their GPU kernels, which write the gradient over the logits."""
    if not on_gpu:
        return chunk_outputs, chunk_gradient
    from meshrl.engines import log_prob_kernels as kernels

    return kernels.chunk_outputs, kernels.chunk_gradient


def _weight_gradient(grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """Return the weight's gradient in float32, so that the sum over chunks loses no digits."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(grad_logits.t(), hidden, out_dtype=torch.float32)
    return grad_logits.t() @ hidden


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        limit: float | None,
        with_entropy: bool,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        size = hidden.element_size()
        keeps = size == 2 and any(ctx.needs_input_grad) and n * weight.shape[0] * size <= keep_bytes
        # An attribute, not a saved tensor, because activation offload must not copy it to the host.
        ctx.kept = {}
        # Logits that are kept anyway need no chunks.
        ctx.step = step = n if keeps and n else tokens_per_chunk(weight.shape[0], hidden.is_cuda)
        log_sums, log_probs = (hidden.new_empty(n, dtype=torch.float32) for _ in range(2))
        entropy = hidden.new_empty(n if with_entropy else 0, dtype=torch.float32)
        outputs_of, _ = chunk_functions(hidden.is_cuda)
        for i in range(0, n, step):
            part = slice(i, i + step)
            logits = F.linear(hidden[part], weight, bias)
            outputs = outputs_of(logits, targets[part], temperature, with_entropy, limit)
            log_sums[part], log_probs[part] = outputs[:2]
            if keeps:
                ctx.kept[i] = logits
            if with_entropy:
                entropy[part] = outputs[2]
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy)
        ctx.temperature, ctx.limit = temperature, limit
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropy = ctx.saved_tensors
        n, step = hidden.shape[0], ctx.step
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # A rank without tokens still needs a gradient of zeros for the collectives with its peers.
        grad_weight = None if n > 0 else torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        _, gradient_of = chunk_functions(hidden.is_cuda)
        for i in range(0, n, step):
            part = slice(i, i + step)
            grads = [None if g is None else g[part] for g in grad_outputs]  # None if the loss does not use it
            logits = ctx.kept.pop(i, None)
            if logits is None:
                logits = F.linear(hidden[part], weight, bias)
            grad = gradient_of(logits, targets[part], log_sums[part], entropy[part], *grads, ctx.temperature, ctx.limit)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                product = grad.t() @ hidden if step >= n else _weight_gradient(grad, hidden[part])
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *([None] * 5),
        )
