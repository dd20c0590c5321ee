"""The embedded rollout: generates with the trainer's own kind of module, in the trainer's own process.

A batch goes through in waves of at most `max_num_seqs` samples. Neighbouring samples of one prompt share its prefill
(packed, under a token budget); then all samples advance together, one token a step, and those that have ended leave
the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshrl.data.proto import DataProto
from meshrl.parallel.packed import PackedSequences
from meshrl.rollout.base import SamplingParams
from meshrl.rollout.embedded.cache import DecodeContext, PrefillContext, SlotCache
from meshrl.rollout.embedded.sampler import sample

# Slots are repacked when this share of them has ended.
REPACK_SHARE = 0.25


class EmbeddedRollout:
    """Generation by a Hugging Face module that is either shared with the trainer or a replica of its own."""

    def __init__(
        self,
        hf_model: PreTrainedModel,
        *,
        pad_token_id: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        shares_weights: bool = False,
    ):
        self.hf_model, self.pad_token_id = hf_model, pad_token_id
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.shares_weights = shares_weights
        self.device = next(hf_model.parameters()).device
        self.version = -1

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies every weight in; with shared storage there is nothing to copy and only the version moves on."""
        if not self.shares_weights:
            own = dict(self.hf_model.named_parameters())
            for name, value in weights:
                if name not in own:
                    raise ValueError(f"weight sync: the rollout has no parameter '{name}', or got it twice")
                param = own.pop(name)
                if param.shape != value.shape:
                    raise ValueError(
                        f"weight sync: '{name}' has shape {list(param.shape)} here, but was sent as {list(value.shape)}"
                    )
                param.copy_(value)
            if own:
                raise ValueError(f"weight sync: {len(own)} parameters were never sent, such as '{next(iter(own))}'")
        self.version = version

    @torch.no_grad()
    def generate_sequences(self, prompts: DataProto, params: SamplingParams) -> DataProto:
        """See `Rollout.generate_sequences`."""
        if self.version < 0:
            raise RuntimeError("the rollout has no weights yet: sync them before generating")
        started = time.perf_counter()
        self.hf_model.eval()
        requests = prompts.batch
        ids, mask, seeds = requests["input_ids"], requests["attention_mask"], requests["seeds"]
        lengths = mask.sum(1).tolist()
        if min(lengths) == 0:
            raise ValueError(f"prompt {lengths.index(0)} of the batch is empty: every prompt needs at least one token")
        waves = [slice(i, i + self.max_num_seqs) for i in range(0, len(ids), self.max_num_seqs)]
        parts = [self._wave(ids[w], mask[w], seeds[w], params) for w in waves]
        responses, log_probs, response_mask = (torch.cat(x) for x in zip(*parts, strict=True))
        attention_mask = torch.cat([mask, response_mask], 1)
        result = {
            "prompts": ids,
            "responses": responses,
            "response_mask": response_mask,
            "input_ids": torch.cat([ids, responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp_(min=0),
            "rollout_log_probs": log_probs,
            "versions": torch.where(response_mask.bool(), self.version, -1).int(),
        }
        seconds = time.perf_counter() - started
        return DataProto.from_dict(tensors=result, meta_info={"timing": {"generate": seconds}})

    def _wave(self, ids: Tensor, mask: Tensor, seeds: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
        """Responses, log-probs and mask of one wave, each [samples, max_tokens] on the CPU."""
        distinct, sample_of = torch.unique_consecutive(torch.where(mask.bool(), ids, -1), dim=0, return_inverse=True)
        logits, cache = self._prefill(distinct, sample_of.to(self.device))
        count = len(ids)
        seeds = seeds.to(self.device)
        stops = torch.tensor(params.stop_token_ids, device=self.device)
        tokens = torch.full((count, params.max_tokens), self.pad_token_id, device=self.device)
        log_probs = torch.zeros(count, params.max_tokens, device=self.device)
        lengths = torch.full((count,), params.max_tokens, device=self.device)
        slots = torch.arange(count, device=self.device)  # which sample each cache slot belongs to
        running = torch.ones(count, dtype=torch.bool, device=self.device)  # by slot
        limit = cache.longest + params.max_tokens
        for step in range(params.max_tokens):
            chosen, chosen_log_probs = sample(logits, params, seeds[slots], step)
            alive = slots[running]
            tokens[alive, step], log_probs[alive, step] = chosen[running], chosen_log_probs[running]
            ended = running & torch.isin(chosen, stops)
            lengths[slots[ended]] = step + 1
            running &= ~ended
            left = int(running.sum())
            if left == 0 or step + 1 == params.max_tokens:
                break
            if left <= (1 - REPACK_SHARE) * len(slots):
                kept = running.nonzero()[:, 0]
                cache.keep(kept)
                slots, chosen, running = slots[kept], chosen[kept], running[kept]
            logits = self._decode(chosen, cache, limit)
        response_mask = (torch.arange(params.max_tokens, device=self.device) < lengths[:, None]).long()
        return tokens.cpu(), log_probs.cpu(), response_mask.cpu()

    def _prefill(self, prompts: Tensor, sample_of: Tensor) -> tuple[Tensor, SlotCache]:
        """Computes each distinct prompt once; returns every sample's first logits and the cache of all samples."""
        lengths = (prompts >= 0).sum(1).tolist()
        row = prompts[prompts >= 0].to(self.device)
        packed = PackedSequences.of(lengths, self.device)
        whole = PrefillContext(packed)
        hidden, pieces, first, start = [], [], 0, 0
        while first < len(lengths):
            last, tokens = first + 1, lengths[first]
            while last < len(lengths) and tokens + lengths[last] <= self.max_num_batched_tokens:
                tokens += lengths[last]
                last += 1
            context = PrefillContext(PackedSequences.of(lengths[first:last], self.device))
            out = self._hidden(row[None, start : start + tokens], context.packed.position_ids, context)[0]
            hidden.append(out[context.packed.cu_seqlens[1:].long() - 1])
            pieces.append(context)
            first, start = last, start + tokens
        for layer in pieces[0].keys:
            whole.keys[layer] = torch.cat([p.keys[layer] for p in pieces], 1)
            whole.values[layer] = torch.cat([p.values[layer] for p in pieces], 1)
        return self._logits(torch.cat(hidden))[sample_of], SlotCache(whole, sample_of)

    def _decode(self, tokens: Tensor, cache: SlotCache, limit: int) -> Tensor:
        cache.make_room(limit)
        context = DecodeContext(cache)
        hidden = self._hidden(tokens[:, None], context.position_ids, context)
        context.advance()
        return self._logits(hidden[:, 0])

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, context: PrefillContext | DecodeContext) -> Tensor:
        out = self.hf_model.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, attention_context=context
        )
        return out.last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.hf_model.get_output_embeddings()(hidden)
