"""Makes a small task with images, and a tiny untrained model that can learn it on a CPU.

python examples/images/prepare.py FOLDER        # FOLDER/model, FOLDER/train.parquet, FOLDER/test.parquet
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meshrl.data.images import as_png
from meshrl.models.tiny import make_tiny_seeing_model

COLOURS = {"r": (220, 40, 40), "g": (40, 200, 60), "b": (50, 70, 230), "y": (230, 220, 50)}

# Turns one behind the other, each ended as the model ends its own.
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
)


def noisy(colour: tuple[int, int, int], rng: np.random.Generator) -> bytes:
    """An image of one colour, 16 to 24 pixels a side, with noise on it."""
    height, width = rng.integers(16, 25, 2)
    pixels = np.array(colour) + rng.normal(0, 25, (height, width, 3))
    return as_png(pixels.clip(0, 255).astype(np.uint8))


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Images with the first letter of their colour as the answer."""
    rng = np.random.default_rng(seed)
    letters = rng.choice(list(COLOURS), count)
    return [
        {
            "prompt": "<image>?",
            "images": [{"bytes": noisy(COLOURS[letter], rng), "path": None}],
            "ground_truth": str(letter),
            "data_source": "colours",
        }
        for letter in letters
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_tiny_seeing_model(folder / "model", "".join(COLOURS) + "?")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)  # for conversations (later.py)
    pq.write_table(pa.Table.from_pylist(rows(512, seed=0)), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows(64, seed=1)), folder / "test.parquet")
    print(f"{folder}: a model, 512 images to train on and 64 others to test with")
