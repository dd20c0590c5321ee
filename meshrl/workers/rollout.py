"""The policy that generates on devices of its own, beside the one that is trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshrl.config.root import ActorRolloutRefConfig
from meshrl.controller import Dispatch, Worker, nd_dispatch, register
from meshrl.data.proto import DataProto
from meshrl.models.loading import empty_model, torch_dtype
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.parallel.mesh import contiguous_group, prepare_device
from meshrl.telemetry.ledger import booked
from meshrl.weights.pools import PoolGroup, PoolSync, connect_rollout
from meshrl.workers.answering import Answering
from meshrl.workers.joining import import_external_lib, join_ranks
from meshrl.workers.settings import WorkerSettings


class RolloutWorker(Worker):
    """One rank of the rollouts: a whole copy of the model, or its part of one that is cut over neighbouring ranks.

    Its weights come from the actor's workers, into any engine; vLLM and SGLang get theirs a bucket at a time.
    """

    preload = ("meshrl.models.preloaded", "meshrl.rollout.embedded.engine")

    def __init__(self, config: ActorRolloutRefConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the rollout, without weights until the first sync."""
        model, rollout, deadline = self.config.model, self.config.rollout, self.settings.collective_deadline
        split, group = rollout.replica_size, None
        import_external_lib(model)
        if split > 1:
            self.device = join_ranks(self.settings.device, self.local_rank, deadline)
            group = contiguous_group(split, deadline)
        else:
            self.device = prepare_device(self.settings.device, self.local_rank)
        self.hf_model = empty_model(
            model.path or "",
            ATTENTION_NAME,
            dtype=torch_dtype(rollout.dtype),
            override=model.override_config,
            trust_remote_code=model.trust_remote_code,
        )
        self.answering = Answering(
            replace(rollout, free_cache_engine=False),  # nobody trains on these devices
            model,
            self.hf_model,
            device=self.device,
            can_share=False,
            rank_group=group,
            memory_budget=self.config.memory_budget_bytes,
            template_kwargs=self.settings.template_kwargs,
            records_routes=self.config.records_routes,
        )
        self.rollout = self.answering.rollout
        self.register_mesh("rollout", self.rank // split, self.world_size // split, is_collect=self.rank % split == 0)

    def close(self) -> None:
        """Ends the engine, and what it may have started beside this process."""
        if hasattr(self, "rollout"):
            self.rollout.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_pool(self, address: str, num_trainers: int) -> None:
        """Connects with the trainers, who join at the same time."""
        lost: PoolSync | None = getattr(self, "pool_sync", None)
        if lost is not None:  # another rollout of that connection is gone
            lost.leave()
        deadline = self.settings.collective_deadline
        group = PoolGroup.join(address, num_trainers + self.rank, num_trainers + self.world_size, deadline)
        self.pool_sync: PoolSync = connect_rollout(
            self.rollout, group, num_trainers, model=self.hf_model, device=self.device
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("generate")
    def finish_answers(self) -> None:
        """Finishes what was begun, and begins nothing more until new weights are there."""
        self.rollout.pause("wait")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("sync")
    def receive_weights(self, version: int) -> dict[str, float]:
        """Takes the actor's weights as this version, and goes on."""
        try:
            return self.pool_sync(self.rollout, version).metrics()
        finally:
            self.rollout.resume()

    @register(dispatch_mode=nd_dispatch("rollout", direct=True))
    @booked("generate")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers prompts, beside those that were begun; `meta_info["validate"]` chooses the sampling of validation."""
        return self.answering(prompts)

    @register(dispatch_mode=nd_dispatch("rollout", direct=True), blocking=False)
    @booked("generate")
    def begin_sequences(self, prompts: DataProto) -> DataProto:
        """The same without waiting: the answers are a future, and go on while weights change."""
        return self.answering(prompts)

    @register(dispatch_mode=nd_dispatch("rollout"))
    @booked("generate")
    def start_generation(self, prompts: DataProto) -> None:
        """`generate_sequences`, beside other calls: `take_generated` gives the answers as they end."""
        self.answering.start(prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("generate")
    def take_generated(self, seconds: float) -> tuple[np.ndarray, DataProto] | None:
        """What has ended of this rank's part: its rows and the answers, or None if nothing did within `seconds`."""
        return self.answering.take(seconds)
