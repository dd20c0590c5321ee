"""`actor_rollout_ref.rollout.*`: how responses are generated."""

from dataclasses import dataclass
from typing import Any

from meshrl.config.engine import DTYPES
from meshrl.config.key import key, section

ACTOR = "actor_rollout_ref.actor"
EXTERNAL = "only the vllm and sglang rollouts read it"
ROLLOUTS = ("embedded", "vllm", "sglang", "hf")


@dataclass
class ValKwargs:
    temperature: float = key(0.0, "Sampling temperature of validation, with do_sample.", low=0)
    top_k: int = key(-1, "Sample from the k likeliest tokens; -1: all.", low=-1)
    top_p: float = key(1.0, "Sample from the smallest set of tokens with this probability.", low=0, high=1)
    n: int = key(1, "Responses per validation prompt.", low=1)
    do_sample: bool = key(False, "Sample; false: take the likeliest token.")


@dataclass
class MultiTurnConfig:
    enable: bool = key(False, "Let the model use tools over several turns.")
    max_assistant_turns: int | None = key(None, "Most turns of the model.", low=1)
    max_user_turns: int | None = key(None, "Most answers to the model.", low=1)
    tool_config_path: str | None = key(None, "File that lists the tools.")
    format: str = key("hermes", "Format of tool calls.")
    max_parallel_calls: int = key(1, "Tool calls run at once.", low=1)
    max_tool_response_length: int = key(256, "Longest tool answer.", low=1)


@dataclass
class EngineKwargs:
    vllm: dict[str, Any] = key({}, "Arguments handed to vLLM.", pending=EXTERNAL)
    sglang: dict[str, Any] = key({}, "Arguments handed to SGLang.", pending=EXTERNAL)


@dataclass
class RolloutConfig:
    name: str = key(
        "embedded",
        "Rollout engine; embedded generates with the trainer's own modules.",
        choices=ROLLOUTS,
        pending={name: f"the {name} rollout; use embedded" for name in ROLLOUTS[1:]},
    )
    mode: str = key(
        "sync",
        "Generate between updates, or beside them.",
        choices=("sync", "async"),
        pending={"async": "asynchronous rollouts"},
    )
    n: int = key(1, "Responses per prompt; group-based estimators need at least 2.", low=1)
    temperature: float = key(1.0, "Sampling temperature.", low=0)
    top_k: int = key(-1, "Sample from the k likeliest tokens; -1: all.", low=-1)
    top_p: float = key(1.0, "Sample from the smallest set of tokens with this probability.", low=0, high=1)
    do_sample: bool = key(True, "Sample; false: take the likeliest token.")
    prompt_length: int | None = key(None, "Longest prompt, in tokens.", low=1, follows="data.max_prompt_length")
    response_length: int | None = key(None, "Longest response, in tokens.", low=1, follows="data.max_response_length")
    dtype: str = key("bfloat16", "Dtype of weights and KV cache while generating.", choices=DTYPES)
    max_num_seqs: int = key(256, "Most sequences generated at once on one rank.", low=1)
    max_num_batched_tokens: int = key(8192, "Most tokens of one engine step, prompts included.", low=1)
    calculate_log_probs: bool = key(True, "Return the log-probs of the sampled tokens.")
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling in validation.")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward of the old log-probs.", low=1, follows=f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Cut the old log-probs' micro-batches by tokens.", follows=f"{ACTOR}.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "Most tokens of such a micro-batch.", low=1, follows=f"{ACTOR}.ppo_max_token_len_per_gpu"
    )
    tensor_model_parallel_size: int = key(1, "Tensor-parallel ranks of one rollout.", low=1, pending=EXTERNAL)
    data_parallel_size: int = key(1, "Data-parallel ranks of one rollout.", low=1, pending=EXTERNAL)
    gpu_memory_utilization: float = key(
        0.5, "Share of the GPU's memory a rollout takes.", low=0, high=1, pending=EXTERNAL
    )
    max_model_len: int | None = key(None, "Longest prompt plus response.", low=1, pending=EXTERNAL)
    enforce_eager: bool = key(False, "No CUDA graphs.", pending=EXTERNAL)
    free_cache_engine: bool = key(True, "Free the KV cache while training.", pending=EXTERNAL)
    enable_chunked_prefill: bool = key(True, "Split long prompts over engine steps.", pending=EXTERNAL)
    enable_prefix_caching: bool = key(True, "Share the KV cache of equal prefixes.", pending=EXTERNAL)
    load_format: str = key("dummy", "How the rollout gets its first weights.", pending=EXTERNAL)
    layered_summon: bool = key(False, "Gather the weights layer by layer.", pending=EXTERNAL)
    update_weights_bucket_megabytes: int = key(512, "Size of a weight-sync bucket.", low=1, pending=EXTERNAL)
    engine_kwargs: EngineKwargs = section(EngineKwargs, "Further arguments of an external engine.")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "Tools and turns.", pending="multi-turn rollouts")
