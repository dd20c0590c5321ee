"""Files of tests have names of their own: without packages pytest imports them by these, and takes the first twice."""

from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
SHIMS = {"vllm_shims", "sglang_shims"}  # of environments of their own, one of which is imported at a time


def shared_names(files):
    """List the modules of tests, and those beside them, that several files would be, with their places."""
    places = defaultdict(list)
    for file in files:
        if file.name not in ("conftest.py", "__init__.py"):
            places[file.name].append(str(file))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_files_share_a_name():
    files = [file.relative_to(TESTS) for file in sorted(TESTS.rglob("*.py")) if not SHIMS & set(file.parts)]
    assert len(files) > 300
    shared = shared_names(files)
    assert not shared, "give each file of tests a name that no other has: " + "; ".join(
        f"{name} is {' and '.join(found)}" for name, found in shared.items()
    )


def test_shared_names_are_seen():
    files = [
        Path("a/test_x.py"),
        Path("b/test_x.py"),
        Path("a/conftest.py"),
        Path("b/conftest.py"),
        Path("b/helper.py"),
    ]
    assert shared_names(files) == {"test_x.py": ["a/test_x.py", "b/test_x.py"]}
