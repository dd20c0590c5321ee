"""Engines with an environment of their own: `make test-vllm`, `make test-sglang`. Elsewhere these tests skip."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
