"""`trainer.gates.*`: what is watched while a run goes on, and what happens when something is off."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshrl.config.conditions import all_of, any_of, differs, equals, is_set
from meshrl.config.key import MOST_STEPS, key
from meshrl.config.names import ROLLOUT

if TYPE_CHECKING:
    from meshrl.config.root import PPOConfig

ACTIONS = ("off", "warn", "stop")
GATES = ("first_step", "log_prob_diff", "non_finite", "entropy_collapse", "equal_rewards")
CORRECTION = "algorithm.rollout_correction"
# Only with the rollout's own log-probs is there something to compare the trainer's with.
COMPARES = equals(f"{ROLLOUT}.calculate_log_probs", True)


@dataclass
class GatesConfig:
    first_step: str = key(
        "warn",
        "When, at the first step, trainer and rollout are not the same policy.",
        choices=ACTIONS,
        only_if=any_of(COMPARES, equals(f"{CORRECTION}.bypass_mode", False)),
        no_request=("off",),
    )
    on_policy_kl: float = key(
        0.01,
        "Largest KL to the old log-probs before the first update.",
        low=0,
        high=1e6,
        only_if=differs(".first_step", "off"),
    )
    log_prob_diff: str = key(
        "warn",
        "When rollout and trainer disagree about log-probs during the run.",
        choices=ACTIONS,
        only_if=COMPARES,
        no_request=("off",),
    )
    log_prob_diff_mean: float = key(
        0.1,
        "Largest mean difference of log-probs, in nats a token.",
        low=0,
        high=1e6,
        only_if=all_of(COMPARES, any_of(differs(".first_step", "off"), differs(".log_prob_diff", "off"))),
    )
    non_finite: str = key("stop", "When a batch has NaN or inf to train on; the batch is kept.", choices=ACTIONS)
    entropy_collapse: str = key("warn", "When the entropy has all but gone.", choices=ACTIONS)
    entropy_share: float = key(
        0.05,
        "Share of the first step's entropy below which it has.",
        low=0,
        high=1,
        only_if=differs(".entropy_collapse", "off"),
    )
    equal_rewards: str = key(
        "warn", "When no sample has an advantage: all rewards are the same, or of each group.", choices=ACTIONS
    )
    patience: int = key(
        3,
        "Steps in a row before the last two of these count.",
        low=1,
        high=MOST_STEPS,
        only_if=any_of(differs(".entropy_collapse", "off"), differs(".equal_rewards", "off")),
    )
    limits: dict[str, Any] = key({}, "Bounds of any metric: {max, min, then}, or just a largest value (warn).")
    repeat_every: int = key(
        50,
        "Say the same warning again after so many steps.",
        low=1,
        high=MOST_STEPS,
        only_if=any_of(*(equals(f".{name}", "warn") for name in GATES), is_set(".limits")),
    )


def gate_problems(config: "PPOConfig") -> list[str]:
    """Gates that could not see what they are to stop for, and limits that say nothing or cannot hold."""
    gates = config.trainer.gates
    problems = limit_problems(gates)
    if gates.first_step == "stop" and not config.actor_rollout_ref.rollout.calculate_log_probs:
        problems.append(
            f"trainer.gates.first_step=stop cannot see whether rollout and trainer are the same policy: {ROLLOUT}."
            "calculate_log_probs=false leaves out the log-probs that it compares; set that to true, or the gate to off"
        )
    return problems


def limit_problems(gates: GatesConfig) -> list[str]:
    """Entries of `trainer.gates.limits` that say nothing or cannot hold."""
    return [problem for name, entry in gates.limits.items() if (problem := _limit_problem(str(name), entry))]


def _limit_problem(name: str, entry: Any) -> str | None:
    where = f"trainer.gates.limits.{name}"
    fields = entry if isinstance(entry, dict) else {"max": entry}
    if unknown := sorted(set(fields) - {"max", "min", "then"}):
        return f"{where} has no {', '.join(unknown)}: it has max, min, then"
    bounds = [fields[end] for end in ("min", "max") if fields.get(end) is not None]
    if not bounds or any(isinstance(b, bool) or not isinstance(b, int | float) or math.isnan(b) for b in bounds):
        return f"{where} needs a number as max or min, not {entry!r}"
    if len(bounds) == 2 and bounds[0] > bounds[1]:
        return f"{where}: min ({bounds[0]}) is above max ({bounds[1]})"
    if fields.get("then", "warn") not in ACTIONS[1:]:
        return f"{where}.then must be warn or stop, not {fields['then']!r}"
    return None
