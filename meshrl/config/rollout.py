"""`actor_rollout_ref.rollout.*`: the rollout engine, sampling, weight sync, validation sampling and tools."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshrl.config.data import VALIDATES
from meshrl.config.engine import DTYPES, short_dtype
from meshrl.config.keys import (
    ACTOR,
    LONGEST_WAIT,
    MOST_AT_ONCE,
    MOST_MEGABYTES,
    MOST_RANKS,
    MOST_ROWS,
    MOST_TOKENS,
    ROLLOUT,
    any_of,
    differs,
    equals,
    fact,
    is_set,
    key,
    section,
)

if TYPE_CHECKING:
    from meshrl.config.rl import PPOConfig

ROLLOUTS = ("embedded", "vllm", "sglang", "hf")
# The rollouts that accept prompts with images.
SEEING_ROLLOUTS = ("embedded", "vllm")
# The rollouts that read a key, for keys that not every rollout reads.
READERS = {
    "gpu_memory_utilization": ("embedded", "vllm", "sglang"),
    "quantization": ("embedded",),
    "kv_cache_dtype": ("embedded",),
    "enforce_eager": ("vllm", "sglang"),
    "enable_chunked_prefill": ("vllm",),
    "enable_prefix_caching": ("embedded", "vllm", "sglang"),
    "as_server": ("vllm", "sglang"),
    "load_format": ("vllm", "sglang"),
    "update_weights_delta": ("embedded", "hf"),
    "update_weights_adapters": ("embedded", "hf", "vllm"),
    "max_num_batched_tokens": ("embedded", "vllm", "sglang"),
    # SGLang reports log-probs after these were applied; the policy's log-probs are those before.
    **dict.fromkeys(
        ("repetition_penalty", "min_tokens", "val_kwargs.repetition_penalty", "val_kwargs.min_tokens"),
        ("embedded", "hf", "vllm"),
    ),
    "engine_kwargs.vllm": ("vllm",),
    "engine_kwargs.sglang": ("sglang",),
}
# The keys among these that change the speed of generation and no response.
SPEED_KEYS = (
    "gpu_memory_utilization", "enforce_eager", "enable_chunked_prefill", "max_num_batched_tokens", "load_format",
)  # fmt: skip
# The LoRA ranks that vLLM allows for its adapter buffers.
VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Keys that a rollout does not need, with the reason.
FROM_TRAINER = "the trainer's weights are its first ones"
UNNEEDED = {
    "embedded": {"load_format": FROM_TRAINER},
    "hf": {"load_format": FROM_TRAINER, "enforce_eager": "it has no CUDA graphs"},
}


def shares_weights(config: "PPOConfig") -> bool:
    """Return whether the rollout generates with the trainer's own module, so that no weights are sent."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    return (
        policy.hybrid_engine
        and rollout.name == "embedded"
        and rollout.replica_size == 1
        and not policy.model.has_adapters
        and not policy.actor.fsdp_config.param_offload
        and not policy.actor.rounds
        and policy.actor.whole_dtype(config.trainer.world_size) == short_dtype(rollout.dtype)
    )


def sends_buckets(config: "PPOConfig") -> bool:
    """Return whether weight sync sends the weights in buckets.

    Weight sync has no buckets if the rollout shares the trainer's weights. It has none either for sharded FSDP1 with
    adapters in a colocated embedded or hf rollout: there full tensors are sent one by one.
    """
    policy = config.actor_rollout_ref
    return not shares_weights(config) and not (
        policy.hybrid_engine
        and policy.rollout.name in ("embedded", "hf")
        and policy.model.has_adapters
        and policy.actor.strategy == "fsdp"
        and policy.actor.fsdp_config.fsdp_size != 1
        and config.trainer.world_size > 1
    )


def sends_adapters(config: "PPOConfig") -> bool:
    """Return whether weight sync can send LoRA adapters without the base weights.

    It is not needed if a colocated rollout merges adapters in place. It is impossible if full tensors are streamed
    without buckets.
    """
    policy = config.actor_rollout_ref
    is_apart = not policy.hybrid_engine or policy.rollout.name == "vllm"
    is_sharded = policy.actor.whole_dtype(config.trainer.world_size) is None
    return policy.model.has_adapters and sends_buckets(config) and (is_apart or is_sharded)


