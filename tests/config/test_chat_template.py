"""Variables of the chat template: which may be set, and whether the tokenizer's files mention them."""

import inspect
import json

import pytest

from meshrl.config import check_config
from meshrl.config.validate_data import RESERVED, template_text

KEY = "data.apply_chat_template_kwargs"
THINKING = "{% if enable_thinking is false %}<think></think>{% endif %}{{ messages }}"


def given(values: str) -> str:
    return f"{KEY}={values}"


def test_what_transformers_sets_itself_is_reserved():
    from transformers import PreTrainedTokenizerBase

    theirs = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert theirs | {"messages"} == RESERVED


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "tools", "messages", "chat_template"])
def test_reserved_names_are_refused(fine, fine_sft, make_model, name):
    for config in (fine, fine_sft):
        (problem,) = check_config(config(given(f"{{{name}: 1}}")))
        assert problem == f"{KEY}: '{name}' cannot be set: it is set by the rendering itself"
    (problem,) = check_config(fine(given("{two words: 1}")), check_files=False)
    assert "'two words' cannot be set: a variable of a template is a plain name" in problem


@pytest.mark.parametrize("place", ["jinja", "config", "named"])
def test_a_name_must_be_in_the_template(fine, fine_sft, make_model, place):
    folder = make_model()
    if place == "jinja":
        (folder / "chat_template.jinja").write_text(THINKING)
    else:
        template = THINKING if place == "config" else [{"name": "default", "template": THINKING}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    for config in (fine, fine_sft):
        assert check_config(config(given("{enable_thinking: false}"))) == []
        (problem,) = check_config(config(given("{enable_thinking: false, thinking: 1}")))
        assert problem == f"{KEY}: the chat template in {folder} does not mention 'thinking': it would change nothing"
        # Without files, and where a tokenizer's own code may bring a template, nobody knows.
        assert check_config(config(given("{thinking: 1}")), check_files=False) == []
    trusting = "actor_rollout_ref.model.trust_remote_code=true"
    assert check_config(fine(given("{thinking: 1}"), trusting)) == []


def test_without_a_template_they_would_do_nothing(fine, make_model, tmp_path):
    folder = make_model()
    assert template_text(folder) is None
    (problem,) = check_config(fine(given("{enable_thinking: false}")))
    assert problem == f"{KEY} has no effect: {folder} has no chat template"
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    (other / "chat_template.jinja").write_text(THINKING)
    assert (
        check_config(fine(given("{enable_thinking: false}"), f"actor_rollout_ref.model.tokenizer_path={other}")) == []
    )


CUSTOM = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}!{% endif %}"


def test_a_template_of_the_configs_own(fine, fine_sft, make_model):
    for config, model in ((fine, "actor_rollout_ref.model"), (fine_sft, "model")):
        key = f"{model}.custom_chat_template"
        assert check_config(config(f"{key}={CUSTOM}", given("{enable_thinking: true}"))) == []
        (problem,) = check_config(config(f"{key}={CUSTOM}", given("{thinking: true}")))
        assert "the given one does not mention 'thinking'" in problem
        (problem,) = check_config(config(f"{key}=template.jinja"))
        assert "must be a Jinja template, the text itself and no file" in problem
        (problem,) = check_config(config(f"{key}={CUSTOM} {{% endfor %}}"))
        assert "is no Jinja template" in problem


def test_a_template_makes_chats_readable(fine, make_model, tmp_path):
    rows = tmp_path / "chats.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "6 * 7"}]}\n' * 1024)
    (problem,) = check_config(fine(f"data.train_files={rows}"))
    assert "has no chat template" in problem
    assert (
        check_config(fine(f"data.train_files={rows}", f"actor_rollout_ref.model.custom_chat_template={CUSTOM}")) == []
    )


@pytest.mark.parametrize(("role", "switch"), [("critic", "algorithm.adv_estimator=gae"),
                                              ("reward_model", "reward_model.enable=true")])  # fmt: skip
def test_models_that_get_token_ids_have_no_template(fine, make_model, role, switch):
    options = [switch, f"{role}.model.path={make_model()}", f"{role}.model.custom_chat_template={CUSTOM}"]
    problems = check_config(fine(*options), check_files=False)
    assert [line for line in problems if "custom_chat_template" in line] == [
        f"{role}.model.custom_chat_template has no effect: it gets the policy's token ids"
    ]
