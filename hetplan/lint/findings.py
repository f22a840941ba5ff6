"""What lint says: findings with an identifier, a place and an explanation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FINDINGS_SCHEMA = "hetplan.findings/1"
"""Schema of `Findings` as JSON."""


class Severity(StrEnum):
    """How sure a finding is."""

    IMPOSSIBLE = "impossible"
    """Physics or arithmetic forbids it: the value is wrong, or does not mean what its name says."""
    SUSPICIOUS = "suspicious"
    """It can be, and usually is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or probably wrong, in one file; rows alike are one finding."""

    rule: str
    """Identifier of the rule, as in `times-do-not-grow`."""
    severity: Severity
    file: str
    lines: tuple[int, ...]
    """First lines that show it, at most ten; empty: the whole file."""
    count: int
    """Rows or values that show it."""
    found: str
    """What was found, with the numbers, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that was found, in the order of the files."""

    findings: tuple[Finding, ...]
    files: tuple[str, ...]
    """Files that were read."""
    skipped: tuple[str, ...]
    """Files that no rule knows, each with why."""
