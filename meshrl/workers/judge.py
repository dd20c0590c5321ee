"""A language model that grades: a rollout of its own on the workers' devices, asked in texts."""

from __future__ import annotations

from typing import Any

from meshrl.config.reward import JudgeConfig
from meshrl.config.rollout import READERS
from meshrl.controller import Dispatch, Worker, nd_dispatch, register
from meshrl.data.proto import DataProto, object_array
from meshrl.rewards.judge import RolloutAsk
from meshrl.rollout.opened import EngineOptions, open_rollout
from meshrl.rollout.requests import SamplingParams
from meshrl.workers.joining import join_ranks
from meshrl.workers.settings import WorkerSettings


class JudgeWorker(Worker):
    """One replica of the judge on each rank. Questions are split over the ranks."""

    def __init__(self, config: JudgeConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the judge's folder into an engine."""
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
        """`reply` to each `text`; where there is none, `error` says why."""
        replies = self.ask(list(questions.non_tensor_batch["text"]))
        failed = [isinstance(reply, Exception) for reply in replies]
        columns: dict[str, list[Any]] = {
            "reply": ["" if bad else reply for bad, reply in zip(failed, replies, strict=True)],
            "error": [str(reply) if bad else None for bad, reply in zip(failed, replies, strict=True)],
        }
        return DataProto(None, {name: object_array(column) for name, column in columns.items()}, {})
