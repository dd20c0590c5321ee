"""vLLM inside this process: its `LLMEngine`, stepped by this rollout between weight updates.

With tensor parallelism the engine still steps in this process. Its workers are either separate processes or the ranks
of a group that all make the same calls, each holding its own shard. Only vLLM's public interfaces are used: the step
loop, a logits processor, a weight-transfer backend, sleep and wake-up, LoRA requests.
"""

from __future__ import annotations

import atexit
import functools
import math
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.config.engine import ModelConfig
from meshrl.models.loading import load_model_config
from meshrl.models.vision import find_sight
from meshrl.rollout.base import NO_WEIGHTS, TAGS, known_tags
from meshrl.rollout.in_process_rollout import SteppingRollout
from meshrl.rollout.requests import Chunk, Request
from meshrl.rollout.text import special_texts
from meshrl.rollout.vllm.arguments import (
    ADAPTER,
    BACKEND,
    Parallel,
    complaint,
    engine_arguments,
    parallel_of,
    token_prompt,
    write_adapter,
)
from meshrl.rollout.vllm.expert_routes import RequestRoutes
from meshrl.rollout.weight_files import MEMORY, FileWeights, SharedFile, buckets, checked, memory_folder, noted

MERGE = "send merged weights instead (actor_rollout_ref.rollout.update_weights_adapters=merged)"
MOST_BLOCKS = 1 << 16  # block count of the route cache if vLLM's config has none
NO_NUMBERS = "the model's log-probs are no numbers: the trainer's weights may have become infinite"


