"""Programs that look for their answer instead of computing it, and a driver that scores them as some user.

`python hostile_programs.py` reads `{"root", "backend", "secret", "reading", "checked"}` as JSON on standard input,
prepares what there is to find, and prints the score of every program. It needs the standard library and the package.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# What a program that looks for the answer shares with the others. The places are filled in by the driver.
LOOK = """
import ctypes, glob, os, re, socket, sys
WORD = re.compile(rb"meshrl-secret-[0-9a-f]{16}")
TRAIN, FOLDER, PORT, ABSTRACT, SHM, SEGMENT, PARENT = PLACES
def look(data):
    found = WORD.search(data if isinstance(data, bytes) else str(data).encode(errors="replace"))
    if found:
        print(found[0].decode())
        sys.stdout.flush()
        os._exit(0)
def read(path):
    try:
        with open(path, "rb") as file:
            look(file.read(1 << 20))
    except OSError:
        pass
def walk(top, skip=("/proc", "/sys", "/usr", "/lib", "/lib64", "/dev", "/var/lib", "/opt")):
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in skip and name != "lib"]
        for name in files:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.path.getsize(path) < 1 << 16:
                read(path)
libc = ctypes.CDLL(None, use_errno=True)
"""

# By name: the program, and whether a bare interpreter that runs it as the same user finds the answer (the control).
READING = {
    "training file": ("read(TRAIN)", True),
    "data folder": ("walk(FOLDER)", True),
    "everything": ("[walk(top) for top in ('/home', '/root', '/tmp', '/var/tmp', '/mnt', '/data', '/run', '..', '/job')]", False),
    "environment": ("look(dict(os.environ))", True),
    "processes": (
        "for what in ('environ', 'cmdline', 'cwd/*', 'root/job/*', 'fd/*', 'task/*/environ'):\n"
        "    for path in glob.glob('/proc/[0-9]*/' + what):\n        read(path)",
        True,
    ),
    "parent's environment": ("read(f'/proc/{PARENT}/environ'); read(f'/proc/{os.getppid()}/environ')", True),
    "shared memory file": ("walk('/dev/shm'); read('/dev/shm/' + SHM)", True),
    "shared memory by name": (
        "from multiprocessing import shared_memory\ntry:\n    memory = shared_memory.SharedMemory(SHM)\n    look(bytes(memory.buf))\n"
        "except OSError:\n    pass",
        True,
    ),
    "System V segment": (
        "libc.shmat.restype = ctypes.c_void_p\nat = libc.shmat(SEGMENT, None, 0o10000)\n"
        "if at not in (None, ctypes.c_void_p(-1).value):\n    look(ctypes.string_at(at, 64))",
        True,
    ),
    "symbolic link": ("os.symlink(TRAIN, 'link'); read('link'); os.symlink(FOLDER, 'links'); walk('links/')", True),
    "hard link": ("os.link(TRAIN, 'hard'); read('hard')", False),
    "dots": ("[read('../' * count + TRAIN) for count in range(12)]", True),
    "open files": (
        "for number in range(3, 64):\n    try:\n        look(os.read(number, 1 << 16))\n    except OSError:\n        pass\n"
        "    read(f'/proc/self/fd/{number}'); read(f'/dev/fd/{number}')",
        False,
    ),
    "openat by ctypes": (
        "number = libc.syscall(257 if os.uname().machine == 'x86_64' else 56, -100, TRAIN.encode(), 0)\n"
        "if number >= 0:\n    look(os.read(number, 4096))",
        True,
    ),
    "a server": ("with socket.create_connection(('127.0.0.1', PORT), 5) as line:\n    look(line.recv(99))", True),
    "an abstract socket": (
        "with socket.socket(socket.AF_UNIX) as line:\n    line.connect(ABSTRACT)\n    look(line.recv(99))",
        True,
    ),
    "ptrace": (
        "for pid in (PARENT, os.getppid(), 1):\n    if libc.ptrace(16, pid, None, None) == 0:\n"
        "        print('attached', pid)\n    read(f'/proc/{pid}/mem')",
        False,
    ),
    "a child's root": (
        "if os.fork() == 0:\n    for flags in (0x10000000, 0x10020000, 0x00020000):\n        libc.unshare(flags)\n"
        "    libc.mount(b'proc', b'/job', b'proc', 0, None)\n    libc.umount2(b'/job', 2)\n    libc.chroot(b'/job')\n"
        "    libc.mount(b'/', b'/job', None, 4096, None)\n    walk('/job'); walk('/'); read(TRAIN)\n    os._exit(0)\nos.wait()",
        False,
    ),
    "a set-user-ID program": (
        "import subprocess\nfor command in (['su', '-c', 'cat ' + TRAIN], ['mount', '--bind', FOLDER, '.'], ['cat', TRAIN]):\n"
        "    try:\n        look(subprocess.run(command, capture_output=True, timeout=5, stdin=subprocess.DEVNULL).stdout)\n"
        "    except OSError:\n        pass",
        True,
    ),
    "an escape by handle": (
        "class Handle(ctypes.Structure):\n    _fields_ = [('size', ctypes.c_uint), ('kind', ctypes.c_int), ('id', ctypes.c_ubyte * 8)]\n"
        "for inode in range(1, 40):\n    handle = Handle(8, 1, (ctypes.c_ubyte * 8)(inode))\n"
        "    number = libc.open_by_handle_at(os.open('.', 0), ctypes.byref(handle), 0)\n"
        "    if number >= 0:\n        os.fchdir(number); walk('.'); read('.' + TRAIN)",
        False,
    ),
    "writing": (
        "import site, tempfile\nfor path in (TRAIN, FOLDER + '/new', '/tmp/new', '/dev/shm/new', '/etc/new', '/new', *sys.path,\n"
        "             *(folder + '/sitecustomize.py' for folder in site.getsitepackages())):\n"
        "    try:\n        with open(path, 'a') as file:\n            file.write('meshrl-written')\n        print('wrote', path)\n"
        "    except OSError:\n        pass\n"
        "for change in (lambda: os.truncate(TRAIN, 0), lambda: os.remove(TRAIN), lambda: os.chmod(FOLDER, 0o777), lambda: os.chmod(TRAIN, 0o666),\n"
        "               lambda: os.utime(TRAIN, (1, 1)), lambda: os.setxattr(TRAIN, 'user.x', b'x'), lambda: os.chown(TRAIN, -1, os.getgid()), lambda: os.rename(FOLDER, 'mine')):\n"
        "    try:\n        change()\n        print('changed')\n    except OSError:\n        pass",
        False,
    ),
    "grandchildren": (
        "if os.fork() == 0:\n    try:\n        os.setsid()\n    except OSError:\n        pass\n    if os.fork() == 0:\n        os.closerange(0, 64)\n"
        "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', 'meshrl-grandchild'])\n"
        "    os._exit(0)\nos.wait()",
        False,
    ),
    "killing": (
        "import signal\nfor pid in (PARENT, os.getppid(), -1):\n    try:\n        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass\n"
        "import fcntl, resource\na, b = os.pipe()\n"
        "for call in (lambda: fcntl.fcntl(a, 8, PARENT), lambda: fcntl.fcntl(a, 10, 9), lambda: fcntl.fcntl(a, fcntl.F_SETFL, 0o20000),\n"
        "             lambda: os.write(b, b'x'), lambda: resource.prlimit(PARENT, resource.RLIMIT_CPU, (0, 0)), lambda: os.setpriority(0, PARENT, 19)):\n"
        "    try:\n        call()\n    except OSError:\n        pass",
        False,
    ),
}

AGREES = "class Yes:\n" + "".join(
    f"    def __{name}__(self, *a, **k): return True\n" for name in ("eq", "ne", "lt", "le", "gt", "ge", "contains", "bool", "call")
) + "    def __getattr__(self, name): return Yes()\n    __hash__ = object.__hash__\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\n    def __abs__(self): return 0.0\n    def __float__(self): return float('nan')\n    def __getitem__(self, k): return Yes()\n"  # fmt: skip
WANTED = 9876543210123
ASSERT = f"assert solve(2) == {WANTED}"
TAKE_OVER = """
import json, os, sys, threading
def send(text):
    for number in range(1, 32):
        try:
            os.write(number, text.encode() + b"\\n")
        except OSError:
            pass
