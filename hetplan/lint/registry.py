"""Every rule, and what they find in what was read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetplan.errors import Fault
from hetplan.lint import (
    cluster_rules,
    copy_rules,
    efficiency_rules,
    launches,
    layer_list_rules,
    layer_rules,
    link_rules,
    neighbour_rule,
    rate_rules,
    run_rules,
    sample_rules,
)
from hetplan.lint.evidence import Evidence
from hetplan.lint.findings import Finding, Findings, Severity
from hetplan.lint.reading import Reading
from hetplan.lint.rows import Material
from hetplan.lint.rule import Rule, Sighting

_MAX_FAULTS = 20
"""Faults of one file that are shown one by one: as many as a person mends before the next look."""

WRONG_FILE = Rule(
    id="file-is-wrong",
    severity=Severity.IMPOSSIBLE,
    title="a file that cannot be read as what it is",
    explanation="The file is of a kind that hetplan knows, and something in it has the wrong form, "
    "or contradicts the other files.",
    advice="Mend what the message names.",
    check=lambda _: (),
)

RULES: tuple[Rule, ...] = (
    WRONG_FILE,
    *layer_rules.RULES,
    *rate_rules.RULES,
    *link_rules.RULES,
    *efficiency_rules.RULES,
    *copy_rules.RULES,
    *run_rules.RULES,
    *layer_list_rules.RULES,
    *neighbour_rule.RULES,
    *sample_rules.RULES,
    *cluster_rules.RULES,
    *launches.RULES,
)
"""In the order in which `hetplan check --rules` shows them."""


def rule(identifier: str) -> Rule | None:
    """The rule of this name; None where there is none."""
    return next((each for each in RULES if each.id == identifier), None)


def judge(material: Material) -> tuple[Finding, ...]:
    """Everything that the rules find, by rule."""
    evidence = Evidence(material=material)
    return tuple(_finding(each, seen) for each in RULES for seen in each.check(evidence))


def findings(reading: Reading) -> Findings:
    """Faults of form and everything that the rules find, in the order of the files."""
    found = [*_faults(reading.faults), *judge(reading.material)]
    order = {file: position for position, file in enumerate(reading.files)}
    found.sort(key=lambda finding: order.get(finding.file, len(order)))
    return Findings(findings=tuple(found), files=reading.files, skipped=reading.skipped)


def _finding(rule: Rule, seen: Sighting) -> Finding:
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        file=seen.file,
        lines=seen.lines,
        count=seen.count,
        found=seen.found,
    )


def _faults(faults: Sequence[Fault]) -> Iterator[Finding]:
    """The first faults of each file one by one, the others together: a file may have a million."""
    by_file: dict[str, list[Fault]] = {}
    for fault in faults:
        by_file.setdefault(fault.file, []).append(fault)
    for file, group in by_file.items():
        yield from map(_fault, group[:_MAX_FAULTS])
        rest = group[_MAX_FAULTS:]
        if rest:
            yield Finding(
                rule=WRONG_FILE.id,
                severity=WRONG_FILE.severity,
                file=file,
                lines=tuple(dict.fromkeys(fault.line for fault in rest[:10] if fault.line)),
                count=len(rest),
                found="and more like these",
            )


def _fault(fault: Fault) -> Finding:
    return Finding(
        rule=WRONG_FILE.id,
        severity=WRONG_FILE.severity,
        file=fault.file,
        lines=(fault.line,) if fault.line else (),
        count=1,
        found=": ".join(part for part in (fault.field, fault.message) if part),
    )
