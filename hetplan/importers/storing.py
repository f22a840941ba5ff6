"""Imported link samples to a profile store: a population of their own, and nothing twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path

from hetplan.cluster.catalogue import kind_called, load_catalogue, nearest_kinds
from hetplan.errors import Fault, InputError
from hetplan.importers.records import Imported
from hetplan.profiling.samples import Provenance
from hetplan.profiling.store import LinkWriter
from hetplan.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFacts:
    """What only its user knows about a measurement that is imported."""

    device: str
    """Device kind of the link's ends."""
    backend: str
    """torch device type, as in `cuda`."""
    measured_on: str
    """ISO date."""
    command: str
    """The command line that imported, or the one that measured."""
    driver: str = ""
    clocks: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What an import added to a store."""

    folders: tuple[str, ...]
    """Populations that hold the samples, in the order of the samples."""
    added: int
    already_there: int
    """Samples that were there before, equal to the last digit, and were not added again."""


def import_facts(
    path: Path,
    imported: Imported,
    *,
    device: str | None = None,
    measured_on: str | None = None,
    driver: str = "",
    clocks: str = "",
) -> ImportFacts:
    """The facts of a file; what the user does not say comes from the output and the file's date.

    An InputError where neither says which device kind the link joins.
    """
    catalogue = {kind.kind: kind for kind in load_catalogue()}
    called = imported.device_name
    device = device or (kind_called(called, catalogue.values()) if called else "")
    if not device:
        says = f" (the file says {called[:60]!a})" if called else ""
        message = (
            f"whose link is it? give the device kind of its ends{says} with --device, as in "
            "nvidia-a100-80gb-sxm; --dry-run only shows what was read"
        )
        raise InputError(Fault(file=str(path), message=message))
    known = catalogue.get(device)
    notes: tuple[str, ...] = ()
    if known is None:
        near = ", ".join(nearest_kinds(device, catalogue))
        hint = f" (nearest: {near})" if near else ""
        notes = (
            f"{device} is no kind of the catalogue{hint}; plans use these samples where a cluster "
            "file calls its devices the same",
        )
    return ImportFacts(
        device=device,
        backend=known.torch_device if known is not None and known.torch_device else "unknown",
        measured_on=measured_on or _day_of(path),
        command=f"hetplan import samples {path.name}",
        driver=driver,
        clocks=clocks,
        notes=notes,
    )


def _day_of(path: Path) -> str:
    """The day of the file's last change; today for what is no file, such as standard input."""
    if not path.is_file():
        return date.today().isoformat()
    return datetime.fromtimestamp(os.stat(path).st_mtime, tz=UTC).date().isoformat()


def store_imported(
    imported: Imported, store: Path, facts: ImportFacts, *, again: bool = False
) -> Stored:
    """Write the link samples; a sample that is already there only with `again`.

    Every row gets the date of its measurement, so equal times of two days are two measurements.
    Raises InputError where there is nothing to store, for a date that is none, and where the store
    cannot be written.
    """
    if not imported.links:
        raise InputError(f"{imported.kind} gave no sample that a profile store keeps")
    try:
        date.fromisoformat(facts.measured_on)
    except ValueError as error:
        message = f"measured_on is {facts.measured_on[:40]!a}; write a date as in 2026-11-20"
        raise InputError(message) from error
    provenance = _provenance(imported, facts)
    folders, added = [], 0
    for name in dict.fromkeys(sample.link for sample in imported.links):
        writer = LinkWriter(store, name, provenance)
        samples = [
            replace(sample, measured_on=sample.measured_on or facts.measured_on)
            for sample in imported.links
            if sample.link == name
        ]
        if again:
            for sample in samples:
                writer.append(sample)
        added += len(samples) if again else writer.add_new(samples)
        folders.append(str(writer.folder))
    return Stored(folders=tuple(folders), added=added, already_there=len(imported.links) - added)


def store_files(
    paths: Sequence[Path],
    imported: Sequence[Imported],
    facts: Sequence[ImportFacts],
    store: Path,
    *,
    again: bool = False,
) -> tuple[str, ...]:
    """Store what several files gave; one line for each says what was added."""
    lines: list[str] = []
    for path, each, fact in zip(paths, imported, facts, strict=True):
        stored = store_imported(each, store, fact, again=again)
        there = stored.already_there
        skipped = f"; {there} were there already (--again adds them once more)" if there else ""
        lines += [f"note: {note}" for note in fact.notes]
        lines.append(
            f"{path}: {stored.added} samples added to {store}, measured on {fact.measured_on}"
            f"{skipped}"
        )
    return tuple(lines)


def _provenance(imported: Imported, facts: ImportFacts) -> Provenance:
    return Provenance(
        device=facts.device,
        device_name=imported.device_name or facts.device,
        backend=facts.backend,
        measured_on=facts.measured_on,
        hetplan_version=__version__,
        torch_version="",
        driver=facts.driver,
        threads=1,
        paced="",
        tool=" ".join(part for part in (imported.kind, imported.tool_version) if part),
        clocks=facts.clocks,
        command=facts.command,
        notes="; ".join(imported.notes),
    )
