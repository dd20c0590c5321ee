"""Checks of a model's folder: completeness, config.json, tokenizer and safetensors headers.

* `folder_problems`, `tensor_file_problems`, `damage_of`: missing, truncated or damaged files.
* `read_model_config`, `fit_problems`: config.json, and the division of the model over an engine's ranks.
* `misfit_problems`, `unread_tensors`: tensors in the files that contradict config.json or have no place in the model.

Weights are never read: safetensors headers suffice.
"""

import json
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.config.engine import EngineConfig, ModelConfig
from meshrl.config.families import ATTENTION_KINDS, GATED_DELTA, LAYER_KINDS, megatron_problems
from meshrl.config.keys import count
from meshrl.files import read_json

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# A vision-language model has one of these files, which describes the preprocessing of images.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
STATE_KEYS = (
    "linear_num_",
    "linear_conv_",
    "linear_attn_",
    "mamba_",
    "ssm_",
    "state_size",
    "conv_L_cache",
    "lru_width",
)
TOKENIZER_JSON = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
WEIGHT_FILES = ("*.safetensors", "*.index.json")
# Weights and adapters as pickles. They are not read, because reading a pickle runs its code.
PICKLED_WEIGHTS = "*.bin"
# The size in bytes above which only the ends of a JSON file are checked, so that the check of a config is quick.
MOST_PARSED = 2**24
LONGEST_HEADER = 100_000_000  # safetensors' own limit


def is_hub_name(path: str) -> bool:
    """Return whether a path must be the name of a model on the hub: `owner/name`, and no folder `owner` exists."""
    return HUB_NAME.fullmatch(path) is not None and not Path(path).parent.exists()


