"""The states of a sample, with a rollout that says what it is told to."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from scripted import (
    CHATML,
    END,
    TOKENIZER,
    ScriptedRollout,
    call_text,
    chatml_tokenizer,
    ids_of,
    make_agent,
    run_loop,
    sample,
)

from meshrl.agents.encoding import TurnEncoder
from meshrl.agents.environments import Environment, ModelUser, ScriptedUser, Step, UserSimulator
from meshrl.agents.loop import State
from meshrl.agents.messages import ToolResult
from meshrl.agents.tools import Tool, tool
from meshrl.rollout.requests import SamplingParams

P, G, T, I, D = State.PENDING, State.GENERATING, State.TOOL_CALLING, State.INTERACTING, State.DONE  # noqa: E741


@tool
def add(a: int, b: int) -> ToolResult:
    """Adds."""
    return ToolResult(str(a + b), reward=0.1)


def says(*turns):
    """The n-th turn of the model, by how often it has spoken."""
    return lambda prompt, request: turns[int(request.request_id.rpartition("turn")[2])]


def reply(text):
    return f"\n<|start|>tool\n{text}<|end|>\n<|start|>assistant\n"


def test_an_answer_without_calls_is_one_turn():
    loop, found = run_loop(make_agent([add]), ScriptedRollout(says("hello")))
    assert loop.states == [P, G, D]
    assert found.token_ids == [*ids_of("hello"), END]
    assert found.mask == [1] * 6
    assert found.log_probs == [-0.5 - i for i in range(6)]
    assert found.versions == [3] * 6
    assert (found.ending, found.assistant_turns, found.user_turns, found.tool_calls) == ("stop", 1, 0, 0)


def test_a_call_and_an_answer():
    call = call_text("add", a=2, b=3)
    rollout = ScriptedRollout(says("so " + call, "five"))
    loop, found = run_loop(make_agent([add]), rollout)
    assert loop.states == [P, G, T, G, D]
    assert TOKENIZER.decode(found.token_ids) == f"so {call}<|end|>{reply('5')}five<|end|>"
    sampled = [token for token, mask in zip(found.token_ids, found.mask, strict=True) if mask]
    assert TOKENIZER.decode(sampled) == f"so {call}<|end|>five<|end|>"
    given = [i for i, mask in enumerate(found.mask) if not mask]
    assert given == list(range(given[0], given[-1] + 1))
    assert {found.log_probs[i] for i in given} == {0.0}
    assert {found.versions[i] for i in given} == {-1}
    assert found.log_probs[given[-1] + 1] == -0.5
    assert found.rewards == [0.1]
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    # Token in, token out: the second request is the first one's prompt and all tokens since.
    first, second = rollout.requests
    assert second.prompt_token_ids == first.prompt_token_ids + tuple(found.token_ids[: given[-1] + 1])
    assert second.params.max_tokens == 400 - given[-1] - 1
    assert first.seed == 100
    assert second.seed != first.seed


def test_parallel_calls_are_run_at_once_and_answered_in_order():
    everyone = asyncio.Barrier(3)

    @tool
    async def meet(seconds: float) -> str:
        """Waits for the others, then a while."""
        await asyncio.wait_for(everyone.wait(), 20)
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    calls = call_text("meet", seconds=0.3) + call_text("meet", seconds=0.0) + call_text("meet", seconds=0.2)
    _, found = run_loop(make_agent([meet], max_parallel_calls=3), ScriptedRollout(says(calls, "ok")))
    answers = [m["content"] for m in found.messages if m["role"] == "tool"]
    assert answers == ["waited 0.3", "waited 0.0", "waited 0.2"]
    assert found.tool_calls == 3


def test_calls_over_the_limit_are_refused_and_told():
    calls = "".join(call_text("add", a=i, b=0) for i in range(4)) + "<tool_call>x</tool_call>"
    _, found = run_loop(
        make_agent([add], max_parallel_calls=2, response_length=2000), ScriptedRollout(says(calls, "ok"))
    )
    answers = [m["content"] for m in found.messages if m["role"] == "tool"]
    assert answers[:2] == ["0", "1"]
    assert all("at most 2 calls" in text for text in answers[2:])
    assert len(answers) == 5
    assert (found.tool_calls, found.tool_errors, found.malformed_calls) == (2, 3, 1)


def test_malformed_and_failing_calls_are_told_to_the_model_and_counted():
    rollout = ScriptedRollout(
        says("<tool_call>{oops</tool_call>", call_text("add", a=1), call_text("sub", a=1), "done")
    )
    loop, found = run_loop(make_agent([add]), rollout)
    assert loop.states == [P, G, T, G, T, G, T, G, D]
    answers = [m["content"] for m in found.messages if m["role"] == "tool"]
    assert "not valid JSON" in answers[0]
    assert "missing argument 'b'" in answers[1]
    assert "no tool 'sub'" in answers[2]
    assert (found.tool_calls, found.tool_errors, found.malformed_calls) == (2, 3, 1)
    assert found.ending == "stop"


@pytest.mark.parametrize(
    ("limits", "assistant", "user"),
    [
        ({"max_assistant_turns": 1}, 1, 0),
        ({"max_assistant_turns": 3}, 3, 2),
        ({"max_user_turns": 1}, 2, 1),
        ({"max_user_turns": 2, "max_assistant_turns": 9}, 3, 2),
    ],
)
def test_turns_are_limited(limits, assistant, user):
    again = call_text("add", a=1, b=1)
    loop, found = run_loop(make_agent([add], **limits), ScriptedRollout(lambda prompt, request: again))
    assert (found.assistant_turns, found.user_turns, found.ending) == (assistant, user, "turns")
    assert found.mask[-1] == 1
    assert loop.states.count(T) == user


def test_an_answer_at_the_last_turn_is_no_cut():
    _, found = run_loop(
        make_agent([add], max_assistant_turns=2), ScriptedRollout(says(call_text("add", a=1, b=1), "two"))
    )
    assert found.ending == "stop"


def test_the_response_is_never_longer_than_its_budget():
    call = call_text("add", a=1, b=1)
    needed = len(ids_of(call)) + 1
    given = len(ids_of(reply("2")))
    for budget in range(needed - 2, needed + given + 6):
        _, found = run_loop(make_agent([add], response_length=budget), ScriptedRollout(says(call, "two")))
        assert len(found.token_ids) <= budget
        assert found.mask[-1] == 1
        if budget < needed:
            wanted = ("length", 1, budget)
        elif budget <= needed + given:  # no room to say anything behind the tool's answer: it is left out
            wanted = ("length", 1, needed)
        elif budget < needed + given + 4:
            wanted = ("length", 2, budget)
        else:
            wanted = ("stop", 2, needed + given + 4)
        assert (found.ending, found.assistant_turns, len(found.token_ids)) == wanted


def test_long_tool_answers_are_cut():
    @tool
    def long() -> str:
        """Talks."""
        return "a" * 40 + "z" * 40

    agent = make_agent([long], box={"max_response_length": 13, "side": "left"})
    _, found = run_loop(agent, ScriptedRollout(says(call_text("long"), "ok")))
    assert found.messages[2]["content"] == "..." + "z" * 10
    assert found.tool_responses_cut == 1


class Keeper(Tool):
    """Keeps."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def create(self, one):
        self.log.append("create")

    def execute(self, state, x: int) -> int:
        return x

    def release(self, state):
        self.log.append("release")


