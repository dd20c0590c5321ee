"""The table of model families: which models the rollout and the training engines can compute.

`FAMILIES` has one row for each `model_type`. The dry run, `generate`, `serve`, the judge, the rollout and the training
engines call the same functions. They refuse an unsupported model by its name and with the reason. A row holds the facts
of a whole family. Facts that depend on a field of config.json (kinds of layers, dropout, soft caps) are read there.
`tests/models/test_every_family.py` compares each row with Transformers' own model. docs/families.md is generated from
the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LogitScaling:
    """The scaling of a family's logits after the output head.

    The scaled logits are `cap * tanh(factor * logits / cap)`, or `factor * logits` without a cap.
    """

    factor: float = 1.0
    cap: float | None = None


UNSCALED = LogitScaling()


@dataclass(frozen=True)
class Family:
    """The support for one model type. A field with a reason is unsupported for that reason; an empty text is supported.

    `packed` is training on samples that share a row. `padded` is training on a padded batch. `rollout` is the embedded
    rollout (None: it has the reason of `packed`).
    """

    packed: str = ""
    padded: str = ""
    rollout: str | None = None
    # Why the embedded rollout has no place for its keys and values in a GPU's cache, which config.json lays out.
    on_gpu: str = ""
    # Transformers' attention implementation for padded batches and for engines that call the unmodified model.
    attention: str = "sdpa"
    # The config.json fields (with defaults) that multiply the logits, divide them, and soft-cap them.
    multiplied_by: tuple[str, float] = ("", 1.0)
    divided_by: tuple[str, float] = ("", 1.0)
    capped_by: tuple[str, float | None] = ("", None)
    # The config.json field (with its default) of the dropout on attention weights.
    dropout: tuple[str, float] = ("attention_dropout", 0.0)
    # The kind of all layers if config.json does not list the kinds.
    default_layers: str = ""
    # The sliding window's width reaches attention only through Transformers' mask, not as an argument of the layers.
    window_in_mask: bool = False
    # Transformers has a token classifier with a head named `score`, which a critic or reward model needs.
    scores: bool = False
    # Transformers supports gradient checkpointing for the family.
    checkpoints: bool = True
    # A vision-language model, whose prompts may hold images.
    sees: bool = False
    # Linear attention that meshrl computes document by document (meshrl/parallel/linear_attention.py).
    gated_delta: bool = False
    # The embedded rollout supports tensor parallelism and FP8 matmuls for the family.
    is_cut: bool = False
    # Megatron-Core has a place for all of its weights.
    megatron: bool = False

    @property
    def reasons(self) -> dict[str, str]:
        """The unsupported uses (`rollout`, `packed`, `padded`), each with its reason."""
        found = {
            "rollout": self.packed if self.rollout is None else self.rollout,
            "packed": self.packed,
            "padded": self.padded,
        }
        return {what: why for what, why in found.items() if why}


STATE = "its layers carry a state from token to token, for which only Transformers' own forward has a place"
OWN_ATTENTION = "its layers compute attention themselves, past the interface through which samples are kept apart"
SOFT_CAP = "it soft-caps attention scores (attn_logit_softcapping), which our attention kernels do not"
SINKS = "its attention has sinks, which our attention kernels do not compute"
CHUNKS = "its layers attend within chunks (attention_chunk_size), which our attention kernels do not compute"
SPARSE = "an indexer chooses the tokens that its layers attend to, which our attention kernels do not compute"
DECODER = "it is the decoder of an encoder-decoder model and counts positions over the whole row"
ENCODER = "it is an encoder, which attends in both directions"
OTHER_HEAD = "its head is more than one projection of the hidden states"
TWICE = "its layers attend twice for each token, and the cache has one place for each layer and token"
LAYER_SHAPES = "its layers differ in the size of heads or share keys, and the cache has one size for all layers"
MULTIMODAL = "it is a model of images, audio or several streams of tokens, of which the language model is not taken out"
REUSED = "its layers run several times for each token, and the cache has one place for each layer and token"
LEFT_PADDING = "its state takes up the padding on the left of a prompt"
NO_POSITIONS = "it counts positions over the padding"
DRAWN = "its routers draw experts at random while it is trained, so that the same weights give other log-probs"
KEY_HEADS = "its layers have other numbers of key heads than its config.json says"
MERGED = "its files hold merged matrices that its modules hold apart, which are not written tensor by tensor"
RANDOM = "its attention hashes tokens at random"
UNKNOWN = (
    "its model_type has no row in meshrl's table of families (meshrl/config/families.py), so that nobody has compared "
    "its log-probs with Transformers' own"
)


def _rows(names: str, row: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), row)


def _nothing(why: str) -> Family:
    return Family(packed=why, padded=why)


def _divides(field: str) -> Family:
    return Family(divided_by=(field, 1.0))


def _multiplies(default: float) -> Family:
    return Family(multiplied_by=("logit_scale", default))


def _caps(default: float | None) -> Family:
    return Family(capped_by=("final_logit_softcapping", default))


SCORED = Family(scores=True)
IMAGES = Family(padded="a model that sees images takes packed rows only", sees=True, is_cut=True)
FAMILIES: dict[str, Family] = {
    # Decoders in which only attention through Transformers' interface mixes tokens.
    **_rows(
        """afmoe aria_text bitnet cwm dbrx deepseek_v2 dots1 ernie4_5 ernie4_5_moe exaone_moe flex_olmo
        fuyu glm4_moe glm4_moe_lite gpt_neox hunyuan_v1_dense hunyuan_v1_moe hy_v3 jais2 laguna longcat_flash
        mellum minimax_m2 minimax_m3_vl_text olmo olmo2 olmo3 olmoe opt solar_open youtu""",
        Family(),
    ),
    **_rows(
        """apertus arcee axk1 exaone4 gemma glm glm4 helium ministral ministral3 nemotron persimmon phi phi3 seed_oss
        smollm3 stablelm starcoder2""",
        SCORED,
    ),
    **_rows("llama mistral qwen2 qwen3", Family(scores=True, is_cut=True, megatron=True)),
    **_rows("mixtral qwen2_moe qwen3_moe deepseek_v3", Family(scores=True, megatron=True)),
    **_rows("qwen2_vl qwen2_5_vl qwen3_vl", IMAGES),
    "qwen3_vl_moe": replace(IMAGES, is_cut=False),
    **_rows("qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text olmo_hybrid", Family(gated_delta=True)),
    "qwen3_next": Family(gated_delta=True, scores=True),
    "ctrl": Family(checkpoints=False),
    "jetmoe": Family(checkpoints=False, on_gpu=KEY_HEADS),
    "biogpt": Family(dropout=("attention_probs_dropout_prob", 0.1)),
    **_rows("gpt2 gpt-sw3", Family(dropout=("attn_pdrop", 0.1))),
    "gpt_bigcode": Family(dropout=("attn_pdrop", 0.1), on_gpu=KEY_HEADS),
    "got_ocr2": Family(attention="eager"),
    "phimoe": Family(packed=DRAWN, padded=DRAWN, rollout="", window_in_mask=True),
    "diffllama": Family(rollout=TWICE, scores=True),
    # Decoders that scale or soft-cap their logits.
    **_rows("cohere cohere2 cohere2_moe", _multiplies(0.0625)),
    "cohere_compass_text": _multiplies(1.0),
    "hyperclovax": Family(multiplied_by=("logits_scaling", 1.0)),
    **_rows("granite granitemoe granitemoeshared", _divides("logits_scaling")),
    "granitemoehybrid": replace(_divides("logits_scaling"), default_layers="mamba"),
    "minicpm3": Family(divided_by=("hidden_size / dim_model_base", 1.0)),
    "gemma3_text": _caps(None),
    "gemma3": Family(),  # a vision-language model around gemma3_text that does not apply the cap
    "nanochat": _caps(15.0),
    **_rows("gemma4 gemma4_text gemma4_unified gemma4_unified_text", replace(_caps(None), rollout=LAYER_SHAPES)),
    "gemma3n_text": replace(_caps(30.0), rollout=LAYER_SHAPES),
    # Attention that meshrl's kernels do not compute yet.
    "gemma2": replace(_caps(30.0), packed=SOFT_CAP, attention="eager", scores=True),
    "vaultgemma": replace(_caps(30.0), packed=SOFT_CAP, attention="eager"),
    "gpt_oss": Family(SINKS, attention="eager", scores=True),
    "mimo_v2_flash": Family(SINKS, attention="eager"),
    **_rows("granite_swa granitemoe_swa", replace(_divides("logits_scaling"), packed=SINKS, attention="eager")),
    **_rows("llama4 llama4_text", Family(CHUNKS)),
    "axk2": Family(SPARSE, scores=True),
    **_rows("deepseek_v32 glm_moe_dsa qwen4_exp qwen4_exp_text", Family(SPARSE)),
    "hy_v4": Family(SPARSE, attention="eager"),
    "deepseek_v4": Family(SPARSE, padded=LEFT_PADDING, attention="eager"),
    # Layers that mix tokens without Transformers' attention interface.
    **_rows("doge falcon", Family(OWN_ATTENTION)),
    **_rows("bloom codegen gpt_neo gptj mpt xglm", Family(OWN_ATTENTION, attention="eager")),
    **_rows("gpt_neox_japanese openai-gpt", Family(OWN_ATTENTION, attention="eager", checkpoints=False)),
    "falcon_h1": Family(STATE, multiplied_by=("lm_head_multiplier", 1.0)),
    **_rows("bamba jamba kimi_linear lfm2 lfm2_moe nemotron_h zamba zamba2 zaya", Family(STATE)),
    "minimax": Family(STATE, scores=True),
    **_rows("falcon_mamba mamba mamba2", Family(STATE, attention="eager")),
    **_rows("recurrent_gemma rwkv xlstm", Family(STATE, padded=LEFT_PADDING)),
    "hrm_text": Family(REUSED, padded=MERGED),
    # Models whose input is not one row of tokens.
    **_rows("moshi phi4_multimodal", Family(MULTIMODAL)),
    "git": Family(MULTIMODAL, attention="eager"),
    **_rows(
        "blt emu3 gemma3n gemma4_assistant gemma4_unified_assistant mllama musicgen musicgen_melody whisper",
        _nothing(MULTIMODAL),
    ),
    **_rows(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr",
        _nothing(DECODER),
    ),
    **_rows(
        """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod""",
        _nothing(ENCODER),
    ),
    **_rows("inkling_text modernbert-decoder", _nothing(OTHER_HEAD)),
    "cpmant": _nothing(NO_POSITIONS),
    "reformer": _nothing(RANDOM),
}
# The families with each of the rarer abilities.
MEGATRON_FAMILIES = tuple(name for name, row in FAMILIES.items() if row.megatron)
CUT_FAMILIES = tuple(name for name, row in FAMILIES.items() if row.is_cut)
GATED_DELTA = tuple(name for name, row in FAMILIES.items() if row.gated_delta)
SEEING = tuple(name for name, row in FAMILIES.items() if row.sees)

# Kinds of layers that attend to a whole document or to a window of it.
ATTENTION_KINDS = ("attention", "full_attention", "sliding_attention")
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")


def family_of(shape: Mapping[str, Any]) -> Family | None:
    """Return the row of a config.json's model type, or None if the table has no such row."""
    return FAMILIES.get(str(shape.get("model_type")))


