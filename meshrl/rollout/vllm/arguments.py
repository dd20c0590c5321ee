"""How vLLM must be started to serve as a rollout, in this process or as a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.config.engine_arguments import server_words

FIXED: dict[str, Any] = {
    # See `log_probs`.
    "logprobs_mode": "processed_logits",
    "logits_processors": ["meshrl.rollout.vllm.log_probs:PolicyLogProbs"],
    "worker_extension_cls": "meshrl.weights.vllm_receiver.WorkerExtension",
    # A step returns the tokens that it computed, so that each has the version of its step.
    "async_scheduling": False,
}
BACKEND = "meshrl"
# The routes for pauses and weights are vLLM's own, but it offers them only in this mode.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
# The same of the route for adapters.
ADAPTERS_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def engine_arguments(path: str | Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `EngineArgs` as a rollout needs them, with the user's own beside them."""
    taken = sorted(set(FIXED) & set(wanted))
    if taken:
        raise ValueError(f"engine_kwargs.vllm.{taken[0]} cannot be set: the rollout needs {FIXED[taken[0]]!r}")
    # As many top log-probs as anyone likes; vLLM's own limit is 20.
    return {"model": str(path), "max_logprobs": -1, "seed": 0} | dict(wanted) | FIXED


def command_line(path: str | Path, wanted: Mapping[str, Any]) -> list[str]:
    """The same as arguments of vLLM's server."""
    words = ["--enable-scale-out", "--weight-transfer-config", json.dumps({"backend": BACKEND})]
    return words + server_words("vllm", engine_arguments(path, wanted))
