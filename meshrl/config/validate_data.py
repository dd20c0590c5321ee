"""Checks of the data: how it is read and ordered, the files and their columns, and variables of the chat template."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.engine import ModelConfig
from meshrl.config.keys import MODEL, changed_keys, count
from meshrl.config.rl import PPOConfig
from meshrl.config.supervised import PreferenceConfig, SFTDataConfig, SupervisedConfig
from meshrl.config.user_code import load_function, positional_problem


def data_problems(config: PPOConfig) -> list[str]:
    """Check weights of files, streaming, samplers and custom data classes, which partly exclude each other."""
    return [
        *_weight_problems(config),
        *_streaming_problems(config),
        *_sampler_problems(config),
        *_custom_problems(config),
        *sample_problems(config),
    ]


def sample_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Check the limits on the number of rows (`train_max_samples`, `val_max_samples`)."""
    data, batch = config.data, prompts_of_a_batch(config)
    problems = [
        f"data.{name}=0 leaves no row; -1 takes all"
        for name in ("train_max_samples", "val_max_samples")
        if getattr(data, name) == 0
    ]
    if 0 < data.train_max_samples < batch:
        problems.append(f"data.train_max_samples ({data.train_max_samples}) is fewer than one batch of {batch}")
    return problems


def _weight_problems(config: PPOConfig) -> list[str]:
    weights, files = config.data.train_weights, config.data.train_files
    if not weights:
        return []
    if files and len(weights) != len(files):
        return [f"data.train_weights has {len(weights)} entries for {len(files)} data.train_files: give one each"]
    return [] if sum(weights) > 0 else ["data.train_weights are all 0: nothing would be drawn"]


def _streaming_problems(config: PPOConfig) -> list[str]:
    if not config.data.streaming:
        changed = changed_keys(config, "data.shuffle_buffer")
        return [f"{name} has no effect without data.streaming=true" for name in changed]
    problems = []
    if config.trainer.total_training_steps is None:
        problems.append("data.streaming=true does not know how many rows there are: set trainer.total_training_steps")
    filters = config.algorithm.filter_groups
    if filters.enable and filters.max_num_gen_batches == 0:
        problems.append("data.streaming=true has no epoch to bound: set algorithm.filter_groups.max_num_gen_batches")
    if config.data.train_max_samples >= 0:
        problems.append("data.train_max_samples does not go with data.streaming=true, which has no end: leave it at -1")
    if config.data.filter_overlong_prompts_workers > 1:
        problems.append("data.filter_overlong_prompts_workers has no effect with data.streaming=true")
    return problems


def _sampler_problems(config: PPOConfig) -> list[str]:
    sampler, data = config.data.sampler, config.data
    if (sampler.class_path is None) != (sampler.class_name is None):
        return ["data.sampler.class_path and class_name go together: set both"]
    if sampler.class_path is not None and (data.streaming or data.train_weights):
        other = "streaming" if data.streaming else "train_weights"
        return [f"data.sampler and data.{other} both say which prompts come next: choose one"]
    return []


def _custom_problems(config: PPOConfig) -> list[str]:
    custom, data = config.data.custom_cls, config.data
    if (custom.path is None) != (custom.name is None):
        return ["data.custom_cls.path and name go together: set both"]
    if custom.path is None:
        return []
    problems = ["data.custom_cls gives all rows at once: data.streaming must be false"] if data.streaming else []
    if data.train_weights:
        problems.append("data.train_weights are for files that are read here: data.custom_cls says itself what comes")
    return problems


def custom_class_problems(config: PPOConfig) -> list[str]:
    """Check that the user's data class can be imported and called, and has a length and rows."""
    custom = config.data.custom_cls
    if custom.path is None or custom.name is None:
        return []
    try:
        found = load_function(custom.path, custom.name)
    except ValueError as error:
        return [f"data.custom_cls: {error}"]
    if problem := positional_problem(found, "files, tokenizer, config"):
        return [f"data.custom_cls: {custom.name} {problem}"]
    missing = [name for name in ("__len__", "__getitem__") if isinstance(found, type) and not hasattr(found, name)]
    return [f"data.custom_cls: {custom.name} has no {' and no '.join(missing)}"] if missing else []


def sampler_file_problems(config: PPOConfig) -> list[str]:
    """Return a message if the user's sampler class cannot be imported."""
    sampler = config.data.sampler
    if sampler.class_path is None or sampler.class_name is None:
        return []
    try:
        load_function(sampler.class_path, sampler.class_name)
    except ValueError as error:
        return [f"data.sampler: {error}"]
    return []


# Checks of the data files' columns and numbers of rows, which read little of the files.

LINES, TABLE = (".jsonl", ".json"), ".parquet"


