"""Every call ends in an answer, whatever the tool does; states live as long as their sample."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from meshrl.agents.messages import Sample, ToolCall, ToolResult
from meshrl.agents.toolbox import ToolBox, ToolSession, load_tool, load_tools, truncate_text
from meshrl.agents.tools import Tool, tool
from meshrl.config.validate_rollout import read_tool_config


@tool
def double(x: int) -> int:
    """Doubles."""
    return 2 * x


@tool
async def later(x: int) -> str:
    """Waits."""
    await asyncio.sleep(0.01)
    return f"later {x}"


@tool
def broken(x: int) -> int:
    """Fails."""
    raise KeyError("no such thing")


@tool(timeout=0.1)
def endless(x: int) -> None:
    """Never comes back."""
    threading.Event().wait()


@tool
def stops() -> None:
    """Raises what a future cannot hold."""
    raise StopIteration


@tool
def paid() -> ToolResult:
    """Gives a reward."""
    return ToolResult("good", 0.25)


class Notebook(Tool):
    """Keeps lines."""

    def __init__(self, log: list[str] | None = None):
        super().__init__()
        self.log = [] if log is None else log

    def create(self, sample: Sample) -> list[str]:
        self.log.append(f"create {sample.number}")
        time.sleep(0.02)
        return []

    async def execute(self, state: list[str], line: str) -> str:
        state.append(line)
        return "/".join(state)

    def release(self, state: list[str]) -> None:
        self.log.append(f"release {len(state)}")


def ask(tools, *calls, **box):
    """The answers to calls made at once, and the session."""

    async def run():
        session = ToolSession(ToolBox(tools, **box), Sample(7, (1,)))
        try:
            return await asyncio.gather(*(session.answer(call) for call in calls)), session
        finally:
            await session.close()

    return asyncio.run(run())


def test_functions_run_and_their_results_come_back():
    answers, session = ask(
        [double, later, paid], ToolCall("double", {"x": 4}), ToolCall("later", {"x": 1}), ToolCall("paid", {})
    )
    assert [a.text for a in answers] == ["8", "later 1", "good"]
    assert [a.reward for a in answers] == [None, None, 0.25]
    assert (session.calls, session.errors, session.cut) == (3, 0, 0)


def test_parameters_may_have_any_name():
    @tool
    def plain(timeout: int, function: str) -> str:
        """Plain."""
        return f"{function} {timeout}"

    @tool
    async def waits(timeout: int) -> str:
        """Async."""
        return f"{timeout} {threading.current_thread() is threading.main_thread()}"

    class Made(Tool):
        """Made."""

        def execute(self, state: None, args: str, timeout: int) -> str:
            return f"{args} {timeout}"

    answers, _ = ask(
        [plain, waits, Made()],
        ToolCall("plain", {"timeout": 3, "function": "f"}),
        ToolCall("waits", {"timeout": 4}),
        ToolCall("made", {"args": "a", "timeout": 5}),
    )
    assert [a.text for a in answers] == ["f 3", "4 True", "a 5"]


def test_what_goes_wrong_is_told_and_counted():
    started = time.perf_counter()
    answers, session = ask(
        [double, broken, endless, stops],
        ToolCall("broken", {"x": 1}),
        ToolCall("endless", {"x": 1}),
        ToolCall("tripple", {"x": 1}),
        ToolCall("double", {"x": "1"}),
        ToolCall("stops", {}),
        ToolCall("double", {"x": 1}),
    )
    assert time.perf_counter() - started < 5
    assert [a.error for a in answers] == [True] * 5 + [False]
    for answer, words in zip(
        answers, ["KeyError", "longer than 0.1 seconds", "no tool 'tripple'", "must be integer", "Error"], strict=False
    ):
        assert words in answer.text
        assert answer.text.startswith("Error: ")
    assert (session.calls, session.errors) == (6, 5)


def test_a_tool_can_end_neither_the_process_nor_the_batch():
    @tool
    def leaves() -> str:
        """Ends the process."""
        sys.exit("usage: ...")

    @tool
    async def leaves_too() -> str:
        """Ends the process from the event loop."""
        raise SystemExit(2)

    @tool
    async def cancels() -> str:
        """Is cancelled by something of its own."""
        waiting = asyncio.create_task(asyncio.sleep(10))
        waiting.cancel()
        return await waiting

    @tool
    def number() -> ToolResult:
        """No text."""
        return ToolResult(42, reward=1)

    @tool
    def unpaid() -> ToolResult:
        """No number."""
        return ToolResult("good", reward="much")

    tools = [leaves, leaves_too, cancels, number, unpaid]
    answers, session = ask(tools, *[ToolCall(one.name, {}) for one in tools])
    assert [a.text for a in answers[:4]] == [
        "Error: RuntimeError: SystemExit: usage: ...",
        "Error: RuntimeError: SystemExit: 2",
        "Error: RuntimeError: CancelledError: ",
        "42",
    ]
    assert "ValueError" in answers[4].text
    assert (session.calls, session.errors) == (5, 4)


def test_a_sample_that_is_cancelled_still_ends():
    async def run():
        session = ToolSession(ToolBox([forever]), Sample(7, (1,)))
        asked = asyncio.create_task(session.answer(ToolCall("forever", {})))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked], timeout=20)
        return asked.cancelled()

    @tool
    async def forever() -> None:
        """Waits."""
        await asyncio.Event().wait()

    assert asyncio.run(run())


def test_plain_tools_do_not_hold_up_each_other():
    everyone = threading.Barrier(8)

    @tool
    def meet() -> str:
        """Waits for the others."""
        everyone.wait(20)
        return "x"

    answers, _ = ask([meet], *[ToolCall("meet", {})] * 8)
    assert [a.text for a in answers] == ["x"] * 8


def test_a_gate_limits_how_many_run_at_once():
    running = most = 0

    @tool
    async def counted() -> None:
        """Counts."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    async def run(size):
        nonlocal most
        most = 0
        gate = asyncio.Semaphore(size)
        sessions = [ToolSession(ToolBox([counted]), Sample(i, (1,)), gate) for i in range(9)]
        await asyncio.gather(*(s.answer(ToolCall("counted", {})) for s in sessions))
        return most

    assert asyncio.run(run(2)) == 2
    assert asyncio.run(run(100)) == 9


