"""Where measurements are kept: a folder per device kind and link, a population per circumstances.

    <store>/<device kind>/<population>/layers.csv, operators.csv + provenance.json
    <store>/links/<link name>/<population>/links.csv + provenance.json

A **population** is everything measured under the same circumstances: device, driver, clocks,
torch, threads, pace and measuring tool. Its folder is named by a hash of those, so a second run
with the same ones adds to it (and skips what it has) and a run with others starts another. Rows
are written one at a time and reach the disk one at a time, under a lock that all writers of the
population share; a kill at any moment leaves a store that can be read and loses at most the row
that was being written.

`read_populations` returns one ProfileSet per population and refuses a damaged store; the fit
chooses among several populations of one kind. `store_state` reads around damage and lists it.
Any folder may be named: a whole store, one device's folder or one population.

File of provenance: schema `hetplan.provenance/2`, fields as in `Provenance`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.files.locks import Lock
from hetplan.files.reading import decode, read_bytes, read_document
from hetplan.files.writing import append_line, make_folder, write_atomically
from hetplan.profiling.samples import (
    AnySample,
    LayerSample,
    LinkSample,
    OperatorSample,
    ProfileSet,
    Provenance,
    Sample,
    SampleFile,
    SampleType,
    header,
    header_faults,
    inspect_samples,
    read_samples,
    row,
)
from hetplan.version import __version__

SCHEMA = "hetplan.provenance/2"
PROVENANCE_FILE = "provenance.json"
LAYERS_FILE = "layers.csv"
LINKS_FILE = "links.csv"
OPERATORS_FILE = "operators.csv"
FILES: Mapping[SampleType, str] = {
    LayerSample: LAYERS_FILE,
    OperatorSample: OPERATORS_FILE,
    LinkSample: LINKS_FILE,
}
"""The file of each kind of sample in a population's folder."""
_FILE_NAMES = (PROVENANCE_FILE, *FILES.values())
LINKS_FOLDER = "links"

_NAMED = re.compile(r"[a-z0-9_.-]+-[0-9a-f]{12}")
"""Names that hetplan gives to folders of populations; people's own say nothing."""


_LOCK_SECONDS = 60.0
"""How long to wait for other writers: each needs milliseconds for its row."""
_MAX_PER_HEADER = 1 << 16
"""Bytes; the longest header of samples has a few hundred."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationState:
    """One population's folder as it is."""

    folder: Path
    profiles: ProfileSet
    """Every sample that can be read, and the provenance where it can be."""
    damage: tuple[Fault, ...]
    """What cannot be used, with file and line."""
    torn: tuple[str, ...]
    """Half rows at the ends of files, which a kill left; they are left out and no damage."""

    @property
    def provenance(self) -> Provenance | None:
        """None where the file is missing or cannot be read."""
        return next(iter(self.profiles.provenance), None)

    @property
    def dates(self) -> tuple[str, ...]:
        """ISO dates on which rows were measured, earliest first."""
        default = self.provenance.measured_on if self.provenance else ""
        rows: tuple[AnySample, ...] = (
            *self.profiles.layers,
            *self.profiles.links,
            *self.profiles.operators,
        )
        dates = {row.measured_on or default for row in rows} or {default}
        return tuple(sorted(dates - {""}))


def store_state(*folders: Path) -> tuple[PopulationState, ...]:
    """Every population under these folders, in the order of folders and paths, each once.

    An InputError where a folder does not exist.
    """
    return tuple(population_state(folder) for folder in _population_folders(*folders))


def stores_digest(*folders: Path) -> str:
    """Names what a fit of these stores depends on: hetplan's version and every byte of theirs."""
    digest = hashlib.sha256(__version__.encode())
    for folder in _population_folders(*folders):
        for name in _FILE_NAMES:
            path = folder / name
            data = read_bytes(path) if path.is_file() else b""
            digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()[:16]


