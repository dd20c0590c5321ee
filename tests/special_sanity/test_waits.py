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
    ("controller/worker_group.py", "_bound"): "deadline of the call",
    ("controller/futures.py", "materialize"): "deadline of the call that the argument comes from",
    ("controller/local.py", "_build"): "Deadlines.start",
    ("controller/ray.py", "build"): "Deadlines.start",
    ("trainer/schedule.py", "finish"): "deadline of the call",
    ("trainer/ppo.py", "move_weights"): "deadline of the call",
    ("trainer/run.py", "join_pools"): "deadline of the call",
    # Threads whose whole work is to wait for the next job; they are daemons, and nobody waits for them.
    ("controller/futures.py", "_run"): "a daemon's queue of jobs",
    ("controller/worker_process.py", "main"): "the worker's queue of calls; it ends with the controller",
    ("rewards/threads.py", "_run"): "a daemon's queue of jobs",
    ("rewards/worker.py", "serve"): "ends with the other end of the pipe",
    ("data/encoding_pool.py", "serve"): "ends with the other end of the pipe",
    # Known to be over: done already, killed, or at its end.
    ("controller/local.py", "_pump"): "not empty, and read by this thread alone",
    ("controller/ray.py", "_note"): "a callback of one that is done",
    ("rollout/server/service.py", "stats"): "asked only if it is done",
    ("rollout/server/streaming.py", "_end"): "a task that has ended",
    # Collectives: the process group has the deadline (trainer.deadlines.collective).
    ("parallel/collectives.py", None): "deadline of the process group",
    ("parallel/ring.py", None): "deadline of the process group",
    ("parallel/pipeline.py", None): "deadline of the process group",
    ("weights/sync.py", None): "deadline of the sync",
    ("weights/exchange.py", None): "deadline of the sync",
}


def waits_of(file):
    """(function, line, method) of every wait that is given nothing."""
    tree = ast.parse(file.read_text())
    found = []

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
            if node.func.attr in WAITS:
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


@pytest.mark.parametrize(("code", "count"), [("q.get()", 1), ("q.get(timeout=3)", 0), ("d.get('x')", 0), ("p.wait()", 1)])
def test_the_lint_sees_them(tmp_path, code, count):
    (tmp_path / "some.py").write_text(f"def work(q, d, p):\n    {code}\n")
    assert len(offenders(tmp_path / "some.py", "some.py")) == count
