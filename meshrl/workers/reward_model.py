"""A model that scores whole answers with one number: a token classifier read at an answer's last token."""

from __future__ import annotations

import torch

from meshrl.config.critic import RewardModelConfig
from meshrl.controller import Dispatch, Worker, nd_dispatch, register
from meshrl.data.proto import DataProto
from meshrl.engines.build import engine_class
from meshrl.telemetry.ledger import booked
from meshrl.workers.joining import import_external_lib, join_ranks
from meshrl.workers.resting import awake, rests, send_to_rest
from meshrl.workers.settings import WorkerSettings


class RewardModelWorker(Worker):
    """One rank of the reward model. Batches are split over the data-parallel ranks of the mesh `reward_model`."""

    def __init__(self, config: RewardModelConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine; the model only answers."""
        import_external_lib(self.config.model)
        self.device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        self.engine = engine_class(self.config)(self.config.model, self.config, None, device=self.device, head="value")
        self.engine.initialize()
        self.register_mesh("reward_model", self.engine.dp_rank, self.engine.dp_size, is_collect=self.engine.is_collect)
        send_to_rest(self.engine, rests(self.config)[0], False)

    @register(dispatch_mode=nd_dispatch("reward_model"))
    @booked("reward")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` [batch, response]: the score of each answer, on its last token."""
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
    """The batch with one more token after each sample's last: a value model's number for it is the whole sample's.

    Packing closes the gap between the last token and the added one, whose own content is never looked at.
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
    """A number for each sample, put on the last token that its model sampled."""
    columns = torch.arange(response_mask.shape[1])
    last = torch.where(response_mask.bool(), columns, -1).amax(1)
    spread = torch.zeros(response_mask.shape, dtype=torch.float32)
    rows = (last >= 0).nonzero()[:, 0]
    spread[rows, last[rows]] = scores[rows].float()
    return spread