def test_states_of_tools_are_released_when_the_rollout_fails():
    log = []

    def speak(prompt, request):
        if request.request_id.endswith("turn0"):
            rollout.reason = "error"  # from the next turn on
        return call_text("keeper", x=1)

    rollout = ScriptedRollout(speak)
    with pytest.raises(RuntimeError, match=r"sample 0, turn 1: the rollout failed: made to fail"):
        run_loop(make_agent([Keeper(log)]), rollout)
    assert log == ["create", "release"]


def test_an_aborted_turn_is_kept_and_ends_the_sample():
    _, found = run_loop(make_agent([add]), ScriptedRollout(says("half a~"), reason="abort"))
    assert found.ending == "abort"
    assert found.token_ids == ids_of("half a")


class Guess(Environment):
    """A number to be found."""

    def __init__(self, log=None, most=9):
        self.log, self.most = log if log is not None else [], most

    def reset(self, one):
        self.number, self.turns = one.ground_truth, 0
        self.log.append("reset")
        return [{"role": "user", "content": f"guess up to {self.most}"}] if self.most != 9 else None

    def step(self, text):
        self.turns += 1
        if not text.isdigit():
            raise ValueError("not a number")
        guess = int(text)
        if guess == self.number:
            return Step(reward=1.0, done=True)
        return Step("higher" if guess < self.number else "lower", reward=-0.1)

    async def close(self):
        self.log.append("close")