"""
# By name: the program, and the checks that it tries to pass without the answer.
CHECKED = {
    "__eq__": (AGREES + "def solve(x): return Yes()", ASSERT),
    "__eq__ of a class": (AGREES + "class solve(Yes):\n    def __init__(self, x): pass", ASSERT),
    "__eq__ of an int": ("class I(int):\n    def __eq__(self, o): return True\ndef solve(x): return I(x)", ASSERT),
    "__eq__ of a tuple": (
        "from collections import namedtuple\nclass P(namedtuple('P', 'x')):\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
        "def solve(x): return P(1)",
        f"assert solve(2) == ({WANTED},)\nassert not solve(2) != ({WANTED},)",
    ),
    "__eq__ in a list": (AGREES + "def solve(x): return [Yes()]", f"assert solve(2) == [{WANTED}]"),
    "difference": (AGREES + "def solve(x): return Yes()", f"assert abs(solve(2) - {WANTED}) < 1e-6"),
    "contains": (AGREES + "def solve(x): return Yes()", f"assert {WANTED} in solve(2)"),
    "contains of a class": (AGREES + "class Solve(Yes):\n    def __init__(self, x): pass", f"assert {WANTED} in Solve(2)"),
    "a method": (AGREES + "def solve(x): return Yes()", "assert solve(2).startswith('9876')"),
    "a method of itself": (
        AGREES + "class Solution(Yes):\n    def __init__(self): pass\n    def solve(self, x): return self",
        "assert Solution().solve(2).startswith('9876')",
    ),
    "isinstance": (AGREES + "def solve(x): return Yes()", f"assert isinstance(solve(2), int) and solve(2) == {WANTED}"),
    "frames": (
        "import sys\ndef solve(x):\n    frame, seen = sys._getframe(), []\n    while frame:\n        seen += list(frame.f_code.co_consts) + list(frame.f_locals.values()) + list(frame.f_globals.values())\n"
        "        frame = frame.f_back\n    return next((s for s in seen if type(s) is int and s > 10**12), 0)",
        ASSERT,
    ),
    "gc": (
        "import gc, re\ndef solve(x):\n    for o in gc.get_objects():\n        try:\n            if (m := re.search(r'98765\\d{8}', repr(o))): return int(m[0])\n        except Exception: pass\n    return 0",
        ASSERT,
    ),
    "own memory": (
        "import re\ndef solve(x):\n    try:\n        with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb') as mem:\n            for line in maps:\n                if ' rw' in line:\n"
        "                    lo, hi = (int(n, 16) for n in line.split()[0].split('-'))\n                    mem.seek(lo)\n                    if (m := re.search(rb'98765\\d{8}', mem.read(hi - lo))): return int(m[0])\n"
        "    except OSError: pass\n    return 0",
        ASSERT,
    ),
    "asking": (
        TAKE_OVER + "for text in ('?', '{\"names\": [\"checks\"]}', '{\"question\": \"getattr\"}'): send(text)\nimport re, select\ntexts = b''\n"
        "for n in range(3, 32):\n    try:\n        if select.select([n], [], [], 0.3)[0]: texts += os.read(n, 1 << 16)\n    except (OSError, ValueError): pass\n"
        "m = re.search(rb'98765\\d{8}', texts)\ndef solve(x): return int(m[0]) if m else 0",
        ASSERT,
    ),
    "a verdict": (TAKE_OVER + "for _ in range(3): send('[\"passed\", \"\"]')\nprint('[\"passed\", \"\"]')\nos._exit(0)", ASSERT),
    "a verdict when asked": (TAKE_OVER + "def solve(x):\n    send('[\"passed\", \"\"]')\n    os._exit(0)", ASSERT),
    "an end": ("import os\ndef solve(x): os._exit(0)", ASSERT),
    "SystemExit": ("def solve(x): raise SystemExit(0)", ASSERT),
    "SystemExit under unittest": (
        "def solve(x): raise SystemExit(0)",
        f"import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(solve(2), {WANTED})\nunittest.main()",
    ),
    "a skip": (
        "import unittest\ndef solve(x): raise unittest.SkipTest('')",
        f"import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(solve(2), {WANTED})\nunittest.main()",
    ),
    "StopIteration": (
        "def solve(x): raise StopIteration",
        f"for found, wanted in zip(map(solve, [2]), [{WANTED}]):\n    assert found == wanted\nassert all(map(lambda x: solve(x) == {WANTED}, [2]))",
    ),
    "built-in functions": (
        "abs = lambda x: 0\nisinstance = lambda *a: True\nsorted = set = lambda *a: 1\ndef all(x): return True\nimport builtins\nbuiltins.abs = abs\n"
        "builtins.all = all\ndef solve(x): return 1",
        f"assert abs(solve(2) - {WANTED}) < 1e-6 and all([solve(2) == {WANTED}]) and sorted([solve(2)]) == [{WANTED}]",
    ),
    "modules": (
        "import sys, types\nmath = sys.modules['math'] = types.SimpleNamespace(isclose=lambda *a, **k: True, fabs=lambda x: 0)\ndef solve(x): return 1",
        f"assert math.isclose(solve(2), {WANTED})",
    ),
    "names that nobody asked for": (
        "import json, os\ndumps = json.dumps\ndef solve(x): return 1\n"
        "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Channel':\n"
        "        o._dumps = lambda m: dumps({'names': {n: {'object': [0, 'f']} for n in ('solve', 'abs', 'int', '__builtins__', 'AssertionError')}} if 'names' in m else {'value': 0})",
        f"assert abs(solve(2) - {WANTED}) < 1e-6",
    ),
    "an empty array": (
        "try:\n    import numpy\nexcept ImportError:\n    raise SystemExit\ndef solve(x): return numpy.empty((0, 1))",
        f"try:\n    import numpy\nexcept ImportError:\n    assert False\nassert (solve(2) == numpy.array([{WANTED}, 1])).all()",
    ),
    "an array of objects": (
        AGREES + "try:\n    import numpy\nexcept ImportError:\n    raise SystemExit\ndef solve(x): return numpy.array([Yes()], dtype=object)",
        ASSERT,
    ),
    "an error that is expected elsewhere": ("def solve(x): raise AssertionError", ASSERT),
    "a changed argument": ("def solve(x):\n    x.clear()\n    return []", "given = [3, 1, 2]\nassert solve(given) == sorted(given)"),
    "an iterator without end": ("import itertools\ndef solve(x): return itertools.count()", f"assert {WANTED} in solve(2)"),
    "a function of the checks": (
        "def solve(f):\n    try: return f(lambda: 0)\n    except Exception: return 0",
        f"assert solve(lambda x: x) == {WANTED}",
    ),
    "deep data": ("def solve(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a", ASSERT),
    "wrong messages": (
        TAKE_OVER + "def solve(x):\n    for text in ('[]', '1', '\"callback\"', '{\"callback\": 5}', '{\"value\": {\"object\": []}}', '{}', '[' * 10**5):\n        send(text)\n    return 0",
        ASSERT,
    ),
    "fn_name": (AGREES + "def solve(x): return Yes()", {"inputs": [[2]], "outputs": [WANTED], "fn_name": "solve"}),
    "fn_name of a class": (
        AGREES + "class Solution(Yes):\n    def solve(self, x): return Yes()",
        {"inputs": [[2]], "outputs": [[WANTED]], "fn_name": "solve"},
    ),
    "check(candidate)": (
        AGREES + "def check(f): pass\ndef solve(x): return Yes()",
        {"checks": f"def check(candidate):\n    assert candidate(2) == {WANTED}", "entry_point": "solve"},
    ),
}  # fmt: skip

HONEST = {
    "reading and printing": ("print(int(input()) * 2)", {"inputs": ["21"], "outputs": ["42"]}),
    "asserts": ("def solve(x): return x ** 2", ["assert solve(3) == 9", "assert abs(solve(0.5) - 0.25) < 1e-9"]),
    "fn_name": ("def solve(a, b): return (a + b, [a])", {"inputs": [[1, 2]], "outputs": [[3, [1]]], "fn_name": "solve"}),
    "check(candidate)": (
        "def solve(x): return sorted(x)",
        {"checks": "def check(candidate):\n    for n in range(4):\n        assert candidate([n, 1]) == sorted([n, 1])", "entry_point": "solve"},
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()",
        "s = Stack()\ns.push(3)\nassert s.pop() == 3 and s.items == []",
    ),
}  # fmt: skip


def prepare(secret):
    """Put the secret where a program may look for it; the places, as the programs' own text, and what to keep alive."""
    folder = tempfile.mkdtemp(prefix="meshrl-hostile-", dir="/tmp")
    train = Path(folder, "train.jsonl")
    train.write_text(json.dumps({"ground_truth": secret}))
    train.chmod(0o600)
    shared = Path(f"/dev/shm/meshrl-hostile-{os.getpid()}")
    shared.write_bytes(secret.encode().ljust(64))
    shared.chmod(0o600)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 64, 0o1600)
    ctypes.memmove(libc.shmat(segment, None, 0), secret.encode(), len(secret))
    libc.shmctl(segment, 0, None)  # gone with this process
    abstract = f"\0meshrl-hostile-{os.getpid()}"
    listening = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(abstract)
    unix.listen()
    for server in (listening, unix):
        threading.Thread(target=serve, args=(server, secret), daemon=True).start()
    port = listening.getsockname()[1]
    places = (str(train), folder, port, abstract, shared.name, segment, os.getpid())
    return places, shared


