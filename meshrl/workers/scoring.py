"""Workers that score responses: the critic of PPO, reward models and LLM judges.

    CriticWorker        values of the states before each response token, and their regression towards the returns
    RewardModelWorker   a token classifier whose value after the last token is the score of a whole response
    JudgeWorker         a language model that replies to texts

Reward model and judge are frozen; only the critic is trained.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.algorithms import BatchStats, agg_loss, compute_value_loss
from meshrl.config.actor_critic import CriticConfig, RewardModelConfig
from meshrl.config.engine import ModelConfig
from meshrl.config.reward import JudgeConfig
from meshrl.config.rollout import READERS
from meshrl.controller import Dispatch, Worker, nd_dispatch, register
from meshrl.data.batch import DataProto, object_array
from meshrl.engines.engine_class import engine_class
from meshrl.engines.training_engine import Engine, LossFunction
from meshrl.rewards.judge import RolloutAsk
from meshrl.rollout.build import EngineOptions, open_rollout
from meshrl.rollout.requests import SamplingParams
from meshrl.telemetry.device_stats import MemoryLog, PeakMemory
from meshrl.telemetry.metrics import count_steps, reduce_metrics
from meshrl.telemetry.time_ledger import booked
from meshrl.workers.checkpointing import CheckpointedWorker
from meshrl.workers.setup import WorkerSettings, awake, import_external_lib, join_ranks, rests, send_to_rest


class CriticWorker(CheckpointedWorker):
    """One rank of the critic. Batches are split over the data-parallel ranks of the mesh `critic`."""

    def __init__(self, config: CriticConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine with a value head, and offload what is configured to be offloaded."""
        import_external_lib(self.config.model)
        self.device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        self.engine = engine_class(self.config)(
            self.config.model,
            self.config,
            self.config.optim,
            device=self.device,
            head="value",
            total_steps=self.settings.total_optimizer_steps,
            seed=self.settings.seed,
        )
        self.engine.initialize()
        self.register_mesh("critic", self.engine.dp_rank, self.engine.dp_size, is_collect=self.engine.is_collect)
        send_to_rest(self.engine, *rests(self.config))

    def _checkpointed(self) -> tuple[Engine, ModelConfig]:
        return self.engine, self.config.model

    def _engine_awake(self) -> AbstractContextManager[None]:
        model, optimizer = rests(self.config)
        return awake(self.engine, self.device, model=model, optimizer=optimizer)

    @register(dispatch_mode=nd_dispatch("critic"))
    @booked("value")
    def compute_values(self, data: DataProto) -> DataProto:
        """Compute `values` `[B, T]`: the critic's expected return of the state before each response token."""
        request = data.select(["input_ids", "attention_mask", "response_mask"], [])
        request.meta_info = self._meta()
        resting = awake(self.engine, self.device, model=rests(self.config)[0], optimizer=False)
        with MemoryLog("values", self.device), resting:
            return DataProto.from_dict(self.engine.forward(request))

    @register(dispatch_mode=nd_dispatch("critic", pad=False))
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Run one update: epochs → mini-batches → micro-batches. Return its metrics, the same on every rank."""
        collected: dict[str, list[float]] = {}
        mini_batches = data.chunk(self.settings.mini_batches)
        memory = PeakMemory(self.device)
        model, optimizer = rests(self.config)
        with awake(self.engine, self.device, model=model, optimizer=optimizer):
            for _ in range(self.config.ppo_epochs or 1):
                for mini_batch in mini_batches:
                    for name, value in self._update_on(mini_batch).items():
                        collected.setdefault(name, []).append(value)
            self.engine.optimizer_zero_grad()
        counts = count_steps("critic", collected)
        return reduce_metrics(collected) | counts | memory.metrics("update_critic")

    def _update_on(self, data: DataProto) -> dict[str, float]:
        """Take one optimizer step on this rank's part of a mini-batch."""
        engine = self.engine
        mask = data.batch["response_mask"]
        tokens, sequences = engine.sum_over_data_parallel(torch.stack([mask.sum(), mask.any(1).sum()])).tolist()
        # All samples of a mini-batch may have been dropped: its loss is 0 then.
        stats = BatchStats(engine.gradient_ranks, max(1, tokens), max(1, sequences), float(mask.shape[1]))
        data.meta_info = self._meta()
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(data, make_value_loss(self.config, stats)).metrics
        norm = engine.optimizer_step()
        return metrics | {
            "critic/grad_norm": norm,
            "critic/skipped_steps": float(not np.isfinite(norm)),
            "critic/lr": engine.lr_scheduler_step(),
        }

    def _meta(self) -> dict[str, object]:
        return {
            "use_dynamic_bsz": self.config.use_dynamic_bsz,
            "max_token_len": self.config.ppo_max_token_len_per_gpu,
            "micro_batch_size": self.config.ppo_micro_batch_size_per_gpu,
        }