_PLACEMENT = ("actor_rollout_ref.hybrid_engine", f"{ROLLOUT}.name", "trainer.nnodes", "trainer.n_gpus_per_node")
_LORA = ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_adapter_path")
SENDS_WEIGHTS = fact(
    "a rollout that does not generate with the trainer's own weights",
    _PLACEMENT,
    lambda config: not shares_weights(config),
)
SENDS_BUCKETS = fact("weights that are sent to a rollout in buckets", _PLACEMENT, sends_buckets)
SENDS_ADAPTERS = fact("adapters that are sent to a rollout (LoRA)", (*_LORA, *_PLACEMENT), sends_adapters)
# Keys of tool calls have an effect only if there are tools.
HAS_TOOLS = any_of(is_set(".tools"), is_set(".tool_config_path"))
# Documentation of keys that training and validation share.
MIN_P = "Sample from tokens with at least this share of the likeliest one's probability."
PENALTY = "Divide the logits of tokens that prompt or answer already hold by this (multiply negative ones); 1: none."
MIN_TOKENS = "Fewest tokens of an answer: neither end tokens nor stop texts end it before."
STOP = "Texts that end an answer once it holds one of them; they stay a part of it."
IGNORE_EOS = "Let the model's end tokens be tokens like others: only stop texts and the length end an answer."
TOOL_FORMATS = ("hermes", "qwen", "llama3_json", "mistral", "deepseek", "qwen3_coder", "glm", "code")


@dataclass
class ValKwargs:
    temperature: float = key(
        0.0, "Sampling temperature of validation, with do_sample.", low=0, high=100, only_if=VALIDATES, noted=True
    )
    top_k: int = key(
        -1, "Sample from the k likeliest tokens; -1: all.", low=-1, high=MOST_TOKENS, only_if=VALIDATES, noted=True
    )
    top_p: float = key(
        1.0,
        "Sample from the smallest set of tokens with this probability.",
        low=0,
        high=1,
        only_if=VALIDATES,
        noted=True,
    )
    min_p: float = key(0.0, MIN_P, low=0, high=1, only_if=VALIDATES, noted=True)
    repetition_penalty: float = key(1.0, PENALTY, low=0, high=100, only_if=VALIDATES, noted=True)
    min_tokens: int | None = key(
        None, MIN_TOKENS, low=0, follows=f"{ROLLOUT}.min_tokens", high=MOST_TOKENS, only_if=VALIDATES, noted=True
    )
    stop: list[str] | None = key(None, STOP, takes_blank=True, follows=f"{ROLLOUT}.stop", only_if=VALIDATES, noted=True)
    ignore_eos: bool | None = key(None, IGNORE_EOS, follows=f"{ROLLOUT}.ignore_eos", only_if=VALIDATES, noted=True)
    n: int = key(1, "Responses per validation prompt.", low=1, high=1_000_000, only_if=VALIDATES, noted=True)
    do_sample: bool = key(False, "Sample; false: take the likeliest token.", only_if=VALIDATES, noted=True)


