"""Engines with an environment of their own: `make test-vllm`, `make test-sglang`. Elsewhere these tests skip."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
SHIMS = str(HERE / "sglang_shims")

sys.path.insert(0, str(HERE.parent / "rollout"))
found = importlib.util.find_spec("sglang")
if found is not None:
    # For this process, and by the environment for those that it starts.
    sys.path.insert(0, SHIMS)
    kept = runpy.run_path(f"{SHIMS}/sitecustomize.py")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SHIMS, os.environ.get("PYTHONPATH")]))
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # It would import its other 250 models in every process.
    models = (Path(found.origin or "").parent / "srt" / "models").glob("*.py")
    used = ("qwen3", "qwen3_moe", "qwen2", "qwen2_moe")
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(file.stem for file in models if file.stem not in used)
