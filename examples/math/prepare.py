"""Turns GSM8K's files into meshrl's rows, or makes up problems of the same form.

python examples/math/prepare.py train.jsonl out.jsonl      # rows with `question` and `answer` (... #### 42)
python examples/math/prepare.py out.jsonl                  # 32 made-up problems
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ASK = "Solve the problem step by step and end with a line '#### answer'.\n\n{question}"
STORIES = [
    (
        "A box holds {a} pens. {b} boxes arrive and {c} pens are sold. How many are left?",
        lambda a, b, c: a * b - c,
    ),
    ("Ida walks {a} km on each of {b} days and {c} km on one more. How far is that?", lambda a, b, c: a * b + c),
    ("{a} trays of {b} eggs are shared, and {c} eggs break. How many are whole?", lambda a, b, c: a * b - c),
    (
        "A tank has {c} litres. A hose adds {a} a minute for {b} minutes. How many are in it?",
        lambda a, b, c: a * b + c,
    ),
]


def row(question: str, answer: str) -> dict[str, str]:
    """A prompt as the trainer reads it, with the reference answer beside it."""
    return {"prompt": ASK.format(question=question), "ground_truth": answer, "data_source": "math"}


def from_gsm8k(path: Path) -> Iterator[dict[str, str]]:
    """The answer is what stands behind the last ####."""
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        yield row(record["question"], record["answer"].rpartition("####")[2].strip().replace(",", ""))


def made_up(count: int = 32, seed: int = 0) -> Iterator[dict[str, str]]:
    """Problems with three small numbers in them."""
    rng = random.Random(seed)
    for number in range(count):
        text, solve = STORIES[number % len(STORIES)]
        a, b, c = rng.randint(3, 12), rng.randint(2, 9), rng.randint(1, 5)
        yield row(text.format(a=a, b=b, c=c), str(solve(a, b, c)))


if __name__ == "__main__":
    *source, out = map(Path, sys.argv[1:])
    rows = from_gsm8k(source[0]) if source else made_up()
    out.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