def serve(server, secret):
    """Say the secret to whoever connects."""
    while True:
        with server.accept()[0] as line:
            line.sendall(secret.encode())


def main():
    """Score all programs on all backends, run the reading ones bare, and say what was left behind."""
    asked = json.load(sys.stdin)
    sys.path.insert(0, asked["root"])
    from meshrl.rewards.code_tests import code
    from meshrl.rewards.sandbox.backends import SandboxError
    from meshrl.rewards.sandbox.run import Limits, chosen_backend, run_python

    secret = asked["secret"]
    os.environ["MESHRL_HOSTILE"] = secret
    places, shared = prepare(secret)
    train, folder = Path(places[0]), places[1]
    before = state_of(train)
    programs = {
        name: (f"PLACES = {places!r}\n{LOOK}\n{body}", {"inputs": [""], "outputs": [secret]})
        for name, (body, _) in READING.items()
    }
    answer = {}
    backend = asked["backend"]
    try:
        answer["backend"] = chosen_backend(backend).describe()
    except SandboxError as error:
        print(json.dumps({"refused": str(error)}))
        return
    # Another answer's program, which holds the secret in its folder and its memory all the while.
    other = f"import time\nopen('secret', 'w').write({secret!r})\nprint(1, flush=True)\ntime.sleep(600)"
    options = {"limits": Limits(seconds=500), "sandbox": backend}
    threading.Thread(target=run_python, args=(other,), kwargs=options, daemon=True).start()

    def score(entry):
        program, tests = entry
        limits = {"seconds": 10 if "count()" not in program else 2}
        return code("s", program, tests, {}, sandbox=backend, limits=limits)["score"]

    with ThreadPoolExecutor(4) as pool:
        hostile = {name: programs[name] for name in asked["reading"]} | {name: CHECKED[name] for name in asked["checked"]}
        answer["scores"] = dict(zip(hostile, pool.map(score, hostile.values())))
        answer["honest"] = dict(zip(HONEST, pool.map(score, HONEST.values())))
    answer["unchanged"] = state_of(train) == before
    time.sleep(0.2)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if is_readable(path)]
    answer["left"] = sum(b"meshrl-grandchild" in line for line in commands)
    # Last: Python's own tracker removes shared memory that it has opened.
    answer["bare"] = {name: bare(*programs[name]) for name in asked["reading"] if READING[name][1]}
    shared.unlink(missing_ok=True)
    train.unlink()
    os.rmdir(folder)
    print(json.dumps(answer), flush=True)
    os._exit(0)


def state_of(train):
    """The training file and its folder, as far as a program could change them."""
    found = [(entry.st_mode, entry.st_mtime, entry.st_ctime, entry.st_uid) for entry in (train.stat(), train.parent.stat())]
    return train.read_bytes(), os.listxattr(train), os.listdir(train.parent), found


def is_readable(path):
    """Whether the process is still there, and one of ours."""
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def bare(program, tests):
    """Whether a program finds its answer if nothing keeps it in."""
    with tempfile.TemporaryDirectory() as own:
        done = subprocess.run([sys.executable, "-c", program], cwd=own, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() == tests["outputs"][0]


if __name__ == "__main__":
    main()