def packing_problem(shape: Mapping[str, Any]) -> str | None:
    """Return the reason that this model cannot train on packed rows (several samples in a row), or None if it can."""
    row = family_of(shape)
    return UNKNOWN if row is None else row.packed or _layer_problem(shape, row) or None


def rollout_problem(shape: Mapping[str, Any]) -> str | None:
    """Return the reason that the embedded rollout cannot generate with this model, or None if it can."""
    row = family_of(shape)
    if row is None or row.rollout is None:
        return packing_problem(shape)
    return row.rollout or _layer_problem(shape, row) or None


def padding_problem(shape: Mapping[str, Any]) -> str | None:
    """Return the reason that padding would change the log-probs of this model's samples, or None if it would not."""
    row = family_of(shape)
    return UNKNOWN if row is None else row.padded or _two_way_problem(shape) or None


def gpu_problem(shape: Mapping[str, Any]) -> str | None:
    """Return the reason that the embedded rollout generates with this model on a CPU only, or None if there is none."""
    row = family_of(shape)
    if shape.get("kv_lora_rank"):
        keys = sum(int(shape.get(f"qk_{kind}_head_dim") or 0) for kind in ("nope", "rope"))
        if keys != shape.get("v_head_dim"):
            return (
                f"its keys have {keys} numbers and its values {shape.get('v_head_dim')}: there the cache has one size"
            )
    return row.on_gpu or None if row is not None else None


