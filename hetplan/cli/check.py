"""`hetplan check`: what is wrong or suspicious in measurements, runs, inputs and launches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, emit

if TYPE_CHECKING:
    from hetplan.lint.findings import Finding, Findings
    from hetplan.lint.own_files import Planned
    from hetplan.lint.reading import Asked
    from hetplan.lint.rule import Rule

FOUND = 2
"""Exit code where something impossible was found, a file is wrong, or --strict found anything."""
WIDTH = 96
"""Characters of a line of explanation: a terminal of 100 with a margin."""

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE...",
        help="Files or folders: hetplan's own, a profile store, other tools' measurements, "
        "launches of Megatron-LM, FlagScale and torchtitan.",
        show_default=False,
    ),
]


def check(
    files: Files = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device kind, for an importer that needs it.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Model whose layers were measured, or that a launch trains."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="Cluster on which a launch runs.")
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Variable or flag of a launch that only its hosts know; again for more.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="Precision that was measured, as in bfloat16."),
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, help="Sequence length that was measured.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="Read every file with this importer of `hetplan import`."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 2 for suspicious findings too.")
    ] = False,
    as_json: AsJson = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="RULE", help="Explain one rule.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List every rule.")] = False,
) -> None:
    """Say what is impossible or suspicious in files, with the rule and what to do.

    Exit code 0: nothing, or only suspicious findings; 2: something impossible, or a file that is
    wrong (with --strict: any finding).
    """
    from hetplan.errors import InputError

    if rules or explain is not None:
        emit(_rules_text(explain))
        return
    if not files:
        raise InputError("no file is named; name files or folders to check, or --rules")
    found, read_as, notes = _find(
        files, _with_launch(_asked(device, model, precision, seq, kind), cluster, given or [])
    )
    if as_json:
        from hetplan.files.encoding import encode
        from hetplan.lint.findings import FINDINGS_SCHEMA

        emit(encode(found, schema=FINDINGS_SCHEMA))
    else:
        emit(_text(found, read_as, notes))
    if _is_bad(found, strict=strict):
        raise typer.Exit(FOUND)


def _asked(
    device: str | None, model: Path | None, precision: str | None, seq: int | None, kind: str | None
) -> Asked:
    """What the options say of the files; an InputError where the importer needs more."""
    from hetplan.importers.open import check_context, importer_kind, known_precision
    from hetplan.importers.records import ImportContext
    from hetplan.lint.reading import Asked
    from hetplan.model.load import load_model

    asked = Asked(
        importer=kind,
        device=device,
        model=None if model is None else load_model(model),
        precision=None if precision is None else known_precision(precision),
        sequence_length=seq,
    )
    if kind is not None:
        context = ImportContext(
            file="",
            link="checked",
            device=device,
            model=asked.model,
            precision=asked.precision,
            sequence_length=seq,
        )
        check_context(importer_kind(kind), context)
    return asked


def _with_launch(asked: Asked, cluster: Path | None, given: list[str]) -> Asked:
    """With what the options say of launches."""
    from dataclasses import replace

    from hetplan.cluster.load import load_cluster
    from hetplan.errors import InputError

    pairs = []
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise InputError(f"--set {each!a}: write NAME=VALUE, as in TP=8")
        pairs.append((name, value))
    return replace(
        asked,
        cluster=None if cluster is None else load_cluster(cluster),
        given=tuple(pairs),
    )


def _planned(path: Path) -> Planned:
    """What a legal plan file was made for; an InputError where it breaks a rule."""
    from hetplan.lint.own_files import Planned
    from hetplan.search.files import load_legal_plan

    inputs = load_legal_plan(path).inputs
    return Planned(model=inputs.model, cluster=inputs.cluster)


def _find(files: list[Path], asked: Asked) -> tuple[Findings, str, tuple[str, ...]]:
    """What is wrong, as what the files were read, and lines about launches and what could not be
    judged.
    """
    from collections import Counter

    from hetplan.lint.reading import read_all
    from hetplan.lint.registry import findings

    reading = read_all(files, asked, {"hetplan.plan": _planned})
    kinds = [
        f"{count} x {kind}" if count > 1 else kind for kind, count in Counter(reading.kinds).items()
    ]
    together = "; held against each other" if reading.is_together else ""
    read_as = f" ({', '.join(kinds)}{together})" if kinds else ""
    lines = (
        *(f"launch: {each}" for each in reading.understood),
        *(f"note: {each}" for each in reading.notes),
    )
    return findings(reading), read_as, lines


def _is_bad(found: Findings, *, strict: bool) -> bool:
    from hetplan.lint.findings import Severity

    return any(strict or each.severity is Severity.IMPOSSIBLE for each in found.findings)


def _text(found: Findings, read_as: str, notes: tuple[str, ...]) -> str:
    """Findings by file, then each rule that was broken, once, with what to do."""
    from hetplan.lint.registry import RULES

    lines: list[str] = []
    broken = {each.rule for each in found.findings}
    for file in dict.fromkeys(each.file for each in found.findings):
        lines.append(file)
        lines += [
            line for each in found.findings if each.file == file for line in _finding_lines(each)
        ]
        lines.append("")
    for rule in RULES:
        if rule.id in broken:
            lines += [*_rule_lines(rule), ""]
    lines += [f"skipped: {each}" for each in found.skipped]
    lines += notes
    lines.append(_summary(found, read_as))
    return "\n".join(lines)


def _finding_lines(finding: Finding) -> list[str]:
    shown = ", ".join(str(line) for line in finding.lines)
    more = ", ..." if finding.count > len(finding.lines) and finding.lines else ""
    where = f"line{'s' if len(finding.lines) > 1 else ''} {shown}{more}" if shown else "whole file"
    count = f"{finding.count} rows, " if finding.count > 1 else ""
    return [f"  {finding.severity.value}: {finding.rule} ({count}{where})", f"    {finding.found}"]


def _rule_lines(rule: Rule) -> list[str]:
    from textwrap import TextWrapper

    # Flags are copied from here: none is cut at its dashes.
    wrapper = TextWrapper(
        WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    return [
        f"{rule.id}: {rule.title}",
        *wrapper.wrap(rule.explanation),
        *wrapper.wrap(f"What to do: {rule.advice}"),
    ]


def _summary(found: Findings, read_as: str) -> str:
    from hetplan.lint.findings import Severity

    impossible = sum(each.severity is Severity.IMPOSSIBLE for each in found.findings)
    suspicious = len(found.findings) - impossible
    read = f"{len(found.files)} file{'s' if len(found.files) != 1 else ''} read"
    skipped = f", {len(found.skipped)} skipped" if found.skipped else ""
    return f"{read}{read_as}{skipped}: {impossible} impossible, {suspicious} suspicious"


def _rules_text(wanted: str | None) -> str:
    """Every rule in one line, or one rule in full."""
    from difflib import get_close_matches

    from hetplan.errors import InputError
    from hetplan.lint.registry import RULES, rule

    if wanted is None:
        width = max(len(each.id) for each in RULES)
        return "\n".join(f"{each.id:<{width}}  {each.severity:<10}  {each.title}" for each in RULES)
    found = rule(wanted)
    if found is None:
        near = get_close_matches(wanted, [each.id for each in RULES], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; --rules lists them"
        raise InputError(f"--explain {wanted}: there is no such rule{hint}")
    return "\n".join([*_rule_lines(found), f"  Severity: {found.severity}"])
