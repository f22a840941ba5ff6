"""What comes back from a campaign, checked and added to a profile store.

A file of results is lines of JSON with a checksum each (`campaign_rows`). Nothing is added before
every file was read: a file of another campaign stops the merge. Single lines that are torn,
changed or wrong are refused, named with their line, and count as not measured; the rest is kept.
Rows go to the population of the run that measured them, so runs with other clocks or drivers do
not mix; repeats are kept, and a line that the store has already is not added again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetplan.errors import Fault, InputError
from hetplan.files import nodes
from hetplan.files.reading import Document, decode, read_bytes
from hetplan.profiling.campaign import CAMPAIGN_FILE, load_campaign
from hetplan.profiling.campaign_rows import SCHEMA, is_whole
from hetplan.profiling.campaign_values import Campaign
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Provenance
from hetplan.profiling.samples_csv import sample_of_values
from hetplan.profiling.store import LayerWriter, LinkWriter, OperatorWriter
from hetplan.profiling.store_state import SCHEMA as PROVENANCE_SCHEMA
from hetplan.profiling.store_state import control_faults

_MAX_LINE_LENGTH = 1 << 20
_RECORDS = ("run", "begin", "done", "layer", "operator", "link", "failure", "stop", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a device or its collective library could not measure."""

    kind: str
    unit: int
    """Number of the unit in the campaign; -1 for a link's operation."""
    link: str
    operation: str
    """What the link's backend does not have; empty for a unit."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge did."""

    files: int
    added: int
    """Samples that the store did not have."""
    held: int
    """Samples that it had already."""
    refused: tuple[Fault, ...]
    """Lines that were not used."""
    failures: tuple[Failure, ...]
    notes: tuple[str, ...]
    """What a reader should know: runs with several clocks, runs that were not finished."""


@dataclass(slots=True)
class _Run:
    """One start of a script: where it was measured, and what it measured."""

    kind: str
    provenance: Provenance
    layers: list[LayerSample] = field(default_factory=list)
    operators: list[OperatorSample] = field(default_factory=list)
    links: list[LinkSample] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)
    ended: str | None = None
    """Clocks at its end; None where it did not come to one."""


@dataclass(slots=True)
class _Found:
    """Everything in the files, before anything is added."""

    runs: dict[str, _Run] = field(default_factory=dict)
    refused: list[Fault] = field(default_factory=list)
    failures: dict[Failure, None] = field(default_factory=dict)
    repeated: int = 0


def result_files(paths: Sequence[Path]) -> tuple[tuple[Path, ...], Campaign | None]:
    """The files of results under these files and folders, and the campaign that lies with them.

    An InputError where a path does not exist, nothing was found, or two campaigns lie there.
    """
    files: dict[Path, None] = {}
    folders: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            folders.setdefault(path)
            found = sorted(path.rglob("*.jsonl"))
            folders |= dict.fromkeys(each.parent for each in found)
            files |= dict.fromkeys(found)
        elif path.is_file():
            files.setdefault(path)
            folders.setdefault(path.parent)
        else:
            raise InputError(f"{path}: there is no such file or folder; name what came back")
    if not files:
        raise InputError(f"{paths[0]}: no results-*.jsonl there; name the files that came back")
    campaigns = [
        load_campaign(folder / CAMPAIGN_FILE)
        for folder in folders
        if (folder / CAMPAIGN_FILE).is_file()
    ]
    if len({each.campaign for each in campaigns}) > 1:
        raise InputError("two campaigns lie there; merge them one after the other")
    return tuple(files), campaigns[0] if campaigns else None


