"""Generation inside workers, and the rollout workers on devices of their own.

    RolloutWorker      one rank of the rollouts that generate beside the trainers
    Answering          one rank's rollout with its agents and sampling parameters, in any worker that generates
    Generation         generation in a thread, whose finished responses are taken while the rest continues

The actor's workers use `Answering` if they generate themselves.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from meshrl.agents.agent_rollout import AgentRollout, as_rectangle, as_samples, make_agent_rollout
from meshrl.config.engine import ModelConfig
from meshrl.config.rl import ActorRolloutRefConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.controller import PADDING_ROWS_KEY, Dispatch, Worker, nd_dispatch, register
from meshrl.data.batch import DataProto
from meshrl.data.images import IMAGES
from meshrl.data.prompt_images import PromptImages
from meshrl.models.loading import empty_model, run_tokenizer, stop_token_ids, torch_dtype
from meshrl.models.moe_routing import ROUTED_EXPERTS
from meshrl.models.vision import find_sight, sees
from meshrl.parallel.attention import ATTENTION_NAME
from meshrl.parallel.mesh import contiguous_group, prepare_device
from meshrl.rollout.base import Rollout, as_batch, as_requests
from meshrl.rollout.build import build_rollout
from meshrl.rollout.remote import Bystander
from meshrl.rollout.requests import SamplingParams
from meshrl.telemetry.device_stats import MemoryLog
from meshrl.telemetry.flops import ModelShape, count_flops
from meshrl.telemetry.time_ledger import Ledger, booked, current_ledger, served_method, working_for
from meshrl.weights.disaggregated import PoolGroup, PoolSync, connect_rollout
from meshrl.workers.setup import WorkerSettings, import_external_lib, join_ranks


class RolloutWorker(Worker):
    """One rank of the rollouts: a whole copy of the model, or one shard of a copy over neighbouring ranks.

    Its weights come from the actor's workers and fit any engine. vLLM and SGLang get their weights a bucket at a time.
    """

    preload = ("meshrl.models.preloaded", "meshrl.rollout.embedded.embedded_rollout")

    def __init__(self, config: ActorRolloutRefConfig, settings: WorkerSettings):
        self.config, self.settings = config, settings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the rollout, which has no weights until the first weight sync."""
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
            replace(rollout, free_cache_engine=False),  # no trainer needs the memory of these devices
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
        """Close the engine and the processes that it started."""
        if hasattr(self, "rollout"):
            self.rollout.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_pool(self, address: str, num_trainers: int) -> None:
        """Connect with the trainers, which call their `join_pool` at the same time."""
        lost: PoolSync | None = getattr(self, "pool_sync", None)
        if lost is not None:  # another rollout of the earlier connection died
            lost.leave()
        deadline = self.settings.collective_deadline
        group = PoolGroup.join(address, num_trainers + self.rank, num_trainers + self.world_size, deadline)
        self.pool_sync: PoolSync = connect_rollout(
            self.rollout, group, num_trainers, model=self.hf_model, device=self.device
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("generate")
    def finish_answers(self) -> None:
        """Finish the requests that were begun, and begin no more until new weights have arrived."""
        self.rollout.pause("wait")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("sync")
    def receive_weights(self, version: int) -> dict[str, float]:
        """Receive the actor's weights as `version`, and resume generation."""
        try:
            return self.pool_sync(self.rollout, version).metrics()
        finally:
            self.rollout.resume()

    @register(dispatch_mode=nd_dispatch("rollout", direct=True))
    @booked("generate")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response to each prompt, concurrently with the requests that were begun before.

        `meta_info["validate"]` selects the sampling parameters of validation.
        """
        return self.answering(prompts)

    @register(dispatch_mode=nd_dispatch("rollout", direct=True), blocking=False)
    @booked("generate")
    def begin_sequences(self, prompts: DataProto) -> DataProto:
        """Begin `generate_sequences` and return a future; its requests continue while weights change."""
        return self.answering(prompts)

    @register(dispatch_mode=nd_dispatch("rollout"))
    @booked("generate")
    def start_generation(self, prompts: DataProto) -> None:
        """Start `generate_sequences` in the background; `take_generated` returns the responses as they end."""
        self.answering.start(prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @booked("generate")
    def take_generated(self, seconds: float) -> tuple[np.ndarray, DataProto] | None:
        """Return the finished rows of this rank's part with their responses; None if none ends within `seconds`."""
        return self.answering.take(seconds)


# Generation inside a worker: the rollout, the agents around it, and their sampling parameters.


class Answering:
    """One rank's rollout of the model `hf_model`, with its agents and sampling parameters.

    With `can_share` the rollout generates with that module's own weights. The ranks of a `rank_group` are one rollout
    and get the same prompts. Either all of them return the same responses, or only the first rank does, if that rank
    alone communicates with the engine.
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
        """Generate a response to each prompt and wait for all of them.

        `meta_info["validate"]` selects the sampling parameters of validation, `meta_info["greedy"]` greedy decoding.
        """
        if not self.answers:
            return DataProto()
        with self._log_memory():
            answers = (self.agents or self.rollout).generate_sequences(prompts, self._sampling(prompts))
            return self._kept(answers, prompts.meta_info, prompts.non_tensor_batch.get(IMAGES))

    def start(self, prompts: DataProto) -> None:
        """Start generation in the background; `take` returns the responses as they end."""
        if not self.answers:
            return
        self.memory = self._log_memory().start()
        self.running = start_generation(self.rollout, self.agents, prompts, self._sampling(prompts))
        self.asked, self.shown = prompts.meta_info, prompts.non_tensor_batch.get(IMAGES)

    def take(self, seconds: float) -> tuple[np.ndarray, DataProto] | None:
        """Return the rows that have ended and their responses; None if none ends within `seconds`."""
        if not self.answers:
            return None
        found = self.running.take(seconds)
        self.memory.note()
        if found is None:
            return None
        rows, answers = found
        return rows, self._kept(answers, self.asked, None if self.shown is None else self.shown[rows])

    def _kept(self, output: DataProto, asked: Mapping[str, Any], shown: np.ndarray | None) -> DataProto:
        """Remove the columns that the caller does not need from the responses, and count the FLOPs of the generation.

        `shown` has the images of the prompts.
        """
        # Padding rows of the prompts have no responses.
        self._count(output, output.non_tensor_batch.get(IMAGES, None if shown is None else shown[: len(output)]))
        if asked.get("validate") or asked.get("greedy"):
            output.non_tensor_batch.pop(ROUTED_EXPERTS, None)  # these samples are not trained on
        elif self.records_routes and len(output):
            # Failed samples have no routes, and a part of a batch may have only failed samples.
            output.non_tensor_batch.setdefault(ROUTED_EXPERTS, np.full(len(output), None, object))
        if not self.config.calculate_log_probs:
            output.pop(batch_keys=["rollout_log_probs"])
        return output

    def _count(self, output: DataProto, images: np.ndarray | None) -> None:
        """Add the FLOPs of generating the responses to the worker's counts.

        Neighbouring rows with the same prompt count the prompt once. The last token of a response is not fed to the
        model.
        """
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
        # The ranks of a replica take the same steps, so each rank counts its share.
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


# Generation in a thread beside the worker's calls: finished responses are taken while the rest continues.

# A row of the worker's own part of the batch, and its response.
Ended = tuple[int, Any]


class Generation:
    """One batch in generation: a thread generates, and `take` returns the responses that ended since its last call."""

    def __init__(self, ended: Iterator[Ended], expected: int, as_part: Callable[[np.ndarray, list[Any]], DataProto]):
        self.left, self._as_part = expected, as_part
        self._box: queue.SimpleQueue[Ended | BaseException] = queue.SimpleQueue()
        call = current_ledger(), served_method()
        threading.Thread(target=self._run, args=(ended, *call), daemon=True, name="generation").start()

    def _run(self, ended: Iterator[Ended], ledger: Ledger | None, method: str) -> None:
        try:
            with working_for(ledger, method, "generate"):
                for item in ended:
                    self._box.put(item)
        except BaseException as error:  # raised by the next call of `take`
            self._box.put(error)

    def take(self, seconds: float) -> tuple[np.ndarray, DataProto] | None:
        """Return rows that have ended and their responses; None if none ends within `seconds`."""
        found: dict[int, Any] = {}
        while self.left > len(found):
            try:
                item = self._box.get_nowait() if found else self._box.get(timeout=seconds)
            except queue.Empty:
                break
            if isinstance(item, BaseException):
                raise item
            found[item[0]] = item[1]
        self.left -= len(found)
        if not found:
            return None
        rows = np.array(sorted(found))
        return rows, self._as_part(rows, [found[row] for row in rows.tolist()])


def start_generation(
    rollout: Rollout, agents: AgentRollout | None, prompts: DataProto, params: SamplingParams
) -> Generation:
    """Start to generate one response to every prompt, directly by the rollout or by agents over several turns."""
    if rollout.version < 0:
        raise RuntimeError("the rollout has no weights yet: sync them before generating")
    prompts = prompts.slice(0, len(prompts) - prompts.meta_info.get(PADDING_ROWS_KEY, 0))
    width, pad = params.max_tokens, rollout.pad_token_id
    if agents is None:
        return Generation(
            _answers(rollout, prompts, params),
            len(prompts),
            lambda rows, answers: as_batch(prompts.select_idxs(rows), answers, width, pad),
        )
    own_prompts = agents.agent.limits.prompt_length if agents.agent.make_environment is not None else None
    return Generation(
        _conversations(agents, prompts, params),
        len(prompts),
        lambda rows, found: as_rectangle(prompts.select_idxs(rows), found, width, pad, own_prompts),
    )


def _answers(rollout: Rollout, prompts: DataProto, params: SamplingParams) -> Iterator[Ended]:
    requests = as_requests(prompts, params)
    row_of = {request.request_id: row for row, request in enumerate(requests)}
    for answer in rollout.as_they_end(requests):
        if answer.finish_reason == "error":
            raise RuntimeError(f"a prompt failed; {answer.request_id}: {answer.error}")
        yield row_of[answer.request_id], answer


def _conversations(agents: AgentRollout, prompts: DataProto, params: SamplingParams) -> Iterator[Ended]:
    """Yield trajectories as they end, from the event loop that runs all of them."""
    loop = asyncio.new_event_loop()
    found = agents.run(as_samples(prompts), params)
    try:
        while True:
            try:
                trajectory = loop.run_until_complete(anext(found))
            except StopAsyncIteration:
                return
            yield trajectory.sample.number, trajectory
    finally:
        loop.run_until_complete(found.aclose())  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
