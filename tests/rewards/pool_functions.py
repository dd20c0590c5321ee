"""What the pool's processes are asked to do; imported by them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def act(data_source, solution_str, ground_truth, extra_info):
    """As `extra_info` says: score, sleep, die, raise, or leave a child behind."""
    todo = extra_info.get("do", "score")
    if todo == "sleep":
        time.sleep(120)
    elif todo == "child":
        child = subprocess.Popen(["sleep", "120"])
        with open(extra_info["file"], "w") as out:
            out.write(str(child.pid))
        time.sleep(120)
    elif todo == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif todo == "die_once" and not Path(extra_info["file"]).exists():
        Path(extra_info["file"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    elif todo == "exit":
        os._exit(7)
    elif todo == "raise":
        raise KeyError("no such thing")
    elif todo == "leave":
        sys.exit(0)
    elif todo == "unsendable":
        return {"score": 1.0, "why": lambda: None}
    elif todo == "meet":
        folder = Path(extra_info["folder"])
        (folder / str(extra_info["n"])).touch()
        deadline = time.monotonic() + 50
        while len(list(folder.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    elif todo == "slow":
        time.sleep(0.2 * (4 - extra_info["n"]))
    return {"score": float(extra_info["n"]), "process": os.getpid()}


def twice(data_source, solution_str, ground_truth, extra_info, response_ids):
    return [2.0] * len(response_ids)
