"""The server as the real `openai` client sees it, against Hugging Face's own model and tokenizer."""

from __future__ import annotations

import openai
import pytest
import torch
from served import CONTEXT
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "system", "content": "count"}, {"role": "user", "content": "1 2 3"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def hf_model(server):
    return AutoModelForCausalLM.from_pretrained(server.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(server):
    return AutoTokenizer.from_pretrained(server.folder)


@torch.no_grad()
def reference(hf_model, prompt, answer, temperature=1.0):
    """Log-probs [tokens, vocabulary] of an answer."""
    logits = hf_model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def ask(client, **fields):
    own = {
        name: fields.pop(name) for name in ("ignore_eos", "return_token_ids", "top_k", "min_tokens") if name in fields
    }
    return client.completions.create(**({"model": "tiny", "prompt": "1+2="} | fields), extra_body=own)


def test_models(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
        client.models.retrieve("big/model")
    assert server.metrics()['http_responses_total{route="/v1/models/{wanted:path}",status="404"}'] == 1


def test_greedy_completion_takes_the_likeliest_tokens(client, hf_model, tokenizer):
    answer = ask(client, max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True)
    prompt = tokenizer("1+2=")["input_ids"]
    choice = answer.choices[0]
    assert choice.token_ids == reference(hf_model, prompt, choice.token_ids).argmax(-1).tolist()
    assert choice.prompt_token_ids == prompt
    assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 12, 16)


def test_log_probs_are_those_of_the_model(client, hf_model, tokenizer):
    answer = ask(client, max_tokens=7, temperature=0.7, logprobs=3, seed=5, return_token_ids=True, ignore_eos=True)
    choice = answer.choices[0]
    prompt, tokens = tokenizer("1+2=")["input_ids"], torch.tensor(choice.token_ids)
    given = torch.tensor(choice.logprobs.token_logprobs)
    wanted = reference(hf_model, prompt, choice.token_ids, 0.7)
    assert (given - wanted.gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-4
    unscaled = reference(hf_model, prompt, choice.token_ids)
    assert (given - unscaled.gather(1, tokens[:, None])[:, 0]).abs().max() > 0.01
    assert choice.logprobs.tokens == [tokenizer.decode([token]) for token in choice.token_ids]
    for text, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert text in tokenizer.all_special_tokens or choice.text[offset] == text
    assert "".join(t for t in choice.logprobs.tokens if t not in tokenizer.all_special_tokens) == choice.text
    for row, tops, text in zip(wanted, choice.logprobs.top_logprobs, choice.logprobs.tokens, strict=True):
        best = row.topk(3)
        assert list(tops)[:3] == [tokenizer.decode([token]) for token in best.indices.tolist()]
        assert (torch.tensor(list(tops.values())[:3]) - best.values).abs().max() < 1e-4
        assert set(list(tops)[3:]) <= {text}
    # The sampled token is there in any case.
    assert any(len(tops) == 4 for tops in choice.logprobs.top_logprobs)
    for row, tops in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert row in tops.values()


def test_several_prompts_and_answers_have_an_order_and_differ(client):
    answer = ask(
        client, prompt=["ab", [5, 6, 7], "ab"], n=2, max_tokens=9, seed=1, ignore_eos=True, return_token_ids=True
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.prompt_token_ids for choice in answer.choices][2:4] == [[5, 6, 7]] * 2
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 6
    again = ask(client, prompt=["ab", [5, 6, 7], "ab"], n=2, max_tokens=9, seed=1, ignore_eos=True)
    assert [choice.text for choice in again.choices] == texts
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == 54


def test_a_stream_says_what_the_whole_answer_says(client):
    fields = {"n": 2, "max_tokens": 20, "seed": 3, "logprobs": 1}
    whole = ask(client, **fields)
    texts, log_probs, reasons, usage = ["", ""], [[], []], [None, None], None
    for event in ask(client, stream=True, stream_options={"include_usage": True}, **fields):
        usage = event.usage or usage
        for choice in event.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            log_probs[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    for given, choice in zip(log_probs, whole.choices, strict=True):
        assert given == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_ends_before_the_stop_string(client, stream):
    free = ask(client, max_tokens=24, seed=8, ignore_eos=True).choices[0].text
    assert len(free) > 12
    stop = free[6:9]
    cut = free[: free.index(stop)]
    fields = {"max_tokens": 24, "seed": 8, "ignore_eos": True, "stop": ["never seen", stop]}
    if stream:
        events = [event.choices[0] for event in ask(client, stream=True, **fields)]
        assert "".join(event.text for event in events) == cut
        assert events[-1].finish_reason == "stop"
    else:
        answer = ask(client, **fields)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
        assert answer.usage.completion_tokens == len(cut) + len(stop)


def test_a_stop_token_ends_the_answer_and_has_no_text(client, tokenizer):
    free = ask(client, max_tokens=24, seed=8, ignore_eos=True, return_token_ids=True).choices[0]
    token = free.token_ids[5]
    place = free.token_ids.index(token)
    body = {"ignore_eos": True, "stop_token_ids": [token], "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt="1+2=", max_tokens=24, seed=8, extra_body=body).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.token_ids[: place + 1]
    assert answer.text == tokenizer.decode(free.token_ids[:place], skip_special_tokens=True)


def test_chat_goes_through_the_template_with_tools(client, tokenizer):
    body = {"return_token_ids": True, "chat_template_kwargs": {"shout": True}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, max_completion_tokens=6, seed=0, extra_body=body
    )
    wanted = tokenizer.apply_chat_template(
        MESSAGES, tools=TOOLS, add_generation_prompt=True, return_dict=False, shout=True
    )
    assert answer.choices[0].prompt_token_ids == wanted
    assert answer.usage.prompt_tokens == len(wanted)
    assert answer.choices[0].message.role == "assistant"
    without = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=2, extra_body=body
    )
    assert len(without.choices[0].prompt_token_ids) < len(wanted) - 20


def test_tool_results_come_back_into_the_template(client, tokenizer):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body={"return_token_ids": True}
    )
    text = 'user=1+1\nassistant={"a": 1}\ntool=2\nassistant='
    assert tokenizer.decode(answer.choices[0].prompt_token_ids) == text


def test_chat_log_probs_and_stream(client, hf_model, tokenizer):
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 10, "seed": 2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields, extra_body={"return_token_ids": True}).choices[0]
    tokens = whole.token_ids
    wanted = reference(hf_model, whole.prompt_token_ids, tokens)
    for at, entry in enumerate(whole.logprobs.content):
        assert abs(entry.logprob - wanted[at, tokens[at]].item()) < 1e-4
        assert [top.token for top in entry.top_logprobs] == [tokenizer.decode([i]) for i in wanted[at].topk(2).indices]
        assert bytes(entry.bytes).decode() == entry.token
    events = [event.choices[0] for event in client.chat.completions.create(**fields, stream=True)]
    assert events[0].delta.role == "assistant"
    assert all(event.delta.role is None for event in events[1:])
    assert "".join(event.delta.content or "" for event in events) == whole.message.content
    given = [entry.logprob for event in events for entry in event.logprobs.content]
    assert given == pytest.approx([entry.logprob for entry in whole.logprobs.content], abs=1e-5)
    assert events[-1].finish_reason == whole.finish_reason


def test_without_a_limit_an_answer_may_fill_the_context(client):
    messages = [{"role": "user", "content": "a" * (CONTEXT - 30)}]
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == CONTEXT
