"""Imported samples to a profile store: a population of their own, and nothing twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path

from hetplan.cluster.catalogue import kind_called, load_catalogue, nearest_kinds
from hetplan.cluster.names import measured_kind
from hetplan.errors import Fault, InputError
from hetplan.importers.records import Imported
from hetplan.profiling.samples import Provenance
from hetplan.profiling.store import LinkWriter, OperatorWriter
from hetplan.units import counted
from hetplan.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What an import added to a store."""

    folders: tuple[str, ...]
    """Populations that hold the samples, in the order of the samples."""
    added: int
    already_there: int
    """Samples that were there before, equal to the last digit, and were not added again."""


def import_provenance(
    path: Path,
    imported: Imported,
    *,
    device: str | None = None,
    measured_on: str | None = None,
    driver: str = "",
    clocks: str = "",
) -> Provenance:
    """Where a file's samples come from; what the user does not say is in the output, or the date
    is the file's.

    An InputError where neither says which device kind it is, or the date is none.
    """
    catalogue = {kind.kind: kind for kind in load_catalogue()}
    called = imported.device_name
    device = (
        measured_kind(device)
        if device
        else (kind_called(called, catalogue.values()) if called else "")
    )
    if not device:
        says = f" (the file says {called[:60]!a})" if called else ""
        message = (
            f"whose link or operators are these? give the device kind{says} with --device, as in "
            "nvidia-a100-80gb-sxm; --dry-run only shows what was read"
        )
        raise InputError(Fault(file=str(path), message=message))
    measured_on = measured_on or _day_of(path)
    try:
        date.fromisoformat(measured_on)
    except ValueError as error:
        message = f"measured_on is {measured_on[:40]!a}; write a date as in 2026-11-20"
        raise InputError(message) from error
    known = catalogue.get(device)
    return Provenance(
        device=device,
        device_name=called or device,
        backend=known.torch_device if known is not None and known.torch_device else "unknown",
        measured_on=measured_on,
        hetplan_version=__version__,
        torch_version="",
        driver=driver,
        threads=1,
        paced="",
        tool=" ".join(part for part in (imported.kind, imported.tool_version) if part),
        clocks=clocks,
        command=f"hetplan import samples {path.name}",
        notes="; ".join(imported.notes),
    )


def _day_of(path: Path) -> str:
    """The day of the file's last change; today for what is no file, such as standard input."""
    if not path.is_file():
        return date.today().isoformat()
    return datetime.fromtimestamp(os.stat(path).st_mtime, tz=UTC).date().isoformat()


def store_imported(
    imported: Imported, store: Path, provenance: Provenance, *, again: bool = False
) -> Stored:
    """Write the samples; a sample that is already there only with `again`.

    Every row gets the date of its measurement, so equal times of two days are two measurements.
    Raises InputError where there is nothing to store, and where the store cannot be written.
    """
    if not imported.links and not imported.operator_samples:
        raise InputError(f"{imported.kind} gave no sample that a profile store keeps")
    folders, added = [], 0
    for name in dict.fromkeys(sample.link for sample in imported.links):
        writer = LinkWriter(store, name, provenance)
        samples = [
            replace(sample, measured_on=sample.measured_on or provenance.measured_on)
            for sample in imported.links
            if sample.link == name
        ]
        if again:
            for sample in samples:
                writer.append(sample)
        added += len(samples) if again else writer.add_new(samples)
        folders.append(str(writer.folder))
    if imported.operator_samples:
        products = OperatorWriter(store, provenance)
        own = [
            replace(sample, device=provenance.device, measured_on=provenance.measured_on)
            for sample in imported.operator_samples
        ]
        if again:
            for each in own:
                products.append(each)
        added += len(own) if again else products.add_new(own)
        folders.append(str(products.folder))
    read = len(imported.links) + len(imported.operator_samples)
    return Stored(folders=tuple(folders), added=added, already_there=read - added)


def store_files(
    paths: Sequence[Path],
    imported: Sequence[Imported],
    provenances: Sequence[Provenance],
    store: Path,
    *,
    again: bool = False,
) -> tuple[str, ...]:
    """Store the samples of several files; lines that say what was added."""
    kinds = [kind.kind for kind in load_catalogue()]
    lines: list[str] = []
    for path, each, provenance in zip(paths, imported, provenances, strict=True):
        stored = store_imported(each, store, provenance, again=again)
        there = stored.already_there
        skipped = f"; {there} were there already (--again adds them once more)" if there else ""
        if provenance.device not in kinds:
            near = ", ".join(nearest_kinds(provenance.device, kinds))
            hint = f" (nearest: {near})" if near else ""
            lines.append(
                f"note: {provenance.device} is no kind of the catalogue{hint}; plans use these "
                "samples where a cluster file calls its devices the same"
            )
        lines.append(
            f"{path}: {counted(stored.added, 'sample')} added to {store}, measured on "
            f"{provenance.measured_on}{skipped}"
        )
    return tuple(lines)
