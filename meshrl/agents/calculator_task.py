"""The task of the calculator recipe: products that a tiny model cannot compute without a tool.

Model and data are generated when needed. The tokenizer has a token for each fixed part of a tool call. So a tiny model
can write a call in the Hermes format with a handful of tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from meshrl.data.row_files import write_tables
from meshrl.models.tiny import char_tokenizer, make_tiny_model

ALPHABET = "0123456789*-. :abcdefghijklmnopqrstuvwxyzE'"
ROLES = ["<user>", "<assistant>", "<tool>"]
CALL_BEGIN = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SMALLEST, LARGEST = 11, 99
HELD_OUT, DEMONSTRATIONS, PROMPTS = 256, 1024, 5_000
TOOL_SHARE = 0.25
Task = tuple[int, int]


def calculator_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of characters, role markers and the two fixed parts of a tool call."""
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    tokenizer.add_tokens([AddedToken(part, normalized=False, special=False) for part in (CALL_BEGIN, CALL_END)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_calculator_model(folder: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Write the tiny model with this task's tokenizer to `folder`."""
    tokenizer = calculator_tokenizer()
    made = make_tiny_model(folder, ALPHABET, seed, vocab_size=len(tokenizer), **overrides)
    tokenizer.save_pretrained(made)
    return made


def write_calculator_data(folder: str | Path, seed: int = 0, tool_share: float = TOOL_SHARE) -> dict[str, str]:
    """Write tables of held-out prompts, training prompts and demonstrations. The three sets are disjoint.

    The held-out prompts are the same for every seed. A share of `tool_share` of the demonstrations calls the
    calculator.
    The other demonstrations give the answer at once, which teaches the model to guess.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1)]
    random.Random(12345).shuffle(tasks)
    held_out, rest = tasks[:HELD_OUT], tasks[HELD_OUT:]
    rng = random.Random(seed)
    rng.shuffle(rest)
    demonstrations, prompts = rest[:DEMONSTRATIONS], rest[DEMONSTRATIONS : DEMONSTRATIONS + PROMPTS]
    tables = {
        "held_out": [task_row(task) for task in held_out],
        "prompts": [task_row(task) for task in prompts],
        "demonstrations": [demonstration(task, with_tool=rng.random() < tool_share) for task in demonstrations],
    }
    return write_tables(folder, tables)


def task_row(task: Task) -> dict[str, Any]:
    """Return a task's row in the format that the trainer reads."""
    a, b = task
    prompt = [{"role": "user", "content": f"{a}*{b}"}]
    return {"prompt": prompt, "data_source": "calculator", "ground_truth": str(a * b)}


def demonstration(task: Task, with_tool: bool) -> dict[str, Any]:
    """Return a demonstration conversation, with a tool call or with the answer at once."""
    a, b = task
    question, result = f"{a}*{b}", str(a * b)
    messages = [{"role": "user", "content": question}]
    if with_tool:
        messages.append({"role": "assistant", "content": f"{CALL_BEGIN}{question}{CALL_END}"})
        messages.append({"role": "tool", "content": result})
    return {"messages": [*messages, {"role": "assistant", "content": result}]}