def engine_problem(engine: str, shape: Mapping[str, Any]) -> str | None:
    """Return the reason that a rollout engine cannot reproduce this model's log-probs, or None if there is none.

    The result is always None for vLLM and SGLang, which have their own checks.
    """
    asked = {"embedded": rollout_problem, "hf": padding_problem}.get(engine)
    return None if asked is None else asked(shape)


def logit_scaling(shape: Mapping[str, Any]) -> LogitScaling:
    """Return the scaling of the model's logits. Raise `ValueError` if its factor is not above 0."""
    row = family_of(shape) or Family()
    factor = _number(shape, *row.multiplied_by) / _number(shape, *row.divided_by)
    if not factor > 0:
        raise ValueError(f"{shape.get('model_type')} multiplies its logits by {factor}: it must be above 0")
    field, default = row.capped_by
    cap = shape.get(field, default) if field else None
    return LogitScaling(factor, None if cap is None else float(cap))


def _number(shape: Mapping[str, Any], field: str, default: float) -> float:
    """Return the number in a field, or a quotient if `field` is `a / b`. Return the default if a field is not set."""
    if not field:
        return default
    values = [float(shape[name]) for name in field.split(" / ") if shape.get(name) is not None]
    if len(values) < len(field.split(" / ")):
        return default
    return values[0] / values[1] if len(values) == 2 else values[0]


