"""Diagnosis of a run from its metrics: is it learning, is it healthy, where does the time go?

Each question gets a `Verdict` with the checks and the numbers behind it.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.config.keys import count
from meshrl.telemetry.metrics import finish_shares
from meshrl.telemetry.page import number
from meshrl.telemetry.panels import STEP_CLOCK, Account, Record, Series, accounts, series_of, validation_series, waiting

GOOD, WATCH, BAD, OPEN = "good", "watch", "bad", "open"
_WORSE = (GOOD, OPEN, WATCH, BAD)
RECENT = 10
# A change between the first and the last steps counts as real above this many standard errors.
_CERTAIN = 3.0
_FEWEST_STEPS = 6
# Metrics that should stay 0: (metric, description, level of the check if it is not 0)
COUNTED = (
    ("training/nonfinite_metrics", "Metric values that were NaN or infinite", BAD),
    ("actor/skipped_steps", "Optimizer steps skipped because the gradient was not finite", BAD),
    ("train/skipped_steps", "Optimizer steps skipped because the gradient was not finite", BAD),
    ("reward/errors", "Samples whose reward function failed or gave no finite number", WATCH),
    ("training/stale_dropped", "Samples dropped because they were too old", WATCH),
    ("training/tracker_failures", "Failed calls to tracking services", WATCH),
)


@dataclass(frozen=True)
class Check:
    """The result of one check: its level, a text with the number, and the metric."""

    level: str
    text: str
    metric: str


@dataclass(frozen=True)
class Verdict:
    """The answer to one question on a run: a level, a short answer, and a text with the numbers behind it."""

    question: str
    level: str
    answer: str
    text: str
    checks: list[Check] = field(default_factory=list)


def verdicts(records: Sequence[Record], distributions: Sequence[Mapping[str, Any]] = ()) -> list[Verdict]:
    """Answer the three questions on a run; `records` come from `merge_steps`."""
    return [learning(records), health(records, distributions), time_spent(records)]


def learning(records: Sequence[Record]) -> Verdict:
    """Judge whether reward and validation rose, or the loss of a supervised run fell, by more than chance."""
    question = "Is it learning?"
    reward = series_of("critic/score/mean", "training reward", records)
    curve = reward if reward.values else series_of("train/loss", "training loss", records)
    checks = [_course(curve, 1 if reward.values else -1)] if curve.values else []
    scores, losses = validation_series(records), [series_of("val/loss", "validation loss", records)]
    checks += [_validation(v, 1 if scores else -1) for v in scores or losses if len(v.values) > 1]
    if not checks:
        return Verdict(question, OPEN, "Nothing yet", "no reward and no loss was logged so far")
    level = checks[0].level
    fell = next((check for check in checks[1:] if check.level == BAD), None)
    if level == GOOD and fell is not None:
        return Verdict(question, WATCH, "Only in training", f"{checks[0].text}; but {fell.text}", checks)
    if level != GOOD and len(checks) > 1 and all(check.level == GOOD for check in checks[1:]):
        # Each validation is a single number without a noise estimate, so it proves no learning on its own.
        unsure, answer = (WATCH, "Only on validation") if level == BAD else (OPEN, "Perhaps")
        return Verdict(question, unsure, answer, f"{checks[1].text}; {checks[0].text}", checks)
    answer = {GOOD: "Yes", WATCH: "Not visibly", BAD: "No", OPEN: "Too early"}[level]
    return Verdict(question, level, answer, "; ".join(check.text for check in checks[:2]), checks)


def health(records: Sequence[Record], distributions: Sequence[Mapping[str, Any]] = ()) -> Verdict:
    """Judge whether something went wrong silently or is about to go wrong."""
    checks = [check for look in _CHECKS if (check := look(records)) is not None]
    checks += [check for check in (_cut(records, distributions),) if check is not None]
    counted = _counted(records)
    question = "Is it healthy?"
    if not (checks or counted):
        return Verdict(question, OPEN, "Nothing yet", "nothing was logged that would tell")
    checks = sorted([*counted, *checks], key=lambda check: -_WORSE.index(check.level))
    level = checks[0].level
    wrong = [check.text for check in checks if check.level in (WATCH, BAD)]
    if not wrong:
        shown = "; ".join(check.text for check in checks[:3])
        return Verdict(question, GOOD, "Yes", f"all {len(checks)} checks are within bounds: {shown}", checks)
    answer = "No" if level == BAD else "Look here"
    return Verdict(question, level, answer, f"{len(wrong)} of {len(checks)} checks: {'; '.join(wrong[:3])}", checks)


def time_spent(records: Sequence[Record]) -> Verdict:
    """Report the work that takes most of a step, workers that wait, and steps that get slower."""
    question, books = "Where does the time go?", accounts(records)
    if not books:
        return Verdict(question, OPEN, "Nothing yet", "no times were logged so far")
    # The worker group that waits least sets the pace.
    main = min(sorted(books, key=lambda book: book.who == "controller"), key=waiting)
    first, *others = sorted(main.entries, key=lambda entry: -entry.seconds)
    who = "" if main.who == STEP_CLOCK else f" of {main.who}"
    text = f"{first.what} takes {first.share:.0%} of a step{who} ({number(first.seconds)} of {number(main.seconds)} s)"
    if others:
        text += f", then {others[0].what} {others[0].share:.0%}"
    checks = [check for account in books for check in _idle(account)]
    checks += [check for check in (_slower(records),) if check is not None]
    wrong = [check.text for check in checks if check.level != GOOD]
    level = WATCH if wrong else GOOD
    return Verdict(question, level, f"Mostly {first.what}", "; ".join([text, *wrong[:2]]), checks)


def _course(curve: Series, better: int) -> Check:
    """Compare the means of the first and the last fifth of the steps, in units of the noise between steps."""
    steps = len(curve.values)
    if steps < _FEWEST_STEPS:
        few = f"too early to tell after {count(steps, 'step')}"
        return Check(OPEN, f"{few}, {curve.label} {number(curve.values[-1])}", curve.metric)
    size = max(2, steps // 5)
    start, end = statistics.fmean(curve.values[:size]), statistics.fmean(curve.values[-size:])
    jumps = [b - a for a, b in zip(curve.values, curve.values[1:], strict=False)]
    noise = math.sqrt(statistics.fmean([jump * jump for jump in jumps]) / 2)
    error = noise * math.sqrt(2 / size)
    errors = better * (end - start) / error if error > 0 else math.copysign(math.inf, better * (end - start) or -1)
    level = GOOD if errors > _CERTAIN else BAD if errors < -_CERTAIN and error > 0 else WATCH
    moved = "rose" if end > start else "fell" if end < start else "stayed"
    if level == WATCH:
        moved = "went"
    text = f"{curve.label} {moved} from {number(start)} (mean of the first {size} steps) to {number(end)} (last {size})"
    return Check(level, text + (f", {abs(errors):.0f} standard errors" if error > 0 else ""), curve.metric)


def _validation(curve: Series, better: int) -> Check:
    place = max(range(len(curve.values)), key=lambda i: better * curve.values[i])
    gain = better * (curve.values[-1] - curve.values[0])
    best = f"{number(curve.values[place])} at step {curve.steps[place]:,.0f}"
    text = f"{curve.label} {number(curve.values[0])} → {number(curve.values[-1])}, best {best}"
    return Check(GOOD if gain > 0 else WATCH if gain == 0 else BAD, text, curve.metric)


def _counted(records: Sequence[Record]) -> list[Check]:
    found = []
    for name, words, level in COUNTED:
        values = series_of(name, "", records).values
        if count := sum(values):
            found.append(Check(level, f"{words}: {count:,.0f}", name))
    return found


def _recent(name: str, records: Sequence[Record]) -> tuple[float, float] | None:
    """Return the medians of a metric over the first and the last `RECENT` steps, or None without values."""
    values = series_of(name, "", records).values
    return (statistics.median(values[:RECENT]), statistics.median(values[-RECENT:])) if values else None


def _bounded(name: str, words: str, watch: float, bad: float, form: str = "{}") -> Callable[..., Check | None]:
    """Return a check for a metric whose absolute value should stay small.

    Above `watch` the level is WATCH, above `bad` it is BAD.
    """

    def look(records: Sequence[Record]) -> Check | None:
        if (found := _recent(name, records)) is None:
            return None
        size = abs(found[1])
        level = BAD if size > bad else WATCH if size > watch else GOOD
        limit = "" if level == GOOD else f", above {form.format(number(bad if level == BAD else watch))}"
        return Check(level, f"{words} {form.format(number(size))}{limit}", name)

    return look


def _mismatch(records: Sequence[Record]) -> Check | None:
    """Check the difference between the log-probs of rollout and trainer.

    Stale samples get five times the limits. Old samples, and KV caches filled by older weights, differ by nature.
    """
    stale = _recent("training/staleness_mean", records)
    slack = 5 if stale is not None and stale[1] > 0 else 1
    words = "rollout and trainer differ by" if slack == 1 else "rollout and trainer, on stale samples, differ by"
    return _bounded("training/rollout_log_prob_diff_mean", words, 1e-2 * slack, 5e-2 * slack, "{} nats")(records)


def _entropy(records: Sequence[Record]) -> Check | None:
    name = "actor/entropy"
    if (found := _recent(name, records)) is None:
        return None
    first, last = found
    text = f"entropy {number(last)} nats, was {number(first)}"
    if 0 <= last < 0.01 * first:
        return Check(WATCH, f"{text}: the policy hardly explores any more", name)
    if last > first + 0.5 and last > 2 * first:
        return Check(WATCH, f"{text}: it grows, answers become noise", name)
    return Check(GOOD, text, name)


def _gradient(records: Sequence[Record]) -> Check | None:
    for name in ("actor/grad_norm", "train/grad_norm"):
        values = series_of(name, "", records).values
        if len(values) >= _FEWEST_STEPS:
            usual, largest = statistics.median(values), max(values[-RECENT:])
            text = f"largest gradient norm of the last {min(RECENT, len(values))} steps {number(largest)}"
            level = WATCH if usual > 0 and largest > 10 * usual else GOOD
            return Check(level, f"{text}, usual {number(usual)}", name)
    return None


def _critic(records: Sequence[Record]) -> Check | None:
    name = "critic/vf_explained_var"
    if (found := _recent(name, records)) is None:
        return None
    level = WATCH if found[1] < 0 else GOOD
    return Check(level, f"the critic explains {number(found[1])} of the returns' variance", name)


def _gates(records: Sequence[Record]) -> Check | None:
    values = series_of("gates/warnings", "", records).values
    if not values:
        return None
    return Check(WATCH if values[-1] else GOOD, f"findings of the numeric gates: {values[-1]:,.0f}", "gates/warnings")


_CHECKS = (
    _mismatch,
    _entropy,
    _bounded("actor/ppo_kl", "KL of an update", 0.03, 0.1, "{} nats"),
    _bounded("actor/pg_clipfrac", "clip fraction", 0.2, 0.5),
    _bounded("training/zero_advantage_share", "share of samples that teach nothing", 0.9, 0.999),
    _gradient,
    _critic,
    _gates,
)


def _cut(records: Sequence[Record], distributions: Sequence[Mapping[str, Any]]) -> Check | None:
    """Check the share of responses that were cut at the maximum length.

    The share comes from finish reasons if they were recorded, and otherwise from response lengths.
    """
    shares = [row.get("length", 0.0) for row in finish_shares(distributions)][-RECENT:]
    name = "finish reason 'length'"
    if not shares:
        name = "response_length/clip_ratio"
        shares = series_of(name, "", records).values[-RECENT:]
    if not shares:
        return None
    share = statistics.median(shares)
    level = BAD if share > 0.5 else WATCH if share > 0.2 else GOOD
    return Check(level, f"{share:.0%} of the answers are cut at the maximum length", name)


def _idle(account: Account) -> list[Check]:
    """Check the waiting time and the unaccounted time of a worker group.

    The controller's waiting is not checked, because waiting for workers is its job.
    """
    waits = waiting(account)
    other = sum(entry.share for entry in account.entries if entry.what == "other")
    name = "timing_s" if account.who == STEP_CLOCK else f"ledger_s/{account.who}"
    found = []
    if account.who not in (STEP_CLOCK, "controller"):
        level = WATCH if waits > 0.25 else GOOD
        found.append(Check(level, f"{account.who} waits for {waits:.0%} of its time", f"{name}/wait_*"))
    level = WATCH if other > 0.15 else GOOD
    found.append(Check(level, f"{other:.0%} of the time of {_of(account)} is booked to nothing", f"{name}/other"))
    if account.booked is not None:
        level = GOOD if abs(account.booked - 1) <= 0.01 else WATCH
        found.append(
            Check(level, f"the ledger of {account.who} sums to {account.booked:.1%}", f"ledger/{account.who}/booked")
        )
    return found


def _of(account: Account) -> str:
    return "a step" if account.who == STEP_CLOCK else account.who


def _slower(records: Sequence[Record]) -> Check | None:
    """Check whether steps became slower than their token counts explain, by the throughput."""
    name = "perf/throughput"
    if len(series_of(name, "", records).values) < 2 * RECENT or (found := _recent(name, records)) is None:
        return None
    slow = found[1] < 0.7 * found[0]
    text = f"throughput {number(found[0])} → {number(found[1])} tokens/s per device"
    return Check(WATCH if slow else GOOD, text + (": steps became slower" if slow else ""), name)
