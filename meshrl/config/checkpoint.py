"""`checkpoint.*` of a trained role: what is saved of it, what is loaded again, and how."""

from dataclasses import dataclass

from meshrl.config.conditions import differs
from meshrl.config.key import key

CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class CheckpointConfig:
    save_contents: list[str] = key(
        ["model", "optimizer", "extra"],
        "What a checkpoint holds: weights, optimizer, schedule and random states, weights for Hugging Face.",
        choices=CONTENTS,
    )
    load_contents: list[str] | None = key(
        None,
        "What is loaded from it; null: all it holds.",
        choices=CONTENTS[:3],
        only_if=differs("trainer.resume_mode", "disable"),
    )
    async_save: bool = key(False, "Copy the state to host memory and write it while training goes on.")