@dataclass
class MultiTurnConfig:
    enable: bool = key(False, "Let the model use tools, or talk to an environment, over several turns.")
    max_assistant_turns: int | None = key(
        None, "Most turns of the model; null: as many as the response holds.", low=1, high=MOST_TOKENS
    )
    max_user_turns: int | None = key(
        None,
        "Most answers to the model, by tools or by the environment; null: as many as the response holds.",
        low=1,
        high=MOST_TOKENS,
    )
    tool_config_path: str | None = key(None, "YAML file that lists tools by import path.")
    tools: list[str] = key([], "Import paths of tools, such as my_tools.py:search or package.module:search.")
    format: str = key("hermes", "Format of tool calls.", choices=TOOL_FORMATS, only_if=HAS_TOOLS)
    max_parallel_calls: int = key(
        1,
        "Most tool calls of one turn, run at once; further ones are refused.",
        low=1,
        high=MOST_AT_ONCE,
        only_if=HAS_TOOLS,
    )
    max_concurrent_calls: int = key(
        64, "Most tool calls at once on one rank, over all samples.", low=1, high=MOST_AT_ONCE, only_if=HAS_TOOLS
    )
    tool_timeout: float = key(
        30.0, "Seconds that one call of a tool or step of the environment may take.", low=0.001, high=LONGEST_WAIT
    )
    max_tool_response_length: int = key(
        256, "Longest tool answer, in characters.", low=1, high=MOST_TOKENS, only_if=HAS_TOOLS
    )
    tool_response_truncate_side: str = key(
        "middle",
        "Where a longer one is cut; left keeps its end.",
        choices=("left", "right", "middle"),
        only_if=HAS_TOOLS,
    )
    environment: str | None = key(None, "Import path of the environment's class, such as my_game.py:Game.")
    environment_kwargs: dict[str, Any] = key({}, "Arguments of the environment's class.")
    tokenization_sanity_check_mode: str = key(
        "strict",
        "Check that turns encoded one by one equal the chat template's whole render; with or without white space.",
        choices=("strict", "ignore_strippable", "disable"),
    )


@dataclass
class EngineKwargs:
    vllm: dict[str, Any] = key({}, "Arguments handed to vLLM (`EngineArgs`).")
    sglang: dict[str, Any] = key({}, "Arguments handed to SGLang (`ServerArgs`).")