class VllmRollout(SteppingRollout):
    """Generation by an in-process vLLM, from a folder with config, tokenizer and weights.

    The folder needs no weights if vLLM loads dummies. `arguments` are vLLM's own (`EngineArgs`): tensor_parallel_size,
    max_model_len, enforce_eager, enable_lora, enable_sleep_mode and so on. The ranks of a `rank_group` form one engine.
    They must be neighbours, and all groups must have the same size. All ranks of a group must make the same calls, and
    all get the same completions. With `records_routes`, completions report the experts that processed their tokens.
    """

    def __init__(
        self, path: str | Path, *, pad_token_id: int, bucket_bytes: int = 512 << 20, trust_remote_code: bool = False,
        rank_group: dist.ProcessGroup | None = None, records_routes: bool = False, **arguments: Any,
    ):  # fmt: skip
        super().__init__()
        try:
            from vllm.config import WeightTransferConfig
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
            from vllm.v1.executor import Executor
        except ImportError as error:
            raise ImportError("rollout.name=vllm needs vLLM: pip install 'meshrl[vllm]'") from error
        self.pad_token_id, self.bucket_bytes = pad_token_id, bucket_bytes
        hf_config = load_model_config(path, trust_remote_code=trust_remote_code)
        self._weights, self.vocabulary = FileWeights(hf_config), int(hf_config.get_text_config().vocab_size)
        self.sight = find_sight(hf_config, ModelConfig(path=str(path), trust_remote_code=trust_remote_code))
        self._specials = functools.partial(special_texts, str(path), trust_remote_code)
        self._folder = Path(memory_folder())
        self._file = SharedFile(self._folder / "weights")
        self._is_guest = dist.is_initialized()
        if rank_group is not None:
            arguments |= {
                "tensor_parallel_size": dist.get_world_size(rank_group),
                "distributed_executor_backend": "external_launcher",
            }
        try:
            with contained():
                config = EngineArgs(
                    **engine_arguments(path, arguments | {"trust_remote_code": trust_remote_code}),
                    weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                ).create_engine_config()
                parallel = config.parallel_config
                self._tensors_pass = parallel.world_size == 1 or rank_group is not None
                if parallel.world_size == 1:
                    # On a CPU vLLM defaults to a worker process even for a single rank.
                    parallel.distributed_executor_backend = "uni"
                    if config.device_config.device_type == "cuda":
                        # vLLM would use the first visible GPU of this process, which may belong to another rank.
                        config.device_config.device = torch.device("cuda", torch.cuda.current_device())
                self.engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
                if rank_group is not None and config.device_config.device_type == "cpu":
                    unname_shared_memory()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.parallel: Parallel | None = None
        if rank_group is not None:
            self.parallel = parallel_of(parallel, dist.get_rank(rank_group), hf_config)
        self.context = int(config.model_config.max_model_len)
        self.version = -1
        self._eager = "force_eager" if config.device_config.device_type == "cpu" else "default"
        self._sleeps = bool(config.model_config.enable_sleep_mode)
        self._requests: dict[str, tuple[Request, int]] = {}
        self._released: set[str] = set()
        self._lacks_weights = False
        self._adapter: Any = None
        self.takes_adapters, self._has_base = config.lora_config is not None, False
        self._tokens = 0
        self.engine.collective_rpc("init_weight_transfer_engine", args=({},))
        self.routes: RequestRoutes | None = None
        if records_routes:
            self.engine.collective_rpc("record_routes")
            cache = config.cache_config
            self.routes = RequestRoutes(int(cache.block_size), int(cache.num_gpu_blocks or MOST_BLOCKS))

    def add(self, request: Request) -> str | None:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from meshrl.rollout.vllm.log_probs import sampling_fields, vllm_refusal

        if self.version < 0:
            return NO_WEIGHTS
        problem = vllm_refusal(request, self.vocabulary, self.context, self.sight)
        if problem is not None:
            return problem
        try:
            given = token_prompt(request, self.sight)
            named = self._named(request) if self.routes is not None else ()
        except ValueError as error:
            return str(error)
        added: list[str] = []
        for index in range(request.params.n):
            name = f"{request.request_id}/{index}"
            fields = sampling_fields(request, index, self.context, self._specials)
            params = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA, flat_logprobs=True)
            try:
                self.engine.add_request(name, TokensPrompt(**given), params, lora_request=self._adapter)
            except ValueError as error:
                self.engine.abort_request(added)
                for other in added:
                    del self._requests[other]
                    if self.routes is not None:
                        self.routes.end(other)
                return str(error)
            self._requests[name] = (request, index)
            added.append(name)
            if self.routes is not None:
                self.routes.begin(name, named)
        return None

    def _named(self, request: Request) -> Sequence[int]:
        """Return the tokens that identify a prompt's blocks.

        As in vLLM's cache, blocks with different images differ: image tokens are replaced by numbers of the images.
        """
        if self.sight is None or not request.images:
            return request.prompt_token_ids
        return self.sight.names(np.array(request.prompt_token_ids), request.images).tolist()

    def step(self) -> list[Chunk]:
        with torch.compiler.set_stance(self._eager):
            outputs = self.engine.step()
        if self.routes is not None:
            self.routes.note(self.engine.collective_rpc("routes_of_step")[0])
        return [self._chunk(output) for output in outputs]

    def _chunk(self, output: Any) -> Chunk:
        from meshrl.rollout.vllm.log_probs import split_log_probs

        request, index = self._requests[output.request_id]
        (answer,) = output.outputs
        tokens = list(answer.token_ids)
        log_probs, tops = split_log_probs(answer.logprobs, len(tokens), request.params.top_log_probs)
        self._tokens += len(tokens)
        reason, error = answer.finish_reason, None
        if any(map(math.isnan, log_probs)):
            if not output.finished:
                self.engine.abort_request([output.request_id])
            del self._requests[output.request_id]
            reason, error = "error", NO_NUMBERS
        elif output.finished:
            del self._requests[output.request_id]
            if reason not in ("stop", "length", "abort"):
                reason, error = "error", f"vLLM ended the request with '{reason}'"
        versions, routes = [self.version] * len(tokens), None
        if self.routes is not None:
            self.routes.sampled(output.request_id, tokens)
            routes = self.routes.end(output.request_id) if reason is not None else None
        return Chunk(request.request_id, index, tokens, log_probs, versions, reason, error, tops, routes)

    def has_work(self) -> bool:
        return bool(self._requests)

    def is_suspended(self) -> bool:
        return bool(self._released) or self._lacks_weights

    def drop(self, request_ids: Sequence[str] | None) -> list[Chunk]:
        names = None if request_ids is None else set(request_ids)
        wanted = [n for n, (r, _) in self._requests.items() if names is None or r.request_id in names]
        self.engine.abort_request(wanted)
        tops: list[dict[int, float]] | None
        chunks = []
        for name in wanted:
            request, index = self._requests.pop(name)
            tops = [] if request.params.top_log_probs else None
            routes = None if self.routes is None else self.routes.end(name)
            chunks.append(Chunk(request.request_id, index, [], [], [], "abort", None, tops, routes))
        return chunks

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self.lock:
            if "weights" in self._released:
                raise RuntimeError("the rollout has released its weights: resume(['weights']) before an update")
            self._lacks_weights = True  # until all weights have arrived
            self._has_base = False
            self.engine.collective_rpc("start_weight_update")
            try:
                named = self._weights.renamed(checked(weights, self._weights.shapes))
                for bucket in buckets(named, self.bucket_bytes):
                    self.engine.collective_rpc("update_weights", args=(self._as_message(bucket),))
            except BaseException as error:
                # The model now mixes new and old weights, but vLLM must leave its update mode.
                with noted(error, "nor could vLLM end the update"):
                    self.engine.collective_rpc("finish_weight_update")
                raise
            self.engine.collective_rpc("finish_weight_update")
            found = (self.engine.collective_rpc(asked) for asked in ("unsent_weights", "passed_over"))
            if problem := complaint(*found):
                raise RuntimeError(problem)
            self._forget()
            self._adapter = None  # vLLM dropped the adapter in the update
            self.version, self._lacks_weights, self._has_base = version, False, True
            self._work.notify_all()

    def _as_message(self, bucket: list[tuple[str, Tensor]]) -> dict[str, Any]:
        if self._tensors_pass:
            return {"tensors": [(name, tensor.detach()) for name, tensor in bucket]}
        return {"path": self._file.path, "entries": self._file.write(bucket)}

    def _forget(self) -> None:
        """Drop all cached keys and values. Running requests recompute theirs."""
        if "kv_cache" not in self._released and not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM could not drop its cache after a weight update")
        if self.sight is not None:
            self.engine.reset_encoder_cache()  # image features computed with the old weights
        if self.routes is not None:
            self.routes.forget_blocks()

    def update_adapter(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int | None = None
    ) -> None:
        """Load a LoRA adapter (peft's config, and tensors by peft's names) that all later requests use.

        Requires `enable_lora=True` and the base weights, which `release` then keeps. A weight update drops the adapter.
        """
        from vllm.lora.request import LoRARequest

        with self.lock:
            if not self._has_base:
                raise RuntimeError("the rollout has no weights that an adapter could change: update_weights first")
            if "weights" in self._released:
                raise RuntimeError("the rollout has released its weights: resume(['weights']) before an update")
            self._lacks_weights = True  # until the adapter has arrived
            folder = str(write_adapter(self._folder / ADAPTER, config, tensors))
            try:
                taken = self.engine.add_lora(LoRARequest(ADAPTER, 1, folder, load_inplace=True))
            except ValueError as error:
                raise RuntimeError(f"vLLM refused the adapter ({error}): {MERGE}") from error
            if not taken:
                raise RuntimeError(f"vLLM refused the adapter: {MERGE}")
            self._adapter = LoRARequest(ADAPTER, 1, folder)
            self._forget()
            self.version, self._lacks_weights = self.version if version is None else version, False
            self._work.notify_all()

    def release(self, tags: Sequence[str] = TAGS) -> None:
        with self.lock:
            given = known_tags(tags) - self._released
            if "kv_cache" in given:
                self._forget()
            asleep = given | self._released
            if self._sleeps and given:
                if "weights" in self._released:  # else vLLM considers itself asleep and frees nothing
                    self.engine.wake_up(["weights"])
                # Level 2 discards the weights, which the next sync sends again. Level 1 keeps a copy in host memory.
                drops = "weights" in asleep and not self.takes_adapters
                self.engine.sleep(level=2 if drops else 1, mode="keep")
                if back := sorted(set(TAGS) - asleep):
                    self.engine.wake_up(back)
            self._released |= given
            self._lacks_weights |= "weights" in given

    def take_back(self, tags: Sequence[str]) -> None:
        with self.lock:
            wanted = known_tags(tags) & self._released
            if self._sleeps and wanted:
                self.engine.wake_up(sorted(wanted))
            self._released -= wanted
            self._work.notify_all()

    def stats(self) -> dict[str, float]:
        with self.lock:
            return {
                "running": float(len(self._requests)),
                "waiting": 0.0,
                "generated_tokens": float(self._tokens),
                "version": float(self.version),
            }

    def close(self) -> None:
        super().close()
        with self.lock:
            if self._folder.exists():
                if self._is_guest:
                    from vllm.distributed import destroy_model_parallel

                    # vLLM's shutdown also destroys the trainer's process group, so it is postponed to the exit of this
                    # process. At exit it must run before other handlers, because it looks for process groups that those
                    # handlers destroy.
                    self.engine.model_executor.shutdown()
                    destroy_model_parallel()
                    atexit.register(self.engine.engine_core.shutdown)
                else:
                    self.engine.engine_core.shutdown()
                shutil.rmtree(self._folder, ignore_errors=True)


def unname_shared_memory() -> None:
    """Unlink the shared memory of vLLM's ranks on CPUs, after all ranks have opened it.

    The name is the same for every engine that runs on ranks of this package. A process that was killed or that exited
    without running destructors would leave the name behind, and the next engine could not start.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    name = getattr(getattr(group.device_communicator, "dist_module", None), "group_name", None)
    if name is not None:
        (MEMORY / f"{name.lstrip('/')}_{group.rank_in_group}").unlink(missing_ok=True)


@contextmanager
def contained() -> Iterator[None]:
    """Restore the process-wide state that building an engine changes: random states and the number of threads."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        # vLLM replaces this function on CPUs.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