def _layer_problem(shape: Mapping[str, Any], row: Family) -> str:
    """Return the reason that meshrl's attention cannot compute layers listed in config.json, or an empty text."""
    kinds = next((shape[name] for name in LAYER_KINDS if shape.get(name)), [row.default_layers or "attention"])
    known = {*ATTENTION_KINDS, "mlp", "moe", *(("linear_attention",) if row.gated_delta else ())}
    if others := sorted({str(kind) for kind in kinds} - known):
        return f"it has layers of the kind {others[0]}, which our attention does not compute"
    return _two_way_problem(shape)


def _two_way_problem(shape: Mapping[str, Any]) -> str:
    if shape.get("use_bidirectional_attention") in (True, "all"):
        return "it attends in both directions (use_bidirectional_attention)"
    return ""


def longest_rotation(shape: Mapping[str, Any]) -> int | None:
    """Return the length in tokens up to which rotary angles do not depend on the longest sample, or None for no limit.

    There is a limit with longrope only, whose frequencies change for longer samples.
    """
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) != "longrope":
        return None
    field = "original_max_position_embeddings"
    return rope.get(field) or shape.get(field) or shape.get("max_position_embeddings")


def dropout_problem(shape: Mapping[str, Any]) -> str | None:
    """Return `field=rate` of the attention dropout in a config.json, or None if it is off.

    meshrl's attention does not compute dropout.
    """
    field, default = (family_of(shape) or Family()).dropout
    rate = shape.get(field, default)
    return f"{field}={rate}" if rate else None


# The config.json keys that the checks for Megatron read, and their values if config.json does not set them.
DEFAULTS: dict[str, Any] = {
    "model_type": "",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}
ROUTER_DEFAULTS: dict[str, Any] = {
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "topk_group": 4,
    "n_group": 8,
    "rope_interleave": True,
}


def facts_of(hf_config: Any) -> dict[str, Any]:
    """Return the values that `megatron_problems` reads from a Hugging Face config object, as a dict."""
    return {name: getattr(hf_config, name) for name in DEFAULTS | ROUTER_DEFAULTS if hasattr(hf_config, name)}


def unmapped(facts: Mapping[str, Any]) -> list[str]:
    """Check that Megatron-Core has a place for every weight of the model. Return problems, empty if there are none."""
    known = {**DEFAULTS, **facts}
    family = known["model_type"]
    if family not in MEGATRON_FAMILIES:
        return [f"no Megatron weights for model_type '{family}': use one of {', '.join(MEGATRON_FAMILIES)}"]
    # Qwen2 has biases on queries, keys and values only; this flag also puts one on the output projection.
    if known["attention_bias"] or known["mlp_bias"]:
        return [f"{family} with attention_bias or mlp_bias has biases megatron-core cannot place one by one"]
    return []


def megatron_problems(facts: Mapping[str, Any]) -> list[str]:
    """Return one message for each feature of a model that strategy=megatron cannot train."""
    if problems := unmapped(facts):
        return problems
    known = {**DEFAULTS, **facts}
    if known["model_type"] == "qwen2_moe":
        problems.append("strategy=megatron cannot train qwen2_moe: its shared expert's gate is not built; use fsdp2")
    if known["hidden_act"] not in ("silu", "swish"):
        act = known["hidden_act"]
        problems.append(f"strategy=megatron computes SwiGLU only, the model has hidden_act={act}: use fsdp2")
    if known["attention_dropout"]:
        dropout = known["attention_dropout"]
        problems.append(f"the model's attention_dropout={dropout} is not supported: override it with 0")
    if known["model_type"] == "deepseek_v3":
        problems += _router_problems({**ROUTER_DEFAULTS, **facts})
    return problems


def _router_problems(known: Mapping[str, Any]) -> list[str]:
    """Return one message for each option of Hugging Face's DeepSeek-V3 whose value Megatron-Core does not implement.

    The options are those of the router and of latent attention, for which Megatron-Core has one fixed behaviour.
    """
    problems = []
    chosen, groups, is_normed = known["num_experts_per_tok"], known["topk_group"], known["norm_topk_prob"]
    if not is_normed or chosen < 2:
        problems.append(
            f"strategy=megatron makes the weights of 2 or more chosen experts sum to one; the model chooses {chosen} "
            f"with norm_topk_prob={is_normed}: use fsdp2"
        )
    if known["n_group"] > 1 and chosen // groups != 2:
        problems.append(
            f"strategy=megatron ranks groups of experts by their best num_experts_per_tok // topk_group = {chosen} // "
            f"{groups} = {chosen // groups}, the model by their best 2: use fsdp2"
        )
    if not known["rope_interleave"]:
        problems.append("strategy=megatron rotates interleaved pairs, the model has rope_interleave=false: use fsdp2")
    return problems
