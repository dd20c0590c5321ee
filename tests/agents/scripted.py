"""A rollout that says what it is told to, and a tokenizer with a chat template of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from meshrl.agents.encoding import TurnEncoder
from meshrl.agents.loop import Agent, AgentLoop, Limits, RequestDesk
from meshrl.agents.messages import Sample
from meshrl.agents.parsers import HermesParser, ToolParser
from meshrl.agents.toolbox import ToolBox
from meshrl.agents.tools import Tool
from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.base import Rollout
from meshrl.rollout.requests import Chunk, Request, SamplingParams

LETTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
MARKS = ["<|start|>", "<|end|>"]
# As ChatML: a mark, the role, the words, an end mark that the model samples itself, and a newline that it does not.
CHATML = (
    "{% if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Neighbouring answers of tools share one turn, as with Qwen.
GROUPED = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>\n{% endif %}"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def chatml_tokenizer(template: str = CHATML) -> Any:
    made = char_tokenizer(LETTERS)
    made.add_special_tokens({"additional_special_tokens": MARKS})
    made.chat_template = template
    return made


TOKENIZER = chatml_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|end|>")


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class ScriptedRollout(Rollout):
    """Answers with `speak(prompt text, request)`: a text, ended by the end mark unless it ends with a tilde.

    `delay(request)` seconds pass before an answer; its tokens come one by one under `version`.
    """

    pad_token_id = 0

    def __init__(
        self,
        speak: Callable[[str, Request], str],
        delay: Callable[[Request], float] = lambda request: 0.0,
        reason: str | None = None,
    ):
        self.speak, self.delay, self.reason = speak, delay, reason
        self.version = 3
        self.requests: list[Request] = []
        self.handed_over: list[int] = []
        self.running = self.most_running = 0

    async def generate(self, requests: Sequence[Request]) -> Any:
        self.handed_over.append(len(requests))
        queue: asyncio.Queue[Chunk] = asyncio.Queue()
        tasks = [asyncio.create_task(self._answer(request, queue)) for request in requests]
        left = len(requests)
        try:
            while left:
                chunk = await queue.get()
                left -= chunk.finish_reason is not None
                yield chunk
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, request: Request, queue: asyncio.Queue[Chunk]) -> None:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        name = request.request_id
        told = self.reason
        if told == "error":
            await queue.put(Chunk(name, 0, [], [], [], "error", "made to fail"))
            return
        said = self.speak(TOKENIZER.decode(list(request.prompt_token_ids)), request)
        tokens = ids_of(said.removesuffix("~")) + ([] if said.endswith("~") else [END])
        kept = tokens[: request.params.max_tokens]
        reason = told or ("stop" if kept and kept[-1] == END else "length")
        await asyncio.sleep(self.delay(request))
        for at, token in enumerate(kept):
            last = at == len(kept) - 1
            await queue.put(Chunk(name, 0, [token], [-0.5 - at], [self.version], reason if last else None))
        self.running -= 1

    def complete(self, requests: Any) -> Any:
        raise AssertionError("loops use generate")

    abort = pause = release = resume = update_weights = stats = close = complete


def make_agent(
    tools: Sequence[Tool] = (),
    parser: ToolParser | None = None,
    environment: Any = None,
    box: dict[str, Any] | None = None,
    **limits: Any,
) -> Agent:
    made = ToolBox(tools, **{"timeout": 2.0, **(box or {})})
    encoder = TurnEncoder(TOKENIZER, [END])
    return Agent(
        encoder, made, parser or HermesParser(tools), Limits(**{"response_length": 400, **limits}), environment, 2.0
    )


def sample(question: str = "hi", number: int = 0, **fields: Any) -> Sample:
    messages = ({"role": "user", "content": question},)
    prompt = TurnEncoder(TOKENIZER, [END]).prompt(messages)
    return Sample(number, tuple(prompt), seed=100 + number, messages=messages, **fields)


def run_loop(agent: Agent, rollout: Rollout, one: Sample | None = None) -> tuple[AgentLoop, Any]:
    """A loop on its own; returns it and its trajectory."""

    async def run() -> tuple[AgentLoop, Any]:
        desk = RequestDesk(rollout)
        loop = AgentLoop(agent, one or sample(), SamplingParams(max_tokens=agent.limits.response_length), desk, "one")
        return loop, await asyncio.wait_for(loop.run(), 20)

    return asyncio.run(run())


def call_text(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
