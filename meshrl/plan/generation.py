"""The rollout: its weights, its KV cache, how many sequences run at once, and how long they take."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshrl.config.families import CUT_FAMILIES, MEGATRON_FAMILIES
from meshrl.config.rollout import RolloutConfig
from meshrl.config.root import PPOConfig
from meshrl.models.loading import torch_dtype
from meshrl.models.sizes import expert_count
from meshrl.plan.hardware import Cluster
from meshrl.plan.lengths import Lengths
from meshrl.plan.model import PlannedModel
from meshrl.plan.roles import Role
from meshrl.plan.timing import Clock, model_flops
from meshrl.rollout.embedded.build import CUDA_BLOCK, SCALE_BYTES
from meshrl.weights.plan import MEGABYTE
from meshrl.weights.rollout_placement import RolloutLayout, rollout

# Host work and launches of one decoding step that graphs do not hide, seconds.
STEP_OVERHEAD = 5e-4
# Products in 8 bits against those in 16, at 256 rows of Qwen3-1.7B on an H200 (at 16,384: 1.7).
PRODUCTS_8 = 1.5
# Engines with memory and weights of their own, beside torch's.
EXTERNAL = ("vllm", "sglang")


@dataclass(frozen=True)
class Generation:
    """One rollout: `replicas` of `ranks` ranks each, on the trainer's devices or on its own."""

    config: PPOConfig
    model: PlannedModel
    actor: Role
    cluster: Cluster

    @property
    def rollout(self) -> RolloutConfig:
        return self.config.actor_rollout_ref.rollout

    @property
    def is_apart(self) -> bool:
        """Whether the rollout has devices of its own."""
        return not self.config.actor_rollout_ref.hybrid_engine

    @property
    def world_size(self) -> int:
        if self.is_apart:
            return max(1, self.rollout.nnodes * self.rollout.n_gpus_per_node)
        return self.config.trainer.world_size

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return min(self.world_size, self.rollout.replica_size)

    @property
    def replicas(self) -> int:
        return max(1, self.world_size // self.ranks)

    @property
    def itemsize(self) -> int:
        return torch_dtype(self.rollout.dtype).itemsize

    @property
    def shares_weights(self) -> bool:
        """Whether the embedded rollout generates with the trainer's own module."""
        actor = self.actor
        return (
            self.rollout.name == "embedded"
            and not self.is_apart
            and actor.placement.startswith("whole")
            and actor.model.lora is None
            and not actor.rests[0]
            and actor.dtype == torch_dtype(self.rollout.dtype)
            and self.ranks == 1
            and not (actor.engine.rounds and self.model.config.model_type not in CUT_FAMILIES)
        )

    @cached_property
    def layout(self) -> RolloutLayout:
        """How a replica's ranks hold the model."""
        tp = min(self.rollout.tensor_model_parallel_size, self.world_size)
        spreads = self.rollout.expert_parallel_size > 1
        spread = self.ranks if spreads and expert_count(self.model.config) else 0
        return RolloutLayout(tp, self.world_size // tp, spread)

    @property
    def spreads_alone(self) -> bool:
        """Whether a replica's ranks hold and compute everything alike, but for the experts."""
        return self.layout.tp == 1 and self.rollout.expert_parallel_size > 1

    def _on_one_rank(self, whole: float, experts: float) -> float:
        """Of an amount for a replica, `experts` of it for them, what one of its ranks has."""
        return whole - experts + experts / self.ranks if self.spreads_alone else whole / self.ranks

    @cached_property
    def weights(self) -> int:
        """Bytes of the fullest rank's own copy."""
        if self.shares_weights:
            return 0
        if self.ranks == 1:
            return self.model.num_params * self.itemsize
        if self.model.config.model_type not in MEGATRON_FAMILIES:
            return int(self._on_one_rank(self.model.num_params, self.model.expert_params)) * self.itemsize
        one = RolloutLayout(self.layout.tp, max(1, self.ranks // self.layout.tp), self.layout.ep)
        if one not in self.model.notes:
            # Experts are alike, so every rank has as much of them; only what is left needs its placement.
            tensors = {name: shape for name, shape in self.model.tensors.items() if ".experts." not in name}
            held = rollout(tensors, self.model.config, one).elements_of_ranks()
            self.model.notes[one] = int(held.max()) + self.model.expert_params // (one.ep or one.tp)
        return self.model.notes[one] * self.itemsize

    @cached_property
    def copies(self) -> int:
        """Bytes of the fullest rank's matrices in 8 bits, beside its weights."""
        if self.rollout.quantization is None:
            return 0
        tensors, tower = self.model.tensors, self.model.tower_tensors
        rounded = [name for name in tensors if name.endswith("_proj.weight") and name not in tower]
        return sum(math.prod(tensors[name]) for name in rounded) // self.layout.tp

    @cached_property
    def bytes_per_token(self) -> int:
        """Keys and values of one token on one rank."""
        config = self.model.config
        if self.model.is_latent:
            return self.model.num_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * self.itemsize
        _, kv_heads, dim = self.model.heads()
        local = max(1, kv_heads // self.rollout.tensor_model_parallel_size)
        of_head = dim + SCALE_BYTES if self.rollout.kv_cache_dtype == "fp8" else dim * self.itemsize
        return 2 * self.model.num_layers * local * of_head

    @property
    def longest(self) -> int:
        data = self.config.data
        return self.rollout.max_model_len or data.max_prompt_length + data.max_response_length

    def cache_bytes(self, held: int) -> int:
        """The KV cache beside `held` bytes of others: a share of what is free (external engines: of all)."""
        total = int(self.cluster.hardware.memory_bytes)
        if self.rollout.name == "hf":
            return int(self.rollout.max_num_seqs * self.longest * self.bytes_per_token)
        if self.rollout.name in EXTERNAL:
            room = int(total * self.rollout.gpu_memory_utilization) - self.weights
        else:
            room = int(max(0, total - held - self.weights - self.copies) * self.rollout.gpu_memory_utilization)
        blocks = max(0, room) // (self.bytes_per_token * CUDA_BLOCK)
        most = self.rollout.max_num_seqs * -(-self.longest // CUDA_BLOCK)
        if self.rollout.name == "embedded":
            blocks = min(blocks, most)
        return blocks * self.bytes_per_token * CUDA_BLOCK

    def smallest_cache(self) -> int:
        """One sequence of full length must fit."""
        return -(-self.longest // CUDA_BLOCK) * CUDA_BLOCK * self.bytes_per_token

    def arriving(self) -> int:
        """What a new version takes beside the engine on devices of its own: all of it, or two buckets of tensors."""
        if not self.is_apart:
            return 0
        return self.two_parts() if self.rollout.name in EXTERNAL else self.weights

    def two_parts(self) -> int:
        """What whole tensors take, half a bucket at a time, on their way into an engine that cuts them itself."""
        bucket = self.rollout.update_weights_bucket_megabytes * MEGABYTE
        largest = max((param.numel() for param in self.model.modules.parameters()), default=0) * self.itemsize
        return min(self.model.num_params * self.itemsize, max(bucket, 2 * largest))

    def workspace(self) -> int:
        """One engine step's hidden states and the logits of its last tokens."""
        hidden = int(self.model.config.hidden_size)
        tokens, rows = self.rollout.max_num_batched_tokens, self.rollout.max_num_seqs
        tp = self.rollout.tensor_model_parallel_size
        wide = 3 * int(self.model.config.intermediate_size) // tp + 4 * hidden
        return tokens * wide * self.itemsize + rows * int(self.model.config.vocab_size) * (4 + self.itemsize)

    def seconds(self, lengths: Lengths, cache: int, clock: Clock) -> tuple[float, float, int]:
        """Seconds of prefill and of decoding on the busiest replica, and how many sequences run at once."""
        part = lengths.part(0, self.replicas, len(lengths.prompts))
        # Inside of a replica, data-parallel ranks have sequences of their own.
        groups = max(1, self.ranks // max(self.layout.tp, self.rollout.expert_parallel_size))
        mean = float(part.totals.mean())
        fit = int(cache // max(1, self.bytes_per_token) // mean) if cache else 1
        at_once = max(1, min(self.rollout.max_num_seqs, fit))
        rates, hardware = clock.rates, self.cluster.hardware
        flops = model_flops(self.model)
        prompts = part.prompts if not self.rollout.enable_prefix_caching else part.prompts[:: self.rollout.n]
        products, attention = flops.forward(prompts.sum(), len(part.prompts), float((prompts**2.0).sum()))
        peak = hardware.flops(8 * self.itemsize)
        experts = self._expert_flops()  # of a token
        rate = peak * rates.products * (PRODUCTS_8 if self.copies else 1.0)
        prefill = self._on_one_rank(products, experts * prompts.sum()) / rate
        prefill += self._on_one_rank(attention, 0.0) / (peak * rates.ragged_attention)
        active, context = _decoding(part.responses, part.prompts, at_once * groups)
        weights = self.weights or self.model.num_params * self.itemsize
        weights -= self.model.tower_params * self.itemsize  # which decoding does not read
        weights -= self.copies * (self.itemsize - 1)  # of these the copy is read
        read = (weights + context / groups * self.bytes_per_token) / (hardware.memory_gbs * 1e9 * rates.decode)
        busy = active * self._on_one_rank(flops.token + flops.target, experts) / rate
        # Cut matrices are put together twice a layer, spread experts once.
        calls = self.model.num_layers * (2 if self.rollout.tensor_model_parallel_size > 1 else self.spreads_alone)
        decode = float(np.maximum(read, busy).sum()) + len(active) * (
            STEP_OVERHEAD + calls * hardware.latency_us * 1e-6
        )
        return prefill, decode, at_once

    def _expert_flops(self) -> float:
        """A token's products in the experts that it visits."""
        experts = expert_count(self.model.config)
        visited = self.model.config.num_experts_per_tok / experts if experts else 0.0
        return 2.0 * visited * self.model.expert_params


def _decoding(responses: np.ndarray, prompts: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """For every decoding step of a replica: running sequences, and tokens in their contexts."""
    free = [0] * slots
    starts = np.zeros(len(responses), np.int64)
    for number, length in enumerate(responses.tolist()):
        starts[number] = heapq.heappop(free)
        heapq.heappush(free, int(starts[number]) + length)
    steps = int((starts + responses).max())
    change, growth = np.zeros(steps + 1), np.zeros(steps + 1)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + responses, -1)
    np.add.at(growth, starts, prompts)
    np.add.at(growth, starts + responses, -(prompts + responses))
    active = change.cumsum()
    # Every running sequence grows by a token a step; what it has grown by is taken off again when it ends.
    context = (growth + np.concatenate([[0.0], active[:-1]])).cumsum()
    return active[:steps], context[:steps]
