"""Programs that look for their answer instead of computing it, and a driver that scores them as some user.

`python hostile_programs.py` reads `{"root", "backend", "secret", "reading", "checked", "bare"}` as JSON on standard
input, prepares what there is to find, and prints the score of every program, and which of the last find it without a
sandbox. It needs the standard library and the package.
"""

import ctypes
import json
import os
import re
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
LIBRARIES = ("lib", "lib64")  # of an environment: tens of thousands of files
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
        folders[:] = [name for name in folders if os.path.join(folder, name) not in skip and name not in LIBRARIES]
        for name in files:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.path.getsize(path) < 1 << 16:
                read(path)
libc = ctypes.CDLL(None, use_errno=True)
"""


def sections(text):
    """Texts by their names, which stand in a line of their own after `==`."""
    parts = re.split("^== ", text.strip(), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].strip("\n") for part in parts}


# Programs that read: `(bare)` are those that find the answer in a bare interpreter of the same user (the control).
READING = {
    name.removesuffix(" (bare)"): (program, name.endswith(" (bare)"))
    for name, program in sections(r"""
== training file (bare)
read(TRAIN)
== data folder (bare)
walk(FOLDER)
== everything
[walk(top) for top in ('/home', '/root', '/tmp', '/var/tmp', '/mnt', '/data', '/run', '..', '/job')]
== environment (bare)
look(dict(os.environ))
== processes (bare)
for what in ('environ', 'cmdline', 'cwd/*', 'root/job/*', 'fd/*', 'task/*/environ'):
    for path in glob.glob('/proc/[0-9]*/' + what):
        read(path)
== parent's environment (bare)
read(f'/proc/{PARENT}/environ'); read(f'/proc/{os.getppid()}/environ')
== shared memory file (bare)
walk('/dev/shm'); read('/dev/shm/' + SHM)
== shared memory by name (bare)
from multiprocessing import shared_memory
try:
    memory = shared_memory.SharedMemory(SHM)
    look(bytes(memory.buf))
except OSError:
    pass
== System V segment (bare)
libc.shmat.restype = ctypes.c_void_p
at = libc.shmat(SEGMENT, None, 0o10000)
if at not in (None, ctypes.c_void_p(-1).value):
    look(ctypes.string_at(at, 64))
== symbolic link (bare)
os.symlink(TRAIN, 'link'); read('link'); os.symlink(FOLDER, 'links'); walk('links/')
== hard link
os.link(TRAIN, 'hard'); read('hard')
== dots (bare)
[read('../' * count + TRAIN) for count in range(12)]
== open files
for number in range(3, 64):
    try:
        look(os.read(number, 1 << 16))
    except OSError:
        pass
    read(f'/proc/self/fd/{number}'); read(f'/dev/fd/{number}')
== openat by ctypes (bare)
number = libc.syscall(257 if os.uname().machine == 'x86_64' else 56, -100, TRAIN.encode(), 0)
if number >= 0:
    look(os.read(number, 4096))
== a server (bare)
with socket.create_connection(('127.0.0.1', PORT), 5) as line:
    look(line.recv(99))
== an abstract socket (bare)
with socket.socket(socket.AF_UNIX) as line:
    line.connect(ABSTRACT)
    look(line.recv(99))
== ptrace
for pid in (PARENT, os.getppid(), 1):
    if libc.ptrace(16, pid, None, None) == 0:
        print('attached', pid)
    read(f'/proc/{pid}/mem')
== a child's root
if os.fork() == 0:
    for flags in (0x10000000, 0x10020000, 0x00020000):
        libc.unshare(flags)
    libc.mount(b'proc', b'/job', b'proc', 0, None)
    libc.umount2(b'/job', 2)
    libc.chroot(b'/job')
    libc.mount(b'/', b'/job', None, 4096, None)
    walk('/job'); walk('/'); read(TRAIN)
    os._exit(0)
os.wait()
== a set-user-ID program (bare)
import subprocess
for command in (['su', '-c', 'cat ' + TRAIN], ['mount', '--bind', FOLDER, '.'], ['cat', TRAIN]):
    try:
        look(subprocess.run(command, capture_output=True, timeout=5, stdin=subprocess.DEVNULL).stdout)
    except OSError:
        pass