def test_a_state_is_made_once_for_a_sample_and_released():
    notebook = Notebook()
    answers, _ = ask([notebook], *[ToolCall("notebook", {"line": x}) for x in "abc"])
    assert [a.text for a in answers] == ["a", "a/b", "a/b/c"]
    assert notebook.log == ["create 7", "release 3"]
    assert ask([notebook])[1].calls == 0
    assert notebook.log == ["create 7", "release 3"]  # an unused tool is never made


def test_tools_that_fail_at_both_ends():
    class Bad(Notebook):
        def create(self, sample):
            raise OSError("no room")

    class Clings(Notebook):
        def release(self, state):
            raise OSError("stuck")

    bad, clings = Bad(), Clings()
    bad.name, clings.name = "bad", "clings"
    answers, session = ask([bad, clings], ToolCall("bad", {"line": "x"}), ToolCall("clings", {"line": "x"}))
    assert "no room" in answers[0].text
    assert answers[1].text == "x"
    assert session.errors == 2


@pytest.mark.parametrize("still_runs", [True, False])
def test_a_state_that_comes_too_late_is_released(still_runs):
    asked, released = threading.Event(), threading.Event()

    class Slow(Tool):
        """Slow."""

        def create(self, sample: Sample) -> str:
            asked.wait(20)
            return "state"

        def execute(self, state: str) -> str:
            return state

        async def release(self, state: str) -> None:
            assert state == "state"
            released.set()

    async def run():
        session = ToolSession(ToolBox([Slow()], timeout=0.01), Sample(7, (1,)))
        answer = await session.answer(ToolCall("slow", {}))
        await session.close()
        if still_runs:
            asked.set()
            await asyncio.to_thread(released.wait, 20)
        return answer

    assert "longer than 0.01 seconds" in asyncio.run(run()).text
    asked.set()
    assert released.wait(20)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 8, 19, 20, 21])
def test_long_answers_are_cut_where_asked(side, limit):
    text = "abcdefghijklmnopqrst"
    cut = truncate_text(text, limit, side)
    assert len(cut) == min(limit, len(text))
    if limit >= len(text):
        assert cut == text
        return
    head, gap, tail = cut.partition("...") if limit > 6 else (cut, "", "")
    if limit > 6:
        assert gap
        assert (head == "") == (side == "left")
        assert (tail == "") == (side == "right")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert abs(len(head) - len(tail)) <= 1 or side != "middle"
    elif side != "middle":
        assert cut == (text[-limit:] if side == "left" else text[:limit])


def test_cut_answers_are_counted():
    @tool
    def long() -> str:
        """Talks."""
        return "x" * 50

    answers, session = ask([long], ToolCall("long", {}), ToolCall("nothing", {}), max_response_length=10, side="right")
    assert answers[0].text == "xxxxxxx..."
    assert len(answers[1].text) == 10
    assert session.cut == 2


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'double'"):
        ToolBox([double, double])


def test_tools_from_files(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from meshrl.agents.tools import Tool, tool\n"
        "@tool\ndef one(x: int) -> int:\n    '''One.'''\n    return x\n"
        "def plain(x: str) -> str:\n    '''Plain.'''\n    return x\n"
        "class Made(Tool):\n    '''Made.'''\n"
        "    def __init__(self, size: int):\n        super().__init__()\n        self.size = size\n"
        "    def execute(self, state, x: int) -> int:\n        return x * self.size\n"
    )
    file = tmp_path / "mine.py"
    listing = tmp_path / "tools.yaml"
    listing.write_text(
        f"tools:\n  - {file}:one\n  - path: {file}:plain\n    name: other\n    timeout: 2.5\n"
        f"  - class_name: {file}:Made\n    config: {{size: 3}}\n"
    )
    found = load_tools(["meshrl.agents.calculator:calculator"], str(listing))
    assert [t.name for t in found] == ["calculator", "one", "other", "made"]
    assert found[2].timeout == 2.5
    answers, _ = ask(found, ToolCall("made", {"x": 5}), ToolCall("calculator", {"expression": "6*7"}))
    assert [a.text for a in answers] == ["15", "42"]
    renamed = load_tool({"path": f"{file}:one", "name": "uno"})
    assert (renamed.name, load_tool({"path": f"{file}:one"}).name) == ("uno", "one")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: 3", "needs a list"),
        ("- a:b", "needs a list"),
        ("tools:\n  - path: a:b\n    size: 3", "unknown key size"),
        ("tools:\n  - name: x", "needs a 'path'"),
        ("tools: [", "cannot read"),
    ],
)
def test_bad_tool_files_are_explained(tmp_path, text, words):
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_tool_config(str(tmp_path / "t.yaml"))


def test_bad_paths_are_explained():
    with pytest.raises(ValueError, match="no import path"):
        load_tools(["nothing"])
    with pytest.raises(ValueError, match="no function 'nothing'"):
        load_tools(["meshrl.agents.calculator:nothing"])
    with pytest.raises(ValueError, match="'config' has no effect"):
        load_tool({"path": "meshrl.agents.calculator:calculator", "config": {"a": 1}})