@dataclass(frozen=True)
class Glance:
    """A quick look at a data file: the columns of its first row, and its number of rows.

    The number may be a lower bound, because counting stops when there are enough rows.
    """

    columns: tuple[str, ...]
    rows: int
    lists: tuple[str, ...] = ()  # the columns that hold lists, such as chat messages


def data_file_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Check the data files: they must be readable, with enough rows and with the columns that the config names."""
    batch = prompts_of_a_batch(config)
    trained, problems = _rows_and_problems(config, "train_files", batch)
    problems += _rows_and_problems(config, "val_files", 1)[1]
    # A stream with weights starts a file again when the file ends.
    is_endless = isinstance(config, PPOConfig) and config.data.streaming and bool(config.data.train_weights)
    if config.data.train_files and not problems and not is_endless and trained < batch:
        problems.append(
            f"data.train_files have {count(trained, 'row')} together, fewer than one batch of {batch}: "
            "add data or lower data.train_batch_size"
        )
    return problems


def _rows_and_problems(config: PPOConfig | SupervisedConfig, name: str, enough: int) -> tuple[int, list[str]]:
    rows, problems = 0, []
    for entry in getattr(config.data, name):
        if Path(entry).is_dir():
            rows += enough  # a saved dataset is not opened here and counts as large enough
            problems += [f"data.{name}: {problem}" for problem in _folder_problems(Path(entry))]
            continue
        try:
            seen = glance(Path(entry), enough)
        except (ValueError, OSError) as error:
            problems.append(f"data.{name}: {error}" if str(entry) in str(error) else f"data.{name}: {entry}: {error}")
            continue
        problems += [f"data.{name}: {entry} {problem}" for problem in _column_problems(config, seen)]
        rows += seen.rows
    return rows, problems


def prompts_of_a_batch(config: PPOConfig | SupervisedConfig) -> int:
    """Return the number of rows of one batch: `gen_batch_size` if it is set, else `train_batch_size`."""
    given = config.data.gen_batch_size if isinstance(config, PPOConfig) else None
    return given or config.data.train_batch_size


def glance(path: Path, enough: int) -> Glance:
    """Read a file's first row and count its rows. Raise `ValueError` if the file cannot be used.

    Lines of a jsonl file are counted only up to `enough`.
    """
    if not path.exists():
        hint = f"; write several as [{path}]" if "," in str(path) else ""
        raise ValueError(f"there is no {path}{hint}")
    if path.suffix not in (*LINES, TABLE):
        raise ValueError(f"{path} is none of {', '.join((TABLE, *LINES))}, nor a folder")
    seen = _glance_at_table(path) if path.suffix == TABLE else _glance_at_lines(path, enough)
    if not seen.rows:
        raise ValueError(f"{path} has no rows")
    return seen


def _folder_problems(path: Path) -> list[str]:
    """Check that a folder is a dataset written by `save_to_disk`, and that it is a single split."""
    if (path / "dataset_dict.json").is_file():
        return [f"{path} holds several splits: name one, such as {path / 'train'}"]
    return (
        [] if (path / "state.json").is_file() else [f"{path} is a folder, but none that datasets' save_to_disk wrote"]
    )


def _glance_at_table(path: Path) -> Glance:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    try:
        with pq.ParquetFile(path) as table:
            lists = tuple(field.name for field in table.schema_arrow if pa.types.is_list(field.type))
            return Glance(tuple(table.schema_arrow.names), table.metadata.num_rows, lists)
    except ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _glance_at_lines(path: Path, enough: int) -> Glance:
    first: dict[str, Any] = {}
    rows = 0
    with path.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            if not rows:
                first = _row_in(path, line)
            rows += 1
            if rows >= enough:
                break
    return Glance(tuple(first), rows, tuple(name for name, value in first.items() if isinstance(value, list)))


def _row_in(path: Path, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"the first line of {path} is not valid JSON, one object a line: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"the first line of {path} is a {type(row).__name__}: each line must be a JSON object")
    return row


def _column_problems(config: PPOConfig | SupervisedConfig, seen: Glance) -> list[str]:
    there = f"it has: {', '.join(seen.columns) or 'nothing'}"
    return [
        f"has no column {getattr(config.data, key)!r} ({there}): name the right one with data.{key}"
        for key in (*_column_keys(config, seen), *_named_columns(config))
        if getattr(config.data, key) not in seen.columns
    ] + _template_problems(config, seen)


def _named_columns(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return the keys of optional columns with a name other than the default. Such columns must exist."""
    if not isinstance(config.data, SFTDataConfig):
        return []
    usual = SFTDataConfig()
    names = ("tools_key", "enable_thinking_key")
    return [name for name in names if getattr(config.data, name) not in (None, getattr(usual, name))]


