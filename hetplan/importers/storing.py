"""Imported samples to a profile store: a population of their own, and nothing twice unasked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TypeVar

from hetplan.errors import InputError
from hetplan.importers.records import Imported
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Provenance
from hetplan.profiling.store import LayerWriter, LinkWriter, OperatorWriter
from hetplan.version import __version__

_Sample = TypeVar("_Sample", LayerSample, LinkSample, OperatorSample)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFacts:
    """What only its user knows about a measurement that is imported."""

    device: str
    """Device kind; of a link: that of its ends."""
    backend: str
    """torch device type, as in `cuda`."""
    measured_on: str
    """ISO date."""
    command: str
    """The command line that imported, or the one that measured."""
    driver: str = ""
    torch_version: str = ""
    clocks: str = ""
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What an import added to a store."""

    folders: tuple[str, ...]
    """Populations that hold the samples, in the order of the samples."""
    links_added: int = 0
    layers_added: int = 0
    links_there: int = 0
    """Samples that were already there, equal to the last digit, and were not added again."""
    layers_there: int = 0
    operators_added: int = 0
    operators_there: int = 0


def store_imported(
    imported: Imported, store: Path, facts: ImportFacts, *, again: bool = False
) -> Stored:
    """Write the link, layer and operator samples; a sample that is already there only with `again`.

    Every row gets the date of its measurement, so equal times of two days are two measurements.
    Raises InputError where there is nothing to store, for a date that is none, and where the store
    cannot be written.
    """
    if not imported.links and not imported.layers and not imported.operators:
        raise InputError(f"{imported.kind} gave no sample that a profile store keeps")
    try:
        date.fromisoformat(facts.measured_on)
    except ValueError as error:
        raise InputError(
            f"measured_on is {facts.measured_on[:40]!a}; write a date as in 2026-11-20"
        ) from error
    link_folders, links_added = _store_links(imported, store, facts, again)
    layer_folders, layers_added = _store_layers(imported, store, facts, again)
    operator_folders, operators_added = _store_operators(imported, store, facts, again)
    return Stored(
        folders=tuple(dict.fromkeys((*link_folders, *layer_folders, *operator_folders))),
        links_added=links_added,
        layers_added=layers_added,
        links_there=len(imported.links) - links_added,
        layers_there=len(imported.layers) - layers_added,
        operators_added=operators_added,
        operators_there=len(imported.operators) - operators_added,
    )


def _store_links(
    imported: Imported, store: Path, facts: ImportFacts, again: bool
) -> tuple[list[str], int]:
    """(populations, samples added)."""
    folders, added = [], 0
    for name in dict.fromkeys(sample.link for sample in imported.links):
        writer = LinkWriter(store, name, _provenance(imported, facts, facts.device))
        samples = [sample for sample in imported.links if sample.link == name]
        added += _add(samples, facts.measured_on, writer.append, writer.add_new, again)
        folders.append(str(writer.folder))
    return folders, added


def _store_layers(
    imported: Imported, store: Path, facts: ImportFacts, again: bool
) -> tuple[list[str], int]:
    """(populations, samples added)."""
    folders, added = [], 0
    for device in dict.fromkeys(sample.device for sample in imported.layers):
        writer = LayerWriter(store, _provenance(imported, facts, device))
        samples = [sample for sample in imported.layers if sample.device == device]
        added += _add(samples, facts.measured_on, writer.append, writer.add_new, again)
        folders.append(str(writer.folder))
    return folders, added


def _store_operators(
    imported: Imported, store: Path, facts: ImportFacts, again: bool
) -> tuple[list[str], int]:
    """(populations, samples added)."""
    folders, added = [], 0
    for device in dict.fromkeys(sample.device for sample in imported.operators):
        writer = OperatorWriter(store, _provenance(imported, facts, device))
        samples = [sample for sample in imported.operators if sample.device == device]
        added += _add(samples, facts.measured_on, writer.append, writer.add_new, again)
        folders.append(str(writer.folder))
    return folders, added


def _add(
    samples: Sequence[_Sample],
    day: str,
    append: Callable[[_Sample], None],
    add_new: Callable[[Sequence[_Sample]], int],
    again: bool,
) -> int:
    """How many were added: all of them `again`, else those that are not there."""
    dated = [replace(sample, measured_on=sample.measured_on or day) for sample in samples]
    if not again:
        return add_new(dated)
    for sample in dated:
        append(sample)
    return len(dated)


def _provenance(imported: Imported, facts: ImportFacts, device: str) -> Provenance:
    tool = " ".join(part for part in (imported.kind, imported.tool_version) if part)
    return Provenance(
        device=device,
        device_name=imported.device_name or device,
        backend=facts.backend,
        measured_on=facts.measured_on,
        hetplan_version=__version__,
        torch_version=facts.torch_version,
        driver=facts.driver,
        threads=1,
        paced="",
        tool=tool,
        clocks=facts.clocks,
        command=facts.command,
        notes="; ".join(part for part in (facts.notes, *imported.notes) if part),
    )
