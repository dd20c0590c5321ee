"""Whether the tensors in a model's safetensors files are those of its config.json, by the files' headers alone."""

import re
import struct
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.config.model_folder import EXPERT_COUNTS, read_header, read_json
from meshrl.config.names import count

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Layers that predict further tokens; files have them behind the model's own, and nobody trains them.
FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers")
FURTHER_PARTS = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)(\.|$)")
# The decoder's layers; towers call theirs the same, below other names.
LAYER = re.compile(
    r"^(?:(?:model|language_model|text_model|transformer|gpt_neox|decoder|backbone)\.)*"
    r"(?:layers|h|blocks)\.(?P<number>\d+)\."
)
EXPERT = re.compile(r"\.experts\.(?P<number>\d+)\.")
EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
# Families whose embeddings have more rows than the config says.
PADDED = ("moshi", "mllama", "mllama_text_model")
# Buffers that older files hold and modules compute: rotary frequencies, causal masks, positions.
BUFFERS = re.compile(
    r"(inv_freq|\.(attn|attention|crossattention)\.(bias|masked_bias)|position_ids|num_batches_tracked)$"
)
# What makes tokens or scores of hidden states: a folder may hold the one that is not asked for, or a tied one.
HEADS = re.compile(r"^(lm_head|score|classifier|embed_out)\.")
# Parts beside a decoder that a language model does not load.
OTHER_PARTS = re.compile(
    r"(^|\.)(visual|vision\w*|audio\w*|speech\w*|image\w*|video\w*|\w*projector|connector|mtp\w*|v_head|talker|token2wav)\."
)


def stored_tensors(folder: Path) -> dict[str, dict[str, Any]]:
    """The `dtype` and `shape` of each tensor that would be read from a folder; empty without safetensors.

    A tensor that the index names and its file does not hold has none. Files that cannot be read are another check's.
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
    del changed  # a file that was written anew is read anew
    return read_header(file)[1]


def misfit_problems(folder: Path, override: Mapping[str, Any]) -> list[str]:
    """What of a folder's tensors does not fit its config.json: their types, layers, experts and embeddings.

    Counts and sizes that `override` sets are the user's own: tensors beyond them are left out on purpose.
    """
    tensors, file = stored_tensors(folder), folder / "config.json"
    if not tensors or not file.is_file():
        return []
    try:
        values = read_json(file)
    except ValueError:
        return []
    if not isinstance(values, dict) or values.get("quantization_config"):
        return []  # which other checks refuse
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
    """Name the weights that are no floats of 16 bits or more: they would be read as other numbers."""
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
    """Whether a tensor is a weight and no float; masks and tables of indices are of truth values and whole numbers."""
    if dtype in FLOATS or BUFFERS.search(name):
        return False
    return dtype not in ("BOOL", "I64", "I32", "U64", "U32") or name.endswith(("weight", "_proj"))


def layer_number(name: str) -> int | None:
    """The number of the decoder's layer that a tensor belongs to."""
    return int(found["number"]) if (found := LAYER.match(name)) else None


def further_layers(names: Collection[str], shape: Mapping[str, Any]) -> set[int]:
    """The numbers of layers behind the model's own that predict further tokens, by the config or by their parts."""
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
    # Some have experts that give back what they get, beside those that are counted.
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
    # Some have narrower embeddings than hidden states.
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
    """Of the tensors of a model's files that its modules have no place for, those that are not left out on purpose.

    Left out on purpose are heads, buffers that modules compute, what the family itself leaves out (`ignored`, regular
    expressions), layers that predict further tokens, parts beside the decoder, and what `override` cuts off.
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
    """What is wrong with weights that a model has no place for, in words; None if there are none."""
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
    """How many tensors these are, and the first of them."""
    first = next(iter(names))
    return f"'{first}'" if len(names) == 1 else f"{count(len(names), 'tensor')}, such as '{first}',"
