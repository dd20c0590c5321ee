"""Demonstrations: which tokens are learned, how long ones are cut, what is refused."""

import json

import numpy as np
import pytest

from meshrl.config.supervised import SFTDataConfig
from meshrl.data.supervised_data import DemonstrationDataset

CONVERSATION = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4 it is"},
]


@pytest.fixture
def dataset(tmp_path, tokenizer):
    """Writes rows and reads them as a dataset, with any settings."""

    def make(rows, tokenizer=tokenizer, **settings):
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DemonstrationDataset([str(file)], tokenizer, SFTDataConfig(**settings))

    return make


def pair(prompt, response):
    return {"prompt": prompt, "response": response}


def learned(data, tokenizer, number: int) -> str:
    batch = data.batch(np.asarray([number])).batch
    return tokenizer.decode(batch["input_ids"][0][batch["response_mask"][0].bool()])


def test_responses_and_their_end_are_learned_and_prompts_are_not(dataset, tokenizer):
    data = dataset([pair("1+1=", "2"), pair("12", "34 a"), pair("5", "")])
    assert [learned(data, tokenizer, i) for i in range(3)] == ["2<eos>", "34 a<eos>", "<eos>"]


def test_a_batch_is_padded_on_the_right(dataset, tokenizer):
    data = dataset([pair("1+1=", "2"), pair("1", "2"), pair("123456", "0")])
    batch = data.batch(np.asarray([2, 1])).batch
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].tolist() == [[1] * 8, [1] * 3 + [0] * 5]
    assert batch["response_mask"].tolist() == [[0] * 6 + [1] * 2, [0, 1, 1] + [0] * 5]
    assert tokenizer.decode(batch["input_ids"][1]) == "12<eos>" + "<pad>" * 5
    assert data.batch(np.asarray([1])).batch["input_ids"].shape == (1, 3)


def test_the_assistants_turns_of_a_conversation_are_learned(dataset, chat_tokenizer):
    rows = [{"talk": CONVERSATION}, {"talk": CONVERSATION[1:3]}]
    data = dataset(rows, chat_tokenizer, messages_key="talk")
    assert learned(data, chat_tokenizer, 0) == "2<eos>4 it is<eos>"
    assert learned(data, chat_tokenizer, 1) == "2<eos>"
    whole = chat_tokenizer.decode(data.sequences[0][0])
    assert whole == "<system>add<eos><user>1+1<eos><assistant>2<eos><user>2+2<eos><assistant>4 it is<eos>"


def test_chat_prompts_with_a_response(dataset, chat_tokenizer):
    data = dataset([pair(CONVERSATION[:2], "2")], chat_tokenizer)
    assert learned(data, chat_tokenizer, 0) == "2<eos>"
    assert chat_tokenizer.decode(data.sequences[0][0]) == "<system>add<eos><user>1+1<eos><assistant>2<eos>"


def test_a_template_that_rewrites_earlier_turns_is_refused(dataset, chat_tokenizer):
    """As templates do that drop the reasoning of all but the last turn."""
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] != 'assistant' else 'x' }}"
    )
    with pytest.raises(ValueError, match=r"row 1: turn 3: the chat template renders earlier turns differently"):
        dataset([{"talk": CONVERSATION}], chat_tokenizer, messages_key="talk")
    assert len(dataset([{"talk": CONVERSATION[:3]}], chat_tokenizer, messages_key="talk")) == 1


def test_a_template_whose_prompt_is_not_in_the_conversation_is_refused(dataset, chat_tokenizer):
    """As templates have that open a block of reasoning only when they ask for an answer."""
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("<assistant>{% endif", "<assistant>b{% endif")
    with pytest.raises(ValueError, match="cannot be told apart: use prompt and response columns instead"):
        dataset([{"talk": CONVERSATION[:3]}], chat_tokenizer, messages_key="talk")


@pytest.mark.parametrize(
    ("where", "wanted", "text"), [("left", "89<eos>", "4+=89<eos>"), ("right", "8", "123 4+=8"[-6:])]
)
def test_long_ones_are_cut_and_counted(dataset, tokenizer, where, wanted, text):
    prompt = "123 4+=" if where == "left" else "3 4+="
    data = dataset([pair(prompt, "89"), pair("1", "2")], max_length=6, truncation=where)
    assert data.truncated == 1
    assert learned(data, tokenizer, 0) == wanted
    assert tokenizer.decode(data.sequences[0][0]) == text


def test_a_first_token_is_never_learned(dataset, tokenizer):
    """Cut on the left, the sequence may begin inside the response: nothing predicts its first token."""
    data = dataset([pair("1", "23456")], max_length=4, truncation="left")
    batch = data.batch(np.asarray([0])).batch
    assert tokenizer.decode(batch["input_ids"][0]) == "456<eos>"
    assert batch["response_mask"].tolist() == [[0, 1, 1, 1]]


