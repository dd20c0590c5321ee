"""Hugging Face models and tokenizers, loaded from a folder and checked.

- `load_model`, `empty_model`, `new_causal_lm`: a model with its weights, on the meta device, or with random weights.
- `load_tokenizer`, `run_tokenizer`, `stop_token_ids`: tokenizers and end tokens.
- `without_memory`: modules with parameters on the meta device and real buffers.
- `persistent_buffers`, `named_weights`: the tensors of a model's files.
- `check_engine`, `check_training`, `logit_scaling_of`, `body_of`: properties of a model's family.
"""

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

# The name of the head of Transformers' token classifiers.
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
    """Return the torch dtype for a config's name of it, such as `bf16` or `float32`."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype '{name}': use one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def naming_what_is_damaged(folder: str | Path) -> Iterator[None]:
    """Turn an exception inside the context into a `ValueError` that names the damaged file, if there is one.

    Libraries report what is wrong with a file, but not which file it is.
    """
    try:
        yield
    except Exception as error:
        if (problem := damage_of(Path(folder))) is None:
            raise
        raise ValueError(problem) from error


def load_model_config(
    path: str | Path, override: dict[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Load a model folder's config.json and apply `override`; raise a `ValueError` for fields that the model lacks."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model at '{path}': expected a folder with config.json")
    with naming_what_is_damaged(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for name, value in (override or {}).items():
        # Most fields of a VLM's config belong to its language model.
        owner = config if hasattr(config, name) else config.get_text_config()
        if not hasattr(owner, name):
            raise ValueError(f"model.override_config.{name}: {type(config).__name__} has no field '{name}'")
        setattr(owner, name, value)
    return config


def refuse_quantized(path: str | Path) -> None:
    """Raise a `ValueError` for a folder with quantized weights, which would be wrong numbers if read as they are."""
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
    """Load a model on the CPU with this attention function and head; every weight must be in the folder.

    A value head that the folder does not have starts at zero, so the values are zero too. Raise a `ValueError` that
    names what in the folder does not fit the model.
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
    """Raise a `ValueError` for a folder whose tensors do not match its config.json, as far as file headers show."""
    if problem := next(iter(misfit_problems(Path(path), override or {})), None):
        raise ValueError(problem)


def refuse_unread(
    path: str | Path, names: Collection[str], model: PreTrainedModel, override: Mapping[str, Any] | None = None
) -> None:
    """Raise a `ValueError` for tensors of a folder that the model has no place for and does not ignore on purpose."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    shape = model.config.get_text_config().to_dict()
    if problem := unread_problem(unread_tensors(names, shape, ignored, override or {})):
        raise ValueError(f"{path}: {problem}")


def load_pickled_model(path: str | Path) -> PreTrainedModel:
    """Load a model that has only pickled weights, with torch's `weights_only`, in the dtype of the weights."""
    config = load_model_config(path)
    scores = any("Classification" in kind for kind in config.architectures or [])
    auto_class = _auto_class(config, "value" if scores else "lm")
    model: PreTrainedModel = auto_class.from_pretrained(path, config=config, dtype="auto", use_safetensors=False)
    return model