def _population_folders(*folders: Path) -> tuple[Path, ...]:
    """In the order of folders and paths, each once."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder; name a profile store")
        for parent in sorted({path.parent for name in _FILE_NAMES for path in folder.rglob(name)}):
            found.setdefault(parent.resolve(), parent)
    return tuple(found.values())


def population_state(folder: Path) -> PopulationState:
    """The population of this folder."""
    provenance, damage = held_provenance(folder)
    files: list[SampleFile[Any]] = []

    def samples(sample_type: type[Sample]) -> tuple[Sample, ...]:
        path = folder / FILES[sample_type]
        if not path.exists():
            return ()
        file = inspect_samples(path, sample_type)
        files.append(file)
        return file.samples

    profiles = ProfileSet(
        layers=samples(LayerSample),
        links=samples(LinkSample),
        operators=samples(OperatorSample),
        provenance=() if provenance is None else (provenance,),
    )
    damage += tuple(fault for file in files for fault in file.faults)
    if provenance is not None:
        damage += _of_others(folder / LAYERS_FILE, provenance, profiles.layers)
        damage += _of_others(folder / OPERATORS_FILE, provenance, profiles.operators)
    return PopulationState(
        folder=folder,
        profiles=profiles,
        damage=damage,
        torn=tuple(file.torn for file in files if file.torn),
    )


def _of_others(
    path: Path, provenance: Provenance, samples: Sequence[LayerSample] | Sequence[OperatorSample]
) -> tuple[Fault, ...]:
    """Rows of another device kind than that of the population."""
    return tuple(
        Fault(
            file=str(path),
            field="device",
            message=f"rows of {other} stand in a population of {provenance.device}; move them "
            "to a population of their own",
        )
        for other in sorted({sample.device for sample in samples} - {provenance.device})
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


def read_store(*folders: Path) -> ProfileSet:
    """Every sample and provenance under these folders."""
    parts = read_populations(*folders)
    names = [field.name for field in fields(ProfileSet)]
    return ProfileSet(
        **{name: tuple(row for part in parts for row in getattr(part, name)) for name in names}
    )


def read_populations(*folders: Path) -> tuple[ProfileSet, ...]:
    """One ProfileSet per population under these folders, in the order of folders and paths.

    An InputError with every fault of every population where there are any: a fit of the rest
    would not say what it leaves out.
    """
    states = store_state(*folders)
    if faults := [fault for state in states for fault in state.damage]:
        raise InputError(
            *faults,
            "the store is damaged: correct or remove what is named above (`hetplan profile list` "
            "shows how many rows each population has left)",
        )
    for state in states:
        for torn in state.torn:
            _LOGGER.warning("%s: a torn last line was dropped: %r", state.folder, torn[:60])
    return tuple(state.profiles for state in states if state.provenance is not None)


class SampleWriter(Generic[Sample]):
    """Adds samples to one population, one row on disk at a time."""

    def __init__(self, folder: Path, provenance: Provenance, sample_type: type[Sample]) -> None:
        self.folder = folder
        self.sample_type: type[Sample] = sample_type
        self._path = _open_population(folder, provenance, sample_type)
        self.samples: tuple[Sample, ...] = read_samples(self._path, sample_type)
        """What the population held when it was opened."""

    def append(self, sample: Sample) -> None:
        """Add a row; it is on disk when this returns."""
        line = row(sample)
        with _locked(self.folder):
            # A full disk or a kill may have left half a row of another writer since.
            _cut_torn_line(self._path, self.sample_type)
            append_line(self._path, line)

    def add_new(self, samples: Sequence[Sample]) -> int:
        """Add all rows that the population does not hold yet, in one step; how many those were.

        Rows that are equal in every column, date and times included, are one measurement.
        """
        with _locked(self.folder):
            _cut_torn_line(self._path, self.sample_type)
            held = Counter(row(sample) for sample in read_samples(self._path, self.sample_type))
            new = []
            for line in map(row, samples):
                if held[line] > 0:
                    held[line] -= 1
                else:
                    new.append(line)
            if new:
                text = self._path.read_text(encoding="utf-8")
                write_atomically(self._path, text + "".join(f"{line}\n" for line in new))
        return len(new)


class LayerWriter(SampleWriter[LayerSample]):
    """Adds layer samples to their population."""

    def __init__(self, store: Path, provenance: Provenance) -> None:
        super().__init__(_device_folder(store, provenance), provenance, LayerSample)


class OperatorWriter(SampleWriter[OperatorSample]):
    """Adds operator samples to their population."""

    def __init__(self, store: Path, provenance: Provenance) -> None:
        super().__init__(_device_folder(store, provenance), provenance, OperatorSample)


class LinkWriter(SampleWriter[LinkSample]):
    """Adds link samples to their population."""

    def __init__(self, store: Path, link: str, provenance: Provenance) -> None:
        _check_name("link", link)
        folder = store / LINKS_FOLDER / link / population_name(provenance)
        super().__init__(folder, provenance, LinkSample)


def _device_folder(store: Path, provenance: Provenance) -> Path:
    _check_name("device kind", provenance.device)
    return store / provenance.device / population_name(provenance)


def _check_name(what: str, name: str) -> None:
    """A name becomes a folder: it must not lead out of the store or into another part of it."""
    odd = any(ord(character) < 32 for character in name)
    if not name or name != Path(name).name or name.startswith(".") or odd:
        raise InputError(f"{what} is {name!r}; it names a folder, so it needs a plain word")
    if what == "device kind" and name == LINKS_FOLDER:
        raise InputError(f"{what} is {name!r}; the store keeps links under that name")


def _locked(folder: Path) -> Lock:
    """Nobody else writes to this population meanwhile."""
    return Lock(folder).take(_LOCK_SECONDS)


def _open_population(folder: Path, provenance: Provenance, sample_type: type[Sample]) -> Path:
    """Path of the samples file, ready for rows: provenance and header written, torn end cut off."""
    make_folder(folder)
    path = folder / FILES[sample_type]
    with _locked(folder):
        if (folder / PROVENANCE_FILE).exists():
            # The folder is named after `provenance`, so what is held is the same or was changed.
            _, faults = held_provenance(folder)
            if faults:
                raise InputError(*faults)
        else:
            write_atomically(folder / PROVENANCE_FILE, encode(provenance, schema=SCHEMA))
        if not path.exists():
            write_atomically(path, header(sample_type) + "\n")
        _cut_torn_line(path, sample_type)
        _bring_up_to_date(path, sample_type)
    return path


def _check_header(path: Path, first: bytes, sample_type: SampleType) -> None:
    if not first.endswith(b"\n"):
        message = (
            "the header line is missing; nothing was changed: move the file away, it holds no "
            "samples that hetplan wrote"
        )
        raise InputError(Fault(file=str(path), line=1, message=message))
    line = first.decode("utf-8", "surrogateescape").removesuffix("\n")
    if faults := header_faults(path, line, sample_type):
        raise InputError(*faults)


def _bring_up_to_date(path: Path, sample_type: type[Sample]) -> None:
    """Rewrite a file of an older form in the current one, in one step."""
    with path.open("rb") as file:
        first = file.readline().decode("utf-8", "replace").rstrip("\r\n")
    if first != header(sample_type):
        lines = (header(sample_type), *map(row, read_samples(path, sample_type)))
        write_atomically(path, "\n".join(lines) + "\n")


def _cut_torn_line(path: Path, sample_type: SampleType) -> None:
    """Remove the half line at the end; only both ends of the file are read.

    An InputError, and the file as it was, where its header is not that of these samples: a writer
    makes the header in one step, so what stands there is somebody's own.
    """
    try:
        with path.open("r+b") as file:
            _check_header(path, file.readline(_MAX_PER_HEADER), sample_type)
            end = whole = file.seek(0, os.SEEK_END)
            tail = b""
            while whole and b"\n" not in tail:
                start = max(0, whole - 65536)
                file.seek(start)
                tail = file.read(whole - start)
                whole = start + tail.rfind(b"\n") + 1
            if whole < end:
                file.seek(whole)
                _LOGGER.warning("%s: a torn last line was cut off: %r", path, file.read(60))
                file.truncate(whole)
                os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written to ({error.strerror}); name a store you may write to"
        ) from error
