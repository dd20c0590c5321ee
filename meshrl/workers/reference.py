"""The policy's reference, or its teacher, on devices of its own: a frozen model that says how likely tokens are."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from meshrl.config.actor import RefConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.root import ActorRolloutRefConfig
from meshrl.controller import Dispatch, Worker, nd_dispatch, register
from meshrl.data.image_reader import IMAGES
from meshrl.data.proto import DataProto, columns_of
from meshrl.engines.build import engine_class
from meshrl.telemetry.ledger import booked
from meshrl.telemetry.memory import MemoryLog
from meshrl.workers.joining import import_external_lib, join_ranks
from meshrl.workers.resting import awake, send_to_rest
from meshrl.workers.settings import WorkerSettings


class ReferenceWorker(Worker):
    """One rank of the reference, in an engine like the actor's. Batches are split over the ranks of the mesh `ref`."""

    def __init__(self, config: ActorRolloutRefConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine; the model only answers."""
        import_external_lib(self.config.model)
        self.device = join_ranks(self.settings.device, self.local_rank, self.settings.collective_deadline)
        engine = self.config.ref.engine(self.config.actor)
        self.engine = engine_class(engine)(reference_model(self.config), engine, None, device=self.device)
        self.engine.initialize()
        self.register_mesh("ref", self.engine.dp_rank, self.engine.dp_size, is_collect=self.engine.is_collect)
        send_to_rest(self.engine, self.config.ref.fsdp_config.param_offload, False)

    @register(dispatch_mode=nd_dispatch("ref"))
    @booked("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """The reference's log-probs of the responses: `ref_log_prob`."""
        request = log_prob_request(data, self.config.ref, self.config.rollout.policy_temperature, entropy=False)
        resting = awake(self.engine, self.device, model=self.config.ref.fsdp_config.param_offload, optimizer=False)
        with MemoryLog("ref", self.device), resting:
            return renamed(self.engine.forward(request), ref_log_prob="log_probs")


def reference_model(config: ActorRolloutRefConfig) -> ModelConfig:
    """What the reference is loaded from: weights of its own, or the policy's without adapters."""
    plain = replace(config.model, lora_rank=0, lora_adapter_path=None)
    return plain if config.ref.model.path is None else replace(plain, path=config.ref.model.path, random_init=False)


def log_prob_request(
    data: DataProto, how: RolloutConfig | RefConfig, temperature: float, *, entropy: bool, sum_pi_squared: bool = False
) -> DataProto:
    """What an engine needs of a batch for the log-probs of its responses, cut as `how` says."""
    meta = {
        "temperature": temperature,
        "use_dynamic_bsz": how.log_prob_use_dynamic_bsz,
        "max_token_len": how.log_prob_max_token_len_per_gpu,
        "micro_batch_size": how.log_prob_micro_batch_size_per_gpu,
        "calculate_entropy": entropy,
        "calculate_sum_pi_squared": sum_pi_squared,
    }
    selected = data.select(["input_ids", "attention_mask", "response_mask"], [])
    return DataProto(selected.batch, columns_of(data, [IMAGES]), meta)


def renamed(output: dict[str, Tensor], **names: str) -> DataProto:
    """An engine's outputs under the controller's names; only collecting ranks have any."""
    return DataProto.from_dict({new: output[old] for new, old in names.items() if old in output})