def merge(files: Sequence[Path], store: Path, campaign: Campaign | None) -> MergeReport:
    """Add the samples of these files to the store; what was added and what was refused.

    An InputError, with nothing added, where a file is of another campaign or of no campaign.
    """
    found = _Found()
    for path in files:
        _read_file(path, campaign, found)
    added = total = 0
    for run in found.runs.values():
        total += len(run.layers) + len(run.operators) + len(run.links)
    for provenance, layers, operators in _by_population(found):
        if layers:
            added += LayerWriter(store, provenance).add_new(layers)
        if operators:
            added += OperatorWriter(store, provenance).add_new(operators)
    for provenance, name, links in _by_link(found):
        added += LinkWriter(store, name, provenance).add_new(links)
    return MergeReport(
        files=len(files),
        added=added,
        held=total - added,
        refused=tuple(found.refused),
        failures=tuple(found.failures),
        notes=_notes(found),
    )


def _by_population(
    found: _Found,
) -> list[tuple[Provenance, list[LayerSample], list[OperatorSample]]]:
    """Samples of devices of the runs that share their circumstances, the earliest's provenance."""
    groups: dict[tuple[str, ...], tuple[Provenance, list[LayerSample], list[OperatorSample]]] = {}
    for run in sorted(found.runs.values(), key=lambda each: each.provenance.measured_on):
        if run.layers or run.operators:
            key = (run.provenance.device, *run.provenance.circumstances)
            _, layers, operators = groups.setdefault(key, (run.provenance, [], []))
            layers.extend(run.layers)
            operators.extend(run.operators)
    return list(groups.values())


def _by_link(found: _Found) -> list[tuple[Provenance, str, list[LinkSample]]]:
    groups: dict[tuple[str, ...], tuple[Provenance, str, list[LinkSample]]] = {}
    for run in sorted(found.runs.values(), key=lambda each: each.provenance.measured_on):
        for sample in run.links:
            key = (sample.link, run.provenance.device, *run.provenance.circumstances)
            groups.setdefault(key, (run.provenance, sample.link, []))[2].append(sample)
    return list(groups.values())


def _notes(found: _Found) -> tuple[str, ...]:
    notes = []
    clocks: dict[str, dict[str, None]] = {}
    for name, run in found.runs.items():
        clocks.setdefault(run.kind, {}).setdefault(run.provenance.clocks or "as it came")
        if run.ended is not None and run.ended != run.provenance.clocks:
            notes.append(
                f"{run.kind}: clocks were changed during run {name}: "
                f"{run.provenance.clocks or 'as it came'}, then {run.ended or 'as it came'}"
            )
    for kind, settings in clocks.items():
        if len(settings) > 1:
            notes.append(f"{kind}: measured with several clocks, kept apart: {'; '.join(settings)}")
    if found.repeated:
        notes.append(f"{found.repeated} lines stand in several files and were counted once")
    return tuple(notes)


def _read_file(path: Path, campaign: Campaign | None, found: _Found) -> None:
    lines = read_bytes(path).split(b"\n")
    if lines and lines[-1]:
        message = "the last line is torn: its measurement was not finished"
        found.refused.append(Fault(file=str(path), line=len(lines), message=message))
    is_result = False
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        record, message = _record(path, line)
        is_result |= record is not None
        if record is None:
            found.refused.append(Fault(file=str(path), line=number, message=message))
        elif record["record"] == "run":
            _begin(path, number, record, campaign, found)
        else:
            _add(path, number, record, found)
    if not is_result:
        message = f"no line of it is a whole record ({SCHEMA}); name files of a campaign script"
        raise InputError(Fault(file=str(path), message=message))


def _record(path: Path, line: bytes) -> tuple[dict[str, Any] | None, str]:
    """The record of a line, or why it is none."""
    if len(line) > _MAX_LINE_LENGTH:
        return None, "the line is too long to be a measurement"
    try:
        root = nodes.read_json(str(path), line.decode("utf-8"))
    except UnicodeDecodeError:
        return None, "is not UTF-8 text"
    except InputError as error:
        return None, error.faults[0].message
    if not isinstance(root, dict) or not isinstance(root.get("record"), str):
        return None, "is no record of a campaign script"
    if not is_whole(root):
        return None, "was changed after it was measured: its checksum is wrong; measure it again"
    if root["record"] not in _RECORDS:
        return None, f"record {root['record'][:40]!a} is not known; use a newer hetplan"
    return root, ""