== an escape by handle
class Handle(ctypes.Structure):
    _fields_ = [('size', ctypes.c_uint), ('kind', ctypes.c_int), ('id', ctypes.c_ubyte * 8)]
for inode in range(1, 40):
    handle = Handle(8, 1, (ctypes.c_ubyte * 8)(inode))
    number = libc.open_by_handle_at(os.open('.', 0), ctypes.byref(handle), 0)
    if number >= 0:
        os.fchdir(number); walk('.'); read('.' + TRAIN)
== writing
import site, tempfile
for path in (TRAIN, FOLDER + '/new', '/tmp/new', '/dev/shm/new', '/etc/new', '/new', *sys.path,
             *(folder + '/sitecustomize.py' for folder in site.getsitepackages())):
    try:
        with open(path, 'a') as file:
            file.write('meshrl-written')
        print('wrote', path)
    except OSError:
        pass
for change, *arguments in (
    (os.truncate, TRAIN, 0), (os.remove, TRAIN), (os.chmod, FOLDER, 0o777), (os.chmod, TRAIN, 0o666), (os.utime, TRAIN),
    (os.setxattr, TRAIN, 'user.x', b'x'), (os.chown, TRAIN, -1, os.getgid()), (os.rename, FOLDER, 'mine'),
):
    try:
        change(*arguments)
        print('changed')
    except OSError:
        pass
== grandchildren
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        os.closerange(0, 64)
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', 'meshrl-grandchild'])
    os._exit(0)