def test_long_ones_are_an_error_unless_configured(dataset):
    with pytest.raises(ValueError, match=r"row 2: the demonstration has 6 tokens, more than data.max_length=5"):
        dataset([pair("12", "34"), pair("123", "45")], max_length=5)
    assert dataset([pair("12", "34")], max_length=5).truncated == 0


def test_nothing_left_to_learn_is_an_error(dataset, chat_tokenizer):
    remedies = (
        r"data.max_length=4 \(data.truncation=right\): raise data.max_length, set data.truncation=left .* row out"
    )
    with pytest.raises(ValueError, match=f"row 2: the demonstration has no token left to learn within {remedies}"):
        dataset([pair("1", "2"), pair("1234", "5")], max_length=4, truncation="right")
    with pytest.raises(ValueError, match=r"row 1: the demonstration has no token left to learn .*: leave the row out"):
        dataset([{"talk": CONVERSATION[:2]}], chat_tokenizer, messages_key="talk")


@pytest.mark.parametrize("bad", [5, ["1", "2"], {"text": "1"}])
def test_a_response_must_be_text(dataset, bad):
    with pytest.raises(ValueError, match="row 2: the response must be a string"):
        dataset([pair("1", "2"), pair("1", bad)])


@pytest.mark.parametrize("bad", [[], "hello", [{"role": "user"}], ["hi"]])
def test_a_conversation_must_be_messages(dataset, chat_tokenizer, bad):
    with pytest.raises(ValueError, match="row 1: the demonstration must be a list of messages with role and content"):
        dataset([{"talk": bad}], chat_tokenizer, messages_key="talk")


def test_a_conversation_must_begin_with_something_to_answer(dataset, chat_tokenizer):
    with pytest.raises(ValueError, match="row 1: the demonstration begins with the assistant"):
        dataset([{"talk": CONVERSATION[2:]}], chat_tokenizer, messages_key="talk")


def test_missing_columns_and_templates_are_named(dataset):
    with pytest.raises(ValueError, match="row 2: column 'response' is missing or null"):
        dataset([pair("1", "2"), {"prompt": "1"}])
    with pytest.raises(ValueError, match="column 'talk' is missing"):
        dataset([pair("1", "2")], messages_key="talk")
    with pytest.raises(ValueError, match="no chat template"):
        dataset([{"talk": CONVERSATION}], messages_key="talk")
    with pytest.raises(ValueError, match="row 1: the prompt has no tokens"):
        dataset([pair("", "2")])


def test_errors_name_the_file_and_its_row(tmp_path, chat_tokenizer):
    """Of several files, and also where the chat template or the tokenizer itself refuses a row."""
    refuse = (
        "{% if messages[1:] and messages[1]['role'] == 'system' %}{{ raise_exception('one is enough') }}{% endif %}"
    )
    chat_tokenizer.chat_template = refuse + chat_tokenizer.chat_template
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text(json.dumps({"talk": CONVERSATION}) + "\n")
    for bad, words in ((CONVERSATION[:1] * 2, "cannot be tokenized: one is enough"), ([1], "must be a list of")):
        files[1].write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in (CONVERSATION, bad)))
        with pytest.raises(ValueError, match=rf"b.jsonl', row 2: the demonstration {words}"):
            DemonstrationDataset(list(map(str, files)), chat_tokenizer, SFTDataConfig(messages_key="talk"))
    (tmp_path / "c.jsonl").write_text(json.dumps(pair("1", "\ud800")) + "\n")
    with pytest.raises(ValueError, match=r"c.jsonl', row 1: the response cannot be tokenized"):
        DemonstrationDataset([str(tmp_path / "c.jsonl")], chat_tokenizer, SFTDataConfig())


def test_only_so_many_samples_are_taken(tmp_path, tokenizer):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(pair(str(number), "1")) + "\n" for number in range(9)))
    data = DemonstrationDataset([str(file)], tokenizer, SFTDataConfig(shuffle=False), 3)
    assert [tokenizer.decode(ids[0]) for ids, _ in data.sequences] == ["0", "1", "2"]
    assert len(DemonstrationDataset([str(file)], tokenizer, SFTDataConfig(), 4)) == 4
    assert len(DemonstrationDataset([str(file)], tokenizer, SFTDataConfig())) == 9


