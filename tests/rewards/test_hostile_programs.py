"""No program that looks for its answer scores, on any backend, for root or an ordinary user; honest ones do."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_programs import CHECKED, HONEST, READING

pytestmark = pytest.mark.slow  # not part of `make test-quick`

ROOT = str(Path(__file__).parents[2])
DRIVER = str(Path(__file__).with_name("hostile_programs.py"))
BACKENDS = ["bwrap", "namespaces", "landlock"]
ORDINARY = 12345
USERS = ["this user", "an ordinary user"]
# Of the programs that want to pass checks, those that look outside their own code.
LOOKING = ["__eq__", "frames", "gc", "own memory", "asking", "a verdict"]


def run_driver(user, backend, reading, checked, bare=()):
    """The driver's answer when it runs as a user; skips where that user cannot read the package or has no Python."""
    if user == "an ordinary user" and os.getuid() != 0:
        pytest.skip("this user is an ordinary one")
    uid = os.getuid() if user == "this user" else ORDINARY
    for python in dict.fromkeys([sys.executable, "/usr/bin/python3"]):
        who = {} if uid == os.getuid() else {"user": uid, "group": uid, "extra_groups": []}
        probe = [python, "-c", f"import os; open({DRIVER!r}); os.listdir({ROOT + '/meshrl'!r})"]
        try:
            if subprocess.run(probe, capture_output=True, cwd="/", **who).returncode == 0:
                break
        except OSError:
            continue
    else:
        pytest.skip("the other user has no Python, or cannot read the package")
    secret = f"meshrl-secret-{secrets.token_hex(8)}"
    asked = {"root": ROOT, "backend": backend, "secret": secret}
    asked |= {"reading": list(reading), "checked": list(checked), "bare": list(bare)}
    environment = {"PATH": os.environ["PATH"], "MESHRL_HOSTILE": secret}
    done = subprocess.run(
        [python, "-B", DRIVER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd="/",
        env=environment,
        timeout=280,
        **who,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    if "refused" in answer:
        pytest.skip(answer["refused"])
    assert answer["scores"] == dict.fromkeys([*reading, *checked], 0.0)
    assert answer["honest"] == dict.fromkeys(HONEST, 1.0)
    assert answer["unchanged"]
    assert answer["left"] == 0
    return answer


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_program_finds_the_answer(backend, user):
    run_driver(user, backend, READING, LOOKING)


@pytest.mark.parametrize("user", USERS)
def test_without_a_sandbox_the_same_programs_find_it(user):
    """The control, which no backend has a part in."""
    names = [name for name, (_, is_found) in READING.items() if is_found]
    assert len(names) > 12
    assert run_driver(user, "auto", [], [], names)["bare"] == dict.fromkeys(names, True)


def test_no_program_passes_checks_without_the_answer():
    assert len(READING) > 20
    assert len(CHECKED) > 30
    run_driver("this user", "auto", [], CHECKED)
