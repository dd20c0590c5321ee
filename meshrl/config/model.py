"""`model.*`: which model, and how it is prepared for training."""

from dataclasses import dataclass
from typing import Any

from meshrl.config.conditions import above, differs, equals
from meshrl.config.key import key


@dataclass
class ModelConfig:
    path: str | None = key(
        None, "Folder with the Hugging Face model (config.json, weights, tokenizer), or its name on the hub."
    )
    tokenizer_path: str | None = key(None, "Folder with the tokenizer; null: the model's folder.")
    custom_chat_template: str | None = key(
        None, "Chat template (Jinja) of the run instead of the tokenizer's; it is saved with the trained model."
    )
    trust_remote_code: bool = key(False, "Run model or tokenizer code found in the folder.")
    external_lib: str | None = key(
        None, "Python module (or file) imported first, here and in every worker: it may register losses and models."
    )
    random_init: bool = key(False, "Start from random weights of this shape; only config.json is read (benchmarks).")
    override_config: dict[str, Any] = key({}, "Fields of the model's config.json to change.")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in backward to save memory.")
    enable_activation_offload: bool = key(
        False, "Move activations to host memory until their backward.", only_if=differs("trainer.device", "cpu")
    )
    use_remove_padding: bool = key(True, "Pack sequences without padding; false: padded, by the model's own attention.")
    use_liger: bool = key(
        False, "Liger kernels.", pending="Liger kernels; use_torch_compile fuses a layer's operations instead"
    )
    lora_rank: int = key(
        0,
        "Rank of the LoRA adapter; 0: train all weights.",
        low=0,
        high=65536,
        only_if=equals(".lora_adapter_path", None),
        noted=True,
    )
    lora_alpha: float = key(
        16.0,
        "Scale of the LoRA adapter, over its rank.",
        low=0,
        high=1e6,
        only_if=equals(".lora_adapter_path", None),
        noted=True,
    )
    target_modules: list[str] = key(
        ["all-linear"], "Modules that get an adapter.", only_if=equals(".lora_adapter_path", None), noted=True
    )
    exclude_modules: list[str] = key(
        [],
        "Modules that get none: last parts of names, or patterns of whole names such as .*visual.*.",
        only_if=above(".lora_rank", 0),
        noted=True,
    )
    lora_adapter_path: str | None = key(None, "Folder of a peft adapter to start from.")

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters are trained instead of the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