def _begin(
    path: Path, number: int, record: dict[str, Any], campaign: Campaign | None, found: _Found
) -> None:
    if record.get("schema") != SCHEMA:
        message = f"found {str(record.get('schema'))[:60]!a}; this hetplan reads {SCHEMA}"
        raise InputError(Fault(file=str(path), line=number, field="schema", message=message))
    name = record.get("campaign")
    if campaign is not None and name != campaign.campaign:
        message = (
            f"found {str(name)[:40]!a}, the campaign here is {campaign.campaign}; merge it with "
            "the folder it was made with"
        )
        raise InputError(Fault(file=str(path), line=number, field="campaign", message=message))
    data = record.get("provenance")
    run, kind = record.get("run"), record.get("kind")
    document = Document(
        file=str(path),
        text=json.dumps(data),
        root={**data, "schema": PROVENANCE_SCHEMA} if isinstance(data, dict) else data,
        sha256="",
    )
    try:
        provenance = decode(document, Provenance, schema=PROVENANCE_SCHEMA)
    except InputError as error:
        found.refused += [
            Fault(file=str(path), line=number, field=fault.field, message=fault.message)
            for fault in error.faults
        ]
        return
    if not isinstance(run, str) or not isinstance(kind, str) or kind != provenance.device:
        message = "a run needs a name and the device kind of its provenance"
        found.refused.append(Fault(file=str(path), line=number, message=message))
        return
    if faults := control_faults(path, provenance, line=number):
        found.refused += faults
        return
    found.runs.setdefault(shown(run[:40]), _Run(kind=kind, provenance=provenance))


def shown(text: str) -> str:
    """The text on one line, without characters that a terminal obeys."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _add(path: Path, number: int, record: dict[str, Any], found: _Found) -> None:
    run = found.runs.get(shown(str(record.get("run"))[:40]))
    if run is None:
        message = "belongs to a run whose first line is missing or wrong"
        found.refused.append(Fault(file=str(path), line=number, message=message))
        return
    what = record["record"]
    if what in ("layer", "operator", "link"):
        _add_sample(path, number, record, run, found)
    elif what == "end":
        run.ended = shown(str(record.get("clocks") or ""))
    elif what == "failure":
        unit = record.get("unit", -1)
        failure = Failure(
            kind=run.kind,
            unit=unit if isinstance(unit, int) else -1,
            link=shown(str(record.get("link", ""))[:100]),
            operation=shown(str(record.get("operation", ""))[:100]),
            reason=shown(str(record.get("reason") or "")[:300]),
        )
        found.failures.setdefault(failure)


def _add_sample(path: Path, number: int, record: dict[str, Any], run: _Run, found: _Found) -> None:
    values, place = record.get("sample"), record.get("number")
    if not isinstance(values, dict) or not isinstance(place, int) or isinstance(place, bool):
        message = "a sample needs its values and its number"
        found.refused.append(Fault(file=str(path), line=number, message=message))
        return
    if place in run.numbers:
        found.repeated += 1
        return
    if record["record"] == "layer":
        layer, faults = sample_of_values(path, number, values, LayerSample)
        if layer is not None and layer.device != run.kind:
            message = f"found {layer.device}; the run is of {run.kind}"
            faults = [Fault(file=str(path), line=number, field="device", message=message)]
        elif layer is not None:
            run.layers.append(layer)
    elif record["record"] == "operator":
        operator, faults = sample_of_values(path, number, values, OperatorSample)
        if operator is not None and operator.device != run.kind:
            message = f"found {operator.device}; the run is of {run.kind}"
            faults = [Fault(file=str(path), line=number, field="device", message=message)]
        elif operator is not None:
            run.operators.append(operator)
    else:
        link, faults = sample_of_values(path, number, values, LinkSample)
        if link is not None:
            run.links.append(link)
    found.refused += faults
    if not faults:
        run.numbers.add(place)
