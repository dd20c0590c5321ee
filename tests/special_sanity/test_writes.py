"""No file that a kill or a full disk could leave half written: all go through `meshrl.files`, or say why not."""

import ast
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrl.files import PART, DamagedFileError, read_json, write_json, write_whole, writing_whole

PACKAGE = Path(__file__).parents[2] / "meshrl"
METHODS = {"write_text", "write_bytes", "tofile", "savefig", "save_pretrained", "to_json_file", "to_parquet", "to_csv"}
FUNCTIONS = {
    "json.dump", "pickle.dump", "torch.save", "save_file", "np.save", "np.savez", "pq.write_table",
    "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.copyfileobj",
}  # fmt: skip
OPENERS = {"open", "io.open", "gzip.open", "os.fdopen"}
JOURNAL = "a journal of whole lines; its readers pass over one that was cut off"
ASIDE = "inside a folder that takes its name when it is whole"
LOCK = "a lock: what it holds is only said to people"
MEMORY = "shared memory: gone with the processes that have it"
PROCESS = "no file: the kernel's, or a pipe"
# (file, function): why it writes a file directly.
ALLOWED = {
    ("agents/calculator_task.py", "make_calculator_model"): "the demo's model, made anew by every demo",
    ("data/serialization.py", "save_tensors"): ASIDE,
    ("trainer/convert_pickles.py", "convert"): ASIDE,
    ("trainer/convert_pickles.py", "_convert_checkpoint"): ASIDE,
    ("trainer/convert_pickles.py", "_convert_model"): ASIDE,
    ("rollout/sglang/sglang_engine.py", "_key_file"): "a folder of this server's own, which starts afterwards",
    ("telemetry/samples.py", "_log"): JOURNAL,
    ("telemetry/run_folder.py", "append_line"): JOURNAL,
    ("telemetry/timeline.py", "write"): "a journal of gzip's members; its reader passes over one that was cut off",
    ("telemetry/timeline.py", "close"): "the same",
    ("serving/offline.py", "__init__"): JOURNAL,
    ("serving/offline.py", "_write_parquet"): "called inside writing_whole",
    ("serving/offline.py", "_table"): "written to memory",
    ("telemetry/run_folder.py", "held"): LOCK,
    ("trainer/memory_checkpoints.py", "held_copies"): LOCK,
    ("trainer/shm_cleaner.py", "is_held"): LOCK,
    ("trainer/shm_cleaner.py", "watch"): LOCK,
    ("tools/verify.py", "write_model"): "a temporary folder of this command",
    ("trainer/launch.py", "save_model"): ASIDE,
    ("trainer/convert.py", "_to_peft"): ASIDE,
    ("trainer/convert.py", "_copy_but_weights"): ASIDE,
    ("trainer/convert.py", "from_hf"): ASIDE,
    ("engines/state_files.py", "write_snapshot"): ASIDE,
    ("engines/state_files.py", "write_index"): ASIDE,
    ("engines/state_files.py", "record_file"): "nothing is written: puts the content on the disk",
    ("models/saving.py", "save_configs"): ASIDE,
    ("models/saving.py", "copy_processor"): ASIDE,
    ("models/lora.py", "save_adapter_config"): ASIDE,
    ("models/tiny.py", "make_tiny_model"): "a model for tests and demos, made anew each time",
    ("models/tiny.py", "make_tiny_seeing_model"): "the same",
    ("workers/checkpointing.py", "_write_hf_files"): ASIDE,
    ("rollout/weight_files.py", "write"): MEMORY,
    ("weights/transports.py", "_own"): MEMORY,
    ("weights/transports.py", "_post"): "a message, complete from the moment it has its name",
    ("rollout/vllm/arguments.py", "write_adapter"): "a folder of this engine's own that it is told to read afterwards",
    ("rollout/engine_server.py", "__init__"): "the output of a server, for people",
    ("rewards/sandbox/run.py", "_in_memory"): MEMORY,
    ("rewards/sandbox/checker.py", "main"): PROCESS,
    ("rewards/sandbox/inside.py", "start_program"): "inside the sandbox",
    ("rewards/sandbox/kernel.py", "enter_user_namespace"): PROCESS,
    ("telemetry/device_stats.py", "reset_peak_rss"): PROCESS,
    ("controller/worker_process.py", "run_worker"): PROCESS,
}


def modes_of(call):
    """The modes that a call may open a file with, as far as they are constants."""
    given = next((word.value for word in call.keywords if word.arg == "mode"), None)
    place = 1 if ast.unparse(call.func) in OPENERS else 0
    given = given or (call.args[place] if len(call.args) > place else ast.Constant("r"))
    either = [given.body, given.orelse] if isinstance(given, ast.IfExp) else [given]
    return [mode.value for mode in either if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]


