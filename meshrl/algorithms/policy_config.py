"""The parameters of all policy losses, and their reading from a config object or mapping."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class PolicyLossConfig:
    """The parameters of all policy losses. Each loss reads only its own. None means the default in the comment."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None  # default: clip_ratio
    clip_ratio_high: float | None = None  # default: clip_ratio
    clip_ratio_c: float | None = None  # dual clip: 3.0; cap of the ratio in dppo_*: 20.0
    tau_pos: float = 1.0  # sapo
    tau_neg: float = 1.05  # sapo
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 1.0  # kl_cov
    dro_beta: float = 0.1
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    behaviour_weight_cap: float = 5.0  # decoupled
    m2_threshold: float = 0.04  # m2po

    def __post_init__(self) -> None:
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1.0:
            raise ValueError(f"clip_ratio_c must be greater than 1.0, got {self.clip_ratio_c}")
        positive = "tau_pos", "tau_neg", "clip_cov_ratio", "kl_cov_ratio", "dro_beta", "behaviour_weight_cap"
        for name in (*positive, "m2_threshold"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share of the tokens, at most 1, got {getattr(self, name)}")
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb ({self.clip_cov_lb}) must be below clip_cov_ub ({self.clip_cov_ub})")
        if self.icepop_low >= self.icepop_high:
            raise ValueError(f"icepop_low ({self.icepop_low}) must be below icepop_high ({self.icepop_high})")

    @property
    def low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @classmethod
    def read(cls, config: Any) -> "PolicyLossConfig":
        """Read each parameter from `config.policy_loss`, else from `config`, else use the default.

        `config` has attributes or keys. A value of None counts as missing.
        """
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if given := field_of(config, "global_batch_info"):
            raise ValueError(
                f"config.global_batch_info ({', '.join(sorted(given))}) is not read: give the mini-batch's counts over "
                "all ranks as stats=BatchStats(dp_size, num_tokens, num_sequences, loss_scale_factor)"
            )
        nested = field_of(config, "policy_loss")
        found: dict[str, Any] = {}
        for field in fields(cls):
            for source in (nested, config):
                value = None if source is None else field_of(source, field.name)
                if value is not None:
                    found[field.name] = float(value)
                    break
        return cls(**found)


def field_of(source: Any, name: str) -> Any:
    """Return the field `name` of a config with attributes or keys, or None if the field or the config is missing."""
    if isinstance(source, Mapping):
        return source.get(name)
    return getattr(source, name, None)
