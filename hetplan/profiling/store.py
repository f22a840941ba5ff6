"""Where measurements are kept: a folder per device kind and link, a population per circumstances.

    <store>/<device kind>/<population>/layers.csv, operators.csv + provenance.json
    <store>/links/<link name>/<population>/links.csv + provenance.json

A **population** is everything measured under the same circumstances: device, driver, clocks,
torch, threads, pace and measuring tool. Its folder is named by a hash of those, so a second run
with the same ones adds to it (and skips what it has) and a run with others starts another. Rows
are written one at a time and reach the disk one at a time, under a lock that all writers of the
population share; a kill at any moment leaves a store that can be read and loses at most the row
that was being written.

`read_populations` returns one ProfileSet per population, each with exactly one provenance: so
every sample can be traced, and whoever fits chooses among several populations of one kind. It
refuses a damaged store; `store_state` reads around damage and tells of it.
Where a kind or a link has several populations nothing is preferred here: choosing (the newest by
`measured_on`, say) is the fit's business.
Any folder may be named: a whole store, one device's folder or one population.

File of provenance: schema `hetplan.provenance/2`, fields as in `Provenance`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from hetplan.errors import Fault, HetplanError, InputError
from hetplan.files.encoding import encode
from hetplan.files.writing import append_line, write_atomically
from hetplan.profiling.samples import (
    LayerSample,
    LinkSample,
    OperatorSample,
    ProfileSet,
    Provenance,
)
from hetplan.profiling.samples_csv import (
    AnySample,
    Sample,
    SampleType,
    header,
    header_faults,
    read_samples,
    row,
)
from hetplan.profiling.store_state import (
    LAYERS_FILE,
    LINKS_FILE,
    LINKS_FOLDER,
    OPERATORS_FILE,
    PROVENANCE_FILE,
    SCHEMA,
    held_provenance,
    population_name,
    population_state,
    store_state,
)

__all__ = [
    "LAYERS_FILE",
    "LINKS_FILE",
    "LINKS_FOLDER",
    "OPERATORS_FILE",
    "PROVENANCE_FILE",
    "SCHEMA",
    "LayerWriter",
    "LinkWriter",
    "OperatorWriter",
    "population_name",
    "read_population",
    "read_populations",
    "read_store",
]

_LOCK_FILE = ".lock"
_MAX_PER_HEADER = 1 << 16
"""Bytes; the longest header of samples has a few hundred."""
_LOGGER = logging.getLogger(__name__)


def read_store(*folders: Path) -> ProfileSet:
    """Every sample and provenance under these folders."""
    populations = read_populations(*folders)
    return ProfileSet(
        layers=tuple(chain.from_iterable(population.layers for population in populations)),
        links=tuple(chain.from_iterable(population.links for population in populations)),
        provenance=tuple(chain.from_iterable(each.provenance for each in populations)),
        operators=tuple(chain.from_iterable(each.operators for each in populations)),
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
            "the store is damaged: mend or remove what is named above (`hetplan profile --list` "
            "shows how many rows each population has left)",
        )
    for state in states:
        for torn in state.torn:
            _LOGGER.warning("%s: a torn last line was dropped: %r", state.folder, torn[:60])
    return tuple(state.profiles for state in states if state.provenance is not None)


def read_population(folder: Path) -> ProfileSet:
    """The samples of one population's folder."""
    state = population_state(folder)
    if state.damage:
        raise InputError(*state.damage)
    return state.profiles


class LayerWriter:
    """Adds layer samples to their population, one row on disk at a time."""

    def __init__(self, store: Path, provenance: Provenance) -> None:
        _check_name("device kind", provenance.device)
        self.folder = store / provenance.device / population_name(provenance)
        self._path = _open_population(self.folder, provenance, LAYERS_FILE, LayerSample)
        self.samples = read_samples(self._path, LayerSample)
        """What the population held when it was opened."""

    def append(self, sample: LayerSample) -> None:
        """Add a row; it is on disk when this returns."""
        _append(self._path, sample)

    def add_new(self, samples: Sequence[LayerSample]) -> int:
        """Add all rows that the population does not hold yet, in one step; how many those were."""
        return _add_new(self._path, samples, LayerSample)


class OperatorWriter:
    """Adds operator samples to their population, one row on disk at a time."""

    def __init__(self, store: Path, provenance: Provenance) -> None:
        _check_name("device kind", provenance.device)
        self.folder = store / provenance.device / population_name(provenance)
        self._path = _open_population(self.folder, provenance, OPERATORS_FILE, OperatorSample)
        self.samples = read_samples(self._path, OperatorSample)
        """What the population held when it was opened."""

    def append(self, sample: OperatorSample) -> None:
        """Add a row; it is on disk when this returns."""
        _append(self._path, sample)

    def add_new(self, samples: Sequence[OperatorSample]) -> int:
        """Add all rows that the population does not hold yet, in one step; how many those were."""
        return _add_new(self._path, samples, OperatorSample)


class LinkWriter:
    """Adds link samples to their population, one row on disk at a time."""

    def __init__(self, store: Path, link: str, provenance: Provenance) -> None:
        _check_name("link", link)
        self.folder = store / LINKS_FOLDER / link / population_name(provenance)
        self._path = _open_population(self.folder, provenance, LINKS_FILE, LinkSample)
        self.samples = read_samples(self._path, LinkSample)
        """What the population held when it was opened."""

    def append(self, sample: LinkSample) -> None:
        """Add a row; it is on disk when this returns."""
        _append(self._path, sample)

    def add_new(self, samples: Sequence[LinkSample]) -> int:
        """Add all rows that the population does not hold yet, in one step; how many those were."""
        return _add_new(self._path, samples, LinkSample)


def _check_name(what: str, name: str) -> None:
    """A name becomes a folder: it must not lead out of the store or into another part of it."""
    odd = any(ord(character) < 32 for character in name)
    if not name or name != Path(name).name or name.startswith(".") or odd:
        raise InputError(f"{what} is {name!r}; it names a folder, so it needs a plain word")
    if what == "device kind" and name == LINKS_FOLDER:
        raise InputError(f"{what} is {name!r}; the store keeps links under that name")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else writes to this population meanwhile; the kernel frees the lock of the killed."""
    import fcntl

    try:
        handle = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written to ({error.strerror}); name a store you may write to"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise HetplanError(
                f"{folder}: its file system has no locks ({error.strerror}), so two writers could "
                "mix their rows; measure into a local folder"
            ) from error
        yield
    finally:
        os.close(handle)


def _open_population(
    folder: Path,
    provenance: Provenance,
    name: str,
    sample_type: type[Sample],
) -> Path:
    """Path of the samples file, ready for rows: provenance and header written, torn end cut off."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be made ({error.strerror}); name a store you may write to"
        ) from error
    path = folder / name
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


def _append(path: Path, sample: AnySample) -> None:
    line = row(sample)
    with _locked(path.parent):
        # A full disk or a kill may have left half a row of another writer since.
        _cut_torn_line(path, type(sample))
        append_line(path, line)


def _add_new(path: Path, samples: Sequence[Sample], sample_type: type[Sample]) -> int:
    """Rows that are equal in every column, date and times included, are one measurement."""
    with _locked(path.parent):
        _cut_torn_line(path, sample_type)
        held = Counter(row(sample) for sample in read_samples(path, sample_type))
        new = []
        for line in map(row, samples):
            if held[line] > 0:
                held[line] -= 1
            else:
                new.append(line)
        if new:
            text = path.read_text(encoding="utf-8")
            write_atomically(path, text + "".join(f"{line}\n" for line in new))
    return len(new)


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
