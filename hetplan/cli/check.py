"""`hetplan check`: what is wrong or doubtful in measurements, runs, inputs and launches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, emit, name_values

if TYPE_CHECKING:
    from hetplan.lint.findings import Finding, Findings, Rule
    from hetplan.lint.reading import LaunchContext, Reading

FOUND = 2
"""Exit code where a finding is an error, or --strict found anything."""
WIDTH = 96
"""Characters of a line of explanation: a terminal of 100 with a margin."""


def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="Files or folders of hetplan and other tools, stores, tables, launches.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 2 for warnings too.")] = False,
    rules: Annotated[bool, typer.Option("--rules", help="List every rule.")] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="RULE", help="Explain one rule.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="Importer that reads the files.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="FILE", help="Model that it trains.", rich_help_panel="A launch"
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster", metavar="FILE", help="Where it runs.", rich_help_panel="A launch"
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A variable or flag that only its hosts know; may be repeated.",
            show_default=False,
            rich_help_panel="A launch",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report errors and warnings in files, and what to do.

    Exit code 0: nothing, or only warnings; 2: an error (with --strict: any finding).
    """
    from hetplan.errors import InputError, Severity
    from hetplan.files.encoding import encode
    from hetplan.lint.findings import FINDINGS_SCHEMA
    from hetplan.lint.registry import check_files

    if rules or explain is not None:
        emit(_rules_text(explain))
        return
    if not files:
        raise InputError("no file is named; name files or folders to check, or --rules")
    found, reading = check_files(files, _context(kind, model, cluster, given or []))
    emit(encode(found, schema=FINDINGS_SCHEMA) if as_json else _text(found, reading))
    if any(strict or each.severity is Severity.ERROR for each in found.findings):
        raise typer.Exit(FOUND)


def _context(
    kind: str | None, model: Path | None, cluster: Path | None, given: list[str]
) -> LaunchContext:
    from hetplan.cluster.load import load_cluster
    from hetplan.importers.table import importer_called
    from hetplan.lint.reading import LaunchContext
    from hetplan.model.load import load_model

    return LaunchContext(
        importer=None if kind is None else importer_called(kind).kind,
        model=None if model is None else load_model(model),
        cluster=None if cluster is None else load_cluster(cluster),
        given=name_values(given),
    )


def _text(found: Findings, reading: Reading) -> str:
    """Findings by file, then each rule that was broken, once, with what to do."""
    from hetplan.lint.registry import RULES

    lines: list[str] = []
    for file in dict.fromkeys(each.file for each in found.findings):
        ours = [each for each in found.findings if each.file == file]
        lines += [file, *(line for each in ours for line in _finding_lines(each)), ""]
    broken = {each.rule for each in found.findings}
    for rule in RULES:
        if rule.id in broken:
            lines += [*_rule_lines(rule), ""]
    lines += [f"skipped: {each}" for each in found.skipped]
    lines += [f"launch: {each}" for each in reading.understood]
    lines += [f"note: {each}" for each in reading.notes]
    return "\n".join([*lines, _summary(found, reading)])


def _finding_lines(finding: Finding) -> list[str]:
    shown = ", ".join(str(line) for line in finding.lines)
    more = ", ..." if finding.count > len(finding.lines) and finding.lines else ""
    where = f"line{'s' if len(finding.lines) > 1 else ''} {shown}{more}" if shown else "whole file"
    count = f"{finding.count} rows, " if finding.count > 1 else ""
    message = ": ".join(part for part in (finding.field, finding.message) if part)
    return [f"  {finding.severity.value}: {finding.rule} ({count}{where})", f"    {message}"]


def _rule_lines(rule: Rule) -> list[str]:
    from textwrap import TextWrapper

    # Flags are copied from here: none is cut at its dashes.
    wrapper = TextWrapper(
        WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    advice = wrapper.wrap(f"What to do: {rule.advice}")
    return [f"{rule.id}: {rule.title}", *wrapper.wrap(rule.explanation), *advice]


def _summary(found: Findings, reading: Reading) -> str:
    from hetplan.errors import Severity

    errors = sum(each.severity is Severity.ERROR for each in found.findings)
    files = f"{len(found.files)} file{'s' if len(found.files) != 1 else ''} read"
    counts = Counter(reading.kinds).items()
    kinds = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in counts)
    together = "; held against each other" if reading.is_together else ""
    read_as = f" ({kinds}{together})" if kinds else ""
    skipped = f", {len(found.skipped)} skipped" if found.skipped else ""
    warnings = len(found.findings) - errors
    return (
        f"{files}{read_as}{skipped}: {errors} error{'s' * (errors != 1)}, "
        f"{warnings} warning{'s' * (warnings != 1)}"
    )


def _rules_text(wanted: str | None) -> str:
    """Every rule in one line, or one rule in full."""
    from difflib import get_close_matches

    from hetplan.errors import InputError
    from hetplan.lint.registry import RULES, rule

    if wanted is None:
        width = max(len(each.id) for each in RULES)
        return "\n".join(f"{each.id:<{width}}  {each.severity:<7}  {each.title}" for each in RULES)
    found = rule(wanted)
    if found is None:
        near = get_close_matches(wanted, [each.id for each in RULES], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; --rules lists them"
        raise InputError(f"--explain {wanted}: there is no such rule{hint}")
    return "\n".join([*_rule_lines(found), f"  Severity: {found.severity}"])
