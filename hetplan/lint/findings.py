"""What `hetplan check` reports: findings, the rules that make them, and the table of all rules.

A rule's check yields one `Fault` per row that breaks it; `apply` joins the faults of one file into
one finding. A check that knows which rows belong together yields findings itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from hetplan.errors import Fault, Severity
from hetplan.lint.evidence import Evidence, Place

__all__ = ["Finding", "Findings", "Rule", "Severity"]

FINDINGS_SCHEMA = "hetplan.findings/2"
"""Schema of `Findings` as JSON."""
MAX_LINES = 10
"""Lines that a finding names."""

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Fault):
    """One thing that is wrong or doubtful in one file; rows that break one rule are one finding."""

    rule: str = ""
    """Identifier of the rule, as in `times-do-not-grow`; `Rule.advice` says what to do."""
    lines: tuple[int, ...] = ()
    """First lines that show it, at most ten; empty: the whole file."""
    count: int = 1
    """Rows or values that show it."""

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """Form 1 called the message `found` and the severities impossible and suspicious."""
        if "found" not in data:
            return data
        words = {"impossible": Severity.ERROR.value, "suspicious": Severity.WARNING.value}
        lines = data.get("lines")
        rest = {key: value for key, value in data.items() if key != "found"}
        return rest | {
            "message": data["found"],
            "severity": words.get(str(data.get("severity")), data.get("severity")),
            "line": lines[0] if isinstance(lines, list) and lines else 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Every finding, in the order of the files."""

    findings: tuple[Finding, ...]
    files: tuple[str, ...]
    """Files that were read."""
    skipped: tuple[str, ...]
    """Files that no rule knows, each with why."""

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """The findings in their newest form."""
        found = data.get("findings")
        entries = found if isinstance(found, list) else []
        return data | {
            "findings": [
                Finding.from_older_form(each) if isinstance(each, dict) else each
                for each in entries
            ]
        }


Check: TypeAlias = Callable[[Evidence], Iterable[Fault]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that is wrong in measurements more often than people think."""

    id: str
    severity: Severity
    title: str
    """What it finds, in a few words."""
    explanation: str
    """Why it is wrong or doubtful, and what usually causes it."""
    advice: str
    """What to do."""
    check: Check


def apply(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """What the rule finds."""
    faults = list(rule.check(evidence))
    for group in grouped(faults, lambda fault: fault.file).values():
        whole = [fault for fault in group if isinstance(fault, Finding)]
        rows = [fault for fault in group if not isinstance(fault, Finding)]
        joined = [finding([at(row) for row in rows], rows[0].message)] if rows else []
        for each in (*joined, *whole):
            yield replace(each, rule=rule.id, severity=rule.severity)


def at(place: Place | Fault, message: str = "") -> Fault:
    """A fault of one row."""
    return Fault(file=place.file, line=place.line, message=message)


def finding(
    places: Iterable[Place | Fault], message: str, *, count: int | None = None, rule: str = ""
) -> Finding:
    """Rows of one file as one finding; `count` where more or fewer values than rows show it."""
    rows = list(places)
    lines = sorted({row.line for row in rows if row.line})[:MAX_LINES]
    return Finding(
        file=rows[0].file,
        line=lines[0] if lines else 0,
        lines=tuple(lines),
        count=len(rows) if count is None else count,
        message=message,
        rule=rule,
    )


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The rows by key, in the order in which the keys first occur."""
    groups: dict[K, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
