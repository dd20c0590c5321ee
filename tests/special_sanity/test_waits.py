"""No unbounded wait: whatever waits for another thread, process or machine says for how long, or why it need not."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "meshrl"
# Calls that wait for ever if they are given no time.
WAITS = {"get", "wait", "join", "acquire", "recv", "recv_bytes", "result", "communicate"}
# (file, function): why it may wait without a time of its own.
ALLOWED = {
    # The future's call has a deadline (`Deadlines`), after which the book settles it with an error.
    ("controller/worker_group.py", "execute_all"): "deadline of the call",
    ("controller/worker_group.py", "execute_rank"): "deadline of the call",
    ("controller/worker_group.py", "mesh_entries"): "deadline of the call",
    ("controller/worker_group.py", "call"): "deadline of the call",
    ("controller/calls.py", "value_of"): "deadline of the call that the argument comes from",
    ("controller/local.py", "_build"): "Deadlines.start",
    ("controller/ray.py", "build"): "Deadlines.start",
    ("trainer/rollout_source.py", "finish"): "deadline of the call",
    ("trainer/rollout_source.py", "move_weights"): "deadline of the call",
    ("trainer/rollout_source.py", "begin_call"): "deadline of the call",
    ("trainer/rollout_source.py", "join_pools"): "deadline of the call",
    # Threads and processes whose whole work is to wait for the next job; nobody waits for them.
    ("controller/calls.py", "_run"): "a daemon's queue of jobs",
    ("controller/worker_process.py", "run_worker"): "the worker's queue of calls; it ends with the controller",
    ("controller/forkserver.py", "_listen"): "a daemon, after the nursery's socket was closed",
    ("controller/ray.py", "watch"): "its end is the end of the actor, which is what it is for",
    ("threads.py", "_run"): "a daemon's queue of jobs",
    ("rewards/pool_worker.py", "serve"): "ends with the other end of the pipe",
    ("rewards/sandbox/inside.py", "run_init"): "an alarm ends it",
    ("data/tokenize.py", "main"): "ends with the other end of the pipe",
    # Known to be over or to be there: done already, readable, not empty.
    ("controller/local.py", "_pump"): "not empty, and read by this thread alone",
    ("controller/ray.py", "_note"): "a callback of one that is done",
    ("controller/dispatch.py", "__new__"): "a context variable",
    ("data/tokenize.py", "answer"): "readable: the caller has waited for that, with CHUNK_SECONDS",
    ("rewards/process_pool.py", "_wait"): "readable",
    ("rewards/process_pool.py", "_hear"): "readable",
    ("serving/offline.py", "answer"): "done",
    ("rollout/remote.py", "as_they_end"): "done",
    ("serving/service.py", "stats"): "asked only if it is done",
    ("serving/openai_answers.py", "ended_before_client_left"): "a task that has ended",
    # Bounded elsewhere.
    ("rewards/process_pool.py", "__call__"): "every sample has a time, after which the pool answers for it",
    (
        "agents/agent_rollout.py",
        "run_coroutine",
    ): "turns, tools and requests have their own times; the call has a deadline",
    ("rollout/embedded/embedded_rollout.py", "_collect"): "a step on this device",
    ("rollout/in_process_rollout.py", None): "a lock between threads of one engine, held for a step at most",
    ("rollout/remote.py", "generate"): "inside asyncio.wait_for",
    ("rollout/remote.py", "run"): "opened again by resume; the call that generates has a deadline",
    ("rollout/in_process_rollout.py", "generate"): "inside asyncio.wait_for",
    ("serving/openai_answers.py", "chunks"): "ends when the client leaves",
    (
        "trainer/checkpoints.py",
        None,
    ): "a copy goes on as long as the remote file system lets it; see the limits in the docs",
    ("workers/checkpointing.py", "checkpoint_files"): "deadline of the call",
    # Collectives: the process group has the deadline (trainer.deadlines.collective).
    ("parallel/context_parallel.py", None): "deadline of the process group",
    ("weights/session.py", None): "deadline of the sync",
    ("weights/executor.py", None): "deadline of the sync",
}


def waits_of(file):
    """(function, line, method) of every wait that is given nothing."""
    tree = ast.parse(file.read_text())
    found = []

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        is_bare = isinstance(node, ast.Call) and not node.args and not node.keywords
        if is_bare and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            found.append((function, node.lineno, node.func.attr))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, None)
    return found


def offenders(file, name):
    return [
        (function, line, method)
        for function, line, method in waits_of(file)
        if (name, function) not in ALLOWED and (name, None) not in ALLOWED
    ]


def test_every_wait_has_an_end():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        found += [f"{name}:{line}: {function} calls .{method}()" for function, line, method in offenders(file, name)]
    assert not found, "waits without a time:\n" + "\n".join(found)


def test_what_is_allowed_is_there():
    for name, function in ALLOWED:
        places = {place for place, *_ in waits_of(PACKAGE / name)}
        assert places if function is None else function in places, f"{name}: {function} waits for nothing any more"


@pytest.mark.parametrize(
    ("code", "count"), [("q.get()", 1), ("q.get(timeout=3)", 0), ("d.get('x')", 0), ("p.wait()", 1)]
)
def test_the_lint_sees_them(tmp_path, code, count):
    (tmp_path / "some.py").write_text(f"def work(q, d, p):\n    {code}\n")
    assert len(offenders(tmp_path / "some.py", "some.py")) == count
