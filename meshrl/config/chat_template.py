"""`data.apply_chat_template_kwargs`: which names may be given, and whether the model's chat template reads them."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshrl.config.model import ModelConfig

# Parameters of transformers' `apply_chat_template` and what it hands to templates: set by the code that renders.
RESERVED = frozenset(
    {
        "self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs",
    }
)  # fmt: skip


def reserved_name(names: Iterable[Any]) -> Any | None:
    """The first of the names that a template cannot be given, or None."""
    wrong = (name for name in names if name in RESERVED or not str(name).isidentifier())
    return next(wrong, None)


def chat_template_problems(kwargs: dict[str, Any], model: ModelConfig, check_files: bool) -> list[str]:
    """Variables of the chat template that cannot be set or, by the tokenizer's files, that nothing reads."""
    key, folder = "data.apply_chat_template_kwargs", model.tokenizer_path or model.path
    problems = template_name_problems(kwargs, key)
    # A tokenizer's own code may bring a template that no file shows.
    if (template := model.custom_chat_template) is not None:
        return problems or template_syntax_problems(template) or unmentioned(kwargs, key, template, "the given one")
    if problems or not check_files or folder is None or model.trust_remote_code:
        return problems
    return template_file_problems(kwargs, key, folder)


def template_syntax_problems(template: str) -> list[str]:
    """What is wrong with a template that the config gives."""
    from jinja2 import Environment, TemplateError  # most runs have none

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
    """Names that are not the template's to read."""
    wrong = reserved_name(names)
    if wrong is None:
        return []
    why = "it is set by the rendering itself" if wrong in RESERVED else "a variable of a template is a plain name"
    return [f"{key}: '{wrong}' cannot be set: {why}"]


def template_file_problems(names: Iterable[str], key: str, folder: str | Path) -> list[str]:
    """Names that no chat template in a tokenizer's folder mentions: they would change nothing."""
    names = list(names)
    if not names or not Path(folder).is_dir():
        return []
    text = template_text(Path(folder))
    if text is None:
        return [f"{key} has no effect: {folder} has no chat template"]
    return unmentioned(names, key, text, str(folder))


def unmentioned(names: Iterable[str], key: str, template: str, where: str) -> list[str]:
    """Names that a chat template does not mention."""
    idle = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]
    return [f"{key}: the chat template in {where} does not mention '{name}': it would change nothing" for name in idle]


def template_text(folder: Path) -> str | None:
    """All chat templates of a tokenizer's folder as one text, or None if there is none."""
    files = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = folder / name
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError:
            continue  # the tokenizer's own loading says what is wrong with it
        given = found.get("chat_template") if isinstance(found, dict) else None
        texts += [json.dumps(given)] if isinstance(given, list | dict) else [given] if given else []
    return "\n".join(texts) or None