def folder_problems(model: ModelConfig, prefix: str) -> list[str]:
    """Check that the model's folder has a config, readable weights and a tokenizer, and check the adapter's folder."""
    if not model.path:
        return [f"set {prefix}.path to the folder of a Hugging Face model"]
    folder = Path(model.path)
    if not folder.is_dir():
        return [
            f"{prefix}.path={model.path} is not a folder, and not whole in the hub's cache: a run downloads it; "
            f"'hf download {model.path}' does so now"
            if is_hub_name(model.path)
            else f"{prefix}.path={model.path} is not a folder; download the model there first"
        ]
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(f"{prefix}.path={model.path} has no config.json")
    if not model.random_init and (pickled := pickle_problem(folder)):
        problems.append(f"{prefix}.path: {pickled}")
    elif not model.random_init and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        problems.append(f"{prefix}.path={model.path} has no weights (none of {', '.join(WEIGHT_FILES)})")
    if not model.random_init:
        problems += [f"{prefix}.path: {problem}" for problem in tensor_file_problems(folder)]
    tokenizer, name = (Path(model.tokenizer_path), "tokenizer_path") if model.tokenizer_path else (folder, "path")
    if not any((tokenizer / file).is_file() for file in TOKENIZER_FILES):
        problems.append(f"{prefix}.{name}={tokenizer} has no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    problems += [f"{prefix}.{name}: {problem}" for problem in _json_problems(tokenizer, TOKENIZER_JSON)]
    problems += [f"{prefix}.path: {problem}" for problem in _json_problems(folder, ("generation_config.json",))]
    if model.lora_adapter_path and not (Path(model.lora_adapter_path) / "adapter_config.json").is_file():
        problems.append(f"{prefix}.lora_adapter_path={model.lora_adapter_path} has no adapter_config.json")
    elif model.lora_adapter_path and (pickled := pickle_problem(Path(model.lora_adapter_path))):
        problems.append(f"{prefix}.lora_adapter_path: {pickled}")
    return problems


def pickle_problem(folder: Path) -> str | None:
    """Return a message if a folder has weights as pickles only, or None."""
    if any(folder.glob("*.safetensors")):
        return None
    found = next((file.name for file in sorted(folder.glob(PICKLED_WEIGHTS))), None)
    return found and (
        f"{folder} has no safetensors, only pickles ({found}), which run what they say when they are read: take it in "
        f"safetensors or, if you trust it, make them with 'meshrl convert {folder} NEW --trust-pickle'"
    )


def _json_problems(folder: Path, names: Sequence[str]) -> list[str]:
    """Return one message for each existing file that is not a JSON object: truncated, or a pointer of git-lfs."""
    files = [folder / name for name in names if (folder / name).is_file()]
    return [problem for file in files if (problem := _json_problem(file, file.stat().st_mtime_ns))]


@cache
def _json_problem(file: Path, changed: int) -> str | None:
    # Cached by file and time of change: several roles share a tokenizer, whose file may have ten megabytes.
    del changed
    if (size := file.stat().st_size) > MOST_PARSED:
        text = file.read_bytes().strip()
        whole = text.startswith(b"{") and text.endswith(b"}")
        return None if whole else f"{file} ({size} bytes) is no whole JSON object: it is truncated or damaged"
    try:
        return None if isinstance(read_json(file), dict) else f"{file} must hold a JSON object"
    except ValueError as error:
        return str(error)


def tensor_file_problems(folder: Path) -> list[str]:
    """Return one message for each safetensors file that is missing or incomplete. Only the headers are read."""
    problems = [problem for file in sorted(folder.glob("*.safetensors")) if (problem := _tensor_file_problem(file))]
    index = folder / "model.safetensors.index.json"
    return problems + (_missing_parts(index) if index.is_file() else [])


def _missing_parts(index: Path) -> list[str]:
    """Return a message if files in an index are missing, as after an interrupted download, or the index is invalid."""
    try:
        named = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return [f"{index} names no files of weights: {error}"]
    if outside := [name for name in named if Path(name).is_absolute() or ".." in Path(name).parts]:
        return [f"{index} names {outside[0]}, which does not lie in its folder"]
    missing = [name for name in named if not (index.parent / name).is_file()]
    if not missing:
        return []
    return [
        f"{index} names {count(len(named), 'file')} of weights, of which {len(missing)} are not there, such as "
        f"{missing[0]}"
    ]


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Read a safetensors file's header. Return its length in bytes and the entry of each tensor."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(min(length, LONGEST_HEADER)))
    return length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def _tensor_file_problem(file: Path) -> str | None:
    size = file.stat().st_size
    try:
        length, header = read_header(file)
        ends = [entry["data_offsets"][1] for entry in header.values()]
    except (struct.error, ValueError, TypeError, LookupError, AttributeError):
        return f"{file} ({size} bytes) has no header of safetensors: it is truncated or damaged"
    wanted = 8 + length + max(ends, default=0)
    return None if size == wanted else f"{file} has {size} of {wanted} bytes: it is truncated or damaged"


def damage_of(folder: Path) -> str | None:
    """Return a message about the first damaged file in a model's folder (JSON or safetensors), or None."""
    for file in sorted(folder.glob("*.json")):
        try:
            read_json(file)
        except ValueError as error:
            return str(error)
    return next(iter(tensor_file_problems(folder)), None)


def quantized_problem(folder: Path) -> str | None:
    """Return a message if a folder's weights are quantized, or None.

    Quantized weights are refused, because engines compute with the numbers in the files. Raise `ValueError` if the
    config cannot be read.
    """
    file = folder / "config.json"
    values = read_json(file) if file.is_file() else {}
    how = values.get("quantization_config") if isinstance(values, dict) else None
    if not how:
        return None
    method = how.get("quant_method", "unknown") if isinstance(how, dict) else how
    return (
        f"{folder} holds quantized weights (quantization_config.quant_method={method} in its config.json): take the "
        "model in bfloat16 or float32, or convert it first (in Transformers: load it with dequantize=True and save it)"
    )


def classifier_problem(model: ModelConfig, shape: dict[str, Any]) -> str | None:
    """Return a message if a folder holds a classifier instead of a language model, or None."""
    kinds = [str(kind) for kind in shape.get("architectures") or []]
    if model.random_init or not kinds or not all(kind.endswith("Classification") for kind in kinds):
        return None
    return (
        f"{model.path} holds {', '.join(kinds)}, a model that scores tokens and has learned to predict none: take a "
        "language model (this one can be reward_model.model.path or critic.model.path)"
    )


def read_model_config(model: ModelConfig) -> dict[str, Any]:
    """Read config.json, with its `text_config` merged in and `override_config` applied.

    The result is empty if there is no such file. Raise `ValueError` if the file cannot be read.
    """
    file = Path(model.path or "") / "config.json"
    if not model.path or not file.is_file():
        return {}
    values = read_json(file)
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object")
    own = {name: values[name] for name in ("model_type",) if name in values}
    return {**values, **values.get("text_config", {}), **own, **model.override_config}


def has_processor(folder: str | Path) -> bool:
    """Return whether a model's folder has a config of image preprocessing."""
    return any((Path(folder) / name).is_file() for name in PROCESSOR_FILES)


def stateful_layers(shape: dict[str, Any]) -> str | None:
    """Return a sign in config.json of recurrent layers, whose state meshrl cannot keep, or None.

    The sign is a kind of layers or the name of a field. Families with gated delta attention are supported.
    """
    if shape.get("model_type") in GATED_DELTA:
        return None
    kinds = next((shape[name] for name in LAYER_KINDS if shape.get(name)), None)
    if kinds is not None:
        others = sorted({str(kind) for kind in kinds} - {*ATTENTION_KINDS, "chunked_attention", "mlp", "moe"})
        return f"layers of the kind {others[0]}" if others else None
    return next((name for name in shape if name.startswith(STATE_KEYS)), None)


def fit_problems(shape: dict[str, Any], engine: EngineConfig, prefix: str) -> list[str]:
    """Check that the engine can compute the model, and that heads, layers and experts divide over its ranks."""
    problems = []
    heads = shape.get("num_attention_heads")
    for name, size in _head_splits(engine).items():
        if heads is not None and heads % size:
            problems.append(f"the model's num_attention_heads ({heads}) must be divisible by {prefix}.{name} ({size})")
    heads, shared_by = shape.get("linear_num_value_heads"), engine.ulysses_sequence_parallel_size
    shared_by *= engine.context_parallel_size
    if heads is not None and engine.strategy != "megatron" and heads % shared_by:
        problems.append(
            f"the model's linear_num_value_heads ({heads}) must be divisible by "
            f"{prefix}.ulysses_sequence_parallel_size * context_parallel_size ({shared_by})"
        )
    if engine.strategy == "megatron":
        problems += megatron_problems(shape) if "model_type" in shape else []
        if "num_hidden_layers" in shape:
            problems += _stage_problems(shape["num_hidden_layers"], engine, f"{prefix}.megatron")
        problems += _tensor_problems(shape, engine, f"{prefix}.megatron")
        problems += _expert_problems(shape, engine, f"{prefix}.megatron")
    return problems


def _tensor_problems(shape: dict[str, Any], engine: EngineConfig, prefix: str) -> list[str]:
    """Check that key-value heads and the intermediate size divide over Megatron's tensor-parallel ranks."""
    tp, problems = engine.megatron.tensor_model_parallel_size, []
    groups, width = shape.get("num_key_value_heads"), shape.get("intermediate_size")
    if groups is not None and groups % tp and tp % groups:
        problems.append(
            f"the model's num_key_value_heads ({groups}) must be divisible by {prefix}.tensor_model_parallel_size "
            f"({tp}), or the other way round"
        )
    if width is not None and width % tp:
        problems.append(
            f"the model's intermediate_size ({width}) must be divisible by {prefix}.tensor_model_parallel_size ({tp})"
        )
    return problems


def _expert_problems(shape: dict[str, Any], engine: EngineConfig, prefix: str) -> list[str]:
    """Check that the experts and their width divide over Megatron's expert ranks.

    For a model without experts, the keys of expert parallelism must not be set.
    """
    megatron = engine.megatron
    experts = next((shape[name] for name in EXPERT_COUNTS if shape.get(name)), 0)
    ep, tp = megatron.expert_model_parallel_size, megatron.tensor_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    if not experts:
        given = {"expert_model_parallel_size": ep if ep > 1 else None}
        given["expert_tensor_parallel_size"] = megatron.expert_tensor_parallel_size
        return [
            f"{prefix}.{name}={size} needs a model with experts" for name, size in given.items() if size is not None
        ]
    problems = []
    if experts % ep:
        problems.append(
            f"the model's {experts} experts must be divisible by {prefix}.expert_model_parallel_size ({ep})"
        )
    width = shape.get("moe_intermediate_size") or shape.get("intermediate_size")
    if width is not None and width % etp:
        problems.append(
            f"the width of the model's experts ({width}) must be divisible by "
            f"{prefix}.expert_tensor_parallel_size ({etp})"
        )
    if tp > 1 and not megatron.sequence_parallel:
        problems.append(
            f"a model with experts on {tp} tensor-parallel ranks needs {prefix}.sequence_parallel=true to be trained"
        )
    return problems


def _head_splits(engine: EngineConfig) -> dict[str, int]:
    if engine.strategy == "megatron":
        return {"megatron.tensor_model_parallel_size": engine.megatron.tensor_model_parallel_size}
    return {"ulysses_sequence_parallel_size": engine.ulysses_sequence_parallel_size}


def _stage_problems(layers: int, engine: EngineConfig, prefix: str) -> list[str]:
    """Check that the layers divide over the pipeline's stages.

    If the first or last stage has its own size, the middle stages share the remaining layers equally.
    """
    megatron = engine.megatron
    given = megatron.override_transformer_config
    if given.get("pipeline_model_parallel_layout"):
        return _written_out_problems(layers, given["pipeline_model_parallel_layout"], engine, prefix)
    first, last = given.get("num_layers_in_first_pipeline_stage"), given.get("num_layers_in_last_pipeline_stage")
    own = [size for size in (first, last) if size is not None]
    pp, vpp = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    # The embedding and the loss may each count as a layer.
    counted = sum(bool(given.get(f"account_for_{name}_in_pipeline_split")) for name in ("embedding", "loss"))
    middle, left = pp - len(own), layers - sum(own) + counted
    if left < 0 or (middle == 0 and left) or (middle and left % (middle * vpp)) or any(size % vpp for size in own):
        stages = count(layers, "layer") if not own else f"{count(layers, 'layer')}, less {' and '.join(map(str, own))}"
        return [
            f"the model's num_hidden_layers ({stages}) must be divisible by {prefix}.pipeline_model_parallel_size "
            f"* virtual_pipeline_model_parallel_size ({middle} * {vpp}); change them, or write the stages out in "
            f"override_transformer_config.pipeline_model_parallel_layout"
        ]
    return []


def written_stages(layout: str | list[Any]) -> list[str]:
    """Split a `pipeline_model_parallel_layout` in Megatron-Core's notation into its model chunks, one string each.

    E is the embedding, t a transformer layer and L the loss. | ends a chunk, and x*n or (...)*n repeats.
    """
    if not isinstance(layout, str):
        return ["".join(chunk) for chunk in layout]
    text = layout.replace(",", "")
    for repeated in (r"([^)])\*(\d+)", r"\(([^()]*)\)\*(\d+)"):
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    return text.split("|")


def _written_out_problems(layers: int, layout: str | list[Any], engine: EngineConfig, prefix: str) -> list[str]:
    megatron, chunks = engine.megatron, written_stages(layout)
    pp, vpp = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    name = f"{prefix}.override_transformer_config.pipeline_model_parallel_layout"
    problems = []
    if len(chunks) != pp * vpp:
        problems.append(
            f"{name} has {count(len(chunks), 'chunk')}; pipeline_model_parallel_size * "
            f"virtual_pipeline_model_parallel_size ask for {pp} * {vpp} = {pp * vpp}"
        )
    written = sum(chunk.count("t") for chunk in chunks)
    if written != layers:
        problems.append(f"{name} places {count(written, 'layer')}; the model has num_hidden_layers={layers}")
    return problems


# Checks that the tensors in a model's safetensors files match its config.json. Only the files' headers are read.

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Layers for multi-token prediction. Files number them after the model's own layers, and meshrl does not train them.
FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers")
FURTHER_PARTS = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)(\.|$)")
# Layers of the decoder. Vision and audio towers use the same layer names below other prefixes.
LAYER = re.compile(
    r"^(?:(?:model|language_model|text_model|transformer|gpt_neox|decoder|backbone)\.)*"
    r"(?:layers|h|blocks)\.(?P<number>\d+)\."
)
EXPERT = re.compile(r"\.experts\.(?P<number>\d+)\.")
EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
# Families whose embeddings have more rows than `vocab_size` in config.json.
PADDED = ("moshi", "mllama", "mllama_text_model")
# Buffers that older files hold although modules compute them: rotary frequencies, causal masks, positions.
BUFFERS = re.compile(
    r"(inv_freq|\.(attn|attention|crossattention)\.(bias|masked_bias)|position_ids|num_batches_tracked)$"
)
# Output heads for tokens or scores. A folder may hold a head that the run does not use, or a tied head.
HEADS = re.compile(r"^(lm_head|score|classifier|embed_out)\.")
# Parts of a multimodal model that its language model does not load.
OTHER_PARTS = re.compile(
    r"(^|\.)(visual|vision\w*|audio\w*|speech\w*|image\w*|video\w*|\w*projector|connector|mtp\w*|v_head|talker|token2wav)\."
)