os.wait()
== killing
import signal
for pid in (PARENT, os.getppid(), -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
import fcntl, resource
a, b = os.pipe()
for call, *arguments in (
    (fcntl.fcntl, a, 8, PARENT), (fcntl.fcntl, a, 10, 9), (fcntl.fcntl, a, fcntl.F_SETFL, 0o20000), (os.write, b, b'x'),
    (resource.prlimit, PARENT, resource.RLIMIT_CPU, (0, 0)), (os.setpriority, 0, PARENT, 19),
):
    try:
        call(*arguments)
    except OSError:
        pass
""").items()
}

WANTED = 9876543210123
OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "contains", "bool", "call")
# A class whose objects agree to everything.
AGREES = "class Yes:\n" + "".join(f"    def __{name}__(self, *a, **k): return True\n" for name in OPERATORS)
AGREES += """
    __hash__ = object.__hash__
    def __getattr__(self, name): return Yes()
    def __getitem__(self, key): return Yes()
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
    def __float__(self): return float('nan')
"""
TAKE_OVER = """
import json, os, sys, threading
def send(text):
    for number in range(1, 32):
        try:
            os.write(number, text.encode() + b"\\n")
        except OSError:
            pass
"""


def with_checks(text):
    """Program and checks of every section; without any, the checks want a number."""
    for name, part in sections(text).items():
        program, _, checks = part.partition("-- checks\n")
        program = program.replace("AGREES\n", AGREES).replace("TAKE_OVER\n", TAKE_OVER)
        yield name, (program, (checks or "assert solve(2) == WANTED").replace("WANTED", str(WANTED)))


# Programs that want to pass checks without the answer.
CHECKED = dict(
    with_checks(r"""
== __eq__
AGREES
def solve(x): return Yes()
== __eq__ of a class
AGREES
class solve(Yes):
    def __init__(self, x): pass
== __eq__ of an int
class I(int):
    def __eq__(self, o): return True
def solve(x): return I(x)
== __eq__ of a tuple
from collections import namedtuple
class P(namedtuple('P', 'x')):
    def __eq__(self, o): return True
    def __ne__(self, o): return False
def solve(x): return P(1)
-- checks
assert solve(2) == (WANTED,)
assert not solve(2) != (WANTED,)
== __eq__ in a list
AGREES
def solve(x): return [Yes()]
-- checks
assert solve(2) == [WANTED]
== difference
AGREES
def solve(x): return Yes()
-- checks
assert abs(solve(2) - WANTED) < 1e-6
== contains
AGREES
def solve(x): return Yes()
-- checks
assert WANTED in solve(2)
== contains of a class
AGREES
class Solve(Yes):
    def __init__(self, x): pass
-- checks
assert WANTED in Solve(2)
== a method
AGREES
def solve(x): return Yes()
-- checks
assert solve(2).startswith('9876')
== a method of itself
AGREES
class Solution(Yes):
    def __init__(self): pass
    def solve(self, x): return self
-- checks
assert Solution().solve(2).startswith('9876')
== isinstance
AGREES
def solve(x): return Yes()
-- checks
assert isinstance(solve(2), int) and solve(2) == WANTED
== frames
import sys
def solve(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += list(frame.f_code.co_consts) + list(frame.f_locals.values()) + list(frame.f_globals.values())
        frame = frame.f_back
    return next((s for s in seen if type(s) is int and s > 10**12), 0)
== gc
import gc, re
def solve(x):
    for o in gc.get_objects():
        try:
            if (m := re.search(r'98765\d{8}', repr(o))): return int(m[0])
        except Exception: pass
    return 0
== own memory
import re
def solve(x):
    try:
        with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb') as mem:
            for line in maps:
                if ' rw' in line:
                    lo, hi = (int(n, 16) for n in line.split()[0].split('-'))
                    mem.seek(lo)
                    if (m := re.search(rb'98765\d{8}', mem.read(hi - lo))): return int(m[0])
    except OSError: pass
    return 0
== asking
TAKE_OVER
for text in ('?', '{"names": ["checks"]}', '{"question": "getattr"}'): send(text)
import re, select
texts = b''
for n in range(3, 32):
    try:
        if select.select([n], [], [], 0.3)[0]: texts += os.read(n, 1 << 16)
    except (OSError, ValueError): pass
m = re.search(rb'98765\d{8}', texts)
def solve(x): return int(m[0]) if m else 0
== a verdict
TAKE_OVER
for _ in range(3): send('["passed", ""]')
print('["passed", ""]')
os._exit(0)
== a verdict when asked
TAKE_OVER
def solve(x):
    send('["passed", ""]')
    os._exit(0)
== an end
import os
def solve(x): os._exit(0)
== SystemExit
def solve(x): raise SystemExit(0)
== SystemExit under unittest
def solve(x): raise SystemExit(0)
-- checks
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(solve(2), WANTED)
unittest.main()
== a skip
import unittest
def solve(x): raise unittest.SkipTest('')
-- checks
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(solve(2), WANTED)
unittest.main()
== StopIteration
def solve(x): raise StopIteration
-- checks
for found, wanted in zip(map(solve, [2]), [WANTED]):
    assert found == wanted
assert all(map(lambda x: solve(x) == WANTED, [2]))
== built-in functions
abs = lambda x: 0
isinstance = lambda *a: True
sorted = set = lambda *a: 1
def all(x): return True
import builtins
builtins.abs = abs
builtins.all = all
def solve(x): return 1
-- checks
assert abs(solve(2) - WANTED) < 1e-6 and all([solve(2) == WANTED]) and sorted([solve(2)]) == [WANTED]
== modules
import sys, types
math = sys.modules['math'] = types.SimpleNamespace(isclose=lambda *a, **k: True, fabs=lambda x: 0)
def solve(x): return 1
-- checks
assert math.isclose(solve(2), WANTED)
== names that nobody asked for
import json, os
dumps = json.dumps
def solve(x): return 1
import gc
for o in gc.get_objects():
    if type(o).__name__ == 'Channel':
        taken = {n: {'object': [0, 'f']} for n in ('solve', 'abs', 'int', '__builtins__', 'AssertionError')}
        o._dumps = lambda m: dumps({'names': taken} if 'names' in m else {'value': 0})
-- checks
assert abs(solve(2) - WANTED) < 1e-6
== an empty array
try:
    import numpy
except ImportError:
    raise SystemExit
def solve(x): return numpy.empty((0, 1))
-- checks
try:
    import numpy
except ImportError:
    assert False
assert (solve(2) == numpy.array([WANTED, 1])).all()
== an array of objects
AGREES
try:
    import numpy
except ImportError:
    raise SystemExit
def solve(x): return numpy.array([Yes()], dtype=object)
== an error that is expected elsewhere
def solve(x): raise AssertionError
== a changed argument
def solve(x):
    x.clear()
    return []
-- checks
given = [3, 1, 2]
assert solve(given) == sorted(given)
== an iterator without end
import itertools
def solve(x): return itertools.count()
-- checks
assert WANTED in solve(2)
== a function of the checks
def solve(f):
    try: return f(lambda: 0)
    except Exception: return 0
-- checks
assert solve(lambda x: x) == WANTED
== deep data
def solve(x):
    a = []
    for _ in range(10**5): a = [a]
    return a
== wrong messages
TAKE_OVER
def solve(x):
    for text in ('[]', '1', '"callback"', '{"callback": 5}', '{"value": {"object": []}}', '{}', '[' * 10**5):
        send(text)
    return 0

""")
)
RETURNS_YES = AGREES + "def solve(x): return Yes()\nclass Solution(Yes):\n    def solve(self, x): return Yes()"
CHECKED |= {
    "fn_name": (RETURNS_YES, {"inputs": [[2]], "outputs": [WANTED], "fn_name": "solve"}),
    "fn_name of a class": (
        RETURNS_YES.replace("def solve(x)", "def other(x)"),
        {"inputs": [[2]], "outputs": [[WANTED]], "fn_name": "solve"},
    ),
    "check(candidate)": (
        RETURNS_YES + "\ndef check(f): pass",
        {"checks": f"def check(candidate):\n    assert candidate(2) == {WANTED}", "entry_point": "solve"},
    ),
}

HONEST = {
    "reading and printing": ("print(int(input()) * 2)", {"inputs": ["21"], "outputs": ["42"]}),
    "asserts": ("def solve(x): return x ** 2", ["assert solve(3) == 9", "assert abs(solve(0.5) - 0.25) < 1e-9"]),
    "fn_name": ("def f(a, b): return (a + b, [a])", {"inputs": [[1, 2]], "outputs": [[3, [1]]], "fn_name": "f"}),
    "check(candidate)": (
        "def solve(x): return sorted(x)",
        {"checks": "def check(candidate):\n    assert candidate([2, 1]) == [1, 2]", "entry_point": "solve"},
    ),
    "a class": ("class A:\n    def __init__(self, x): self.x = x", "assert A(3).x == 3"),
}


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
    """Score programs on a backend, run others bare, and say what was left behind."""
    asked = json.load(sys.stdin)
    sys.path.insert(0, asked["root"])
    from meshrl.rewards.functions import code
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
    options = {"limits": Limits(seconds=500), "backend": chosen_backend(backend)}
    threading.Thread(target=run_python, args=(other,), kwargs=options, daemon=True).start()

    def score(entry):
        program, tests = entry
        limits = {"seconds": 10 if "count()" not in program else 2}
        return code("s", program, tests, {}, sandbox=backend, limits=limits)["score"]

    with ThreadPoolExecutor(4) as pool:
        hostile = {name: programs[name] for name in asked["reading"]} | {
            name: CHECKED[name] for name in asked["checked"]
        }
        answer["scores"] = dict(zip(hostile, pool.map(score, hostile.values()), strict=True))
        answer["honest"] = dict(zip(HONEST, pool.map(score, HONEST.values()), strict=True))
    answer["unchanged"] = state_of(train) == before
    time.sleep(0.2)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if is_readable(path)]
    answer["left"] = sum(b"meshrl-grandchild" in line for line in commands)
    # Last: Python's own tracker removes shared memory that it has opened.
    answer["bare"] = {name: bare(*programs[name]) for name in asked["bare"]}
    shared.unlink(missing_ok=True)
    train.unlink()
    os.rmdir(folder)
    print(json.dumps(answer), flush=True)
    os._exit(0)


def state_of(train):
    """The training file and its folder, as far as a program could change them."""
    found = [
        (entry.st_mode, entry.st_mtime, entry.st_ctime, entry.st_uid) for entry in (train.stat(), train.parent.stat())
    ]
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