def _template_problems(config: PPOConfig | SupervisedConfig, seen: Glance) -> list[str]:
    """Return a message if a column holds chat messages, but the tokenizer has no chat template to tokenize them."""
    prefix = MODEL if isinstance(config, PPOConfig) else "model"
    model = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    folder = Path(model.tokenizer_path or model.path or "nowhere")
    # A tokenizer's own code may define a template that is in no file.
    if model.trust_remote_code or not folder.is_dir() or (model.custom_chat_template or template_text(folder)):
        return []
    # A demonstration's response is always a text, and a label is never a text.
    others: tuple[str, ...] = ("label_key",) if isinstance(config, PreferenceConfig) else ("response_key",)
    if isinstance(config.data, SFTDataConfig) and config.data.prompt_dict_keys:
        others += ("prompt_key",)  # the prompt is nested inside the column
    keys = [key for key in _column_keys(config, seen) if key not in others]
    return [
        f"has chat messages in {getattr(config.data, key)!r} (data.{key}), but {folder} has no chat template: put one "
        f"there as chat_template.jinja, set {prefix}.tokenizer_path to a folder that has one, or write plain text"
        for key in keys
        if getattr(config.data, key) in seen.lists
    ][:1]


def _column_keys(config: PPOConfig | SupervisedConfig, seen: Glance) -> Sequence[str]:
    """Return the keys that name the columns which every row must have."""
    if isinstance(config, PPOConfig):
        return ("prompt_key",)
    if isinstance(config, PreferenceConfig):
        if config.is_judged:
            return ("prompt_key", "response_key", "label_key")
        # Conversations may contain their prompt.
        has_texts = config.data.chosen_key not in seen.lists
        return ("chosen_key", "rejected_key", "prompt_key") if has_texts else ("chosen_key", "rejected_key")
    assert isinstance(config.data, SFTDataConfig)
    return ("prompt_key", "response_key") if config.data.messages_key is None else ("messages_key",)


# Checks of `data.apply_chat_template_kwargs`: permitted names, and names that the model's chat template reads.

# Parameters of transformers' `apply_chat_template` and the variables that it passes to templates. The code sets them.
RESERVED = frozenset(
    {
        "self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs",
    }
)  # fmt: skip


def reserved_name(names: Iterable[Any]) -> Any | None:
    """Return the first name that cannot be passed to a template as a variable, or None."""
    wrong = (name for name in names if name in RESERVED or not str(name).isidentifier())
    return next(wrong, None)


def chat_template_problems(kwargs: dict[str, Any], model: ModelConfig, check_files: bool) -> list[str]:
    """Check the variables for the chat template: they must be permitted, and the template must mention them."""
    key, folder = "data.apply_chat_template_kwargs", model.tokenizer_path or model.path
    problems = template_name_problems(kwargs, key)
    # A tokenizer's own code may define a template that is in no file.
    if (template := model.custom_chat_template) is not None:
        return problems or template_syntax_problems(template) or unmentioned(kwargs, key, template, "the given one")
    if problems or not check_files or folder is None or model.trust_remote_code:
        return problems
    return template_file_problems(kwargs, key, folder)


def template_syntax_problems(template: str) -> list[str]:
    """Check that `model.custom_chat_template` is a Jinja template that can be parsed."""
    from jinja2 import Environment, TemplateError  # imported here, because most runs have no such template

    key = "model.custom_chat_template"
    if template.strip().count("{{") + template.strip().count("{%") == 0:
        return [f"{key} must be a Jinja template, the text itself and no file: {template[:60]!r} inserts nothing"]
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        )
    except TemplateError as error:
        return [f"{key} is no Jinja template: {error}"]
    return []


def template_name_problems(names: Iterable[Any], key: str) -> list[str]:
    """Return a message if one of the names cannot be passed to a template as a variable."""
    wrong = reserved_name(names)
    if wrong is None:
        return []
    why = "it is set by the rendering itself" if wrong in RESERVED else "a variable of a template is a plain name"
    return [f"{key}: '{wrong}' cannot be set: {why}"]


def template_file_problems(names: Iterable[str], key: str, folder: str | Path) -> list[str]:
    """Return one message for each name that no chat template in a tokenizer's folder mentions."""
    names = list(names)
    if not names or not Path(folder).is_dir():
        return []
    text = template_text(Path(folder))
    if text is None:
        return [f"{key} has no effect: {folder} has no chat template"]
    return unmentioned(names, key, text, str(folder))


def unmentioned(names: Iterable[str], key: str, template: str, where: str) -> list[str]:
    """Return one message for each name that the text of a chat template does not mention."""
    idle = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]
    return [f"{key}: the chat template in {where} does not mention '{name}': it would change nothing" for name in idle]


def template_text(folder: Path) -> str | None:
    """Return all chat templates in a tokenizer's folder as one text, or None if there is none."""
    files = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = folder / name
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError:
            continue  # loading the tokenizer reports the problem
        given = found.get("chat_template") if isinstance(found, dict) else None
        texts += [json.dumps(given)] if isinstance(given, list | dict) else [given] if given else []
    return "\n".join(texts) or None
