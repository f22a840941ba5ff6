"""Every rule, and what the rules find in what was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import yaml

from hetplan.errors import Fault
from hetplan.lint import launches, layers, links, samples
from hetplan.lint.evidence import Evidence, Inputs
from hetplan.lint.findings import Check, Finding, Findings, Rule, Severity, apply, finding, grouped
from hetplan.lint.reading import LaunchContext, Reading, read_all

_MAX_FAULTS = 20
"""Faults of one file that are shown one by one: as many as a person mends before the next look."""

WRONG_FILE = "file-is-wrong"
_CHECKS: Mapping[str, Check] = {
    WRONG_FILE: lambda _: (),
    **layers.CHECKS,
    **links.CHECKS,
    **samples.CHECKS,
    **launches.CHECKS,
}


def _rules() -> Iterator[Rule]:
    """The texts of rules.yaml, each with its check."""
    texts = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
    for name, text in texts.items():
        severity = Severity(text.pop("severity"))
        yield Rule(id=name, severity=severity, check=_CHECKS[name], **text)


RULES = tuple(_rules())
"""In the order in which `hetplan check --rules` shows them."""


def rule(identifier: str) -> Rule | None:
    """The rule of this name; None where there is none."""
    return next((each for each in RULES if each.id == identifier), None)


def check_files(paths: Sequence[Path], context: LaunchContext) -> tuple[Findings, Reading]:
    """What is wrong or doubtful in these files and folders, and what they were read as."""
    reading = read_all(paths, context)
    return findings(reading), reading


def judge(inputs: Inputs) -> tuple[Finding, ...]:
    """Everything that the rules find, by rule."""
    evidence = Evidence(inputs=inputs)
    return tuple(each for rule in RULES for each in apply(rule, evidence))


def findings(reading: Reading) -> Findings:
    """Faults of form and everything that the rules find, in the order of the files."""
    found = [*_wrong_files(reading.faults), *judge(reading.inputs)]
    order = {file: position for position, file in enumerate(reading.files)}
    found.sort(key=lambda each: order.get(each.file, len(order)))
    return Findings(findings=tuple(found), files=reading.files, skipped=reading.skipped)


def _wrong_files(faults: Sequence[Fault]) -> Iterator[Finding]:
    """The first faults of each file one by one, the others together: a file may have a million."""
    for group in grouped(faults, lambda fault: fault.file).values():
        for fault in group[:_MAX_FAULTS]:
            values = {each.name: getattr(fault, each.name) for each in fields(Fault)}
            lines = (fault.line,) if fault.line else ()
            yield Finding(**values | {"rule": WRONG_FILE, "lines": lines})
        rest = group[_MAX_FAULTS:]
        if rest:
            yield finding(rest, "and more like these", rule=WRONG_FILE)