def test_variables_of_the_chat_template(dataset, chat_tokenizer):
    """What a variable adds before the model's turn is no part of what is learned."""
    chat_tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if short and m.role == 'assistant' %}=={% endif %}{{ m.content }}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% if short %}=={% endif %}{% endif %}"
    )
    short = {"apply_chat_template_kwargs": {"short": True}}
    rows = [{"messages": CONVERSATION}]
    data = dataset(rows, chat_tokenizer, messages_key="messages", **short)
    assert chat_tokenizer.decode(data.sequences[0][0]).count("<assistant>==") == 2
    assert learned(data, chat_tokenizer, 0) == "2<eos>4 it is<eos>"
    plain = dataset(rows, chat_tokenizer, messages_key="messages")
    assert "==" not in chat_tokenizer.decode(plain.sequences[0][0])
    asked = dataset([pair([{"role": "user", "content": "1+1"}], "2")], chat_tokenizer, **short)
    assert chat_tokenizer.decode(asked.sequences[0][0]) == "<user>1+1<eos><assistant>==2<eos>"


def test_prompts_and_responses_inside_their_columns(dataset, tokenizer):
    """As verl's scripts read GSM8K's: both are in one column of mappings, and some files hold them as lists of one."""
    row = {"extra_info": {"question": "1+1=", "answer": {"text": "2"}}}
    listed = {"extra_info": [{"question": "1+1=", "answer": [{"text": "2"}]}]}
    plain = dataset([pair("1+1=", "2")])
    inside = dataset(
        [row, listed], prompt_key="extra_info", response_key="extra_info",
        prompt_dict_keys=["question"], response_dict_keys=["answer", "text"],
    )  # fmt: skip
    for number in range(2):
        for ours, wanted in zip(inside.sequences[number], plain.sequences[0], strict=True):
            assert ours.tolist() == wanted.tolist()
    with pytest.raises(ValueError, match=r"row 1.*there is no 'reply' in 'extra_info.answer': it has \['text'\]"):
        dataset([row], prompt_key="extra_info", response_key="extra_info", prompt_dict_keys=["question"],
                response_dict_keys=["answer", "reply"])  # fmt: skip


def test_a_text_as_the_users_message(dataset, chat_tokenizer):
    chat = dataset([pair([{"role": "user", "content": "1+1"}], "2")], chat_tokenizer)
    text = dataset([pair("1+1", "2")], chat_tokenizer, prompt_as_message=True)
    assert text.sequences[0][0].tolist() == chat.sequences[0][0].tolist()
    as_it_stands = dataset([pair("1+1", "2")], chat_tokenizer)
    assert as_it_stands.sequences[0][0].tolist() != chat.sequences[0][0].tolist()


WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% if enable_thinking is defined %}{{ '1' if enable_thinking else '0' }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tools_tokenizer(chat_tokenizer, monkeypatch):
    monkeypatch.setattr(chat_tokenizer, "chat_template", WITH_TOOLS)
    return chat_tokenizer


@pytest.mark.parametrize("written", [lambda tools: tools, json.dumps])
def test_a_rows_tools_and_thinking_reach_the_template(dataset, tools_tokenizer, written):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    talk = {"talk": CONVERSATION[1:3]}
    rows = [talk, talk | {"tools": written(tools)}, talk | {"enable_thinking": True}, talk | {"tools": None}]
    rows.append(talk | {"tools": written(tools), "enable_thinking": False})

    def begun(**settings):
        data = dataset(rows, tools_tokenizer, messages_key="talk", shuffle=False, **settings)
        assert {learned(data, tools_tokenizer, n) for n in range(len(rows))} == {"2<eos>"}
        return [tools_tokenizer.decode(ids).partition("<user>")[0] for ids, _ in data.sequences]

    told = [tools_tokenizer.decode(tools_tokenizer(text)["input_ids"]) for text in ("", "[add]", "1", "", "[add]0")]
    assert begun() == told
    assert begun(tools_key=None, enable_thinking_key=None) == [""] * len(rows)


def test_chat_prompts_have_tools_as_well(dataset, tools_tokenizer):
    row = pair(CONVERSATION[1:2], "2") | {"tools": [{"type": "function", "function": {"name": "add"}}]}
    data = dataset([row], tools_tokenizer)
    wanted = tools_tokenizer.decode(tools_tokenizer("[add]")["input_ids"])
    assert tools_tokenizer.decode(data.sequences[0][0]).startswith(wanted)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"tools": "{"}, "data.tools_key=tools: not JSON"),
        ({"tools": {"name": "add"}}, "data.tools_key=tools: it must be a list of schemas"),
        ({"enable_thinking": "yes"}, "data.enable_thinking_key=enable_thinking"),
    ],
)
def test_columns_of_conversations_that_cannot_be_read(dataset, tools_tokenizer, column, words):
    with pytest.raises(ValueError, match=words):
        dataset([{"talk": CONVERSATION[1:3]} | column], tools_tokenizer, messages_key="talk")
