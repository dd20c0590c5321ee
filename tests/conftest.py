"""What several rooms' tests share: one thread, tiny models of several families, a character tokenizer.

Transformers is imported where it is used: most tests do without it, and it takes seconds.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from meshrl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS

# In CI a run tests the commit, not its luck; elsewhere new examples are tried each time.
settings.register_profile("repeatable", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("repeatable")


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_XDIST_WORKER:
    gc.disable()  # until all tests are collected: what is imported stays

# Most of a whole run goes into these: whoever shares it begins with them, and all end at about the same time.
SLOW_FIRST = ("special_e2e", "controller", "special_distributed", "special_sanity")
SLOWEST = (
    "test_chaos.py",
    "test_faults.py",
    "test_resume.py",
    "test_learning.py",
    "test_tool_learning.py",
    "test_layouts.py",
)

ALPHABET = "0123456789abc>+= \n"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Large, so that a wrongly placed token changes the logits by far more than rounding does.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
WINDOW = 4
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    # Keys and values of unequal size, chosen experts of one group, a latent query.
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 7,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 4,  # of what is rotated
        },
    ),
    # One layer looks back over all of the document, the other over a window.
    "qwen3_mixed": (
        "Qwen3Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    # Three layers with a state, then one that attends; fewer heads of keys than of values, an odd number of layers.
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**LINEAR}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**LINEAR, "linear_allow_neg_eigval": True}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
}

# Sizes for a config of any family, which takes those of the fields that it has; every one another, so that none can
# stand for another.
TINY: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "sliding_window": 7,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 26,
    "shared_expert_intermediate_size": 18,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "head_dim": 4,
}


@pytest.fixture(scope="session")
def tiny_config() -> Callable[[str], Any]:
    """A config of three layers of any family of Transformers: `tiny_config("gemma2")`."""
    from transformers import CONFIG_MAPPING

    def make(family: str) -> Any:
        default = CONFIG_MAPPING[family]()
        wanted = TINY | (LATENT if hasattr(default, "kv_lora_rank") else {})
        if family == "helium":  # whose heads must be as wide together as its hidden states
            wanted["head_dim"] = 8
        return CONFIG_MAPPING[family](**{name: value for name, value in wanted.items() if hasattr(default, name)})

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow folders first, in them the slowest files; what is left keeps its order."""

    def turn(item: pytest.Item) -> tuple[int, int]:
        folder, file = item.path.parent.name, item.path.name
        place = SLOW_FIRST.index(folder) if folder in SLOW_FIRST else len(SLOW_FIRST)
        return place, SLOWEST.index(file) if file in SLOWEST else len(SLOWEST)

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    if IS_XDIST_WORKER:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def only_built_in_functions() -> Iterator[None]:
    """What the tests of a file register under names of their own is not there for the next file."""
    yield
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS):
        for name, function in list(registry._functions.items()):
            if not function.__module__.startswith("meshrl."):
                del registry._functions[name]


@pytest.fixture(scope="session")
def make_lm() -> Callable[..., PreTrainedModel]:
    """A model of a family with fixed random weights: `make_lm("qwen3")` runs with our attention, others by name."""
    import transformers

    from meshrl.parallel.attention import ATTENTION_NAME

    def make(family: str, attention: str = ATTENTION_NAME, **overrides: Any) -> PreTrainedModel:
        name, fields = FAMILIES[family]
        config = getattr(transformers, name)(**(SHAPE | fields | overrides))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention
            )
        return model.eval()

    return make


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, no chat template."""
    from meshrl.models.tiny import char_tokenizer

    return char_tokenizer(ALPHABET)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character or role mark, with a chat template that never renders a turn twice differently."""
    from meshrl.models.tiny import char_tokenizer

    made = char_tokenizer(ALPHABET + "defghijklmnopqrstuvwxyz")
    made.add_special_tokens({"additional_special_tokens": ["<system>", "<user>", "<assistant>"]})
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's kind of model and tokenizer. Shared: do not write into it."""
    from meshrl.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"), ALPHABET, num_hidden_layers=2, hidden_size=32)


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with tiny models that see, by family. Shared: do not write into them."""
    from meshrl.models.tiny import make_tiny_seeing_model

    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_seeing_model(tmp_path_factory.mktemp(family), ALPHABET, family=family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def image() -> Callable[..., bytes]:
    """Makes images of noise: `image(height, width, seed)`; 8 x 8 pixels are one token of the tiny models."""
    import numpy as np

    from meshrl.data.images import as_png

    def make(height: int, width: int, seed: int = 0) -> bytes:
        rng = np.random.default_rng(seed)
        return as_png(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))

    return make
