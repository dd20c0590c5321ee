"""`optim.*`: the optimizer and the learning-rate schedule of one model."""

from dataclasses import dataclass

from meshrl.config.key import MOST_STEPS, key


@dataclass
class OptimConfig:
    lr: float = key(1e-6, "Peak learning rate.", low=0, high=10)
    optimizer: str = key("AdamW", "Optimizer class.", choices=("AdamW",))
    weight_decay: float = key(0.01, "Decoupled weight decay.", low=0, high=10)
    betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates.", low=0, high=1)
    eps: float = key(1e-8, "AdamW's epsilon: gradients much smaller than this move nothing.", low=0, high=1)
    lr_warmup_steps: int = key(
        -1, "Optimizer steps of linear warm-up; -1: by lr_warmup_steps_ratio.", low=-1, high=MOST_STEPS
    )
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all optimizer steps.", low=0, high=1)
    lr_scheduler_type: str = key(
        "constant",
        "Schedule after the warm-up; wsd: constant, then a linear decay over lr_decay_steps_ratio.",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    lr_decay_steps_ratio: float = key(0.2, "wsd: the decay at the end, as a share of all steps.", low=0, high=1)
    min_lr_ratio: float = key(0.0, "Where linear, cosine and wsd end, as a share of lr.", low=0, high=1)
