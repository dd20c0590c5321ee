"""What a check found: a line with ok, warn or fail, and what to do about it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
ORDER: tuple[Status, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer. `numbers` are what it was judged by, for programs that read the JSON."""

    check: str
    status: Status
    found: str
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


def worst(findings: Iterable[Finding]) -> Status:
    """`fail` if any failed, else `warn` if any warns."""
    return ORDER[max((ORDER.index(finding.status) for finding in findings), default=0)]


def as_lines(findings: Iterable[Finding]) -> list[str]:
    """The findings for a terminal, the advice under those that need some."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.check:<15} {finding.found}")
        if finding.advice:
            lines.append(f"{'':<22}-> {finding.advice}")
    return lines


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The findings for a program: the worst status and every finding with its numbers."""
    listed = list(findings)
    return {
        "status": worst(listed),
        "findings": [
            {
                "check": finding.check,
                "status": finding.status,
                "found": finding.found,
                "advice": finding.advice,
                "numbers": dict(finding.numbers),
            }
            for finding in listed
        ],
    }


def judged(value: float, warn: float, fail: float, low_is_bad: bool = True) -> Status:
    """The status of a number by two bounds, below (or above) which it warns and fails."""
    if not low_is_bad:
        value, warn, fail = -value, -warn, -fail
    return "fail" if value < fail else "warn" if value < warn else "ok"