@contextmanager
def holding_load_reports() -> Iterator[list[logging.LogRecord]]:
    """Hold back Transformers' reports of weights that do not match, and yield the list of them.

    A value head in place of the language model's head always causes such a report, and it is expected.
    """
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
    """Build a folder's model with parameters on the meta device and real buffers, most of which are in no file."""
    refuse_quantized(path)
    config = _config_for(head, path, override, trust_remote_code)
    model = _without_memory(_auto_class(config, head), config, attention, dtype, trust_remote_code)
    if (Path(path) / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def empty_causal_lm(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a causal language model of this config with parameters on the meta device."""
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
    """Convert floating-point buffers that are weights to float32, whatever the model's dtype, as trainers read them."""
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
    """Return the auto class that builds a language model of this config; VLMs have another class."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def _attention_of(config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """Return the attention function by part of the model.

    It is the same for all layers, except in the vision tower, whose layers see all of an image at once.
    """
    attention = attention_name(config, attention)
    return {"": attention, "text_config": attention, "vision_config": "sdpa"} if sees(config) else attention


def _config_for(
    head: str, path: str | Path, override: dict[str, Any] | None, trust_remote_code: bool
) -> PretrainedConfig:
    config = load_model_config(path, override, trust_remote_code)
    if head == "value":
        config.num_labels = 1
        # A value model's head is not the transpose of its embedding.
        config.tie_word_embeddings = False
    return config


def is_value_head(name: str) -> bool:
    """Return whether a parameter belongs to the head of a value or reward model."""
    return name.split(".")[0] == VALUE_HEAD


def new_causal_lm(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a causal language model of this config with new random weights."""
    # A copy: Transformers stores the attention in the config, which the layers of other models may share.
    made = _auto_class(config, "lm").from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation=_attention_of(config, attention)
    )
    return _with_exact_buffers(made)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Load a tokenizer and make sure that it has a padding token and an end token."""
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
    """Load the tokenizer of a run's model, with the chat template that the config sets."""
    tokenizer = load_tokenizer(model.tokenizer_path or model.path or "", model.trust_remote_code)
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def stop_token_ids(path: str | Path, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a response.

    They are the tokenizer's end token and the end tokens of the generation config, if there is one.
    """
    stops = {int(tokenizer.eos_token_id)}
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        stops.update(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    return sorted(stops)


# Modules built without memory for their parameters, but with real buffers.

META = torch.device("meta")
# Floating-point buffers have fewer elements than this. Parameters with more elements are never allocated.
LARGE = 1 << 24
FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
)
# Filling a tensor on the meta device takes a millisecond per parameter. These are names, because Transformers replaces
# torch's functions with its own.
FILLS = frozenset({"normal_", "uniform_", "trunc_normal_", "fill_", "constant_", "zero_", "zeros_", "ones_"})


@contextmanager
def without_memory() -> Iterator[None]:
    """Build modules with parameters on the meta device and buffers on the CPU, in this thread, inside the context.

    Modules compute most buffers, such as rotary frequencies, themselves. These buffers are in no file, so they must be
    real.
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
    """A torch function mode that makes large new tensors on the meta device, and skips filling them.

    It applies to floating-point tensors of at least `LARGE` elements, if the caller names no device. Other large
    tensors are not parameters but buffers, such as the mask of all positions in some models.
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


# Weights that are not parameters: buffers that a model's files hold, such as the bias of DeepSeek-V3's routers.


def buffer_homes(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the buffers that belong to the module's state, as (name, owner, name within the owner).

    Buffers that a module computes for itself are left out. The result can be kept, because walking through all modules
    takes longer than looking a buffer up.
    """
    return [
        (f"{prefix}.{name}" if prefix else name, part, name)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the module's state, by name."""
    return {name: owner.get_buffer(own) for name, owner, own in buffer_homes(module)}


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of a model's files: parameters (tied ones once) and the buffers of the model's state."""
    return {name: param.detach() for name, param in module.named_parameters()} | persistent_buffers(module)


# Properties of a loaded model, from the table of model families.

# Stands for the attention function of Transformers that computes a family correctly.
PLAIN_ATTENTION = "plain"


def shape_of(hf_config: Any) -> dict[str, Any]:
    """Return the fields of a model's config as `read_model_config` does: a language model's fields win."""
    whole, text = hf_config.to_dict(), hf_config.get_text_config().to_dict()
    return {**whole, **text, "model_type": hf_config.model_type}


def check_engine(engine: str, hf_config: Any, on_gpu: bool) -> None:
    """Raise a `ValueError` if a rollout engine would compute the model differently from Transformers."""
    why = engine_problem(engine, shape_of(hf_config))
    if why is None and on_gpu and engine == "embedded":
        why = gpu_problem(shape_of(hf_config))
    if why is not None:
        raise ValueError(f"the {engine} engine cannot generate with a {hf_config.model_type} model: {why}")


def check_training(hf_config: Any, packs: bool) -> None:
    """Raise a `ValueError` if packed (or padded) samples would have other log-probs than each sample alone."""
    if (why := (packing_problem if packs else padding_problem)(shape_of(hf_config))) is not None:
        how = "share a row" if packs else "be padded"
        raise ValueError(f"samples of a {hf_config.model_type} model cannot {how}: {why}")


def logit_scaling_of(hf_config: Any) -> LogitScaling:
    """Return the scaling and soft cap that the model applies to the output of its head."""
    return logit_scaling(shape_of(hf_config))


def attention_name(hf_config: Any, attention: str) -> str:
    """Return the name of an attention function; `PLAIN_ATTENTION` becomes the one of the model's family."""
    if attention != PLAIN_ATTENTION:
        return attention
    return (family_of({"model_type": hf_config.model_type}) or Family()).attention


def body_of(hf_model: PreTrainedModel) -> nn.Module:
    """Return the model without its head; for some families `base_model` is the whole model."""
    body = hf_model.base_model
    return hf_model.model if body is hf_model else body


@torch.no_grad()
def scale_logits_(logits: Tensor, scaling: LogitScaling) -> Tensor:
    """Scale and soft-cap the output of the head in place."""
    if scaling == UNSCALED:
        return logits
    if scaling.cap is None:
        return logits.mul_(scaling.factor)
    return logits.mul_(scaling.factor / scaling.cap).tanh_().mul_(scaling.cap)
