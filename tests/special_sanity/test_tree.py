"""The tree itself: imports point downward, importing is quick, nothing heavy loads before it is used."""

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PACKAGE = Path(__file__).parents[2] / "meshrl"
# From the lowest floor to the highest. A room may import its own floor's rooms and those below.
FLOORS = [
    {"config", "recipes", "imports", "registry", "threads", "files", "environment"},
    {"data", "algorithms", "balance"},
    {"models", "telemetry"},
    {"parallel"},
    {"engines", "rollout"},
    {"weights", "serving"},
    {"rewards"},
    {"agents"},
    {"controller"},
    {"workers"},
    {"trainer"},
    {"tools"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
STRANGERS = [("engines", "rollout"), ("rollout", "engines"), ("controller", "models"), ("algorithms", "data")]


def imports_of(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("meshrl."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("meshrl."))


def room_of(file):
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if room_of(f) != "__init__"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_downward(file):
    room = room_of(file)
    for imported in imports_of(file):
        assert FLOOR[imported] <= FLOOR[room], f"{room} imports {imported}, which is above it"
        assert (room, imported) not in STRANGERS, f"{room} must not import {imported}"


def test_every_room_has_a_floor():
    assert {room_of(file) for file in FILES} == set(FLOOR)


def run_python(code):
    """What a process prints, and how much of the processor it took: others may be using it, too."""
    code += "\nimport time; print(time.process_time())"
    *lines, seconds = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return "\n".join(lines), float(seconds)


def test_importing_the_package_is_quick_and_light():
    heavy = "torch,transformers,ray,tensordict,numpy,matplotlib,omegaconf"
    out, seconds = run_python(
        f"import sys, meshrl, meshrl.cli; print([m for m in '{heavy}'.split(',') if m in sys.modules])"
    )
    assert out.strip() == "[]"
    assert seconds < 1


def test_help_is_quick():
    _, seconds = run_python("import sys; from meshrl.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert seconds < 1


def test_without_ray_everything_but_the_ray_backend_works():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import meshrl.trainer.launch, meshrl.trainer.demo, meshrl.controller\n"
        "from meshrl.controller import *\n"
        "try: create_worker_group(ResourcePool([1], use_gpu=False), ClassWithInitArgs(Worker), backend='ray')\n"
        "except ImportError as error: print(error)\n"
    )
    out, _ = run_python(code)
    assert "meshrl[ray]" in out


def test_no_utils_and_no_prints():
    for file in FILES:
        assert not {"utils", "helpers", "misc", "common"} & set(file.with_suffix("").parts[len(PACKAGE.parts) :]), file
        if "print" in (text := file.read_text()):
            calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
            assert not [c for c in calls if getattr(c.func, "id", "") == "print"], file


def test_what_the_tests_skip_without_is_installed():
    """`importorskip` must not hide a whole package: all that the dev extra names is here."""
    assert not [name for name in dev_packages() if not is_installed(name)]


def dev_packages():
    """List the distributions that `meshrl[dev]` asks for, through the extras that it names."""
    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    waiting, names = ["dev"], set()
    while waiting:
        for requirement in map(Requirement, extras[waiting.pop()]):
            if requirement.name == "meshrl":
                waiting += requirement.extras
            else:
                names.add(requirement.name)
    return sorted(names)


def is_installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
