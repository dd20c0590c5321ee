"""Answering prompts inside a worker: the rollout, the agents around it, and how both sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from meshrl.agents.batch import make_agent_rollout
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.data.image_reader import IMAGES
from meshrl.data.images import PromptImages
from meshrl.data.proto import DataProto
from meshrl.models.loading import run_tokenizer, stop_token_ids
from meshrl.models.routes import ROUTED_EXPERTS
from meshrl.models.sight import find_sight, sees
from meshrl.rollout.base import SamplingParams
from meshrl.rollout.build import build_rollout
from meshrl.rollout.remote.bystander import Bystander
from meshrl.telemetry.flops import ModelShape, count_flops
from meshrl.telemetry.memory import MemoryLog
from meshrl.workers.generating import start_generation


class Answering:
    """One rank's rollout. `hf_model` says which model it is; with `can_share` the rollout generates with it.

    The ranks of a `rank_group` are one rollout: all of them get the same prompts and have the same answers, or only
    the first of them does, where it alone speaks with the engine.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: ModelConfig,
        hf_model: PreTrainedModel,
        *,
        device: torch.device,
        can_share: bool,
        rank_group: dist.ProcessGroup | None = None,
        adapter_rank: int = 0,
        memory_budget: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        records_routes: bool = False,
    ):
        self.config, self.records_routes = config, records_routes
        self._log_memory = lambda: MemoryLog("gen", device, memory_budget)
        path = model.path or ""
        tokenizer = run_tokenizer(model)
        self.stop_token_ids = tuple(stop_token_ids(path, tokenizer))
        self.rollout = build_rollout(
            config,
            model,
            hf_model,
            tokenizer,
            device=device,
            can_share=can_share,
            rank_group=rank_group,
            adapter_rank=adapter_rank,
            records_routes=records_routes,
        )
        self.shape = ModelShape.of(hf_model.config)
        self.sight = find_sight(hf_model.config, model)
        self.agents = None
        self.answers = not isinstance(self.rollout, Bystander)
        if config.multi_turn.enable and self.answers:
            sight = None
            if sees(hf_model.config):
                sight = PromptImages(model.path or "", tokenizer, None, model.trust_remote_code)
            self.agents = make_agent_rollout(
                self.rollout, tokenizer, config, self.stop_token_ids, template_kwargs, sight
            )

    def __call__(self, prompts: DataProto) -> DataProto:
        """Answers prompts.

        `meta_info["validate"]` chooses the sampling of validation, `meta_info["greedy"]` the likeliest tokens.
        """
        if not self.answers:
            return DataProto()
        with self._log_memory():
            answers = (self.agents or self.rollout).generate_sequences(prompts, self._sampling(prompts))
            return self._kept(answers, prompts.meta_info, prompts.non_tensor_batch.get(IMAGES))

    def start(self, prompts: DataProto) -> None:
        """The same beside other calls: `take` gives the answers as they end."""
        if not self.answers:
            return
        self.memory = self._log_memory().start()
        self.running = start_generation(self.rollout, self.agents, prompts, self._sampling(prompts))
        self.asked, self.shown = prompts.meta_info, prompts.non_tensor_batch.get(IMAGES)

    def take(self, seconds: float) -> tuple[np.ndarray, DataProto] | None:
        """Rows that have ended and their answers, or None if none did within `seconds`."""
        if not self.answers:
            return None
        found = self.running.take(seconds)
        self.memory.note()
        if found is None:
            return None
        rows, answers = found
        return rows, self._kept(answers, self.asked, None if self.shown is None else self.shown[rows])

    def _kept(self, output: DataProto, asked: Mapping[str, Any], shown: np.ndarray | None) -> DataProto:
        """What of the answers to prompts with these images is given away; counts their operations."""
        # Rows that only filled up the prompts have no answers.
        self._count(output, output.non_tensor_batch.get(IMAGES, None if shown is None else shown[: len(output)]))
        if asked.get("validate") or asked.get("greedy"):
            output.non_tensor_batch.pop(ROUTED_EXPERTS, None)  # nobody trains on these
        elif self.records_routes and len(output):
            # Samples that came to nothing have none; a part of a batch may hold no others.
            output.non_tensor_batch.setdefault(ROUTED_EXPERTS, np.full(len(output), None, object))
        if not self.config.calculate_log_probs:
            output.pop(batch_keys=["rollout_log_probs"])
        return output

    def _count(self, output: DataProto, images: np.ndarray | None) -> None:
        """Counts what the answers took: a prompt once for neighbours that share it, of an answer all but its end."""
        if self.shape is None or not len(output):
            return
        tensors, width = output.batch, output.batch["responses"].shape[1]
        prompts, mask = tensors["input_ids"][:, :-width], tensors["attention_mask"]
        starts, lengths = mask[:, :-width].sum(1).numpy(), mask.sum(1).numpy()
        is_new = torch.cat([torch.ones(1, dtype=torch.bool), (prompts[1:] != prompts[:-1]).any(1)]).numpy()
        if images is not None:
            is_new[1:] |= np.array([own != before for own, before in zip(images[1:], images[:-1], strict=True)], bool)
        flops = self.shape.forward(starts[is_new], 0)
        flops += self.shape.forward(lengths - (lengths > starts), int(tensors["response_mask"].sum()), starts)
        if images is not None and self.sight is not None and self.shape.tower is not None:
            flops += self.shape.tower.forward(self.sight.grids(images))
        # Ranks that take the same steps count a share each.
        count_flops(flops if self.config.is_elsewhere else flops / self.config.replica_size)

    def _sampling(self, prompts: DataProto) -> SamplingParams:
        config = self.config
        how = config.val_kwargs if prompts.meta_info.get("validate") else config
        return SamplingParams(
            max_tokens=config.response_length or 1,
            temperature=how.temperature if how.do_sample and not prompts.meta_info.get("greedy") else 0.0,
            top_k=how.top_k,
            top_p=how.top_p,
            min_p=how.min_p,
            repetition_penalty=how.repetition_penalty,
            min_tokens=how.min_tokens or 0,
            stop=tuple(how.stop or ()),
            stop_token_ids=() if how.ignore_eos else self.stop_token_ids,
        )
