"""Engines with an environment of their own: `make test-vllm`, `make test-sglang`. Elsewhere these tests skip."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def use_shims(name):
    """For this process, and by the environment for those that it starts."""
    shims = str(HERE / name)
    sys.path.insert(0, shims)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [shims, os.environ.get("PYTHONPATH")]))
    return runpy.run_path(f"{shims}/sitecustomize.py")


sys.path.insert(0, str(HERE.parent / "rollout"))
found = importlib.util.find_spec("sglang")
if importlib.util.find_spec("vllm") is not None:
    kept = use_shims("vllm_shims")
if found is not None:
    kept = use_shims("sglang_shims")
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # It would import its other 250 models in every process.
    models = (Path(found.origin or "").parent / "srt" / "models").glob("*.py")
    used = ("qwen3", "qwen3_moe", "qwen2", "qwen2_moe")
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(file.stem for file in models if file.stem not in used)
