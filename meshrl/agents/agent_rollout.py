"""Multi-turn generation of a batch: `generate_sequences` with tools and environments, and metrics of conversations."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.agents.encoding import TurnEncoder
from meshrl.agents.loop import ENDINGS, NO_VERSION, Agent, AgentLoop, Limits, RequestDesk, Trajectory
from meshrl.agents.messages import Sample
from meshrl.agents.parsers import make_parser
from meshrl.agents.toolbox import ToolBox, load_tools
from meshrl.config.rollout import MultiTurnConfig, RolloutConfig
from meshrl.config.user_code import load_by_path
from meshrl.data.batch import DataProto, object_array
from meshrl.data.images import IMAGES
from meshrl.data.prompt_images import PromptImages
from meshrl.data.tokenize import is_chat
from meshrl.rollout.base import Rollout, joined, routes_column, unpadded_prompts
from meshrl.rollout.requests import SamplingParams

# Columns of a batch that tools and environments may use. Each column is optional.
SAMPLE_COLUMNS = ("raw_prompt", "ground_truth", "extra_info")
COUNTS = ("assistant_turns", "user_turns", "tool_calls", "tool_errors", "malformed_calls", "tool_responses_cut")
_batches = itertools.count()


class AgentRollout:
    """A rollout that answers prompts over several turns, using any `Rollout`. Its output has the same form.

    In addition, `non_tensor_batch` has for each sample the `COUNTS`, the `ending` and the `turn_rewards`.
    """

    def __init__(self, rollout: Rollout, agent: Agent, max_concurrent_calls: int = 64):
        self.rollout, self.agent, self.max_concurrent_calls = rollout, agent, max_concurrent_calls

    def generate_sequences(self, prompts: DataProto, params: SamplingParams) -> DataProto:
        """Run one conversation for every prompt of a batch.

        Inputs: `input_ids`, `attention_mask` and `seeds` as in `Rollout.generate_sequences`, and optionally
        `SAMPLE_COLUMNS`. `params.max_tokens` limits the tokens of all turns together, including the responses of tools.
        """
        if self.rollout.version < 0:
            raise RuntimeError("the rollout has no weights yet: sync them before generating")
        started = time.perf_counter()
        found = run_coroutine(self._collect(as_samples(prompts), params))
        width = self.agent.limits.prompt_length if self.agent.make_environment is not None else None
        output = as_rectangle(prompts, found, params.max_tokens, self.rollout.pad_token_id, width)
        output.meta_info["timing"] = {"generate": time.perf_counter() - started}
        return output

    async def _collect(self, samples: Sequence[Sample], params: SamplingParams) -> list[Trajectory]:
        found: dict[int, Trajectory] = {}
        async for trajectory in self.run(samples, params):
            found[trajectory.sample.number] = trajectory
        return [found[sample.number] for sample in samples]

    async def run(self, samples: Sequence[Sample], params: SamplingParams) -> AsyncIterator[Trajectory]:
        """Run all samples concurrently and yield each trajectory as it ends. A sample that fails ends all others."""
        desk, gate = RequestDesk(self.rollout), asyncio.Semaphore(self.max_concurrent_calls)
        batch = next(_batches)
        loops = [AgentLoop(self.agent, s, params, desk, f"agents{batch}-{s.number}", gate) for s in samples]
        tasks = [asyncio.create_task(loop.run()) for loop in loops]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await desk.close()


def make_agent_rollout(
    rollout: Rollout,
    tokenizer: Tokenizer,
    config: RolloutConfig,
    stop_token_ids: Sequence[int],
    template_kwargs: Mapping[str, Any] | None = None,
    sight: PromptImages | None = None,
) -> AgentRollout:
    """Build the agent rollout that `rollout.multi_turn` describes; check the chat template and its variables."""
    turns = config.multi_turn
    tools = load_tools(turns.tools, turns.tool_config_path)
    box = ToolBox(
        tools,
        timeout=turns.tool_timeout,
        max_response_length=turns.max_tool_response_length,
        side=turns.tool_response_truncate_side,
        sight=sight,
    )
    limits = Limits(
        response_length=config.response_length or 1,
        prompt_length=config.prompt_length,
        max_assistant_turns=turns.max_assistant_turns,
        max_user_turns=turns.max_user_turns,
        max_parallel_calls=turns.max_parallel_calls,
    )
    encoder = TurnEncoder(tokenizer, stop_token_ids, box.schemas(), template_kwargs, sight)
    encoder.check(roles_of(turns), turns.tokenization_sanity_check_mode)
    make_environment = None
    if turns.environment is not None:
        make_environment = functools.partial(load_by_path(turns.environment), **turns.environment_kwargs)
    parser = make_parser(turns.format, tools)
    agent = Agent(encoder, box, parser, limits, make_environment, turns.tool_timeout)
    return AgentRollout(rollout, agent, turns.max_concurrent_calls)


def roles_of(config: MultiTurnConfig) -> list[list[str]]:
    """Return the roles that may respond to the model, one list for each turn that the chat template is checked with."""
    turns: list[list[str]] = []
    if config.tools or config.tool_config_path is not None:
        turns += [["tool"], ["tool", "tool"], ["tool"]]
    if config.environment is not None:
        turns += [["user"], ["user"]]
    return turns


def as_samples(prompts: DataProto) -> list[Sample]:
    """Make one sample for each row of a batch."""
    tokens, seeds = unpadded_prompts(prompts), prompts.batch["seeds"]
    nothing = object_array([None] * len(tokens))
    chats, truths, infos, images = (prompts.non_tensor_batch.get(n, nothing) for n in (*SAMPLE_COLUMNS, IMAGES))
    return [
        Sample(
            number,
            tokens[number],
            int(seeds[number]),
            _messages(chats[number]),
            truths[number],
            infos[number] or {},
            images[number] or (),
        )
        for number in range(len(tokens))
    ]


def _messages(raw_prompt: Any) -> tuple[dict[str, Any], ...]:
    if is_chat(raw_prompt):
        return tuple(raw_prompt)
    return ({"role": "user", "content": raw_prompt},) if isinstance(raw_prompt, str) else ()


def as_rectangle(
    prompts: DataProto, found: Sequence[Trajectory], width: int, pad_token_id: int, prompt_width: int | None = None
) -> DataProto:
    """Return the trajectories, one for each prompt, as a `DataProto` with padded tensors `[batch, width]`.

    `prompt_width` is set if environments wrote the prompts. Otherwise the prompts are those of the batch.
    """
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    if prompt_width is not None:
        ids, mask = _padded_prompts(found, prompt_width, pad_token_id)
    lengths = torch.tensor([len(t.token_ids) for t in found])
    inside = torch.arange(width) < lengths[:, None]

    def rectangle(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        out = torch.full(inside.shape, fill, dtype=dtype)
        out[inside] = torch.tensor([value for t in found for value in getattr(t, name)], dtype=dtype)
        return out

    columns = {name: np.array([getattr(t, name) for t in found], dtype=np.int64) for name in COUNTS}
    tensors = joined(
        ids,
        mask,
        responses=rectangle("token_ids", pad_token_id, torch.long),
        there=inside,
        response_mask=rectangle("mask", 0, torch.long),
        rollout_log_probs=rectangle("log_probs", 0.0, torch.float32),
        versions=rectangle("versions", NO_VERSION, torch.int32),
    )
    images = {}
    if IMAGES in prompts.non_tensor_batch or any(t.images for t in found):
        images = {IMAGES: object_array([t.images for t in found])}
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={
            **columns,
            "ending": object_array([t.ending for t in found]),
            "turn_rewards": object_array([t.rewards for t in found]),
            **images,
            **routes_column((t.routes for t in found), tensors["attention_mask"]),
        },
    )


def _padded_prompts(found: Sequence[Trajectory], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(found), width), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, trajectory in enumerate(found):
        count = len(trajectory.prompt_ids)
        ids[row, width - count :] = torch.tensor(trajectory.prompt_ids)
        mask[row, width - count :] = 1
    return ids, mask


def agent_metrics(data: DataProto) -> dict[str, float]:
    """Return metrics of a batch's conversations: turns, calls, errors, and the shares of endings."""
    columns = data.non_tensor_batch
    if "assistant_turns" not in columns or len(data) == 0:
        return {}
    calls = columns["tool_calls"] + columns["malformed_calls"]
    metrics = {
        "agent/num_turns/mean": float((columns["assistant_turns"] + columns["user_turns"]).mean()),
        "agent/num_turns/max": float((columns["assistant_turns"] + columns["user_turns"]).max()),
        "agent/assistant_turns/mean": float(columns["assistant_turns"].mean()),
        "agent/tool_calls/mean": float(columns["tool_calls"].mean()),
        "agent/tool_use_share": float((calls > 0).mean()),
        "agent/tool_errors/sum": float(columns["tool_errors"].sum()),
        "agent/malformed_calls/sum": float(columns["malformed_calls"].sum()),
        "agent/tool_responses_cut/sum": float(columns["tool_responses_cut"].sum()),
    }
    for ending in ENDINGS:
        metrics[f"agent/ended_by/{ending}"] = float((columns["ending"] == ending).mean())
    return metrics


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end from synchronous code, even if this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = asyncio.run(coroutine)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, name="agents", daemon=True)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
