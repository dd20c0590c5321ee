"""Requests and answers in SGLang's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshrl.rollout.admission import refusal, room
from meshrl.rollout.remote.client import Piece, span_versions
from meshrl.rollout.requests import Request
from meshrl.rollout.sglang.routes import RoutedLayers


def sglang_refusal(
    request: Request, vocabulary: int, context: int, end_tokens: frozenset[int], records_routes: bool
) -> str | None:
    """Why SGLang cannot serve a request, or None."""
    params = request.params
    if records_routes and params.stop_token_ids and not end_tokens <= frozenset(params.stop_token_ids):
        return (
            f"SGLang does not stop at stop_token_ids without the model's own ({sorted(end_tokens)}) among them, and of "
            "an answer that is cut off it returns no routes: add them, or use another rollout"
        )
    if params.repetition_penalty != 1 or params.logit_bias or params.min_tokens:
        return (
            "SGLang's log-probs are those after repetition_penalty, logit_bias and min_tokens, which are not the "
            "policy's: leave them out, or use another rollout"
        )
    return refusal(request, vocabulary, context)


def sampling_fields(request: Request, context: int, end_tokens: frozenset[int]) -> dict[str, Any]:
    """SGLang's sampling parameters of one answer."""
    params = request.params
    stops = frozenset(params.stop_token_ids)
    fields: dict[str, Any] = {
        "max_new_tokens": room(request, context),
        # Its temperature 0 is the likeliest token with log-probs at temperature 1, as ours.
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "stop": list(params.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        # SGLang either obeys all stop tokens, with the model's own among them, or none: see `cut_at_stop`.
        "ignore_eos": not end_tokens <= stops,
    }
    if not fields["ignore_eos"]:
        fields["stop_token_ids"] = sorted(stops)
    return fields


def as_piece(event: Mapping[str, Any], given: int, top: int, routed: RoutedLayers | None = None) -> Piece:
    """What an event of a stream adds to the first `given` tokens; its lists begin at the first token."""
    meta = event["meta_info"]
    entries = (meta.get("output_token_logprobs") or [])[given:]
    tops = None
    if top:
        ranked = (meta.get("output_top_logprobs") or [])[given:]
        tops = [{int(entry[1]): float(entry[0]) for entry in sorted(row, key=lambda e: -e[0])[:top]} for row in ranked]
    reason, error = None, None
    if meta.get("finish_reason"):
        reason = meta["finish_reason"]["type"]
        if reason not in ("stop", "length", "abort") or meta["finish_reason"].get("status_code"):
            reason, error = "error", str(meta["finish_reason"].get("message") or reason)
    spans = meta.get("weight_versions")
    return Piece(
        [int(entry[1]) for entry in entries],
        [float(entry[0]) for entry in entries],
        tops,
        reason,
        error,
        span_versions(spans) if spans else None,
        routed.read(meta["routed_experts"]) if routed is not None and meta.get("routed_experts") else None,
    )


def cut_at_stop(piece: Piece, stops: Sequence[int]) -> Piece:
    """The piece up to its first stop token, which then ends the answer."""
    place = next((i for i, token in enumerate(piece.token_ids) if token in stops), None)
    if place is None:
        return piece
    surplus = len(piece.token_ids) - place - 1
    versions = piece.all_versions
    return Piece(
        piece.token_ids[: place + 1],
        piece.log_probs[: place + 1],
        None if piece.top_log_probs is None else piece.top_log_probs[: place + 1],
        "stop",
        None,
        versions[: len(versions) - surplus] if versions is not None else None,
    )
