"""The samples a page holds: some of every part of the run, as plain data that its script draws and filters."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshrl.telemetry.panels import finite
from meshrl.telemetry.report_text import visible

MAX_SAMPLES = 240
MAX_TEXT = 4000
# Over all samples of a page: about two megabytes with all columns.
MAX_TOKENS = 60_000
_OWN = frozenset({"step", "split", "prompt", "response", "score", "finish", "tokens"})
_COLUMNS = ("log_prob", "advantage", "version", "mismatch", "told")


def page_samples(rows: Sequence[Mapping[str, Any]], limit: int = MAX_SAMPLES) -> list[dict[str, Any]]:
    """Samples from the whole run, the latest first: one of every so many rows, with the last ones.

    Beyond a number of tokens the older ones are text only.
    """
    every = max(1, -(-len(rows) // limit))
    left, found = MAX_TOKENS, []
    for row in list(rows)[::-1][::every]:
        sample = _sample(row)
        if "tokens" in sample:
            left -= len(sample["tokens"]["text"])
            if left < 0:
                del sample["tokens"]
        found.append(sample)
    return found


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "step": _number(row.get("step")),
        "split": visible(row.get("split", ""), 40),
        "prompt": visible(_prompt(row.get("prompt", "")), MAX_TEXT),
        "response": visible(row.get("response", ""), MAX_TEXT),
        "score": _number(row.get("score")),
        "finish": visible(row.get("finish", ""), 40),
        "more": [[visible(k, 40), visible(v, 300)] for k, v in row.items() if k not in _OWN and v is not None],
    }
    tokens = row.get("tokens")
    if isinstance(tokens, Mapping) and isinstance(tokens.get("text"), list):
        sample["tokens"] = _tokens(tokens)
    return sample


def _prompt(prompt: Any) -> Any:
    """Chat messages as a conversation, anything else as it is."""
    messages: list[Any] = prompt if isinstance(prompt, list) and prompt else [None]
    if not all(isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in messages):
        return prompt
    return "\n".join(f"{m.get('role', '')}: {m['content']}" for m in messages)


def _tokens(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that fit the text: a number for all, or one for each token."""
    text = [visible(piece) for piece in tokens["text"]]
    found: dict[str, Any] = {"text": text}
    for name in _COLUMNS:
        values = tokens.get(name)
        if isinstance(values, list) and len(values) == len(text):
            found[name] = [_number(value) for value in values]
        elif _number(values) is not None:
            found[name] = _number(values)
    if isinstance(tokens.get("of"), int):
        found["of"] = tokens["of"]
    return found


def _number(value: Any) -> float | None:
    """A finite number, or nothing: JSON has no other, and a script takes no truth value for one."""
    if isinstance(value, bool):
        return int(value)
    return value if finite(value) else None