@dataclass
class RolloutConfig:
    name: str = key(
        "embedded",
        "Rollout engine; embedded generates with the trainer's own modules.",
        choices=ROLLOUTS,
    )
    as_server: bool | None = key(
        None,
        "The engine as a server beside each rank (true) or inside its process (false); null: only SGLang is a server.",
    )
    nnodes: int = key(
        0, "Machines of the rollout's own, with actor_rollout_ref.hybrid_engine=false.", low=0, high=MOST_RANKS
    )
    n_gpus_per_node: int = key(0, "Rollout processes on each of them.", low=0, high=MOST_RANKS)
    n: int = key(1, "Responses per prompt; group-based estimators need at least 2.", low=1, high=1_000_000)
    temperature: float = key(1.0, "Sampling temperature.", low=0, high=100, only_if=equals(".do_sample", True))
    top_k: int = key(
        -1, "Sample from the k likeliest tokens; -1: all.", low=-1, high=MOST_TOKENS, only_if=equals(".do_sample", True)
    )
    top_p: float = key(
        1.0,
        "Sample from the smallest set of tokens with this probability.",
        low=0,
        high=1,
        only_if=equals(".do_sample", True),
    )
    min_p: float = key(0.0, MIN_P, low=0, high=1, only_if=equals(".do_sample", True))
    repetition_penalty: float = key(1.0, PENALTY, low=0, high=100)
    min_tokens: int = key(0, MIN_TOKENS, low=0, high=MOST_TOKENS)
    stop: list[str] = key([], STOP, takes_blank=True)
    ignore_eos: bool = key(False, IGNORE_EOS)
    do_sample: bool = key(True, "Sample; false: take the likeliest token.")
    prompt_length: int | None = key(
        None, "Longest prompt, in tokens.", low=1, follows="data.max_prompt_length", high=MOST_TOKENS
    )
    response_length: int | None = key(
        None, "Longest response, in tokens.", low=1, follows="data.max_response_length", high=MOST_TOKENS
    )
    dtype: str = key("bfloat16", "Dtype of weights and KV cache while generating.", choices=DTYPES)
    quantization: str | None = key(
        None,
        "fp8: generate with products of 8-bit floats, from weights that are rounded anew after every sync (embedded).",
        choices=("fp8",),
    )
    kv_cache_dtype: str = key(
        "auto",
        "Dtype of the KV cache; auto: that of the weights, fp8: 8 bits (embedded, on GPUs).",
        choices=("auto", "fp8"),
    )
    max_num_seqs: int = key(256, "Most sequences generated at once on one rank.", low=1, high=MOST_AT_ONCE)
    max_num_batched_tokens: int = key(
        8192, "Most tokens of one engine step, prompts included.", low=1, high=MOST_TOKENS
    )
    calculate_log_probs: bool = key(True, "Return the log-probs of the sampled tokens.")
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling in validation.")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward of the old log-probs.",
        low=1,
        follows=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        high=MOST_ROWS,
        only_if=equals(".log_prob_use_dynamic_bsz", False),
        noted=True,
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Cut the old log-probs' micro-batches by tokens.", follows=f"{ACTOR}.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Most tokens of such a micro-batch.",
        low=1,
        follows=f"{ACTOR}.ppo_max_token_len_per_gpu",
        high=MOST_TOKENS,
        only_if=equals(".log_prob_use_dynamic_bsz", True),
        noted=True,
    )
    tensor_model_parallel_size: int = key(
        1,
        "Neighbouring ranks that are one rollout and hold a part of every matrix each (embedded, vllm, sglang).",
        low=1,
        high=MOST_RANKS,
    )
    expert_parallel_size: int = key(
        1,
        "Neighbouring ranks that are one rollout and hold some experts each (embedded; vllm: as many as cut it).",
        low=1,
        high=MOST_RANKS,
    )
    gpu_memory_utilization: float = key(
        0.5,
        "Share of the GPU's memory a rollout takes.",
        low=0,
        high=1,
        only_if=any_of(differs("trainer.device", "cpu"), differs(".name", "embedded")),
        noted=True,
    )
    max_model_len: int | None = key(None, "Longest prompt plus response.", low=1, high=MOST_TOKENS)
    enforce_eager: bool = key(False, "No CUDA graphs.")
    free_cache_engine: bool = key(True, "Give the KV cache, and weights of the rollout's own, up while training.")
    enable_chunked_prefill: bool = key(True, "Split long prompts over engine steps.")
    enable_prefix_caching: bool = key(True, "Share the KV cache of equal prefixes.")
    load_format: str = key("dummy", "How the rollout gets its first weights.")
    update_weights_bucket_megabytes: int = key(
        512, "Size of a weight-sync bucket.", low=1, high=MOST_MEGABYTES, only_if=SENDS_BUCKETS, noted=True
    )
    update_weights_verify: bool = key(
        True, "Compare sums of all weights on both sides after every sync.", only_if=SENDS_WEIGHTS
    )
    update_weights_delta: bool = key(
        False,
        "Send only what changed since the last version; senders keep a copy, and free_cache_engine must be off.",
        only_if=SENDS_BUCKETS,
    )
    update_weights_adapters: str = key(
        "alone",
        "LoRA: send the base once (it stays in host memory) and then adapters alone, or always the merged weights.",
        choices=("alone", "merged"),
        only_if=SENDS_ADAPTERS,
    )
    engine_kwargs: EngineKwargs = section(EngineKwargs, "Further arguments of an external engine.")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "Tools and turns.")

    @property
    def rounds(self) -> bool:
        """True if the rollout computes in FP8 or has an FP8 KV cache, so that its policy differs from the trainer's."""
        return self.quantization is not None or self.kv_cache_dtype != "auto"

    @property
    def policy_temperature(self) -> float:
        """The temperature of the trained log-probs: the sampling temperature, or 1 with greedy generation."""
        return self.temperature if self.do_sample and self.temperature > 0 else 1.0

    @property
    def replica_size(self) -> int:
        """The number of ranks of one rollout replica.

        Tensor parallelism and expert parallelism use the same ranks, so that the larger size counts.
        """
        return max(self.tensor_model_parallel_size, self.expert_parallel_size)

    @property
    def is_elsewhere(self) -> bool:
        """True if the engine runs in processes of its own. Then one rank of a replica sends all requests to it."""
        return self.name == "sglang" or (self.name == "vllm" and bool(self.as_server))
