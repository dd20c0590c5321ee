"""`PreferenceConfig`: the whole config of `meshrl prefer`, which learns which of two answers is better."""

from dataclasses import dataclass
from typing import ClassVar

from meshrl.config.key import key, section
from meshrl.config.optim import OptimConfig
from meshrl.config.sft import SequenceDataConfig, SupervisedConfig
from meshrl.config.trainer import RunConfig
from meshrl.config.tree import changed_keys

# As in `meshrl.algorithms`: the losses of a policy that compare it with a reference, and that of a reward model.
WITH_REFERENCE, REWARD = ("dpo", "ipo", "hinge"), "reward"
PREFERENCE_LOSSES = (*WITH_REFERENCE, "simpo", REWARD)


@dataclass
class PreferenceDataConfig(SequenceDataConfig):
    noun: ClassVar[str] = "pair"
    sequences_per_row: ClassVar[int] = 2

    chosen_key: str = key("chosen", "Column with the better answer: a text, or a list of messages.")
    rejected_key: str = key("rejected", "Column with the worse answer.")


@dataclass
class PreferenceLossConfig:
    name: str = key(
        "dpo",
        "Loss of a pair: of a policy (dpo, ipo, hinge, simpo), or of a reward model (reward, Bradley-Terry).",
        choices=PREFERENCE_LOSSES,
    )
    beta: float = key(0.1, "How much log-ratios (simpo: mean log-probs) count; ipo aims at 1 / (2 beta).", low=1e-9)
    label_smoothing: float = key(
        0.0, "dpo, simpo, reward: the share of pairs that are taken to be the wrong way round.", low=0, high=0.5
    )
    simpo_gamma: float = key(
        0.5, "simpo: the margin (beta times the difference) that the chosen answer should have.", low=0
    )
    sft_weight: float = key(0.0, "Weight of the chosen answers' negative log-likelihood a token, beside it.", low=0)

    @property
    def options(self) -> dict[str, float]:
        """The numbers in the loss of a pair."""
        return {"beta": self.beta, "label_smoothing": self.label_smoothing, "simpo_gamma": self.simpo_gamma}


@dataclass
class PreferenceReferenceConfig:
    path: str | None = key(None, "Its folder; null: the model as it begins, with adapters that model without them.")
    param_offload: bool = key(False, "Its weights wait in host memory while the policy learns.")


@dataclass
class PreferenceConfig(SupervisedConfig):
    data: PreferenceDataConfig = section(PreferenceDataConfig, "The pairs of answers.", train_batch_size=64)
    optim: OptimConfig = section(OptimConfig, "The optimizer.", lr=1e-6)
    loss: PreferenceLossConfig = section(PreferenceLossConfig, "What a pair teaches.")
    reference: PreferenceReferenceConfig = section(
        PreferenceReferenceConfig, "What dpo, ipo and hinge compare the policy with."
    )
    trainer: RunConfig = section(RunConfig, "Processes, lengths of the run, logging.", total_epochs=1)

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with another."""
        return self.loss.name in WITH_REFERENCE

    @property
    def trains_scores(self) -> bool:
        """Whether the model becomes a reward model."""
        return self.loss.name == REWARD


def preference_problems(config: PreferenceConfig) -> list[str]:
    """Keys that would silently do nothing with the chosen loss."""
    loss, has_reference = config.loss.name, config.has_reference
    unused = {
        "loss.beta": loss == REWARD,
        "loss.label_smoothing": loss in ("ipo", "hinge"),
        "loss.simpo_gamma": loss != "simpo",
        "loss.sft_weight": loss == REWARD,
        "reference": not has_reference,
    }
    problems = [
        f"{name} has no effect with loss.name={loss}"
        for prefix, is_idle in unused.items()
        for name in (changed_keys(config, prefix) if is_idle else ())
    ]
    if has_reference and config.model.has_adapters and config.reference.path is None:
        given = changed_keys(config, "reference.param_offload")
        problems += [f"{name} has no effect with adapters, whose base is the reference" for name in given]
    if has_reference and config.model.random_init and config.reference.path is None and not config.model.has_adapters:
        problems.append(
            f"model.random_init=true: loss.name={loss} needs a reference with the same weights: give a folder"
        )
    return problems
