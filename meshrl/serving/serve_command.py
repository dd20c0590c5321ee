"""Command-line options of `meshrl serve` and `meshrl generate`, and their conversion into settings.

`--help` imports this module, so heavy imports stay inside the functions.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrl.rollout.build import EngineOptions
    from meshrl.rollout.requests import SamplingParams
    from meshrl.serving.settings import Settings

ENGINES = ("embedded", "hf", "vllm", "sglang")
TOKEN_VARIABLE, KEY_VARIABLE = "MESHRL_TOKEN", "MESHRL_API_KEY"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model and for the engine that generates with it."""
    parser.add_argument("model", help="folder of a Hugging Face model with its tokenizer")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", choices=ENGINES, default="embedded", help="what generates (default: embedded)")
    engine.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    engine.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    engine.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="most answers generated at once")
    engine.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="most tokens of a step")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer together")
    engine.add_argument(
        "--gpu-memory-utilization", type=float, default=0.5, metavar="X", help="share of a GPU's memory it takes"
    )
    engine.add_argument("--quantization", choices=("fp8",), help="weights in 8 bits (embedded)")
    engine.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="fp8: keys and values in 8 bits (embedded)"
    )
    engine.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    engine.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of vLLM or SGLang itself; may be given several times",
    )


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """Convert parsed arguments into `EngineOptions`; sizes below 1 raise a ValueError."""
    from meshrl.rollout.build import EngineOptions

    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    return EngineOptions(
        engine=arguments.engine,
        dtype=arguments.dtype,
        device=arguments.device,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        trust_remote_code=arguments.trust_remote_code,
        arguments=named_values(arguments.engine_arg, "--engine-arg"),
    )


def named_values(words: Sequence[str], option: str) -> dict[str, Any]:
    """Parse the KEY=VALUE words of an option; a value that is not JSON stays a string."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.isidentifier() or not equals:
            raise ValueError(f"{option} needs KEY=VALUE, got '{word}'")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the server's address, its access rules and its limits."""
    add_engine_options(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    server.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one (default: 8000)")
    server.add_argument("--name", help="the model's name in requests (default: its folder's name)")
    server.add_argument(
        "--token", help=f"opens /update_weights, /pause and /resume to its bearer (or {TOKEN_VARIABLE})"
    )
    server.add_argument("--api-key", help=f"only its bearer may generate (or {KEY_VARIABLE})")
    server.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="without a key: also answer requests whose Host is this name, or any with '*'; may be given several times",
    )
    server.add_argument("--max-concurrency", type=int, default=256, metavar="N", help="most requests answered at once")
    server.add_argument("--max-queue", type=int, default=1024, metavar="N", help="most requests that wait")
    server.add_argument("--max-answers", type=int, default=128, metavar="N", help="most answers to one request")
    server.add_argument("--max-request-bytes", type=int, default=4 << 20, metavar="N", help="largest request")
    server.add_argument("--max-upload-bytes", type=int, metavar="N", help="largest upload of weights")
    server.add_argument("--request-seconds", type=float, default=600.0, metavar="S", help="longest a request may take")


def server_settings(arguments: argparse.Namespace) -> Settings:
    """Build the server's settings from parsed arguments and environment variables."""
    from pathlib import Path

    from meshrl.config.web_access import own_names
    from meshrl.serving.settings import Settings

    return Settings(
        name=arguments.name or Path(arguments.model).resolve().name,
        token=arguments.token or os.environ.get(TOKEN_VARIABLE) or None,
        api_key=arguments.api_key or os.environ.get(KEY_VARIABLE) or None,
        max_concurrency=arguments.max_concurrency,
        max_queue=arguments.max_queue,
        max_answers=arguments.max_answers,
        max_request_bytes=arguments.max_request_bytes,
        max_upload_bytes=arguments.max_upload_bytes,
        request_seconds=arguments.request_seconds,
        names=own_names(arguments.host, arguments.allowed_host),
    )


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the prompts file, the output file and sampling."""
    add_engine_options(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--prompts", required=True, metavar="FILE", help=".parquet or .jsonl with a prompt in each row")
    files.add_argument("--out", required=True, metavar="FILE", help=".parquet or .jsonl to write")
    files.add_argument("--prompt-key", default="prompt", metavar="COLUMN", help="a text or a list of chat messages")
    files.add_argument("--image-key", metavar="COLUMN", help="images of each row, for a model that sees")
    files.add_argument(
        "--chat-template-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a variable of the chat template, such as enable_thinking=false; may be given several times",
    )
    files.add_argument("--token-ids", action="store_true", help="also write token ids and log-probs")
    files.add_argument("--restart", action="store_true", help="forget what an earlier run has written")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: 512)")
    sampling.add_argument("--n", type=int, default=1, help="answers to each prompt")
    sampling.add_argument("--seed", type=int, default=0, help="decides every answer, also after a restart")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token")
    sampling.add_argument("--top-k", type=int, default=-1, help="-1: no limit")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Convert parsed arguments into `SamplingParams`, without the end tokens, which need the loaded model."""
    from meshrl.rollout.requests import SamplingParams

    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        min_tokens=arguments.min_tokens,
        stop=tuple(arguments.stop),
        n=arguments.n,
    )
