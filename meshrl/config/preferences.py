"""`PreferenceConfig`: the whole config of `meshrl prefer`, which learns which answers are better, or good."""

from dataclasses import dataclass

from meshrl.config.key import key, section
from meshrl.config.optim import OptimConfig
from meshrl.config.sft import SequenceDataConfig, SupervisedConfig, SupervisedRunConfig
from meshrl.config.tree import changed_keys

# As in `meshrl.algorithms`: the loss of answers that were judged one by one, that of a reward model, the losses that
# compare a policy with a reference, and all of them.
JUDGED, REWARD = "kto", "reward"
WITH_REFERENCE = ("dpo", "ipo", "hinge", JUDGED)
PREFERENCE_LOSSES = (*WITH_REFERENCE, "simpo", "orpo", REWARD)


@dataclass
class PreferenceDataConfig(SequenceDataConfig):
    chosen_key: str = key("chosen", "Column with the better answer: a text, or a list of messages.")
    rejected_key: str = key("rejected", "Column with the worse answer.")
    response_key: str = key("response", "kto: column with the answer: a text, or a list of messages.")
    label_key: str = key("label", "kto: column that says whether the answer is good: true or false, 1 or 0.")


@dataclass
class PreferenceLossConfig:
    name: str = key(
        "dpo",
        "dpo, ipo, hinge, simpo, orpo: a policy, of pairs; kto: of judged answers; reward: a reward model.",
        choices=PREFERENCE_LOSSES,
    )
    beta: float = key(
        0.1,
        "How much log-ratios (simpo: mean log-probs) count; ipo aims at 1/(2 beta); orpo: the weight of pairs.",
        low=1e-9,
        high=1e6,
    )
    label_smoothing: float = key(
        0.0, "dpo, simpo, reward: the share of pairs that are taken to be the wrong way round.", low=0, high=0.5
    )
    simpo_gamma: float = key(
        0.5, "simpo: the margin (beta times the difference) that the chosen answer should have.", low=0, high=1e6
    )
    sft_weight: float = key(
        0.0, "Weight of the chosen answers' negative log-likelihood a token, beside it.", low=0, high=1e6
    )
    desirable_weight: float = key(1.0, "kto: weight of good answers.", low=0, high=1e6)
    undesirable_weight: float = key(1.0, "kto: weight of bad answers.", low=0, high=1e6)

    @property
    def options(self) -> dict[str, float]:
        """The numbers in the loss of a pair, or of a judged answer."""
        if self.name == JUDGED:
            names = ("beta", "desirable_weight", "undesirable_weight")
        else:
            names = ("beta", "label_smoothing", "simpo_gamma")
        return {name: getattr(self, name) for name in names}

    @property
    def likelihood_weight(self) -> float:
        """How much the log-likelihood of chosen answers counts: it is a part of orpo."""
        return 1.0 if self.name == "orpo" else self.sft_weight


@dataclass
class PreferenceReferenceConfig:
    path: str | None = key(None, "Its folder; null: the model as it begins, with adapters that model without them.")
    param_offload: bool = key(False, "Its weights wait in host memory while the policy learns.")


@dataclass
class PreferenceConfig(SupervisedConfig):
    data: PreferenceDataConfig = section(PreferenceDataConfig, "The answers.", train_batch_size=64)
    optim: OptimConfig = section(OptimConfig, "The optimizer.", lr=1e-6)
    loss: PreferenceLossConfig = section(PreferenceLossConfig, "What the answers teach.")
    reference: PreferenceReferenceConfig = section(
        PreferenceReferenceConfig, "What dpo, ipo, hinge and kto compare the policy with."
    )
    trainer: SupervisedRunConfig = section(
        SupervisedRunConfig, "Processes, lengths of the run, logging.", total_epochs=1
    )

    @property
    def noun(self) -> str:
        """What a row of the data is."""
        return "answer" if self.is_judged else "pair"

    @property
    def sequences_per_row(self) -> int:
        """How many sequences a row of the data becomes, which stay together."""
        return 1 if self.is_judged else 2

    @property
    def is_judged(self) -> bool:
        """Whether answers were judged one by one instead of compared."""
        return self.loss.name == JUDGED

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with another."""
        return self.loss.name in WITH_REFERENCE

    @property
    def has_second_model(self) -> bool:
        """Whether that other model is held beside it: adapters that can be switched off need none."""
        return self.has_reference and not (self.model.has_adapters and self.reference.path is None)

    @property
    def trains_scores(self) -> bool:
        """Whether the model becomes a reward model."""
        return self.loss.name == REWARD


def preference_problems(config: PreferenceConfig) -> list[str]:
    """Keys that would silently do nothing with the chosen loss."""
    loss, has_reference = config.loss.name, config.has_reference
    unused = {
        "loss.beta": loss == REWARD,
        "loss.label_smoothing": loss not in ("dpo", "simpo", REWARD),
        "loss.simpo_gamma": loss != "simpo",
        "loss.sft_weight": loss in ("orpo", JUDGED, REWARD),
        "loss.desirable_weight": loss != JUDGED,
        "loss.undesirable_weight": loss != JUDGED,
        "reference": not has_reference,
        **dict.fromkeys(("data.chosen_key", "data.rejected_key"), loss == JUDGED),
        **dict.fromkeys(("data.response_key", "data.label_key"), loss != JUDGED),
    }
    problems = [
        f"{name} has no effect with loss.name={loss}"
        for prefix, is_idle in unused.items()
        for name in (changed_keys(config, prefix) if is_idle else ())
    ]
    if has_reference and not config.has_second_model:
        given = changed_keys(config, "reference.param_offload")
        problems += [f"{name} has no effect with adapters, whose base is the reference" for name in given]
    if config.has_second_model and config.model.random_init and config.reference.path is None:
        problems.append(
            f"model.random_init=true: loss.name={loss} needs a reference with the same weights: give a folder"
        )
    return problems