def is_write(call):
    name = ast.unparse(call.func)
    if name in FUNCTIONS:
        return True
    if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
        return True
    if name in OPENERS or (isinstance(call.func, ast.Attribute) and call.func.attr == "open" and name != "os.open"):
        return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes_of(call))
    return False


def writes_of(tree):
    """(function, line, call) of every write that is not inside `with writing_whole(...)`."""
    found = []

    def visit(node, function, whole):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.With):
            whole = whole or any("writing_whole(" in ast.unparse(item.context_expr) for item in node.items)
        if isinstance(node, ast.Call) and not whole and is_write(node):
            found.append((function, node.lineno, ast.unparse(node.func)))
        for child in ast.iter_child_nodes(node):
            visit(child, function, whole)

    visit(tree, None, False)
    return found


def all_writes():
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if name != "files.py":
            yield from ((name, *write) for write in writes_of(ast.parse(file.read_text())))


def test_every_file_is_written_whole():
    found = [
        f"{file}:{line}: {function} calls {call}" for file, function, line, call in all_writes()
        if (file, function) not in ALLOWED
    ]  # fmt: skip
    assert not found, "files written in place (see meshrl/files.py):\n" + "\n".join(found)


def test_what_is_allowed_is_there():
    assert ALLOWED.keys() - {(file, function) for file, function, *_ in all_writes()} == set()


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("path.write_text('x')", 1),
        ("open(path, 'w')", 1),
        ("open(path, mode='ab')", 1),
        ("path.open('r+b')", 1),
        ("path.open('r+b' if path.exists() else 'w+b')", 1),
        ("path.open()", 0),
        ("open(path, 'rb')", 0),
        ("gzip.open(path, 'at', 3)", 1),
        ("json.dump(value, stream)", 1),
        ("with writing_whole(path) as aside:\n    aside.write_text('x')", 0),
        ("book.open('update_actor')", 0),
        ("write_json(path, {})", 0),
    ],
)
def test_the_lint_sees_them(code, count):
    assert len(writes_of(ast.parse(code))) == count


def in_child(work):
    """Runs something in a forked process in which no file may get a byte, as on a full disk; the error it raises."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            work()
            os.write(theirs, b"nothing")
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with os.fdopen(ours) as told:
        return told.read()


def test_a_full_disk_leaves_what_was_there(tmp_path):
    file = tmp_path / "state.json"
    said = in_child(lambda: write_json(file, {"step": 1}))
    assert said == f"OSError: [Errno {errno.EFBIG}] File too large: '{file}'"
    assert not list(tmp_path.iterdir())
    write_json(file, {"step": 1})
    assert "File too large" in in_child(lambda: write_json(file, {"step": 2}))
    assert read_json(file) == {"step": 1}
    assert list(tmp_path.iterdir()) == [file]
    # The control: what all of these were before.
    assert "File too large" in in_child(lambda: file.write_text('{"step": 2}'))
    with pytest.raises(DamagedFileError, match=f"{file} is not valid JSON: it is empty"):
        read_json(file)


WRITES = """
import sys
from meshrl.files import write_json
number = 0
while True:
    number += 1
    write_json(sys.argv[1], [number] * 20000)
    if number == 1:
        print("begun", flush=True)
"""


def test_kills_leave_a_whole_file(tmp_path):
    file, seen = tmp_path / "state.json", set()
    for number in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITES, str(file)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"begun\n"
        time.sleep(0.007 * number)
        process.kill()
        process.wait(10)
        value = read_json(file)
        assert len(value) == 20000
        assert len(set(value)) == 1
        seen.add(value[0])
    assert len(seen) > 1
    assert {path.name for path in tmp_path.iterdir()} <= {file.name, file.name + PART}


def test_links_and_what_is_no_file(tmp_path, capfd):
    (tmp_path / "far").mkdir()
    (tmp_path / "near.txt").symlink_to(tmp_path / "far" / "real.txt")
    write_whole(tmp_path / "near.txt", "kept \ud83d\n")
    assert (tmp_path / "near.txt").is_symlink()
    assert (tmp_path / "far" / "real.txt").read_bytes() == b"kept \\ud83d\n"
    write_whole("/dev/stdout", "said\n")
    assert capfd.readouterr().out == "said\n"
    with pytest.raises(FileNotFoundError, match=r"no/x\.txt'"):
        write_whole(tmp_path / "no" / "x.txt", "")

    def fail():
        with writing_whole(tmp_path / "y.txt") as aside:
            aside.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list(tmp_path.glob("y.txt*"))


@pytest.mark.parametrize("content", [b"", b" \n", b'{"a": ', b"\xff\xfe{}", b"nonsense"])
def test_damaged_json_is_named(tmp_path, content):
    file = tmp_path / "some.json"
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match=f"{file} is not valid JSON") as caught:
        read_json(file)
    assert type(caught.value) is DamagedFileError
