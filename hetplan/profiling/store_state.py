"""What a profile store holds, damage included: every row that can be read, and what cannot.

Nothing here raises because of what a file holds: whoever lists a store wants to see the rest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.reading import decode, read_document
from hetplan.profiling.samples import (
    LayerSample,
    LinkSample,
    OperatorSample,
    ProfileSet,
    Provenance,
)
from hetplan.profiling.samples_csv import SampleFile, inspect_samples

SCHEMA = "hetplan.provenance/2"
PROVENANCE_FILE = "provenance.json"
LAYERS_FILE = "layers.csv"
LINKS_FILE = "links.csv"
OPERATORS_FILE = "operators.csv"
LINKS_FOLDER = "links"

_NAMED = re.compile(r"[a-z0-9_.-]+-[0-9a-f]{12}")
"""Names that hetplan gives to folders of populations; people's own say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationState:
    """One population's folder as it is."""

    folder: Path
    provenance: Provenance | None
    """None where the file is missing or cannot be read."""
    layers: tuple[LayerSample, ...]
    links: tuple[LinkSample, ...]
    damage: tuple[Fault, ...]
    """What cannot be used, with file and line."""
    torn: tuple[str, ...]
    """Half rows at the ends of files, which a kill left; they are left out and no damage."""
    operators: tuple[OperatorSample, ...] = ()

    @property
    def profiles(self) -> ProfileSet:
        """The samples as a set with its provenance."""
        provenance = () if self.provenance is None else (self.provenance,)
        return ProfileSet(
            layers=self.layers,
            links=self.links,
            provenance=provenance,
            operators=self.operators,
        )

    @property
    def dates(self) -> tuple[str, ...]:
        """ISO dates on which rows were measured, earliest first."""
        default = self.provenance.measured_on if self.provenance else ""
        found = {layer.measured_on or default for layer in self.layers}
        found |= {link.measured_on or default for link in self.links}
        found |= {operator.measured_on or default for operator in self.operators}
        return tuple(sorted(date for date in found or {default} if date))


def store_state(*folders: Path) -> tuple[PopulationState, ...]:
    """Every population under these folders, in the order of folders and paths, each once.

    An InputError where a folder does not exist.
    """
    found: dict[Path, PopulationState] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder; name a profile store")
        names = (PROVENANCE_FILE, LAYERS_FILE, LINKS_FILE, OPERATORS_FILE)
        parents = {path.parent for name in names for path in folder.rglob(name)}
        for parent in sorted(parents):
            if parent.resolve() not in found:
                found[parent.resolve()] = population_state(parent)
    return tuple(found.values())


def population_state(folder: Path) -> PopulationState:
    """The population of this folder."""
    provenance, damage = held_provenance(folder)
    layers: SampleFile[LayerSample] = SampleFile(samples=())
    links: SampleFile[LinkSample] = SampleFile(samples=())
    operators: SampleFile[OperatorSample] = SampleFile(samples=())
    if (folder / LAYERS_FILE).exists():
        layers = inspect_samples(folder / LAYERS_FILE, LayerSample)
    if (folder / LINKS_FILE).exists():
        links = inspect_samples(folder / LINKS_FILE, LinkSample)
    if (folder / OPERATORS_FILE).exists():
        operators = inspect_samples(folder / OPERATORS_FILE, OperatorSample)
    damage += (*layers.faults, *links.faults, *operators.faults)
    if provenance is not None:
        damage += _of_others(folder / LAYERS_FILE, provenance, layers.samples)
        damage += _of_others(folder / OPERATORS_FILE, provenance, operators.samples)
    return PopulationState(
        folder=folder,
        provenance=provenance,
        layers=layers.samples,
        links=links.samples,
        damage=damage,
        torn=tuple(filter(None, (layers.torn, links.torn, operators.torn))),
        operators=operators.samples,
    )


def _of_others(
    path: Path, provenance: Provenance, samples: Sequence[LayerSample] | Sequence[OperatorSample]
) -> tuple[Fault, ...]:
    """Rows of another device kind than that of the population."""
    others = {sample.device for sample in samples} - {provenance.device}
    return tuple(
        Fault(
            file=str(path),
            field="device",
            message=f"rows of {other} stand in a population of {provenance.device}; move them "
            "to a population of their own",
        )
        for other in sorted(others)
    )


def _changed(folder: Path, provenance: Provenance) -> tuple[Fault, ...]:
    """Circumstances that are not those after which hetplan named the folder."""
    if not _NAMED.fullmatch(folder.name) or folder.name == population_name(provenance):
        return ()
    message = (
        "was changed by hand: samples of its device, driver, versions, clocks and tool belong in "
        f"a folder {population_name(provenance)}; restore it, or move the folder away"
    )
    return (Fault(file=str(folder / PROVENANCE_FILE), message=message),)


def population_name(provenance: Provenance) -> str:
    """Name of the folder of everything measured on this device under these circumstances."""
    common = (provenance.device, *provenance.circumstances)
    digest = hashlib.sha256("\0".join(common).encode()).hexdigest()
    # 48 bits: populations of one device number a few dozen.
    return f"{provenance.backend}-{digest[:12]}"


def held_provenance(folder: Path) -> tuple[Provenance | None, tuple[Fault, ...]]:
    """The provenance of a population's folder, and why it cannot be believed; None: unreadable."""
    path = folder / PROVENANCE_FILE
    if not path.exists():
        # Provenance is written first, so samples without it are not a kill's doing.
        message = (
            "is missing beside its samples; restore it, or remove samples of which nobody knows "
            "where they were measured"
        )
        return None, (Fault(file=str(path), message=message),)
    try:
        provenance = decode(read_document(path), Provenance, schema=SCHEMA)
    except InputError as error:
        return None, error.faults
    faults = control_faults(path, provenance)
    return (None, faults) if faults else (provenance, _changed(folder, provenance))


def control_faults(path: Path, provenance: Provenance, *, line: int = 0) -> tuple[Fault, ...]:
    """Fields with characters that a terminal obeys instead of showing; line breaks are allowed."""
    return tuple(
        Fault(
            file=str(path),
            line=line,
            field=field.name,
            message="has control characters; no driver writes them, restore the file",
        )
        for field in fields(provenance)
        if any(
            not each.isprintable() and each not in "\n\t"
            for each in str(getattr(provenance, field.name))
        )
    )
