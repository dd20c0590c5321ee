"""Hugging Face models and tokenizers from a folder."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.config.engine import ModelConfig
from meshrl.config.families import (
    UNSCALED,
    Family,
    LogitScaling,
    engine_problem,
    family_of,
    gpu_problem,
    logit_scaling,
    packing_problem,
    padding_problem,
)
from meshrl.config.keys import count
from meshrl.config.model_folder import (
    TOKENIZER_FILES,
    damage_of,
    misfit_problems,
    pickle_problem,
    quantized_problem,
    unread_problem,
    unread_tensors,
)
from meshrl.files import read_json
from meshrl.models.vision import sees

# What Transformers calls the head of its token classifiers.
VALUE_HEAD = "score"
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type for a config's word such as `bf16` or `float32`."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype '{name}': use one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def naming_what_is_damaged(folder: str | Path) -> Iterator[None]:
    """Libraries say what is wrong with a file, not with which: a `ValueError` names the one that cannot be read."""
    try:
        yield
    except Exception as error:
        if (problem := damage_of(Path(folder))) is None:
            raise
        raise ValueError(problem) from error


def load_model_config(
    path: str | Path, override: dict[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Reads a model folder's config.json, sets `override` in it and refuses fields the model does not know."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model at '{path}': expected a folder with config.json")
    with naming_what_is_damaged(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for name, value in (override or {}).items():
        # Of a model that sees, most fields are its language model's.
        owner = config if hasattr(config, name) else config.get_text_config()
        if not hasattr(owner, name):
            raise ValueError(f"model.override_config.{name}: {type(config).__name__} has no field '{name}'")
        setattr(owner, name, value)
    return config


def refuse_quantized(path: str | Path) -> None:
    """A `ValueError` for a folder with quantized weights: read as they are, they would be other numbers."""
    if problem := quantized_problem(Path(path)):
        raise ValueError(problem)


def load_model(
    path: str | Path,
    attention: str,
    head: str = "lm",
    *,
    dtype: torch.dtype = torch.float32,
    override: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Loads a model on the CPU with this attention function and head; every weight must be in the folder.

    A value head that the folder does not have starts at zero: so do the values. What of the folder does not fit the
    model is a `ValueError` that names it.
    """
    if problem := pickle_problem(Path(path)):
        raise ValueError(problem)
    refuse_misfit(path, override)
    config = _config_for(head, path, override, trust_remote_code)
    with naming_what_is_damaged(path), holding_load_reports() as reports:
        loaded: Any = _auto_class(config, head).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=_attention_of(config, attention),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    model, info = loaded
    new_head = [name for name in info["missing_keys"] if is_value_head(name)]
    missing = sorted(set(info["missing_keys"]) - set(new_head))
    if missing:
        raise ValueError(f"the model at '{path}' lacks {count(len(missing), 'weight')}, first of all '{missing[0]}'")
    if mismatched := sorted(tuple(entry) for entry in info["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise ValueError(
            f"the model at '{path}' has {count(len(mismatched), 'weight')} of another shape, first of all '{name}': it "
            f"is {list(found)} in the files, and the model needs {list(wanted)}"
        )
    refuse_unread(path, info["unexpected_keys"], model, override)
    for name in new_head:
        torch.nn.init.zeros_(model.get_parameter(name))
    if not new_head or not all(name.startswith("lm_head.") for name in info["unexpected_keys"]):
        for report in reports:
            logging.getLogger(report.name).handle(report)
    return model


def refuse_misfit(path: str | Path, override: Mapping[str, Any] | None = None) -> None:
    """A `ValueError` for a folder whose tensors are not those of its config.json, as far as their headers tell."""
    if problem := next(iter(misfit_problems(Path(path), override or {})), None):
        raise ValueError(problem)


def refuse_unread(
    path: str | Path, names: Collection[str], model: PreTrainedModel, override: Mapping[str, Any] | None = None
) -> None:
    """A `ValueError` for tensors of a folder that a model has no place for, but for those left out on purpose."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    shape = model.config.get_text_config().to_dict()
    if problem := unread_problem(unread_tensors(names, shape, ignored, override or {})):
        raise ValueError(f"{path}: {problem}")


def load_pickled_model(path: str | Path) -> PreTrainedModel:
    """Loads a model whose weights are pickles alone, which torch reads as `weights_only`, in the type they have."""
    config = load_model_config(path)
    scores = any("Classification" in kind for kind in config.architectures or [])
    auto_class = _auto_class(config, "value" if scores else "lm")
    model: PreTrainedModel = auto_class.from_pretrained(path, config=config, dtype="auto", use_safetensors=False)
    return model


@contextmanager
def holding_load_reports() -> Iterator[list[logging.LogRecord]]:
    """Keeps Transformers' reports of weights that do not match back: a value head in place of the language model's is
    new to it, and no news to us."""
    reports: list[logging.LogRecord] = []

    def passes(record: logging.LogRecord) -> bool:
        if is_report := "LOAD REPORT" in record.getMessage():
            reports.append(record)
        return not is_report

    source = logging.getLogger(modeling_utils.__name__)
    source.addFilter(passes)
    try:
        yield reports
    finally:
        source.removeFilter(passes)


def empty_model(
    path: str | Path,
    attention: str,
    head: str = "lm",
    *,
    dtype: torch.dtype = torch.float32,
    override: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a folder without memory for its parameters; its buffers are real: most are in no file."""
    refuse_quantized(path)
    config = _config_for(head, path, override, trust_remote_code)
    model = _without_memory(_auto_class(config, head), config, attention, dtype, trust_remote_code)
    if (Path(path) / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def empty_causal_lm(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model of this shape without memory for its parameters."""
    return _without_memory(_auto_class(config, "lm"), copy.deepcopy(config), attention, dtype)


def _without_memory(
    auto_class: Any, config: PretrainedConfig, attention: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    with without_memory():
        model = auto_class.from_config(
            config,
            dtype=dtype,
            attn_implementation=_attention_of(config, attention),
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()
    return _with_exact_buffers(model)


def _with_exact_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """Buffers that are weights are float32 whatever the model's type, as trainers read them."""
    for buffer in persistent_buffers(model).values():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return model


def _auto_class(config: PretrainedConfig, head: str) -> Any:
    if head == "value":
        if sees(config):
            raise ValueError(f"not supported yet: values of a model that sees images (model_type {config.model_type})")
        return AutoModelForTokenClassification
    return causal_lm_class(config)


def causal_lm_class(config: PretrainedConfig) -> Any:
    """What builds a model with a language model's head of this config; one that sees is of another kind."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def _attention_of(config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """The same for all layers, but for those that look at images: they see all of an image at once."""
    attention = attention_name(config, attention)
    return {"": attention, "text_config": attention, "vision_config": "sdpa"} if sees(config) else attention


def _config_for(
    head: str, path: str | Path, override: dict[str, Any] | None, trust_remote_code: bool
) -> PretrainedConfig:
    config = load_model_config(path, override, trust_remote_code)
    if head == "value":
        config.num_labels = 1
        # A value model's two ends are different things.
        config.tie_word_embeddings = False
    return config


def is_value_head(name: str) -> bool:
    """Whether a parameter belongs to the head of a value or reward model."""
    return name.split(".")[0] == VALUE_HEAD


def new_causal_lm(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model of this shape with fresh random weights."""
    # A copy: Transformers notes the attention in the config, where the layers of another model of it would read it.
    made = _auto_class(config, "lm").from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation=_attention_of(config, attention)
    )
    return _with_exact_buffers(made)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Loads a tokenizer and makes sure that it has a padding and an end token."""
    if not Path(path).is_dir():
        raise FileNotFoundError(f"no tokenizer at '{path}': expected a folder with tokenizer files")
    if not any((Path(path) / file).is_file() for file in TOKENIZER_FILES):
        raise FileNotFoundError(f"'{path}' has no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    with naming_what_is_damaged(path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer at '{path}' has no eos_token: RL needs one to know where an answer ends")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def run_tokenizer(model: ModelConfig) -> Tokenizer:
    """Load the tokenizer of a run's model, with the chat template that the config gives it."""
    tokenizer = load_tokenizer(model.tokenizer_path or model.path or "", model.trust_remote_code)
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def stop_token_ids(path: str | Path, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an answer: the tokenizer's end token and those of the generation config, if there is one."""
    stops = {int(tokenizer.eos_token_id)}
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        stops.update(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    return sorted(stops)


# Modules built without memory for their parameters, but with real buffers.

META = torch.device("meta")
# Buffers of floats are smaller than this, and a parameter that is not is never allocated, not even for a moment.
LARGE = 1 << 24
FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
)
# Filling what has no memory takes a millisecond a parameter. By name: Transformers puts functions of its own in the
# place of torch's.
FILLS = frozenset({"normal_", "uniform_", "trunc_normal_", "fill_", "constant_", "zero_", "zeros_", "ones_"})


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that this thread makes inside have parameters on the meta device and buffers on the CPU.

    Most buffers, such as rotary frequencies, are computed by the modules themselves and in no file: they must be real.
    """
    thread = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == META or threading.get_ident() != thread:
            return None  # as it is
        return nn.Parameter(parameter.to(META), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with _LargeOnMeta():
            yield
    finally:
        hook.remove()


class _LargeOnMeta(TorchFunctionMode):
    """Makes new tensors of `LARGE` floats and more on the meta device, where the caller names no other, and fills none.

    Others are no parameters but buffers, such as the mask of all positions that some models have.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FILLS and (filled := args[0] if args else kwargs["tensor"]).device == META:
            return filled
        if func in FACTORIES and kwargs.get("device") is None:
            shape_only = func(*args, **(kwargs | {"device": META}))
            if shape_only.numel() >= LARGE and shape_only.is_floating_point():
                return shape_only
        return func(*args, **kwargs)


# Weights that are no parameters: buffers that a model's files hold, such as the bias of DeepSeek-V3's routers.


def buffer_homes(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The buffers that belong to the module's state, as name, owner and the owner's name for it.

    Those that a module computes for itself are left out. Walking through all modules takes longer than looking up.
    """
    return [
        (f"{prefix}.{name}" if prefix else name, part, name)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the module's state, by name."""
    return {name: owner.get_buffer(own) for name, owner, own in buffer_homes(module)}


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Everything that a model's files hold: parameters, tied ones once, and the buffers that belong to its state."""
    return {name: param.detach() for name, param in module.named_parameters()} | persistent_buffers(module)


# What the table of model families says of a loaded model, and what follows from it.

# Stands for the one of Transformers' attention functions that computes a family right.
PLAIN_ATTENTION = "plain"


def shape_of(hf_config: Any) -> dict[str, Any]:
    """The fields of a model's config as `read_model_config` reads them: a language model's fields win."""
    whole, text = hf_config.to_dict(), hf_config.get_text_config().to_dict()
    return {**whole, **text, "model_type": hf_config.model_type}


def check_engine(engine: str, hf_config: Any, on_gpu: bool) -> None:
    """A `ValueError` if a rollout engine would compute the model otherwise than Transformers."""
    why = engine_problem(engine, shape_of(hf_config))
    if why is None and on_gpu and engine == "embedded":
        why = gpu_problem(shape_of(hf_config))
    if why is not None:
        raise ValueError(f"the {engine} engine cannot generate with a {hf_config.model_type} model: {why}")


def check_training(hf_config: Any, packs: bool) -> None:
    """A `ValueError` if packed (or padded) samples would have other log-probs than each has alone."""
    if (why := (packing_problem if packs else padding_problem)(shape_of(hf_config))) is not None:
        how = "share a row" if packs else "be padded"
        raise ValueError(f"samples of a {hf_config.model_type} model cannot {how}: {why}")


def logit_scaling_of(hf_config: Any) -> LogitScaling:
    """What the model does to the product of its head."""
    return logit_scaling(shape_of(hf_config))


def attention_name(hf_config: Any, attention: str) -> str:
    """The name of an attention function; for `PLAIN_ATTENTION` that of the family's row."""
    if attention != PLAIN_ATTENTION:
        return attention
    return (family_of({"model_type": hf_config.model_type}) or Family()).attention


def body_of(hf_model: PreTrainedModel) -> nn.Module:
    """The model without its head; some families' own name for it is that of a model around them."""
    body = hf_model.base_model
    return hf_model.model if body is hf_model else body


@torch.no_grad()
def scale_logits_(logits: Tensor, scaling: LogitScaling) -> Tensor:
    """Scale and soft-cap the product of the head in place."""
    if scaling == UNSCALED:
        return logits
    if scaling.cap is None:
        return logits.mul_(scaling.factor)
    return logits.mul_(scaling.factor / scaling.cap).tanh_().mul_(scaling.cap)
