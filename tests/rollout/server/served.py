"""A running `meshrl serve` and the model it serves."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

ALPHABET = '0123456789abcdefghijklmnopqrstuvwxyz>+= \n{}[]":,'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}={{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments'] | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}assistant={% endif %}"
)
CONTEXT, CONCURRENCY, QUEUE, MOST_BYTES = 2048, 8, 16, 64 << 10
TOKEN = "let-me-in"


@dataclass
class Server:
    """A running server: where it is, and what it serves."""

    url: str
    folder: Path
    other: Path
    process: subprocess.Popen[str]

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers={"authorization": f"Bearer {TOKEN}"})

    def metrics(self) -> dict[str, float]:
        """Every metric by its name (and labels) without the package's."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("meshrl_"): float(value) for name, value in pairs}

    def metric(self, name: str) -> float:
        return self.metrics()[name]

    def wait_until_idle(self) -> None:
        """All slots and all blocks are back, soon."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            now = self.metrics()
            busy = sum(now[f"{who}_{how}"] for who in ("requests", "rollout") for how in ("running", "waiting"))
            if not busy:
                break
            time.sleep(0.05)
        assert not busy
        assert now["rollout_free_blocks"] == now["rollout_total_blocks"] > 100


def make_folder(folder: Path, seed: int) -> Path:
    from meshrl.models.tiny import char_tokenizer, make_tiny_model

    # Large initial weights, so that a wrong token or weight shows.
    make_tiny_model(folder, ALPHABET, seed=seed, hidden_size=32, max_position_embeddings=CONTEXT, initializer_range=0.2)
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