def bisecting(prompt, request):
    low, high = 0, 9
    turns = prompt.split("<|start|>")
    for said, heard in zip(turns[2::2], turns[3::2], strict=False):
        guess = int(said.removeprefix("assistant\n")[0])
        low, high = (guess + 1, high) if "higher" in heard else (low, guess - 1)
    return str((low + high) // 2)


@pytest.mark.parametrize("number", range(10))
def test_an_environment_is_played_to_its_end(number):
    log = []
    agent = make_agent(environment=lambda: Guess(log))
    loop, found = run_loop(agent, ScriptedRollout(bisecting), sample(ground_truth=number))
    assert found.ending == "environment"
    assert loop.states == [P, *[G, I] * found.assistant_turns, D]
    guesses = [int(m["content"]) for m in found.messages if m["role"] == "assistant"]
    assert guesses[-1] == number
    assert found.rewards == [-0.1] * (len(guesses) - 1) + [1.0]
    assert log == ["reset", "close"]
    assert found.mask[-1] == 1


def test_an_environment_may_write_the_prompt():
    agent = make_agent(environment=lambda: Guess(most=4))
    _, found = run_loop(agent, ScriptedRollout(bisecting), sample("unused", ground_truth=4))
    assert TOKENIZER.decode(found.prompt_ids) == "<|start|>user\nguess up to 4<|end|>\n<|start|>assistant\n"
    with pytest.raises(ValueError, match=r"data\.max_prompt_length=7"):
        run_loop(make_agent(environment=lambda: Guess(most=4), prompt_length=7), ScriptedRollout(bisecting))


def test_an_environment_that_breaks_ends_its_sample():
    log = []
    _, found = run_loop(make_agent(environment=lambda: Guess(log)), ScriptedRollout(says("no idea")))
    assert found.ending == "environment_error"
    assert found.assistant_turns == 1
    assert log == ["reset", "close"]


def test_tools_come_before_the_environment():
    agent = make_agent([add], environment=lambda: Guess())
    rollout = ScriptedRollout(says(call_text("add", a=1, b=2), "3"))
    loop, found = run_loop(agent, rollout, sample(ground_truth=3))
    assert loop.states == [P, G, T, G, I, D]
    assert found.ending == "environment"


def test_a_scripted_user():
    one = sample(extra_info={"user_turns": ["and then?", "really?"]})
    _, found = run_loop(make_agent(environment=ScriptedUser), ScriptedRollout(says("a", "b", "c", "d")), one)
    assert [m["content"] for m in found.messages] == ["hi", "a", "and then?", "b", "really?", "c"]
    assert found.ending == "environment"


def test_a_user_as_a_function_sees_the_conversation():
    seen = []

    async def answer(messages):
        seen.append([(m["role"], m["content"]) for m in messages])
        return "more" if len(messages) < 4 else None

    run_loop(make_agent(environment=lambda: UserSimulator(answer)), ScriptedRollout(says("a", "b", "c")))
    assert seen[0] == [("user", "hi"), ("assistant", "a")]
    assert seen[1] == [*seen[0], ("user", "more"), ("assistant", "b")]


def test_a_user_as_a_plain_function_holds_nobody_up():
    everyone = threading.Barrier(3)

    def answer(messages):
        everyone.wait(20)

    async def run():
        return await asyncio.gather(*(UserSimulator(answer).step("a") for _ in range(3)))

    assert [step.done for step in asyncio.run(run())] == [True] * 3


def test_templates_get_the_ids_of_calls_that_they_were_checked_with():
    wants_id = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
        "{{ raise_exception('an id has 9 characters') }}{% endif %}",
    )
    agent = replace(make_agent([add]), encoder=TurnEncoder(chatml_tokenizer(wants_id), [END]))
    agent.encoder.check([["tool"]])
    _, found = run_loop(agent, ScriptedRollout(says(call_text("add", a=2, b=3), "five")))
    assert found.ending == "stop"


def test_a_user_played_by_a_model_sees_the_roles_swapped():
    prompts = []

    def speak(prompt, request):
        prompts.append(prompt)
        return "tell me more" if len(prompts) < 2 else "###STOP###"

    agent = make_agent()
    user = ScriptedRollout(speak)

    def make():
        params = SamplingParams(max_tokens=20)
        return ModelUser(user, agent.encoder.prompt, agent.encoder.answer_text, "You are a customer.", params)

    _, found = run_loop(make_agent(environment=make), ScriptedRollout(says("a", "b")))
    assert [m["content"] for m in found.messages] == ["hi", "a", "tell me more", "b"]
    assert prompts[0] == (
        "<|start|>system\nYou are a customer.<|end|>\n<|start|>assistant\nhi<|end|>\n<|start|>user\na<|end|>\n"
        "<|start|>assistant\n"
    )