def make_value_loss(config: CriticConfig, stats: BatchStats) -> LossFunction:
    """Return the clipped value loss of a mini-batch whose counts over all ranks are `stats`."""
    mode = config.loss_agg_mode or "token-mean"
    watched = BatchStats(dp_size=1, num_tokens=stats.num_tokens, num_sequences=stats.num_sequences)

    def loss_function(output: dict[str, Tensor], data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        batch = data.to(output["values"].device).batch
        mask = batch["response_mask"]
        loss, clipped = compute_value_loss(
            output["values"], batch["returns"], batch["values"], mask, config.cliprange_value, mode, stats=stats
        )
        mean = agg_loss(output["values"].detach(), mask, "token-mean", stats=watched)
        metrics = {
            "critic/vf_loss": loss.detach() / stats.dp_size,
            "critic/vf_clipfrac": clipped,
            "critic/vpred_mean": mean,
        }
        return loss, metrics

    return loss_function


# A reward model: a token classifier whose value after the last token is the score of the whole response.


class RewardModelWorker(Worker):
    """One rank of the reward model. Batches are split over the data-parallel ranks of the mesh `reward_model`."""

    def __init__(self, config: RewardModelConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine without an optimizer, because the reward model only runs forward passes."""
        import_external_lib(self.config.model)
        self.device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        self.engine = engine_class(self.config)(self.config.model, self.config, None, device=self.device, head="value")
        self.engine.initialize()
        self.register_mesh("reward_model", self.engine.dp_rank, self.engine.dp_size, is_collect=self.engine.is_collect)
        send_to_rest(self.engine, rests(self.config)[0], False)

    @register(dispatch_mode=nd_dispatch("reward_model"))
    @booked("reward")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Compute `rm_scores` `[B, T]`: the score of each response on its last token, and 0 elsewhere."""
        request = data.select(["input_ids", "attention_mask", "response_mask"], [])
        request = with_end(request)
        request.meta_info = {
            "use_dynamic_bsz": self.config.use_dynamic_bsz,
            "max_token_len": self.config.forward_max_token_len_per_gpu,
            "micro_batch_size": self.config.micro_batch_size_per_gpu,
        }
        with awake(self.engine, self.device, model=rests(self.config)[0], optimizer=False):
            output = self.engine.forward(request)
        if not output:
            return DataProto.from_dict({})
        return DataProto.from_dict({"rm_scores": on_last_tokens(output["values"][:, 0], data.batch["response_mask"])})


def with_end(data: DataProto) -> DataProto:
    """Append one token to each sample, because a value model's number for that token covers the whole sample.

    A value belongs to the state before its token. Packing closes the gap between the last token and the appended one,
    whose own content is never read.
    """
    ids, mask = data.batch["input_ids"], data.batch["attention_mask"]
    ones = torch.ones(len(ids), 1, dtype=mask.dtype)
    tensors = {
        "input_ids": torch.cat([ids, ids[:, -1:]], 1),
        "attention_mask": torch.cat([mask, ones], 1),
        "response_mask": ones,
    }
    return DataProto.from_dict(tensors)


def on_last_tokens(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Put each sample's score `[B]` on the last token that its model sampled; return `[B, T]`."""
    columns = torch.arange(response_mask.shape[1])
    last = torch.where(response_mask.bool(), columns, -1).amax(1)
    spread = torch.zeros(response_mask.shape, dtype=torch.float32)
    rows = (last >= 0).nonzero()[:, 0]
    spread[rows, last[rows]] = scores[rows].float()
    return spread


# An LLM judge: a rollout of its own on the workers' devices, which replies to texts.


class JudgeWorker(Worker):
    """One replica of the judge on each rank. Questions are split over the ranks."""

    def __init__(self, config: JudgeConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the judge's model folder into a rollout engine."""
        config = self.config
        device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        share, share_is_read = config.gpu_memory_utilization, config.engine in READERS["gpu_memory_utilization"]
        options = EngineOptions(
            engine=config.engine,
            dtype=config.dtype,
            device=str(device),
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            gpu_memory_utilization=share if share_is_read else EngineOptions.gpu_memory_utilization,
            trust_remote_code=config.trust_remote_code,
            arguments=dict(config.engine_kwargs),
        )
        opened = open_rollout(config.path or "", options)
        params = SamplingParams(
            max_tokens=config.max_tokens, temperature=config.temperature, stop_token_ids=opened.stop_token_ids
        )
        self.ask = RolloutAsk(opened.rollout, opened.tokenizer, params, seed=self.settings.seed)
        self.register_mesh("judge", self.rank, self.world_size, is_collect=True)

    @register(dispatch_mode=nd_dispatch("judge"))
    def reply(self, questions: DataProto) -> DataProto:
        """Return the judge's `reply` to each `text`; if a reply failed, `error` has the reason."""
        replies = self.ask(list(questions.non_tensor_batch["text"]))
        failed = [isinstance(reply, Exception) for reply in replies]
        columns: dict[str, list[Any]] = {
            "reply": ["" if bad else reply for bad, reply in zip(failed, replies, strict=True)],
            "error": [str(reply) if bad else None for bad, reply in zip(failed, replies, strict=True)],
        }
        return DataProto(None, {name: object_array(column) for name, column in columns.items()}, {})
