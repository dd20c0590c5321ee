"""What is kept of single tokens, so that a sample can be read by how likely, how good and how old its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Per sample; a file of a thousand steps with two long samples each stays at some ten megabytes.
MAX_TOKENS = 512
# What a decoder puts for bytes that are no whole character, and how many tokens one may be spread over.
_BROKEN, _MOST_BROKEN = "\ufffd", 8
Decode = Callable[[list[int]], str]


def token_pieces(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; where a character ends in a later token, that one has all of it and the first none."""
    ids, pieces = list(token_ids), []
    context = read = 0  # tokens before `read` have given their text; those from `context` on help
    before = ""
    for end in range(1, len(ids) + 1):
        after = decode(ids[context:end])
        if after.endswith(_BROKEN) and end - read < _MOST_BROKEN and end < len(ids):
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        context, read = read, end
        before = decode(ids[context:read])
    return pieces


def token_details(row: dict[str, Tensor], decode: Decode, limit: int = MAX_TOKENS) -> dict[str, Any] | None:
    """The tokens of one answer with their log-probs, advantages and versions, as far as the batch has them.

    `row` holds tensors of one sample, [response tokens] each; `attention_mask` is that of prompt and response. A column
    whose values are all alike is one number. `of` is the length of an answer that was cut after `limit` tokens; `told`
    is 1 for what the model was told and did not sample.
    """
    ids = row["responses"]
    there = row["attention_mask"][-len(ids) :].bool() if "attention_mask" in row else row["response_mask"].bool()
    places = there.nonzero().ravel()
    kept = places[:limit]
    if len(kept) == 0:
        return None
    found: dict[str, Any] = {"text": token_pieces(decode, ids[kept].tolist())}
    if len(kept) < len(places):
        found["of"] = len(places)
    sampled = row["response_mask"][kept].bool()
    if not sampled.all():
        found["told"] = [int(not s) for s in sampled.tolist()]
    log_probs = row.get("rollout_log_probs", row.get("old_log_probs"))
    if log_probs is not None:
        found["log_prob"] = _column(log_probs[kept], sampled, 3)
    if "rollout_log_probs" in row and "old_log_probs" in row:
        found["mismatch"] = _column((row["old_log_probs"] - row["rollout_log_probs"])[kept], sampled, 2)
    if "advantages" in row:
        found["advantage"] = _column(row["advantages"][kept], sampled, 3)
    if "versions" in row:
        found["version"] = _column(row["versions"][kept], sampled)
    return found


def finish_reasons(batch: dict[str, Tensor], stops: Sequence[int]) -> list[str]:
    """Why each answer ended: `length` if it fills the rectangle without a stop token at its end, else `stop`."""
    import torch

    last = batch["responses"][:, -1]
    fills = batch["attention_mask"][:, -1].bool()
    ended = torch.isin(last, torch.tensor(list(stops), dtype=last.dtype))
    return ["length" if cut else "stop" for cut in (fills & ~ended).tolist()]


def _column(values: Tensor, sampled: Tensor, digits: int | None = None) -> Any:
    """The values of the sampled tokens with so many digits (None: whole numbers), 0 for the others."""
    kept = values.masked_fill(~sampled, 0).tolist()
    # Adding 0.0 turns -0.0, which reads badly, into 0.0.
    numbers = kept if digits is None else [float(f"{value:.{digits}g}") + 0.0 for value in kept]
    different = {number for number, own in zip(numbers, sampled.tolist(), strict=True) if own}
    return different.pop() if len(different) == 1 else numbers
