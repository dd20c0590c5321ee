"""Kills at a chosen moment, from inside the process that is to die: the n-th time it comes to an event.

Events are the files that Python opens, renames, makes or removes below the watched folders (its audit hook tells before
it happens), every part of a weight sync that is sent or taken, every call of a worker, every phase of the controller
and every sample of a reward process. Numbers in names are left out: `open-w out/checkpoints/global_step_#/x.json`.

`MESHRL_AIMS` names a folder: `plan.json` has the aims, `hit-N` is there once the N-th has happened. They happen in
their order, each once, however many processes the run has had since.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import sys
import threading
import time

VARIABLE = "MESHRL_AIMS"
WRITING = re.compile(r"[wax+]")
# What is random in the names of folders in memory.
OF_A_SYNC = ("begin sync", "send", "receive", "end of sync")
RANDOM = re.compile(r"(meshrl(-copies)?-)\w+")


class Aims:
    """This process's part of a plan."""

    def __init__(self, folder, who):
        self.folder, self.who = folder, who
        with open(f"{folder}/plan.json") as file:
            plan = json.load(file)
        self.out, self.aims, self.records, self.cgroup = plan["out"], plan["aims"], plan["record"], plan["cgroup"]
        self.counts, self.quiet = {}, threading.local()

    def audit(self, name, details):
        """Python's audit hook: the events of files."""
        if name == "open":
            path, mode, flags = details
            if not isinstance(path, str | bytes):
                return
            writes = bool(WRITING.search(mode)) if mode else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            self.see("open-w" if writes else "open-r", path)
        elif name in ("os.rename", "os.mkdir", "os.remove", "shutil.rmtree"):
            self.see(name.rpartition(".")[2], details[0], details[1] if name == "os.rename" else None)

    def see(self, what, path, to=None):
        named = self.named(path)
        if named is None and to is not None:
            named = self.named(to)
        if named is None:
            return
        if what in ("mkdir", "open-w") and (text := os.fsdecode(path)).startswith("/dev/shm/"):
            self.note("memory.txt", text)
        self.event(f"{what} {named}")

    def named(self, path):
        text = os.path.abspath(os.fsdecode(path))
        if text.startswith("/dev/shm/meshrl-"):
            return "memory/" + re.sub(r"\d+", "#", RANDOM.sub(r"\1*", text.removeprefix("/dev/shm/")))
        if text == self.out or text.startswith(f"{self.out}/"):
            return "out" + re.sub(r"\d+", "#", text.removeprefix(self.out))
        return None

    def event(self, text):
        """Something is about to happen."""
        if getattr(self.quiet, "on", False):
            return
        self.quiet.on = True
        try:
            self._event(text)
        finally:
            self.quiet.on = False

    def _event(self, text):
        if text == "begin sync":  # the parts of each sync are counted anew
            self.counts = {key: count for key, count in self.counts.items() if key not in OF_A_SYNC}
        self.counts[text] = self.counts.get(text, 0) + 1
        if self.records:
            self.note("events.jsonl", json.dumps([self.who, text, self.counts[text]]))
        number = next((n for n in range(len(self.aims)) if not os.path.exists(f"{self.folder}/hit-{n}")), None)
        if number is None:
            return
        aim = self.aims[number]
        is_mine = self.who == aim["who"] or self.who.partition(":")[0] == aim["who"]
        if not is_mine or aim["event"] != text or self.counts[text] < aim["number"]:
            return
        try:
            os.close(os.open(f"{self.folder}/hit-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # another process of this kind was first
        if aim["delay"]:
            threading.Thread(target=lambda: (time.sleep(aim["delay"]), self.act(aim["action"])), daemon=True).start()
        else:
            self.act(aim["action"])

    def act(self, action):
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        elif action == "no memory":
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE"),) * 2)
            # What the process has free of its own is taken, but for what small things need.
            malloc = ctypes.CDLL(None).malloc
            malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            for bits in range(24, 11, -1):
                while malloc(1 << bits):
                    pass
        elif action == "oom kill":
            with open(f"{self.cgroup}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
            bytes(range(256)) * (1 << 17)  # 32 MB: the kernel kills at the next page beyond the group's limit
        else:
            raise ValueError(action)

    def note(self, name, line):
        descriptor = os.open(f"{self.folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with contextlib.suppress(OSError):  # on the full disk that is this file's too
            os.write(descriptor, line.encode() + b"\n")
        os.close(descriptor)


armed = None


def arm(who=None):
    """Watches this process; where it forks workers, they take their role's name when they are built."""
    global armed
    if who is None:
        words = " ".join(sys.orig_argv)
        kinds = {"controller.forkserver": "forkserver", "rewards.pool_worker": "reward"}
        who = next((kind for name, kind in kinds.items() if name in words), None)
    if who is None:
        return
    if armed is None:
        armed = Aims(os.environ[VARIABLE], who)
        sys.addaudithook(armed.audit)
    armed.who, armed.counts = who, {}
    {"controller": watch_controller, "forkserver": watch_workers, "reward": watch_rewards}[who](armed)


def around(owner, name, before):
    """Has `before(*arguments)` run before a function of a module or class."""
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def watch_calls(aims, module):
    around(module, "call_worker", lambda worker, path, *rest: aims.event(f"call {path.rpartition('/')[2]}"))


def watch_controller(aims):
    from meshrl.controller import in_process
    from meshrl.telemetry.time_ledger import PhaseTimer

    around(PhaseTimer, "_announce", lambda timer: aims.event(f"phase {timer._open[-1] if timer._open else 'between'}"))
    watch_calls(aims, in_process)


def watch_workers(aims):
    from meshrl.controller import worker_process
    from meshrl.weights.transports import Carrier, ProcessGroupCarrier, SharedMemoryCarrier

    def named(info, *rest):
        aims.who = f"{info.role.partition('+')[0]}:{info.rank}"

    around(worker_process, "apply_environment", named)
    watch_calls(aims, worker_process)
    around(Carrier, "send", lambda carrier, *rest: aims.event("send"))
    around(Carrier, "begin", lambda carrier, *rest: aims.event("begin sync"))
    around(Carrier, "flush", lambda carrier, *rest: aims.event("end of sync"))
    around(SharedMemoryCarrier, "receive", lambda carrier, *rest: aims.event("receive"))
    around(ProcessGroupCarrier, "receive", lambda carrier, *rest: aims.event("receive"))


def watch_rewards(aims):
    from meshrl.rewards import pool_worker

    around(pool_worker, "call_one", lambda *rest: aims.event("sample"))