def stored_tensors(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the `dtype` and `shape` of each tensor that would be loaded from a folder.

    The entry is empty for a tensor that the index names and its file does not hold. The result is empty without
    safetensors files, and if a file cannot be read (`tensor_file_problems` reports that).
    """
    index, single = folder / INDEX, folder / SINGLE
    try:
        if index.is_file():
            found: dict[str, dict[str, Any]] = {}
            for name, file in read_json(index)["weight_map"].items():
                found[str(name)] = _header(folder / file, (folder / file).stat().st_mtime_ns).get(name, {})
            return found
        return dict(_header(single, single.stat().st_mtime_ns)) if single.is_file() else {}
    except (OSError, struct.error, ValueError, TypeError, LookupError, AttributeError):
        return {}


@cache
def _header(file: Path, changed: int) -> dict[str, Any]:
    del changed  # a part of the cache's key: a changed file is read again
    return read_header(file)[1]


def misfit_problems(folder: Path, override: Mapping[str, Any]) -> list[str]:
    """Return one message for each way in which a folder's tensors contradict its config.json.

    Dtypes and the numbers of layers, experts and embeddings are compared. Counts and sizes that `override` sets are
    not compared, because the user leaves out tensors on purpose.
    """
    tensors, file = stored_tensors(folder), folder / "config.json"
    if not tensors or not file.is_file():
        return []
    try:
        values = read_json(file)
    except ValueError:
        return []
    if not isinstance(values, dict) or values.get("quantization_config"):
        return []  # other checks refuse these
    text = values.get("text_config")
    shape = {**values, **(text if isinstance(text, dict) else {})}
    found = [_index_problem(tensors), type_problem(tensors)]
    if not override.keys() & set(LAYER_COUNTS):
        found.append(_layer_problem(tensors, shape))
    if not override.keys() & set(EXPERT_COUNTS):
        found.append(_expert_problem(tensors, shape))
    if not override.keys() & {"vocab_size", "hidden_size"}:
        found.append(_embedding_problem(tensors, shape))
    return [f"{folder}: {problem}" for problem in found if problem is not None]


def _index_problem(tensors: Mapping[str, Mapping[str, Any]]) -> str | None:
    lost = [name for name, entry in tensors.items() if not entry]
    if not lost:
        return None
    named = _some(lost).rstrip(",")
    return f"{INDEX} names {named}, which its file does not hold: the download is not whole, or files were mixed"


def type_problem(tensors: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a message if weights are not floats of at least 16 bits, or None. Engines would misread such weights."""
    wrong = [name for name, entry in tensors.items() if "dtype" in entry and _is_of_wrong_type(name, entry["dtype"])]
    if not wrong:
        return None
    found, verb = tensors[wrong[0]], "is" if len(wrong) == 1 else "are"
    return (
        f"{_some(wrong)} ({found['dtype']} {found.get('shape')}) {verb} no float of 16 bits or more, and config.json "
        "has no quantization_config: numbers of a quantized model would be read as they are. Take the model in "
        "bfloat16 or float32"
    )


def _is_of_wrong_type(name: str, dtype: str) -> bool:
    """Return whether a tensor is a weight but not a float. Masks (bools) and index tables (integers) are permitted."""
    if dtype in FLOATS or BUFFERS.search(name):
        return False
    return dtype not in ("BOOL", "I64", "I32", "U64", "U32") or name.endswith(("weight", "_proj"))


def layer_number(name: str) -> int | None:
    """Return the number of the decoder layer to which a tensor belongs, or None."""
    return int(found["number"]) if (found := LAYER.match(name)) else None


def further_layers(names: Collection[str], shape: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the layers for multi-token prediction, which follow the model's own layers.

    They are found by fields of the config or by the names of their parts.
    """
    layers = _first(shape, LAYER_COUNTS)
    counted = max(int(shape.get(field) or 0) for field in FURTHER_LAYERS)
    parts = {layer_number(name) for name in names if FURTHER_PARTS.search(name)}
    return {*range(layers, layers + counted), *(number for number in parts if number is not None and number >= layers)}


def _layer_problem(tensors: Collection[str], shape: Mapping[str, Any]) -> str | None:
    layers = _first(shape, LAYER_COUNTS)
    numbers = {name: number for name in tensors if (number := layer_number(name)) is not None}
    if not layers or not numbers:
        return None
    field = next(field for field in LAYER_COUNTS if shape.get(field))
    further = further_layers(tensors, shape)
    held = f"config.json has {field}={layers}, and the files hold {count(len({*numbers.values()} - further), 'layer')}"
    if lost := sorted(set(range(layers)) - {*numbers.values()}):
        return f"{held}: there is no tensor of layer {lost[0]}. Take the config.json that belongs to the files"
    extra = [name for name, number in numbers.items() if number >= layers and number not in further]
    if not extra:
        return None
    return (
        f"{held}: {_some(extra)} would be read by nothing. Take the config.json that belongs to the files, or say "
        f"that fewer layers are meant: override_config.{field}={layers}"
    )


def _expert_problem(tensors: Collection[str], shape: Mapping[str, Any]) -> str | None:
    experts = _first(shape, EXPERT_COUNTS)
    found = {int(match["number"]) for name in tensors if LAYER.match(name) and (match := EXPERT.search(name))}
    # Some models have identity experts (`zero_expert_num`) in addition to the counted experts.
    if not found or not experts or len(found) == experts + (shape.get("zero_expert_num") or 0):
        return None
    field = next(field for field in EXPERT_COUNTS if shape.get(field))
    return (
        f"config.json has {field}={experts}, and the files hold {count(len(found), 'expert')} of a layer: take the "
        "config.json that belongs to the files"
    )


def _embedding_problem(tensors: Mapping[str, Mapping[str, Any]], shape: Mapping[str, Any]) -> str | None:
    name = next((name for name in tensors if EMBEDDINGS.search(name) and not OTHER_PARTS.search(name)), None)
    sizes = [shape.get("vocab_size"), shape.get("hidden_size")]
    # In some models embeddings are narrower than hidden states.
    of_another_size = {"word_embed_proj_dim", "embedding_size"} & shape.keys() or shape.get("model_type") in PADDED
    if name is None or not all(sizes) or of_another_size:
        return None
    found = tensors[name].get("shape")
    if found is None or list(found) == sizes:
        return None
    return (
        f"'{name}' is {found}, and config.json has vocab_size={sizes[0]} and hidden_size={sizes[1]}: take the "
        "config.json that belongs to the files"
    )


def unread_tensors(
    names: Collection[str], shape: Mapping[str, Any], ignored: Collection[str], override: Mapping[str, Any]
) -> list[str]:
    """Filter the names of tensors without a place in the model. Return the names that are not left out on purpose.

    These tensors are left out on purpose: heads, buffers that modules compute, tensors that the family ignores
    (`ignored`, regular expressions), layers for multi-token prediction, parts other than the decoder, and layers
    beyond the number in `override`.
    """
    left_out = [re.compile(pattern) for pattern in ignored]
    cuts_layers = bool(override.keys() & set(LAYER_COUNTS))
    layers, further = _first(shape, LAYER_COUNTS), further_layers(names, shape)
    return [
        name
        for name in sorted(names)
        if not any(pattern.search(name) for pattern in (*left_out, HEADS, BUFFERS, OTHER_PARTS))
        and layer_number(name) not in further
        and not (cuts_layers and (layer_number(name) or 0) >= layers)
    ]


def unread_problem(names: Collection[str]) -> str | None:
    """Return a message about weights without a place in the model, or None if there are no such weights."""
    if not names:
        return None
    return (
        f"{_some(names)} would be read by nothing: the model of this config.json has no such weights. Take the "
        "config.json that belongs to the files"
    )


def _first(shape: Mapping[str, Any], names: Collection[str]) -> int:
    found = next((shape[name] for name in names if isinstance(shape.get(name), int)), 0)
    return int(found)


def _some(names: Collection[str]) -> str:
    """Describe the number of tensors and the name of the first, for a message."""
    first = next(iter(names))
    return f"'{first}'" if len(names) == 1 else f"{count(len(names), 'tensor')}, such as '{first}',"
